"""Further cards for one UNet: a process for each, with a copy of it. docs/several-gpus.md."""
