"""What must be read, computed and dropped, in order, to make some rows of an image.

The same list is executed by bands.py and added up by plan.py, so what is predicted is what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch

from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS, ConvProblem, out_size
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem
from lib_rocm_sd.vae.steps import (
    AttentionStep,
    ConvStep,
    Recipe,
    Rows,
    Step,
    made_rows,
    needed_rows,
)


@dataclass(frozen=True)
class Size:
    """One image: `channels` as stored, padded."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True, eq=False)
class Chain:
    """A recipe at one input size: images 0 to len(steps), `batch` of each.

    `in_place`: images that may be written over the one that their residual block began with.
    `halved`: images that are made in two halves even where they are made whole, so that their
    statistics take half of the memory.
    """

    recipe: Recipe
    sizes: tuple[Size, ...]
    batch: int
    dtype: torch.dtype
    in_place: frozenset[int] = frozenset()
    halved: frozenset[int] = frozenset()
    _known: dict[object, list[Action]] = field(default_factory=dict, init=False)

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.recipe.steps

    @property
    def last(self) -> int:
        """The number of the output."""
        return len(self.steps)

    def rows(self, image: int) -> Rows:
        """All rows of an image."""
        return (0, self.sizes[image].height)

    def actions(self, image: int, rows: Rows, stored: frozenset[int]) -> list[Action]:
        """What `trace` says, asked once."""
        key = (image, rows, stored)
        if key not in self._known:
            self._known[key] = trace(self.sizes, self.steps, image, rows, stored, self.in_place)
        return self._known[key]

    def image_bytes(self, image: int, rows: Rows | None = None) -> int:
        """Bytes of some rows of an image, default all."""
        size = self.sizes[image]
        first, last = rows or (0, size.height)
        return self.batch * (last - first) * size.width * size.channels * self.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes of what the caller gets, without padding."""
        size = self.sizes[-1]
        return self.batch * size.height * size.width * self.recipe.out_channels * self.itemsize


def chain(recipe: Recipe, batch: int, height: int, width: int, dtype: torch.dtype) -> Chain:
    """`recipe` on an input of this size. Raises ValueError where an image would be empty."""
    sizes = [Size(height, width, _padded(recipe.in_channels, 16))]
    for step in recipe.steps:
        if not isinstance(step, AttentionStep):
            height, width = out_size(step.kind, height, width)
        if height < 1 or width < 1:
            raise ValueError(f"{sizes[0].height} x {sizes[0].width} is too small: {step.name}")
        sizes.append(Size(height, width, _padded(step.out_channels, 8)))
    return Chain(recipe, tuple(sizes), batch, dtype)


def _padded(channels: int, multiple: int) -> int:
    return (channels + multiple - 1) // multiple * multiple


@dataclass(frozen=True)
class Action:
    """Read `rows` of a stored image, or compute them from `source` rows of the image before.

    A residual step takes the same rows of the image before that. `made` may be a row more than
    `rows` at either end. `drop`: images needed no more then. `in_place`: the image comes to lie in
    the memory of the image before that, which is one of these.
    """

    image: int
    rows: Rows
    source: Rows | None
    made: Rows
    drop: tuple[int, ...]
    in_place: bool = False


def trace(
    sizes: tuple[Size, ...],
    steps: tuple[Step, ...],
    image: int,
    rows: Rows,
    stored: Collection[int],
    in_place: Collection[int] = (),
) -> list[Action]:
    """The actions that end in `rows` of `image`, whose forerunners `stored` hold all rows of.

    What was read of a stored image is not written over, and what is wanted does not come to lie in
    an image of more channels, whose memory it would keep.
    """
    stored_images = set(stored) - {image}
    needs = _needs(sizes, steps, image, rows, stored_images)
    last_use = {index: index for index in needs}
    for index in set(needs) - stored_images:
        for used in (index - 1, index - 2)[: 1 + steps[index - 1].residual]:
            last_use[used] = max(last_use[used], index)
    drops: dict[int, tuple[int, ...]] = {}
    for index in needs:
        if last_use[index] != index:
            drops[last_use[index]] = (*drops.get(last_use[index], ()), index)
    actions = []
    for index in sorted(needs):
        kept, drop = needs[index], drops.get(index, ())
        if index in stored_images:
            actions.append(Action(index, kept, None, kept, drop))
            continue
        step = steps[index - 1]
        source = _source(step, kept, sizes[index - 1].height)
        made = kept if isinstance(step, AttentionStep) else made_rows(step.kind, kept)
        over = index in in_place and index - 2 in drop and index - 2 not in stored_images
        if over and index == image:
            over = sizes[index].channels == sizes[index - 2].channels
        actions.append(Action(index, kept, source, made, drop, over))
    return actions


def _needs(
    sizes: tuple[Size, ...], steps: tuple[Step, ...], image: int, rows: Rows, read: Collection[int]
) -> dict[int, Rows]:
    """The rows of each image that `rows` of `image` depend on, back to those that are `read`."""
    needs: dict[int, Rows] = {image: rows}
    for index in range(image, -1, -1):
        if index not in needs or index in read:
            continue
        step = steps[index - 1]
        source = _source(step, needs[index], sizes[index - 1].height)
        needs[index - 1] = _union(needs.get(index - 1), source)
        if step.residual:
            needs[index - 2] = _union(needs.get(index - 2), needs[index])
    return needs


def _source(step: Step, rows: Rows, height: int) -> Rows:
    if isinstance(step, AttentionStep):
        return (0, height)
    return needed_rows(step.kind, rows, height)


def _union(one: Rows | None, other: Rows) -> Rows:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))


def advance(chain: Chain, action: Action, made: int, alive: dict[int, int], start: int = -1) -> int:
    """Take an action, which makes `made` bytes, of those after image `start`, which is not written
    over; the bytes of all images meanwhile. `alive`: by image, those that are there.
    """
    image, over = action.image, None
    if action.source is not None and image > start:
        if isinstance(chain.steps[image - 1], AttentionStep):
            over = image - 1  # attention works in place
        elif action.in_place and image - 2 > start:
            over = image - 2
    alive[image] = made if over is None else alive[over]
    if over is not None:
        alive[over] = 0
    total = sum(alive.values())
    for used in action.drop:
        alive.pop(used, None)
    return total


def alive_bytes(chain: Chain, actions: list[Action]) -> list[int]:
    """The bytes of all images that are there while each action is done."""
    alive: dict[int, int] = {}
    made_bytes = [chain.image_bytes(action.image, action.made) for action in actions]
    return [advance(chain, *each, alive) for each in zip(actions, made_bytes, strict=True)]


def peak_bytes(
    chain: Chain, actions: list[Action], workspace: Callable[[Action], int] | None = None
) -> int:
    """The most bytes alive at once while `actions` are done; the result is alive at the end.

    `workspace(action)`: bytes that computing its rows needs beside them.
    """
    beside = [
        0 if action.source is None or workspace is None else workspace(action) for action in actions
    ]
    alive = alive_bytes(chain, actions)
    return max((sum(both) for both in zip(alive, beside, strict=True)), default=0)


def normed(chain: Chain, image: int) -> bool:
    """True if a GroupNorm reads the image."""
    return image < chain.last and chain.steps[image].norm is not None


def parts(chain: Chain, action: Action) -> list[Action]:
    """The action, or, where it makes all of an image that is made in halves, the two of them."""
    image = action.image
    height = chain.sizes[image].height
    if image not in chain.halved or action.made != (0, height):
        return [action]
    rows = bands(height, -(-height // (2 * STATISTICS_ROWS)) * STATISTICS_ROWS)
    step, below = chain.steps[image - 1], chain.sizes[image - 1].height
    return [replace(action, rows=r, made=r, source=_source(step, r, below)) for r in rows]


def conv_problem(chain: Chain, action: Action, statistics: bool) -> ConvProblem:
    """What an action of a ConvStep asks of the engine."""
    step, source = chain.steps[action.image - 1], action.source
    assert isinstance(step, ConvStep) and source is not None
    before = chain.sizes[action.image - 1]
    shortcut = "none"
    if step.residual:
        shortcut = "identity" if step.shortcut is None else "conv"
    problem = ConvProblem(
        step.kind,
        chain.batch,
        source[1] - source[0],
        before.width,
        before.channels,
        step.out_channels,
        DTYPE_NAMES[chain.dtype],
        step.norm is not None,
        shortcut,
        chain.sizes[action.image - 2].channels if step.residual else 0,
        statistics,
    )
    return replace(problem, in_place=True) if action.in_place else problem


def rms_problem(chain: Chain, image: int, rows: int) -> RmsProblem:
    """What the RMSNorm of so many rows that are read for an image asks of the engine."""
    step, size = chain.steps[image - 1], chain.sizes[image - 1]
    shape = (chain.batch, rows, size.width, size.channels)
    affine = DTYPE_NAMES[step.rms.gamma.dtype]
    return RmsProblem(shape, DTYPE_NAMES[chain.dtype], False, affine, isinstance(step, ConvStep))


def whole_problem(chain: Chain, image: int, in_place: bool | None = None) -> ConvProblem:
    """The convolution that makes all of an image, by default in place where it may be."""
    everything, before = chain.rows(image), chain.rows(image - 1)
    if in_place is None:
        in_place = image in chain.in_place
    action = Action(image, everything, before, everything, (), in_place)
    return conv_problem(chain, action, normed(chain, image))


def bands(height: int, rows: int) -> list[Rows]:
    """0 to `height` in bands of `rows`, the last perhaps lower."""
    return [(first, min(first + rows, height)) for first in range(0, height, max(rows, 1))]
