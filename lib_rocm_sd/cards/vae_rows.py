"""One image of a VAE made by several ranks: each makes its rows of every image of the chain.

Nothing is made twice, as bands of one device are: the rows at which two meet are exchanged, and the
statistics of GroupNorm, as parts that lie where the whole image's lie, are merged by each in the
whole image's order. So all rows together are the whole frame to the bit, if all run by one config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.cards.ranks import Ranks
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import UNLIMITED_BYTES
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS
from lib_rocm_sd.vae.attention import mix, norm_after
from lib_rocm_sd.vae.bands import Run, launch, norm_of, nothing
from lib_rocm_sd.vae.program import Program
from lib_rocm_sd.vae.steps import AttentionStep, Rows, needed_rows
from lib_rocm_sd.vae.store import InputRows
from lib_rocm_sd.vae.trace import Action, Chain, chain
from lib_rocm_sd.vae.weights import ReadyAttention, prepare

SPLIT_PIXELS = 1 << 15
"""From so many pixels on, attention's queries are split too; below, each computes them all, since
it is little, and torch's own attention may give other bits for fewer queries."""


@dataclass(eq=False)
class SharedRun:
    """A run's images by rank: `parts`, rows of the smallest image.

    By image and rank: `rows` are those that a rank makes, `needs` those that its part of the next
    image is convolved from; no rows for attention, and of the last image.
    """

    run: Run
    ranks: Ranks
    parts: Sequence[Rows]
    rows: list[list[Rows]] = field(init=False)
    needs: list[list[Rows]] = field(init=False)

    def __post_init__(self) -> None:
        chain = self.run.chain
        smallest = _smallest(chain)
        self.rows = []
        for size in chain.sizes:
            by = 1 << round(size.height / smallest).bit_length() - 1
            rows = [(first * by, last * by) for first, last in self.parts]
            self.rows.append([*rows[:-1], (rows[-1][0], size.height)])
        self.needs = [
            [(first, first) for first, _ in mine]
            if isinstance(step, AttentionStep)
            else [needed_rows(step.kind, rows, size.height) for rows in theirs]
            for step, size, mine, theirs in zip(
                chain.steps, chain.sizes, self.rows, self.rows[1:], strict=False
            )
        ]
        self.needs.append([(first, first) for first, _ in self.rows[-1]])


def _smallest(chain: Chain) -> int:
    """Rows of the smallest image."""
    return min(size.height for size in chain.sizes)


def units(chain: Chain) -> int:
    """In how many parts, at most, the images can be split."""
    return -(-_smallest(chain) // STATISTICS_ROWS)


def parts_of(chain: Chain, shares: Sequence[Rows]) -> list[Rows]:
    """Rows of the smallest image, from shares of its `units`."""
    height = _smallest(chain)
    return [(a * STATISTICS_ROWS, min(b * STATISTICS_ROWS, height)) for a, b in shares]


def make_shared(shared: SharedRun, image: torch.Tensor) -> torch.Tensor:
    """The chain's whole output (1, C', H', W'), on each rank, for the input (1, C, H, W)."""
    run, me = shared.run, shared.ranks.rank
    chain = run.chain
    images: dict[int, torch.Tensor] = {}
    x = InputRows(image, run.dtype).read(shared.needs[0][me])
    for index, step in enumerate(chain.steps, 1):
        own, needed = shared.rows[index][me], shared.needs[index][me]
        if isinstance(step, AttentionStep):
            whole = _attend(shared, index, images[index - 1])
            images[index] = whole[:, own[0] : own[1]].contiguous()
            x = whole[:, needed[0] : needed[1]].contiguous()
        else:
            before = images[index - 2] if step.residual else None
            images[index], x = _convolve(shared, index, x, before)
        images.pop(index - 2, None)
        run.tick()
    channels = chain.recipe.out_channels
    sizes = [last - first for first, last in shared.rows[chain.last]]
    whole = shared.ranks.concatenate(images[chain.last][..., :channels], sizes, 1)
    return whole.permute(0, 3, 1, 2).contiguous()


def _convolve(
    shared: SharedRun, image: int, x: torch.Tensor, before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of an image, and those that its part of the next one needs, which begin
    and end in the same memory. Notes the whole image's norm where its reader wants one.
    """
    run, ranks, all_rows, needs = shared.run, shared.ranks, shared.rows[image], shared.needs[image]
    me, size = ranks.rank, run.chain.sizes[image]
    own, needed = all_rows[me], needs[me]
    top, end = min(own[0], needed[0]), max(own[1], needed[1])
    room = x.new_empty((len(x), end - top, size.width, size.channels))
    action = Action(image, own, shared.needs[image - 1][me], own, ())
    needs_norm = run.ready[image - 1].next_norm is not None
    y = room[:, own[0] - top : own[1] - top]
    _, statistics = launch(run, action, x, before, y, needs_norm, False)
    parts = [] if statistics is None else [statistics]
    sent: dict[int, list[torch.Tensor]] = {}
    edges: dict[int, torch.Tensor | None] = {}
    for other in (other for other in range(ranks.size) if other != me):
        first, last = _both(own, needs[other])
        rows = [y[:, first - own[0] : last - own[0]]] if first < last else []
        sent[other] = [*parts, *rows]
        first, last = _both(all_rows[other], needed)
        edges[other] = room[:, first - top : last - top] if first < last else None
    pairs = permutations(range(ranks.size), 2)
    if needs_norm or any(
        needs[b][0] < all_rows[a][1] and all_rows[a][0] < needs[b][1] for a, b in pairs
    ):
        received = ranks.exchange(sent)
        for other, edge in edges.items():
            if edge is not None:
                edge.copy_(received[other][-1])
        if statistics is not None:
            received[me] = parts
            norm = norm_of(run, image, [received[rank][0] for rank in range(ranks.size)])
            assert norm is not None
            run.norms[image] = norm
    return y, room[:, needed[0] - top : needed[1] - top]


def _attend(shared: SharedRun, image: int, own: torch.Tensor) -> torch.Tensor:
    """Attention over all pixels: the whole image, on each rank."""
    run, ranks, parts = shared.run, shared.ranks, shared.rows[image]
    ready, sizes = run.ready[image - 1], [last - first for first, last in parts]
    assert isinstance(ready, ReadyAttention)
    first, last = parts[ranks.rank]
    x = ranks.concatenate(own, sizes, 1).contiguous()
    split = x.shape[1] * x.shape[2] >= SPLIT_PIXELS
    rows = (first, last) if split else (0, x.shape[1])
    mix(ready, x, run.norms.get(image - 1), rows, run.session)
    if split:
        x = ranks.concatenate(x[:, first:last], sizes, 1).contiguous()
    norm = norm_after(ready, x, run.session)
    if norm is not None:
        run.norms[image] = norm
    return x


def _both(one: Rows, other: Rows) -> Rows:
    return max(one[0], other[0]), min(one[1], other[1])


class TogetherProgram(Program):
    """A decoder or an encoder whose images ranks can make together; all have the same weights."""

    @property
    def scale(self) -> int:
        """Which of vae/program.py's SCALES the images between steps are multiplied by."""
        return self._scale

    def take_scale(self, scale: int) -> None:
        """Use that of another process, which has found it."""
        if scale != self._scale:
            self._scale, self._hopeless = scale, False
            self.release()

    def look(self) -> None:
        """See what the module is now. Raises UnknownModuleError."""
        self._look()

    def chain_of(self, image: torch.Tensor) -> Chain:
        """What is done with one image like this (N, C, H, W)."""
        height, width = image.shape[2:]
        return chain(self._recipe, 1, height, width, self._weight.dtype)

    def whole_bytes(self, image: torch.Tensor, session: Session) -> int:
        """Device memory for one such image, not in bands, as the plan for it was made."""
        where = (self._weight.dtype, image.device, session.of_part(self._part), engine.renewals)
        height, width = image.shape[2:]
        plans = self._plans.get(where)
        return plans.planner((1, height, width)).whole().peak_bytes if plans else UNLIMITED_BYTES

    def together(
        self,
        image: torch.Tensor,
        parts: Sequence[Rows],
        ranks: Ranks,
        session: Session,
        progress: Callable[[int, int], None] = nothing,
        interrupt: Callable[[], bool] = bool,
    ) -> torch.Tensor:
        """The whole output for (N, C, H, W), one image after the other, made by all ranks.

        `parts`: rows of the smallest image, by rank. `progress` and `interrupt` are called between
        steps; raises Interrupted.
        """
        if not self._ready:
            self._ready = prepare(self._recipe, self.scales)
        links, pictures = self.chain_of(image), []
        for number, one in enumerate(image.split(1)):
            run = Run(links, self._ready, links.dtype, image.device, session=session)
            run.progress, run.interrupt = progress, interrupt
            run.done, run.total = number * len(links.steps), len(image) * len(links.steps)
            pictures.append(make_shared(SharedRun(run, ranks, parts), one))
        return torch.cat(pictures)
