"""What making rows of an image will take: memory, arithmetic, and bytes read of stored images.

Everything is added up from the very actions that bands.py will take. Those from two stored images
are the same but for the first two or three, so what was added up for one serves the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from lib_rocm_sd.ops.base import Variant
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.kernel import statistics_bytes
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.layer_norm.rms import TorchRms
from lib_rocm_sd.vae import attention
from lib_rocm_sd.vae.steps import AttentionStep, Rows
from lib_rocm_sd.vae.trace import (
    Action,
    Chain,
    advance,
    bands,
    conv_problem,
    normed,
    parts,
    peak_bytes,
    rms_problem,
    whole_problem,
)


@dataclass(frozen=True)
class ConvWay:
    """A variant and its config, for all convolutions of a class."""

    variant: Variant[ConvProblem, ConvInputs]
    config: Any

    @property
    def fused(self) -> bool:
        """True for our kernel, which makes nothing but the output and its statistics."""
        return isinstance(self.variant, MatrixConv)

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Bytes beside input and output."""
        if not self.fused:
            return self.variant.workspace(problem)
        if not problem.statistics:
            return 0
        size, rows = problem.out_size, self.config.rows
        return problem.batch * statistics_bytes(problem.kind, *size, problem.out_channels, rows)


Chosen = Callable[[ConvProblem], ConvWay]
"""Says how a convolution will be run; asked about those of the whole frame."""


LONGEST = 8
"""The most blocks that a leg in bands makes again and again."""


@dataclass
class Sweep:
    """One pass of a leg over an image: the peak of a band, the flops of all `ticks` bands, and the
    bytes that a band reads of the leg's first image and of the hidden one.
    """

    peak: int
    flops: float
    ticks: int
    read: int
    read_hidden: int = 0


def between_blocks(chain: Chain) -> list[int]:
    """The images that no residual block has inside."""
    steps = chain.steps
    hidden = {i + 1 for i in range(len(steps) - 1) if steps[i + 1].residual}
    return [image for image in range(chain.last + 1) if image not in hidden]


@dataclass
class _Line:
    """The actions from image `first` to the last, and what each takes; place 0 is `first`'s."""

    first: int
    actions: list[Action]
    made: list[int]
    """Bytes of the rows that each action makes."""
    work: list[int]
    """Bytes beside inputs and output."""
    flops: list[int]
    """FLOPs of each action and all after it, and 0."""
    alive: list[dict[int, int]]
    """Bytes of the images that are there after each."""
    peaks: list[int]
    """The most bytes from each action on, and 0."""


class Forecast:
    """Forecasts one chain whose convolutions will run in the `chosen` ways.

    `like`: the forecast of a chain that differs in nothing but what is made in place, or in halves.
    """

    def __init__(self, chain: Chain, chosen: Chosen, like: Forecast | None = None) -> None:
        self.chain = chain
        self._chosen = chosen
        self._ways: dict[tuple[int, bool], ConvWay] = like._ways if like else {}
        self._spaces: dict[tuple[object, ...], int] = like._spaces if like else {}
        self._lines: dict[tuple[int, Rows, bool], _Line] = {}
        self._sweeps: dict[tuple[int, int, int], Sweep] = {}
        self._wholes: dict[tuple[int, int], int] = {}
        self._origins = self._first_starts()
        each = [self._flops_of_rows(image, *chain.rows(image)) for image in range(chain.last + 1)]
        self._until: list[int] = like._until if like else list(accumulate(each))
        """The arithmetic of all images up to each."""

    def whole_peak(self, start: int, stop: int) -> int:
        """The peak of making all of image `stop` from all of image `start`."""
        key = (start, stop)
        if key not in self._wholes:
            line = self._line(stop, self.chain.rows(stop), 0, sweeping=False)
            self._wholes[key] = self._peak(line, start, None)
        return self._wholes[key]

    def flops(self, start: int, stop: int) -> float:
        """The arithmetic of making all of image `stop` from all of image `start`."""
        return float(self._until[stop] - self._until[start])

    def sweep(self, image: int, band_rows: int, start: int, hidden: int | None = None) -> Sweep:
        """A pass over `image` in bands of `band_rows` from images `start` and perhaps `hidden`.

        Added up by one band from the middle.
        """
        if hidden is not None:
            return self._from_two(image, band_rows, start, hidden)
        key = (image, band_rows, start)
        if key not in self._sweeps:
            split = bands(self.chain.sizes[image].height, band_rows)
            rows = split[(len(split) - 1) // 2]
            line = self._line(image, rows, self._origins[image], sweeping=True)
            read_bytes = self.chain.image_bytes(start, line.actions[start - line.first].rows)
            self._sweeps[key] = Sweep(
                self._peak(line, start, image),
                float(line.flops[start + 1 - line.first] * len(split)),
                len(split),
                read_bytes,
            )
        return self._sweeps[key]

    def _first_starts(self) -> list[int]:
        """For each image the first that a leg in bands may make it from: after any attention."""
        nodes, starts = between_blocks(self.chain), [0]
        after = place = 0
        for image, step in enumerate(self.chain.steps, 1):
            after = image if isinstance(step, AttentionStep) else after
            place += nodes[place] < image
            starts.append(max(after, nodes[max(place - LONGEST, 0)]))
        return starts

    def _from_two(self, image: int, band_rows: int, start: int, hidden: int) -> Sweep:
        chain = self.chain
        split = bands(chain.sizes[image].height, band_rows)
        rows = split[(len(split) - 1) // 2]
        actions = chain.actions(image, rows, frozenset((start, hidden)))
        read_bytes = {
            a.image: chain.image_bytes(a.image, a.rows) for a in actions if a.source is None
        }
        return Sweep(
            peak_bytes(chain, actions, lambda action: self._workspace(action, image)),
            float(sum(map(self._flops_of, actions)) * len(split)),
            len(split),
            read_bytes.get(start, 0),
            read_bytes.get(hidden, 0),
        )

    def _line(self, image: int, rows: Rows, first: int, sweeping: bool) -> _Line:
        key = (image, rows, sweeping)
        if key not in self._lines:
            chain = self.chain
            actions = chain.actions(image, rows, frozenset({first}))
            made_bytes = [chain.image_bytes(action.image, action.made) for action in actions]
            over = image if sweeping else None
            work = [0, *(self._workspace(action, over) for action in actions[1:])]
            flops, total = [0], 0
            for action in reversed(actions):
                total += self._flops_of(action)
                flops.append(total)
            line = _Line(first, actions, made_bytes, work, flops[::-1], [], [])
            alive: dict[int, int] = {}
            totals = []
            for action, each, beside in zip(actions, made_bytes, work, strict=True):
                totals.append(advance(chain, action, each, alive, first) + beside)
                line.alive.append(dict(alive))
            for place in range(len(totals) - 2, -1, -1):
                totals[place] = max(totals[place], totals[place + 1])
            line.peaks = [*totals, 0]
            self._lines[key] = line
        return self._lines[key]

    def _peak(self, line: _Line, start: int, sweeping: int | None) -> int:
        """The most bytes there are while a line's actions are taken from image `start` on."""
        first = start - line.first
        if first == 0:
            return line.peaks[0]
        alive = {start: self.chain.image_bytes(start, line.actions[first].rows)}
        peak = alive[start]
        for place in range(first + 1, len(line.actions)):
            action, work = line.actions[place], line.work[place]
            if action.in_place and action.image - 2 == start:  # stored: not written over
                work = self._workspace(replace(action, in_place=False), sweeping)
            peak = max(peak, advance(self.chain, action, line.made[place], alive, start) + work)
            if place > first + 1 and alive == line.alive[place]:
                return max(peak, line.peaks[place + 1])
        return peak

    def _flops_of(self, action: Action) -> int:
        return 0 if action.source is None else self._flops_of_rows(action.image, *action.made)

    def _flops_of_rows(self, image: int, first: int, last: int) -> int:
        if image == 0:
            return 0
        chain = self.chain
        return chain.batch * chain.steps[image - 1].flops(last - first, chain.sizes[image].width)

    def _workspace(self, action: Action, sweeping: int | None) -> int:
        """Bytes beside inputs and output while an action is done; `sweeping` None: all at once."""
        chain, image = self.chain, action.image
        step, size = chain.steps[image - 1], chain.sizes[image]
        if isinstance(step, AttentionStep):
            channels = step.heads * step.head_dim
            return attention.workspace_bytes(
                chain.batch, size.height, size.width, channels, chain.itemsize
            )
        normalised, source = 0, action.source
        if step.rms is not None and source is not None:
            norm = rms_problem(chain, image, source[1] - source[0])
            normalised = norm.tensor_bytes + TorchRms().workspace(norm)
        statistics = sweeping in (None, image) and normed(chain, image)
        way = self.way(image)
        if way.fused and not statistics:
            return normalised
        halved = image in chain.halved
        key = (image, action.source, action.made, action.in_place, statistics, way, halved)
        if key not in self._spaces:
            self._spaces[key] = max(
                way.workspace_bytes(conv_problem(chain, part, statistics))
                for part in parts(chain, action)
            )
        return normalised + self._spaces[key]

    def way(self, image: int) -> ConvWay:
        """How the convolution that makes an image is run."""
        key = (image, image in self.chain.in_place)
        if key not in self._ways:
            self._ways[key] = self._chosen(whole_problem(self.chain, image))
        return self._ways[key]
