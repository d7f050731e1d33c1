"""What those who make a picture together have in common, whether they are processes that a WebUI
feeds or ranks of torch.distributed: how they exchange tensors, and how one of them fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lib_rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    import torch


class RankError(RocmSdError):
    """Another rank died, failed, or did not come in time. The message names it."""


class LostError(RankError):
    """Its process has ended, or does not answer; the message says how."""


class FailedError(RankError):
    """It could not do what was asked, and goes on; the message says why."""

    def __init__(self, reason: str, memory: bool = False) -> None:
        super().__init__(reason)
        self.memory = memory
        """Whether its card is out of memory."""


class Ranks(Protocol):
    """Those who make an image; each makes the same calls in the same order. Raises RankError where
    another is gone.
    """

    rank: int
    size: int

    def concatenate(self, own: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All ranks' tensors along `dim`, where rank r has `sizes[r]` of it."""
        ...

    def exchange(self, sent: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """By rank, the tensors that each other one sends here. `sent`: for each of them up to two,
        contiguous, of any shape and of floating point.
        """
        ...
