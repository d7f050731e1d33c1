"""Dtypes by the names that problems and kernels call them by."""

from __future__ import annotations

import torch

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""The float types known here."""
HALVES = (torch.float16, torch.bfloat16)
"""What our kernels read. Their names are HALVES of base.py."""
FLOATS = frozenset(DTYPES.values())
DTYPE_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.bool: "bool"}
