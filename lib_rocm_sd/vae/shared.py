"""One image made by several devices: each makes its rows of every image of the chain.

Nothing is made twice, as bands of one device are: the rows at which two meet are exchanged, and the
statistics of GroupNorm, as parts that lie where the whole image's lie, are merged by each in the
whole image's order. So all rows together are the whole frame to the bit, if all run by one config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS
from lib_rocm_sd.vae.attention import mix, norm_after
from lib_rocm_sd.vae.bands import Run, launch, norm_of
from lib_rocm_sd.vae.steps import AttentionStep, Rows, needed_rows
from lib_rocm_sd.vae.store import InputRows
from lib_rocm_sd.vae.trace import Action, Chain
from lib_rocm_sd.vae.weights import ReadyAttention

SPLIT_PIXELS = 1 << 15
"""From so many pixels on, attention's queries are split too; below, each computes them all, since
it is little, and torch's own attention may give other bits for fewer queries."""


class Ranks(Protocol):
    """Those who make it; each makes the same calls in the same order."""

    rank: int
    size: int

    def concatenate(self, own: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All ranks' tensors along `dim`, where rank r has `sizes[r]` of it."""
        ...

    def start_swap(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Any:
        """Send a tensor to each rank of `sent`, fill those of `received`; done after `.wait()`."""
        ...


@dataclass(eq=False)
class Shared:
    """A run's images by rank: `parts`, rows of the smallest image."""

    run: Run
    ranks: Ranks
    parts: Sequence[Rows]

    def rows(self, image: int) -> list[Rows]:
        """By rank, of an image."""
        height = self.run.chain.sizes[image].height
        by = 1 << round(height / smallest(self.run.chain)).bit_length() - 1
        found = [(first * by, last * by) for first, last in self.parts]
        return [*found[:-1], (found[-1][0], height)]


def smallest(chain: Chain) -> int:
    """Rows of the smallest image."""
    return min(size.height for size in chain.sizes)


def units(chain: Chain) -> int:
    """In how many parts, at most, the images can be split."""
    return -(-smallest(chain) // STATISTICS_ROWS)


def parts_of(chain: Chain, shares: Sequence[Rows]) -> list[Rows]:
    """Rows of the smallest image, from shares of its `units`."""
    height = smallest(chain)
    return [(a * STATISTICS_ROWS, min(b * STATISTICS_ROWS, height)) for a, b in shares]


def make_shared(shared: Shared, image: torch.Tensor) -> torch.Tensor:
    """The chain's whole output (1, C', H', W'), on each rank, for the input (1, C, H, W)."""
    run, me = shared.run, shared.ranks.rank
    chain = run.chain
    images: dict[int, torch.Tensor] = {}
    source = InputRows(image, run.dtype)
    for index, step in enumerate(chain.steps, 1):
        own = shared.rows(index)[me]
        if isinstance(step, AttentionStep):
            images[index] = _attend(shared, index, images[index - 1])
        else:
            needed = [
                needed_rows(step.kind, rows, chain.sizes[index - 1].height)
                for rows in shared.rows(index)
            ]
            if index == 1:
                x = source.read(needed[me])
            else:
                x = fetch(shared.ranks, images[index - 1], shared.rows(index - 1), needed)
            action = Action(index, own, needed[me], own, ())
            before = images[index - 2] if step.residual else None
            images[index] = _convolve(shared, action, x, before)
        images.pop(index - 2, None)
        run.tick()
    channels = chain.recipe.out_channels
    sizes = [last - first for first, last in shared.rows(chain.last)]
    whole = shared.ranks.concatenate(images[chain.last][..., :channels], sizes, 1)
    return whole.permute(0, 3, 1, 2).contiguous()


def _convolve(
    shared: Shared, action: Action, x: torch.Tensor, before: torch.Tensor | None
) -> torch.Tensor:
    """The action's rows; notes the norm of the whole image where its reader wants one."""
    run, image = shared.run, action.image
    wanted = run.ready[image - 1].next_norm is not None
    y, statistics = launch(run, action, x, before, None, wanted, False)
    if wanted:
        assert statistics is not None
        norm = norm_of(run, image, [_whole_statistics(shared, statistics)])
        assert norm is not None
        run.norms[image] = norm
    return y


def _whole_statistics(shared: Shared, own: torch.Tensor) -> torch.Tensor:
    """All ranks' statistics, see bands.joined. Another config may have another number of parts, and
    another variant another number of phases; how many goes by the CPU's memory, so that no device
    is waited for.
    """
    mine, size = torch.tensor([own.shape[1:3]]), shared.ranks.size
    counts = [(int(a), int(b)) for a, b in shared.ranks.concatenate(mine, [1] * size, 0)]
    if len({phases for phases, _ in counts}) == 1:
        return shared.ranks.concatenate(own, [parts for _, parts in counts], 2)
    sizes = [phases * parts for phases, parts in counts]
    return shared.ranks.concatenate(own.flatten(1, 2), sizes, 1).unsqueeze(1)


def _attend(shared: Shared, image: int, own: torch.Tensor) -> torch.Tensor:
    """Attention over all pixels: this rank's rows."""
    run, ranks, parts = shared.run, shared.ranks, shared.rows(image)
    ready, sizes = run.ready[image - 1], [last - first for first, last in parts]
    assert isinstance(ready, ReadyAttention)
    first, last = parts[ranks.rank]
    x = ranks.concatenate(own, sizes, 1).contiguous()
    split = x.shape[1] * x.shape[2] >= SPLIT_PIXELS
    rows = (first, last) if split else (0, x.shape[1])
    mix(ready, x, run.norms[image - 1], rows, run.session)
    if split:
        x = ranks.concatenate(x[:, first:last], sizes, 1).contiguous()
    norm = norm_after(ready, x, run.session)
    if norm is not None:
        run.norms[image] = norm
    return x[:, first:last].contiguous()


def fetch(
    ranks: Ranks, own: torch.Tensor, has: Sequence[Rows], needs: Sequence[Rows]
) -> torch.Tensor:
    """This rank's needed rows of an image (N, H, W, C) of which rank r has the rows `has[r]`."""
    me = ranks.rank
    sent, received = {}, {}
    for other in range(ranks.size):
        given, taken = _both(has[me], needs[other]), _both(has[other], needs[me])
        if other == me:
            continue
        if given[0] < given[1]:
            sent[other] = own[:, given[0] - has[me][0] : given[1] - has[me][0]]
        if taken[0] < taken[1]:
            shape = (own.shape[0], taken[1] - taken[0], *own.shape[2:])
            received[other] = own.new_empty(shape)
    ranks.start_swap(sent, received).wait()
    kept = _both(has[me], needs[me])
    pieces = [received[other] for other in sorted(received) if other < me]
    pieces.append(own[:, kept[0] - has[me][0] : kept[1] - has[me][0]])
    pieces += [received[other] for other in sorted(received) if other > me]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, 1)


def _both(one: Rows, other: Rows) -> Rows:
    return max(one[0], other[0]), min(one[1], other[1])
