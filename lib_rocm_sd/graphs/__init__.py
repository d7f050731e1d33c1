"""A program's launches, recorded once and then made by one call: graphs of the device.

A graph reads and writes fixed addresses. `memory` is what lies there, `device` records and says
where that is possible, `programs` knows what was recorded. docs/unet.md says where graphs are used,
and why not everywhere.
"""
