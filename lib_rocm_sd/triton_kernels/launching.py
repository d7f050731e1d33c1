"""What all launches of Triton's kernels have in common. Needs Triton."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import triton

OLDEST = 3
"""The first major release whose kernels these are."""
FAILED: tuple[type[Exception], ...] = (
    *(triton.CompilationError, triton.OutOfResources, subprocess.SubprocessError),
    *(AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *filter(None, [getattr(triton, "TritonError", None)]),
)
"""What Triton and the compilers that it calls raise, besides RuntimeError."""


def too_old() -> str:
    """Why this Triton cannot compile them; empty if it can."""
    major = triton.__version__.split(".")[0]
    new = not major.isdigit() or int(major) >= OLDEST
    return "" if new else f"triton {triton.__version__} is older than {OLDEST}.0"


@contextmanager
def launching(device: torch.device, what: object) -> Iterator[None]:
    """Within this, kernels are launched on `device`; what Triton cannot do is a RuntimeError."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except FAILED as error:
        raise RuntimeError(f"Triton, {what}: {error}") from error
