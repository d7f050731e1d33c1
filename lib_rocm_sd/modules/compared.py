"""Whether a result of ours is what the host's own forward gives, as far as halves can tell."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lib_rocm_sd.ops.conv.torch import Flags, no_search, searches

VARIABLE = "ROCM_SD_SPOT_CHECK"
"""0: nothing is compared. The WebUI has a setting for it."""
OF_ADDED, OF_ALL = 16, 1
"""What rounding may amount to between two computations in half precision, in units of the type's
epsilon: of what a block adds to its input, and of its result; each by its norm.
"""


def is_wanted() -> bool:
    """Whether blocks are compared where a host has no setting for it."""
    return os.environ.get(VARIABLE, "") != "0"


def without_search() -> AbstractContextManager[Any]:
    """The host's convolutions must not begin MIOpen's search for an algorithm, which can take
    minutes: a torch that cannot keep MIOpen from it computes them without.
    """
    return _WITHOUT_MIOPEN if searches() else no_search()


@contextmanager
def _without_miopen() -> Iterator[None]:
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(before)


_WITHOUT_MIOPEN = Flags(_without_miopen)


def difference(apart: float, added: float, whole: float, epsilon: float) -> str:
    """How far a result is from the host's, for people; empty if rounding explains it, and where
    the host's own is not finite. Norms: of the difference, of what was added, of the result.
    """
    if not math.isfinite(whole):
        return ""
    rounding = epsilon * (OF_ADDED * added + OF_ALL * whole)
    if apart <= rounding:
        return ""
    if not math.isfinite(apart) or not added:
        return "gave other values"
    apart_of_it, explained = percent(apart / added), percent(rounding / added)
    return f"differed by {apart_of_it} (rounding explains {explained})"


def percent(share: float) -> str:
    """'12.3%'; of less than 0.1%, two digits that say something."""
    return f"{share:.1%}" if share >= 1e-3 else f"{100 * share:.2g}%"


def epsilon(*results: torch.Tensor) -> float:
    """The coarsest of their types'."""
    return max(torch.finfo(each.dtype).eps for each in results)


def norms(ours: torch.Tensor, theirs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(3,) float32 on the device: see `difference`. ours, theirs (N, ...); x like them where they
    add to it.
    """
    added = theirs - x if x.shape == theirs.shape else theirs
    three = torch.stack((ours - theirs, added, theirs))
    return torch.linalg.vector_norm(three, dim=list(range(1, three.ndim)), dtype=torch.float32)
