"""Which images to keep whole, and how high the bands are in which the next one is made.

All rows that a value depends on are hundreds in a deep network, so bands of the whole network would
make most of it again and again. Instead the network is cut into legs of a few steps: a leg makes
one image, which is kept, from those that were, in bands of rows with all that they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lib_rocm_sd.upscaler import windows
from lib_rocm_sd.upscaler.steps import ConvStep, WindowStep
from lib_rocm_sd.upscaler.trace import Action, Chain, Trace
from lib_rocm_sd.vae.forecast import Chosen
from lib_rocm_sd.vae.plan import HOST_FLOPS_PER_BYTE, BandPlan, Leg
from lib_rocm_sd.vae.trace import bands

LEAST_ROWS = 8
"""No band is lower, in rows of the smallest image."""


class Planner:
    """Plans for one chain, whose convolutions will be run in the `chosen` ways."""

    def __init__(self, chain: Chain, chosen: Chosen) -> None:
        self.chain = chain
        self._chosen = chosen

    def whole(self) -> BandPlan:
        """Everything at once."""
        legs = [Leg(0, self.chain.last, None, "output")]
        peak, cost = self._band(legs[0], frozenset())
        return BandPlan(tuple(legs), peak + self.chain.output_bytes, 0, cost, len(self.chain.cuts))

    def cheapest(
        self, budget_bytes: int, host_bytes: int, most_cost: float = math.inf
    ) -> BandPlan | None:
        """The plan of least cost within the budgets; None where none costs up to `most_cost`."""
        plans = [self._plan(keep, budget_bytes) for keep in ("device", "host")]
        plans.append(self.whole())
        fit = [
            plan
            for plan in plans
            if plan.peak_bytes <= budget_bytes
            and plan.host_bytes <= host_bytes
            and plan.cost <= most_cost
        ]
        return min(fit, key=lambda plan: plan.cost, default=None)

    def smallest(self, host_bytes: int) -> BandPlan:
        """The plan of least peak."""
        plans = [self.whole(), *(self._plan(keep, 0) for keep in ("device", "host"))]
        fit = [plan for plan in plans if plan.host_bytes <= host_bytes]
        return min(fit, key=lambda plan: plan.peak_bytes)

    def _plan(self, keep: str, budget_bytes: int) -> BandPlan:
        """Legs between all cuts, each in the highest bands that fit the budget, else in those that
        take least. What is kept waits as `keep` says.
        """
        chain, legs, start = self.chain, list[Leg](), 0
        peak, host, cost, ticks = 0, 0, 0.0, 0
        for stop in self.chain.cuts:
            best: tuple[int, float, Leg] | None = None
            place = "output" if stop == chain.last else keep
            waiting = self._waiting_bytes(start, stop)
            for rows in self._heights(stop):
                leg = Leg(start, stop, rows, place)
                band, flops = self._band(leg, frozenset((0, *self.chain.cuts)))
                if keep == "host":  # what the next band reads is on its way, too
                    band += self._read_bytes(leg)
                resident = waiting if keep == "device" else 0
                resident += chain.output_bytes if stop == chain.last else 0
                if best is None or band + resident < best[0]:
                    best = (band + resident, flops, leg)
                if best[0] <= budget_bytes:
                    break
            assert best is not None and best[2].rows is not None
            count = len(bands(chain.rows(stop)[1], best[2].rows))
            peak, cost, ticks = max(peak, best[0]), cost + best[1] * count, ticks + count
            if keep == "host":
                host = max(host, waiting)
                cost += HOST_FLOPS_PER_BYTE * chain.image_bytes(stop)
            legs.append(best[2])
            start = stop
        return BandPlan(tuple(legs), peak, host, cost, ticks)

    def _heights(self, stop: int) -> Iterator[int]:
        """Rows of a band of image `stop`, the highest first."""
        height = self.chain.height
        count = max(math.ceil(math.log2(height / LEAST_ROWS)), 0)
        for each in range(count + 1):
            yield min(height, LEAST_ROWS << (count - each)) * self.chain.network.growth[stop]

    def _waiting_bytes(self, start: int, stop: int) -> int:
        """Bytes of the kept images that are there when image `stop` has been made from `start`."""
        chain, uses = self.chain, self.chain.network.last_uses
        kept = [i for i in self.chain.cuts if i <= start and uses[i] > start]
        kept += [] if stop == chain.last else [stop]
        return sum(map(chain.image_bytes, kept))

    def _trace(self, leg: Leg, stored: frozenset[int]) -> Trace:
        """A band from the middle."""
        chain = self.chain
        split = bands(chain.rows(leg.stop)[1], leg.rows or chain.rows(leg.stop)[1])
        kept = frozenset(image for image in stored if image <= leg.start)
        return chain.trace(leg.stop, split[(len(split) - 1) // 2], kept)

    def _band(self, leg: Leg, stored: frozenset[int]) -> tuple[int, float]:
        """The peak of a band, and its arithmetic."""
        chain, trace = self.chain, self._trace(leg, stored)
        flops = sum(chain.flops(action) for action in trace.actions if action.source is not None)
        return chain.peak_bytes(trace, self._workspace), float(flops)

    def _read_bytes(self, leg: Leg) -> int:
        trace = self._trace(leg, frozenset((0, *self.chain.cuts)))
        read = (action for action in trace.actions if action.source is None and action.image)
        return sum(self.chain.image_bytes(action.image, action.rows) for action in read)

    def _workspace(self, action: Action) -> int:
        """Bytes beside inputs and output while an action is done."""
        step = self.chain.network.steps[action.image - 1]
        if isinstance(step, WindowStep):
            return windows.workspace_bytes(self.chain, step, action)
        if not isinstance(step, ConvStep) or step.kind == "1x1":
            return self.chain.image_bytes(action.image, action.made)
        problem = self.chain.conv_problem(action)
        return self._chosen(problem).workspace_bytes(problem)
