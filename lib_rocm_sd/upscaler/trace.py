"""What must be read, computed and dropped, in order, to make some rows of an image; and what that
takes. The same list is executed by run.py and added up by plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.upscaler.steps import ConvStep, Network, WindowStep, padded
from lib_rocm_sd.vae.steps import Rows

MOST_HALO = 16
"""Rows above and below of a leg's first image that one row of its last depends on, where images can
be kept so often: an RRDB needs 15.
"""


@dataclass(frozen=True)
class Action:
    """Read `rows` of a stored image, or compute them from `source` rows of the images that its step
    reads. `made` may be a row more than `rows` at either end. `drop`: images needed no more then.
    """

    image: int
    rows: Rows
    source: Rows | None
    made: Rows
    drop: tuple[int, ...]


@dataclass(frozen=True)
class Buffer:
    """The memory of images that lie side by side: its rows, channels, and each image's first."""

    rows: Rows
    channels: int
    places: dict[int, int]


@dataclass(frozen=True)
class Trace:
    """The actions that end in some rows of an image, and the buffers of those side by side.

    `facts`: equal for traces of one chain whose tensors and bands have the same sizes.
    """

    actions: tuple[Action, ...]
    buffers: tuple[Buffer, ...]
    facts: Hashable

    def buffer_of(self, image: int) -> Buffer | None:
        """The buffer that an image lies in, if not alone."""
        return next((buffer for buffer in self.buffers if image in buffer.places), None)


@dataclass(frozen=True, eq=False)
class Chain:
    """A network at one size: `batch` pictures whose image 0 has this `height` and `width`."""

    network: Network
    batch: int
    height: int
    width: int
    dtype: torch.dtype
    _known: dict[object, Trace] = field(default_factory=dict, init=False)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The images that are kept, the last among them: legs end in them, and begin with the one
        before. Nothing that is not kept is read later.
        """
        network, uses = self.network, self.network.last_uses
        depth = [0.0]  # by image, rows of the smallest above one that it depends on
        crossing = [set[int]()]  # by image, those before it that are read after it
        for image, step in enumerate(network.steps, 1):
            halo = step.halo / network.growth[step.uses[0]]
            depth.append(max(depth[used] for used in step.uses) + halo)
            before = crossing[-1] | {image - 1} - {0}
            crossing.append({i for i in before if uses.get(i, 0) > image})
        small = [image for image in range(1, self.last) if network.growth[image] == 1]
        long_lived = [i for i in small if i in uses and depth[uses[i]] - depth[i] > MOST_HALO]
        chosen: list[int] = []
        while not chosen or chosen[-1] != self.last:
            start = chosen[-1] if chosen else 0
            able = [i for i in (*small, self.last) if i > start and crossing[i] <= set(chosen)]
            until = min((i for i in long_lived if i in able), default=self.last)
            near = [i for i in able if i <= until and depth[i] - depth[start] <= MOST_HALO]
            chosen.append(max(near, default=able[0]))
        return tuple(chosen)

    @property
    def last(self) -> int:
        """The number of the last image."""
        return len(self.network.steps)

    def rows(self, image: int) -> Rows:
        """All rows of an image."""
        return (0, self.height * self.network.growth[image])

    def channels(self, image: int) -> int:
        """Channels in memory."""
        return padded(self.network.channels[image])

    def pixels(self, image: int, rows: Rows) -> int:
        """Pixels of some rows, of all pictures."""
        return self.batch * (rows[1] - rows[0]) * self.width * self.network.growth[image]

    def image_bytes(self, image: int, rows: Rows | None = None) -> int:
        """Bytes of some rows of an image, default all."""
        rows = rows or self.rows(image)
        return self.pixels(image, rows) * self.channels(image) * self.dtype.itemsize

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        factor = self.network.growth[-1] * self.network.exit.shuffle
        return self.height * factor, self.width * factor

    @property
    def output_bytes(self) -> int:
        """Bytes of the result in float32."""
        return 4 * self.batch * math.prod(self.result) * self.network.exit.channels

    def trace(self, image: int, rows: Rows, stored: frozenset[int]) -> Trace:
        """How `rows` of `image` are made from images `stored`, which hold all of theirs."""
        key = (image, rows, stored)
        if key not in self._known:
            self._known[key] = self._trace(image, rows, stored - {image})
        return self._known[key]

    def _trace(self, image: int, rows: Rows, stored: frozenset[int]) -> Trace:
        steps, needs, last_use = self.network.steps, {image: rows}, {image: image}
        for index in range(image, 0, -1):
            if index in stored or index not in needs:
                continue
            step = steps[index - 1]
            source, made = self._source(index, needs[index]), step.makes(needs[index])
            for used in step.uses:
                reads = not isinstance(step, ConvStep) or used in step.reads
                needs[used] = _union(needs.get(used), source if reads else made)
                last_use.setdefault(used, index)
        drops: dict[int, tuple[int, ...]] = {}
        for used, index in last_use.items():
            if used != image:
                drops[index] = (*drops.get(index, ()), used)
        actions = []
        for index in sorted(needs):
            kept, drop = needs[index], drops.get(index, ())
            if index == 0 or index in stored:
                actions.append(Action(index, kept, None, kept, ()))
            else:
                made = steps[index - 1].makes(kept)
                actions.append(Action(index, kept, self._source(index, kept), made, drop))
        return Trace(tuple(actions), self._buffers(actions), tuple(map(self._facts, actions)))

    def flops(self, action: Action) -> int:
        """Multiplications and additions; of windows also those of rows that are not wanted."""
        step, rows = self.network.steps[action.image - 1], action.made
        if isinstance(step, WindowStep) and action.source is not None:
            rows = action.source
        return step.flops(self.pixels(action.image, rows))

    def is_whole(self, action: Action) -> bool:
        """True if all of an image is made from all of those before."""
        first = self.network.steps[action.image - 1].uses[0]
        return action.source == self.rows(first) and action.made == self.rows(action.image)

    def _facts(self, action: Action) -> Hashable:
        (first, last), source = action.made, action.source
        if source is None:
            return (action.image, last - first)
        growth = self.network.steps[action.image - 1].growth
        above = first - source[0] * growth
        return (action.image, last - first, source[1] - source[0], above, self.is_whole(action))

    def _source(self, image: int, rows: Rows) -> Rows:
        step = self.network.steps[image - 1]
        return step.needs(rows, self.rows(step.uses[0])[1])

    def _buffers(self, actions: list[Action]) -> tuple[Buffer, ...]:
        computed = {action.image for action in actions if action.source is not None}
        made = {action.image: action.made for action in actions}
        read = {
            step.reads
            for image, step in enumerate(self.network.steps, 1)
            if image in computed and isinstance(step, ConvStep) and len(step.reads) > 1
        }
        buffers = []
        for group in self.network.groups:
            if not any(group[: len(reads)] == reads for reads in read):
                continue
            rows, places, channels = None, {}, 0
            for image in group:
                places[image] = channels
                channels += self.channels(image)
                rows = _union(rows, made[image]) if image in made else rows
            assert rows is not None
            buffers.append(Buffer(rows, channels, places))
        return tuple(buffers)

    def conv_problem(self, action: Action) -> ConvProblem:
        """What an action of a 3x3 convolution asks of the engine."""
        step = self.network.steps[action.image - 1]
        assert isinstance(step, ConvStep) and action.source is not None
        channels = self.channels(action.image)
        return ConvProblem(
            step.kind,
            self.batch,
            action.source[1] - action.source[0],
            self.width * self.network.growth[step.reads[0]],
            sum(map(self.channels, step.reads)),
            channels,
            DTYPE_NAMES[self.dtype],
            shortcut="identity" if step.residuals else "none",
            shortcut_channels=channels if step.residuals else 0,
            epilogue=step.activation,
        )

    def conv_problems(self, trace: Trace) -> list[ConvProblem]:
        """What the 3x3 convolutions of a trace ask of the engine, in order."""
        steps = self.network.steps
        made = ((steps[a.image - 1], a) for a in trace.actions if a.source is not None)
        return [
            self.conv_problem(action)
            for step, action in made
            if isinstance(step, ConvStep) and step.kind != "1x1"
        ]

    def peak_bytes(self, trace: Trace, workspace: Callable[[Action], int]) -> int:
        """The most bytes alive at once while a trace is followed; its result is alive at the end.

        `workspace(action)`: bytes that computing its rows needs beside them.
        """
        alive: dict[object, int] = {}
        members = [
            {action.image for action in trace.actions if action.image in buffer.places}
            for buffer in trace.buffers
        ]
        peak = 0
        for action in trace.actions:
            buffer = trace.buffer_of(action.image)
            if buffer is None:
                alive[action.image] = self.image_bytes(action.image, action.made)
            else:
                pixels = self.pixels(action.image, buffer.rows)
                alive[id(buffer)] = pixels * buffer.channels * self.dtype.itemsize
            if action.source is not None:
                beside = workspace(action)
            else:  # what was read is copied to where it lies beside others
                beside = self.image_bytes(action.image, action.rows) if buffer else 0
            peak = max(peak, sum(alive.values()) + beside)
            for used in action.drop:
                alive.pop(used, None)
                for buffer, left in zip(trace.buffers, members, strict=True):
                    left.discard(used)
                    if not left:
                        alive.pop(id(buffer), None)
        return peak


def _union(one: Rows | None, other: Rows) -> Rows:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))
