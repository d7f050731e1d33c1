"""Which images to make whole, which in bands, and where what lies between waits.

A plan is a way from the input to the output over the images between two blocks. A leg of it makes
one such image from another, whole, or in bands: then for each GroupNorm on the way there is a pass
that gathers its statistics, making again from the leg's first image what the passes before it made.
Each leg's memory is predicted from the very actions that bands.py will take; the cheapest way whose
legs all fit is found by dynamic programming.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS
from lib_rocm_sd.vae.forecast import LONGEST, Chosen, Forecast, Sweep, between_blocks
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep
from lib_rocm_sd.vae.trace import Chain, alive_bytes, whole_problem

MIN_ROWS = 64
"""No band is lower than this, counted at the leg's highest resolution."""
HOST_FLOPS_PER_BYTE = 2500.0
DEVICE_FLOPS_PER_BYTE = 60.0
"""Arithmetic done in the time in which a byte goes to or from the host, or is copied on the device:
what a plan's cost counts with."""
_LEG_COST = 1e6


def highest(chain: Chain, start: int, stop: int) -> int:
    """Rows of the highest image after `start`, up to `stop`."""
    return max([size.height for size in chain.sizes[start + 1 : stop + 1]])


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
        return self._rows_of(chain.sizes[image].height, highest(chain, self.start, self.stop))

    def _rows_of(self, height: int, top: int) -> int:
        rows = (self.rows or height) * height // top
        return min(max(rows // STATISTICS_ROWS, 1) * STATISTICS_ROWS, height)

    def all_band_rows(self, chain: Chain) -> list[tuple[int, int]]:
        """Each image that is swept over, with the rows of its bands."""
        sizes, top = chain.sizes, highest(chain, self.start, self.stop)
        return [(i, self._rows_of(sizes[i].height, top)) for i in self.passes(chain)]


@dataclass(frozen=True)
class BandPlan:
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


class _Waiting(NamedTuple):
    """An image that waits. Blocks are given back while they are read; one piece is not."""

    image: int
    place: str  # input, piece, blocks, host


_Taken = tuple[int, int, float, int]
"""What a leg takes: peak bytes, bytes on the host, cost, ticks."""


@dataclass(frozen=True)
class _Onward:
    """Legs between two images of which the first one that fits is taken; each costs `least` or
    more, and all that follow `after` or more. `taken`: what is known of the first few of them, by
    the place where their image waits.
    """

    to: _Waiting
    legs: tuple[Leg, ...]
    least: float
    after: float
    taken: dict[str, list[_Taken]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sums:
    """All passes of a leg: peaks of those before the last and of the last, without what lies there
    whole; bytes of stored images read in its band, moved from the host, and copied by all.
    """

    early: int
    final: int
    band: int
    moved: int
    copied: int
    flops: float
    ticks: int
    last_ticks: int


@dataclass(frozen=True)
class _Wanted:
    """What is searched for: the least cost, or the least peak, within two budgets."""

    budget: int
    host_budget: int
    by_peak: bool = False
    most_cost: float = math.inf

    def key(self, plan: BandPlan) -> tuple[float, float]:
        """Less is better."""
        return self._key(plan.peak_bytes, plan.cost)

    def _key(self, peak: int, cost: float) -> tuple[float, float]:
        return (peak, cost) if self.by_peak else (cost, peak)

    def better(
        self,
        plan: BandPlan,
        rival: BandPlan | None,
        way: _Onward,
        legs: Iterable[tuple[Leg, _Taken]],
    ) -> BandPlan | None:
        """`plan` and the first of `legs` within the budget, where that is better than `rival`."""
        bar = (math.inf, math.inf) if rival is None else self.key(rival)
        least = plan.cost + way.least + _LEG_COST
        if self._key(plan.peak_bytes, least) >= bar or least + way.after > self.most_cost:
            return None
        for leg, (peak, host, cost, ticks) in legs:
            if peak > self.budget:
                continue
            peak, cost = max(plan.peak_bytes, peak), plan.cost + cost + _LEG_COST
            if host > self.host_budget or self._key(peak, cost) >= bar:
                return None
            if cost + way.after > self.most_cost:
                return None
            host = max(plan.host_bytes, host)
            return BandPlan((*plan.legs, leg), peak, host, cost, plan.ticks + ticks)
        return None


class BandPlanner:
    """Plans for one chain, whose convolutions will be run in the `chosen` ways.

    `forecast`: of this chain, where there is one.
    """

    def __init__(self, chain: Chain, chosen: Chosen, forecast: Forecast | None = None) -> None:
        self.chain = chain
        self._forecast = forecast or Forecast(chain, chosen)
        self._sums: dict[tuple[int, int, int, bool, bool, bool], _Sums] = {}
        self._found: dict[tuple[int, bool], list[_Onward]] = {}
        self._nodes = between_blocks(chain)
        self._bytes = [chain.image_bytes(image) for image in range(chain.last + 1)]

    def whole(self) -> BandPlan:
        """Everything at once."""
        leg = Leg(0, self.chain.last, None, "output")
        return BandPlan((leg,), *self._whole("input", leg))

    def cheapest(
        self, budget_bytes: int, host_bytes: int, most_cost: float = math.inf
    ) -> BandPlan | None:
        """The plan of least cost within the budgets; None where none costs up to `most_cost`."""
        return self._search(_Wanted(budget_bytes, host_bytes, most_cost=most_cost))

    def smallest(self, host_bytes: int) -> BandPlan:
        """The plan of least peak."""
        plan = self._search(_Wanted(1 << 62, host_bytes, by_peak=True))
        assert plan is not None, "the whole frame is always a plan"
        return plan

    def _search(self, wanted: _Wanted) -> BandPlan | None:
        best: dict[_Waiting, BandPlan] = {_Waiting(0, "input"): BandPlan((), 0, 0, 0.0, 0)}
        for image in self._nodes[:-1]:
            for state in [state for state in best if state.image == image]:
                for way in self._onward(image, wanted.by_peak):
                    costs = self._taken(state.place, way, wanted.budget)
                    grown = wanted.better(best[state], best.get(way.to), way, costs)
                    if grown is not None:
                        best[way.to] = grown
        plans = [plan for state, plan in best.items() if state.image == self.chain.last]
        return min(plans, key=wanted.key, default=None)

    def _onward(self, start: int, by_peak: bool) -> list[_Onward]:
        """The legs from an image; those in bands in the highest first, if `by_peak` the lowest."""
        if (start, by_peak) in self._found:
            return self._found[start, by_peak]
        chain, steps = self.chain, []
        first = self._nodes.index(start)
        for distance, stop in enumerate(self._nodes[first + 1 :]):
            attends = any(isinstance(step, AttentionStep) for step in chain.steps[start:stop])
            banded = distance < LONGEST and chain.batch == 1 and not attends
            pair = stop == start + 2 and chain.steps[stop - 1].residual
            top = highest(chain, start, stop)
            heights = [MIN_ROWS << n for n in range(6, -1, -1) if MIN_ROWS << n < top] or [top]
            heights = heights[-1 if by_peak else 0 :]
            flops, after = self._forecast.flops(start, stop), self._forecast.flops(stop, chain.last)
            swept = Leg(start, stop, heights[0], "").passes(chain) if banded else ()
            again = sum(self._forecast.flops(start, image) for image in swept)
            for keep in ("output",) if stop == chain.last else ("device", "host"):
                copy_flops = self._bytes[stop] * (keep == "host") * HOST_FLOPS_PER_BYTE
                whole = Leg(start, stop, None, keep)
                steps.append(
                    _Onward(_Waiting(stop, _place(whole)), (whole,), flops + copy_flops, after)
                )
                for hidden in () if not banded else (None, "device", "host") if pair else (None,):
                    legs = tuple(Leg(start, stop, rows, keep, hidden) for rows in heights)
                    least = (flops if hidden else again) + copy_flops
                    steps.append(_Onward(_Waiting(stop, _place(legs[0])), legs, least, after))
        self._found[start, by_peak] = steps
        return steps

    def _taken(self, place: str, way: _Onward, budget: int) -> Iterator[tuple[Leg, _Taken]]:
        """The legs and what each takes from an image that waits in `place`.

        None where what they hold whole is more than the budget.
        """
        costs = way.taken.setdefault(place, [])
        if way.legs[0].rows is not None and max(self._held(place, way.legs[0])[:2]) > budget:
            return
        for index, leg in enumerate(way.legs):
            if index == len(costs):
                ask = self._whole if leg.rows is None else self._banded
                costs.append(ask(place, leg))
            yield leg, costs[index]

    def _whole(self, place: str, leg: Leg) -> _Taken:
        chain = self.chain
        peak = self._forecast.whole_peak(leg.start, leg.stop)
        flops = self._forecast.flops(leg.start, leg.stop)
        read_bytes = self._bytes[leg.start]
        if place == "blocks":
            peak = max(peak, 2 * read_bytes)
        if leg.keep == "output":
            peak = max(peak, self._bytes[leg.stop] + chain.output_bytes)
        moved_bytes = read_bytes * (place == "host") + self._bytes[leg.stop] * (leg.keep == "host")
        return peak, moved_bytes, flops + moved_bytes * HOST_FLOPS_PER_BYTE, 1

    def _held(self, place: str, leg: Leg) -> tuple[int, int, bool]:
        """Bytes of whole images that are there while a leg in bands gathers statistics, and while
        it makes its last image; and whether some are given back meanwhile.
        """
        source = self._bytes[leg.start] if place in ("piece", "blocks") else 0
        hidden = self._bytes[leg.start + 1] if leg.hidden == "device" else 0
        leaving = hidden + (source if place == "blocks" else 0)
        staying = source if place == "piece" else 0
        if leg.keep == "output":
            return source + hidden, staying + leaving + self.chain.output_bytes, False
        kept_bytes = self._bytes[leg.stop] if leg.keep == "device" else 0
        return source + hidden, staying + max(leaving, kept_bytes), leaving > 0

    def _banded(self, place: str, leg: Leg) -> _Taken:
        first, last = self._bytes[leg.start], self._bytes[leg.stop]
        between = self._bytes[leg.start + 1] if leg.hidden else 0
        sums = self._summed(leg, place == "host")
        early, late, leaving = self._held(place, leg)
        late += sums.final + (2 * sums.band if leaving else 0)
        if leg.keep == "host":
            late += last // sums.last_ticks
        peak = max(early + sums.early, late)
        to_host = between * (leg.hidden == "host") + last * (leg.keep == "host")
        moved_bytes = sums.moved + to_host
        cost = sums.flops + moved_bytes * HOST_FLOPS_PER_BYTE + sums.copied * DEVICE_FLOPS_PER_BYTE
        return peak, first * (place == "host") + to_host, cost, sums.ticks

    def _summed(self, leg: Leg, from_host: bool) -> _Sums:
        """The leg's passes together; `from_host`: its first image waits there."""
        on_host = leg.hidden == "host"
        key = (leg.start, leg.stop, leg.rows or 0, leg.hidden is not None, from_host, on_host)
        if key not in self._sums:
            sweeps = self._swept(leg)
            last, early, moved_bytes, read_bytes = sweeps[-1], 0, 0, 0
            for sweep in sweeps:
                there = sweep.read * from_host + sweep.read_hidden * on_host
                moved_bytes += there * sweep.ticks
                read_bytes += (sweep.read + sweep.read_hidden) * sweep.ticks
                if sweep is not last:
                    early = max(early, sweep.peak + there)
            if on_host:
                early += self._bytes[leg.start + 1] // sweeps[0].ticks
            self._sums[key] = _Sums(
                early,
                last.peak + last.read * from_host + last.read_hidden * on_host,
                max(last.read, last.read_hidden),
                moved_bytes,
                read_bytes - moved_bytes,
                sum([sweep.flops for sweep in sweeps]),
                sum([sweep.ticks for sweep in sweeps]),
                last.ticks,
            )
        return self._sums[key]

    def _swept(self, leg: Leg) -> list[Sweep]:
        """The leg's passes, in order; after the first one the hidden image may be there as well."""
        sweeps: list[Sweep] = []
        for image, rows in leg.all_band_rows(self.chain):
            hidden = leg.start + 1 if leg.hidden and sweeps else None
            sweeps.append(self._forecast.sweep(image, rows, leg.start, hidden))
        return sweeps


def _place(leg: Leg) -> str:
    if leg.keep != "device":
        return leg.keep
    return "piece" if leg.rows is None else "blocks"


HALVED_BYTES = 24 << 20
"""Statistics that take no more are made at once: it keeps a small card's work-groups together."""


def thrifty(chain: Chain, chosen: Chosen) -> BandPlanner:
    """The planner of `chain` with what is to be made in place, and in halves, when it runs so: the
    whole frame then takes less memory, which costs next to nothing.

    A residual block's output may be written over what the block began with, where nobody else reads
    that; and an image that is made when memory is fullest may be made in two halves, so that its
    statistics, one for each work-group before they are merged, take half as much. Both give the
    same bits.
    """
    able = [image for image in range(2, chain.last + 1) if _may_be_in_place(chain, image, chosen)]
    narrower = [i for i in able if chain.sizes[i].channels < chain.sizes[i - 2].channels]
    best = replace(chain, in_place=frozenset(able) - frozenset(narrower))
    forecast = Forecast(best, chosen)
    least = BandPlanner(best, chosen, forecast).whole().peak_bytes
    for image in narrower:  # keeps a wider image's memory, so it may do harm
        candidate = replace(best, in_place=best.in_place | {image})
        other = Forecast(candidate, chosen, forecast)
        peak = BandPlanner(candidate, chosen, other).whole().peak_bytes
        if peak < least:
            best, forecast, least = candidate, other, peak
    halved = _halved(best, forecast)
    if halved:
        best = replace(best, halved=halved)
        forecast = Forecast(best, chosen, forecast)
    return BandPlanner(best, chosen, forecast)


def _may_be_in_place(chain: Chain, image: int, chosen: Chosen) -> bool:
    """True where our kernel can write the image over the one that its block began with."""
    if not chain.steps[image - 1].residual:
        return False
    channels, before = chain.sizes[image].channels, chain.sizes[image - 2].channels
    attended = image < chain.last and isinstance(chain.steps[image], AttentionStep)
    if channels > before or (channels < before and attended):
        return False
    apart, over = (chosen(whole_problem(chain, image, in_place)) for in_place in (False, True))
    # By one config, so that bands, which may be out of place, still have the same bits.
    return over.fused and apart.fused and over.config == apart.config


def _halved(chain: Chain, forecast: Forecast) -> frozenset[int]:
    """The images during which the most is alive, where their statistics add much to it."""
    if chain.batch > 1:
        return frozenset()
    actions = chain.actions(chain.last, chain.rows(chain.last), frozenset({0}))
    alive = alive_bytes(chain, actions)
    images = set()
    for action, size in zip(actions, alive, strict=True):
        if action.source is None or not isinstance(chain.steps[action.image - 1], ConvStep):
            continue
        problem = whole_problem(chain, action.image)
        way = forecast.way(action.image)
        statistics = way.workspace_bytes(problem)
        if way.fused and statistics > HALVED_BYTES and size + statistics > max(alive):
            images.add(action.image)
    return frozenset(images)
