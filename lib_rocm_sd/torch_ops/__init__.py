"""`torch.ops.rocm_sd.*`: what functional.py computes, as operators that torch knows.

Importing this registers them. They have gradients, shapes for tracing, and stay whole in what
torch.compile makes. Hosts call functional.py, which costs less a call; while torch.compile traces,
it calls these where they are registered.
"""

from __future__ import annotations

from lib_rocm_sd.engine.route import doors
from lib_rocm_sd.torch_ops.register import KEEPS_WHOLE, registered
from lib_rocm_sd.torch_ops.table import DOORS, OPS

LIBRARY = registered(OPS)

if KEEPS_WHOLE:
    doors.update(DOORS)
