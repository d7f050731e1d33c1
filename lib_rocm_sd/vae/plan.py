"""Which images to make whole, which in bands, and where what lies between waits.

A plan is a way from the input to the output over the images between two blocks. A leg of it makes
one such image from another, whole, or in bands: then for each GroupNorm on the way there is a pass
that gathers its statistics, making again from the leg's first image what the passes before it made.
Each leg's memory is predicted from the very actions that bands.py will take; the cheapest way whose
legs all fit is found by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from lib_rocm_sd.ops.conv_problem import STATISTICS_ROWS
from lib_rocm_sd.vae import attention
from lib_rocm_sd.vae.steps import AttentionStep
from lib_rocm_sd.vae.trace import (
    Action,
    Chain,
    bands,
    conv_problem,
    normed,
    parts,
    peak_bytes,
    whole_problem,
)
from lib_rocm_sd.vae.ways import Chosen, Way

MIN_ROWS = 64
"""No band is lower than this, counted at the leg's highest resolution."""
LONGEST = 8
"""The most blocks that a banded leg makes again and again."""
HOST_FLOPS_PER_BYTE = 2500.0
DEVICE_FLOPS_PER_BYTE = 60.0
"""Arithmetic done in the time in which a byte goes to or from the host, or is copied on the device:
what a plan's cost counts with."""
_LEG_COST = 1e6


@dataclass(frozen=True)
class Leg:
    """Image `stop` from image `start`; `rows` per band at the highest resolution, None: whole.

    `keep`: where `stop` waits: device, host or output. `hidden`: where the one image between the
    two waits, None: it is made again.
    """

    start: int
    stop: int
    rows: int | None
    keep: str
    hidden: str | None = None

    def passes(self, chain: Chain) -> list[int]:
        """The images that are swept over, in order: those that a GroupNorm reads, and the last."""
        if self.rows is None:
            return [self.stop]
        steps = chain.steps
        inner = range(self.start + 1, self.stop)
        return [i for i in inner if steps[i].norm is not None] + [self.stop]

    def band_rows(self, chain: Chain, image: int) -> int:
        """Rows of a band of `image`, so that its statistics are parts of the whole image's."""
        heights = [size.height for size in chain.sizes[self.start + 1 : self.stop + 1]]
        height = chain.sizes[image].height
        rows = (self.rows or height) * height // max(heights)
        return min(max(rows // STATISTICS_ROWS, 1) * STATISTICS_ROWS, height)


@dataclass(frozen=True)
class Plan:
    """Legs from input to output. `cost` in floating-point operations, `ticks` in bands."""

    legs: tuple[Leg, ...]
    peak_bytes: int
    host_bytes: int
    cost: float
    ticks: int

    @property
    def whole(self) -> bool:
        """True if nothing is done in bands."""
        return all(leg.rows is None for leg in self.legs)

    def __str__(self) -> str:
        how = "whole frame" if self.whole else f"bands, {len(self.legs)} legs"
        return f"{how}, {self.peak_bytes >> 20} MiB"


@dataclass(frozen=True)
class _State:
    """An image that waits. Blocks are given back while they are read; one piece is not."""

    image: int
    place: str  # input, piece, blocks, host


@dataclass
class _Sweep:
    """One pass of a leg: the peak of a band, the flops of all, and bytes read of stored images."""

    peak: int = 0
    flops: float = 0.0
    read: dict[int, int] = field(default_factory=dict)
    ticks: int = 0

    def ahead(self, images: Iterable[int]) -> int:
        """Bytes of the next band's rows of `images`, copied while this band is computed."""
        return sum(self.read.get(image, 0) for image in images) // self.ticks


class Planner:
    """Plans for one chain, whose convolutions will be run in the `chosen` ways."""

    def __init__(self, chain: Chain, chosen: Chosen) -> None:
        self.chain = chain
        self._chosen = chosen
        self._ways: dict[int, Way] = {}
        self._sweeps: dict[tuple[int, int, int, bool], list[_Sweep]] = {}
        steps = chain.steps
        hidden = {i + 1 for i in range(len(steps) - 1) if steps[i + 1].residual}
        self._nodes = [image for image in range(chain.last + 1) if image not in hidden]

    def whole(self) -> Plan:
        """Everything at once."""
        leg, peak, host, cost, ticks = self._whole(_State(0, "input"), self.chain.last, "output")
        return Plan((leg,), peak, host, cost, ticks)

    def cheapest(self, budget_bytes: int, host_bytes: int) -> Plan | None:
        """The plan of least cost within the budgets; None where there is none."""
        return self._search(budget_bytes, host_bytes, by_peak=False)

    def smallest(self, host_bytes: int) -> Plan:
        """The plan of least peak."""
        found = self._search(1 << 62, host_bytes, by_peak=True)
        assert found is not None, "the whole frame is always a plan"
        return found

    def _search(self, budget: int, host_budget: int, by_peak: bool) -> Plan | None:
        best: dict[_State, Plan] = {_State(0, "input"): Plan((), 0, 0, 0.0, 0)}

        def key(plan: Plan) -> tuple[float, ...]:
            return (plan.peak_bytes, plan.cost) if by_peak else (plan.cost, plan.peak_bytes)

        for image in self._nodes[:-1]:
            for state in [state for state in best if state.image == image]:
                plan = best[state]
                for leg, peak, host, cost, ticks in self._legs(state, budget, by_peak):
                    if peak > budget or host > host_budget:
                        continue
                    grown = Plan(
                        (*plan.legs, leg),
                        max(plan.peak_bytes, peak),
                        max(plan.host_bytes, host),
                        plan.cost + cost + _LEG_COST,
                        plan.ticks + ticks,
                    )
                    to = _State(leg.stop, _place(leg))
                    if to not in best or key(grown) < key(best[to]):
                        best[to] = grown
        done = [plan for state, plan in best.items() if state.image == self.chain.last]
        return min(done, key=key, default=None)

    def _legs(
        self, state: _State, budget: int, by_peak: bool
    ) -> Iterator[tuple[Leg, int, int, float, int]]:
        first = self._nodes.index(state.image)
        for distance, stop in enumerate(self._nodes[first + 1 :]):
            keeps = ("output",) if stop == self.chain.last else ("device", "host")
            for keep in keeps:
                yield self._whole(state, stop, keep)
                if self.chain.batch > 1 or distance >= LONGEST:
                    continue
                if any(
                    isinstance(step, AttentionStep) for step in self.chain.steps[state.image : stop]
                ):
                    continue
                pair = stop == state.image + 2 and self.chain.steps[stop - 1].residual
                for hidden in (None, "device", "host") if pair else (None,):
                    yield from self._highest(state, stop, keep, hidden, budget, by_peak)

    def _highest(
        self, state: _State, stop: int, keep: str, hidden: str | None, budget: int, by_peak: bool
    ) -> Iterator[tuple[Leg, int, int, float, int]]:
        """The leg with the highest bands that fit, or with the lowest."""
        top = max(size.height for size in self.chain.sizes[state.image + 1 : stop + 1])
        heights = [MIN_ROWS << power for power in range(6, -1, -1) if MIN_ROWS << power < top]
        heights = heights or [top]
        for rows in heights[-1:] if by_peak else heights:
            found = self._banded(state, Leg(state.image, stop, rows, keep, hidden))
            if found[1] <= budget:
                yield found
                return

    def _whole(self, state: _State, stop: int, keep: str) -> tuple[Leg, int, int, float, int]:
        chain = self.chain
        actions = chain.actions(stop, chain.rows(stop), frozenset({state.image}))
        peak = peak_bytes(chain, actions, partial(self._workspace, None))
        read = chain.image_bytes(state.image)
        if state.place == "blocks":
            peak = max(peak, 2 * read)
        if keep == "output":
            peak = max(peak, chain.image_bytes(stop) + chain.output_bytes)
        moved = read * (state.place == "host") + chain.image_bytes(stop) * (keep == "host")
        cost = self._flops(actions) + moved * HOST_FLOPS_PER_BYTE
        return Leg(state.image, stop, None, keep), peak, moved, cost, 1

    def _banded(self, state: _State, leg: Leg) -> tuple[Leg, int, int, float, int]:
        chain = self.chain
        image_bytes = chain.image_bytes
        sweeps = self._swept(leg)
        source = image_bytes(leg.start) if state.place in ("piece", "blocks") else 0
        kept = image_bytes(leg.stop) if leg.keep == "device" else 0
        kept = chain.output_bytes if leg.keep == "output" else kept
        hidden = image_bytes(leg.start + 1) if leg.hidden == "device" else 0
        leaving = hidden + (source if state.place == "blocks" else 0)
        staying = source if state.place == "piece" else 0
        on_host = (leg.start, state.place == "host"), (leg.start + 1, leg.hidden == "host")
        there = [image for image, is_there in on_host if is_there]
        early = max((sweep.peak + sweep.ahead(there) for sweep in sweeps[:-1]), default=0)
        if leg.hidden == "host":
            early += image_bytes(leg.start + 1) // sweeps[0].ticks
        final = sweeps[-1].peak + sweeps[-1].ahead(there)
        if leg.keep == "host":
            final += image_bytes(leg.stop) // sweeps[-1].ticks
        band = max(sweeps[-1].read.values(), default=0) // max(sweeps[-1].ticks, 1)
        if leg.keep == "output":
            late = staying + leaving + kept
        else:
            late = staying + max(leaving, kept) + (2 * band if leaving else 0)
        peak = max(source + hidden + early, late + final)
        moved = sum(sweep.read.get(i, 0) for sweep in sweeps for i in there)
        copied = sum(sum(sweep.read.values()) for sweep in sweeps) - moved
        host = image_bytes(leg.start) * (state.place == "host")
        host += image_bytes(leg.start + 1) * (leg.hidden == "host")
        moved += image_bytes(leg.start + 1) * (leg.hidden == "host")
        host += image_bytes(leg.stop) * (leg.keep == "host")
        moved += image_bytes(leg.stop) * (leg.keep == "host")
        cost = sum(sweep.flops for sweep in sweeps)
        cost += moved * HOST_FLOPS_PER_BYTE + copied * DEVICE_FLOPS_PER_BYTE
        return leg, peak, host, cost, sum(sweep.ticks for sweep in sweeps)

    def _swept(self, leg: Leg) -> list[_Sweep]:
        """The leg's passes, by one band from the middle of each."""
        key = (leg.start, leg.stop, leg.rows or 0, leg.hidden is not None)
        if key not in self._sweeps:
            self._sweeps[key] = []
            stored = {leg.start}
            for image in leg.passes(self.chain):
                self._sweeps[key].append(self._sweep(image, leg, stored))
                stored |= {image} if leg.hidden else set()
        return self._sweeps[key]

    def _sweep(self, image: int, leg: Leg, stored: set[int]) -> _Sweep:
        chain = self.chain
        split = bands(chain.sizes[image].height, leg.band_rows(chain, image))
        actions = chain.actions(image, split[(len(split) - 1) // 2], frozenset(stored))
        sweep = _Sweep(ticks=len(split))
        sweep.peak = peak_bytes(chain, actions, partial(self._workspace, image))
        sweep.flops = self._flops(actions) * len(split)
        for action in actions:
            if action.source is None:
                size = chain.image_bytes(action.image, action.rows)
                sweep.read[action.image] = size * len(split)
        return sweep

    def _flops(self, actions: list[Action]) -> float:
        chain = self.chain
        return float(
            chain.batch
            * sum(
                chain.steps[action.image - 1].flops(
                    action.made[1] - action.made[0], chain.sizes[action.image].width
                )
                for action in actions
                if action.source is not None
            )
        )

    def _workspace(self, sweeping: int | None, action: Action) -> int:
        """Bytes beside inputs and output while an action is done; `sweeping` None: all at once."""
        chain, image = self.chain, action.image
        size = chain.sizes[image]
        if isinstance(chain.steps[image - 1], AttentionStep):
            return attention.workspace_bytes(
                chain.batch, size.height, size.width, size.channels, chain.itemsize
            )
        if image not in self._ways:
            self._ways[image] = self._chosen(whole_problem(chain, image))
        statistics = normed(chain, image) and sweeping in (None, image)
        way = self._ways[image]
        return max(
            way.workspace_bytes(conv_problem(chain, part, statistics))
            for part in parts(chain, action)
        )


def _place(leg: Leg) -> str:
    if leg.keep != "device":
        return leg.keep
    return "piece" if leg.rows is None else "blocks"
