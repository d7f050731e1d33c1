"""Rows of a UNet's images that several ranks compute: what the program of a block asks of others.

A block keeps its program. Where its convolution, its norm or its self-attention reads more than
this rank's rows, compute.py exchanges first, by `Calls.rows`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn


class Rows(Protocol):
    """This rank's rows of all images in one call of a UNet. Every rank asks the same in the same
    order; what goes wrong amid it cannot be begun anew, and ends the call on all of them.
    """

    @property
    def facts(self) -> Hashable:
        """What shapes follow from, beside those of this rank's rows."""
        ...

    def is_ours(self, module: nn.Module) -> bool:
        """Whether all ranks compute this block by its program."""
        ...

    def beneath(self, module: nn.Module) -> Callable[..., Any] | None:
        """What exchanges for the forward of this module; None where only modules within do."""
        ...

    def begin(self, module: nn.Module) -> None:
        """The program of this block begins."""
        ...

    def edges(
        self, x: torch.Tensor, above: int, below: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """So many rows next to x (N, C, H, W); None at the whole image's top and bottom."""
        ...

    def statistics(self, own: torch.Tensor) -> torch.Tensor:
        """All ranks' (N, ranks, C, 4) of this rank's (N, 1, C, 4)."""
        ...

    def tokens(self, own: torch.Tensor) -> torch.Tensor:
        """The whole image's (N, tokens, C) of this rank's, those of its rows."""
        ...


_here = threading.local()


@contextmanager
def among(rows: Rows) -> Iterator[None]:
    """Blocks that this thread calls have only these rows of their images."""
    _here.rows = rows
    try:
        yield
    finally:
        _here.rows = None


def current() -> Rows | None:
    """The rows that blocks have now; None for whole images."""
    return getattr(_here, "rows", None)


def surrounded(rows: Rows, x: torch.Tensor, below: int = 1) -> tuple[torch.Tensor, int]:
    """x (N, H, W, C) with the row above it and `below` of those below; and how many lie above."""
    above, under = rows.edges(x.permute(0, 3, 1, 2), 1, below)
    parts = [None if each is None else each.permute(0, 2, 3, 1) for each in (above, under)]
    whole = torch.cat([each for each in (parts[0], x, parts[1]) if each is not None], 1)
    return whole, int(above is not None)


def merged(statistics: torch.Tensor) -> torch.Tensor:
    """(N, 1, C, 4) of all the parts of statistics (N, parts, C, 4): mean, sum of squares, count."""
    mean, squares, count, _ = statistics.unbind(-1)
    total = count.sum(1, keepdim=True)
    together = (mean * (count / total)).sum(1, keepdim=True)
    apart = mean - together
    squares = torch.addcmul(squares, count * apart, apart).sum(1, keepdim=True)
    return torch.stack((together, squares, total, statistics[:, :1, :, 3]), -1)
