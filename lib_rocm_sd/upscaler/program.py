"""A host's upscaler as our own program: the whole picture at once or in exact bands, never in tiles
that do not see their neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Places
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.upscaler import windows
from lib_rocm_sd.upscaler.plan import Planner
from lib_rocm_sd.upscaler.run import Run, run_plan
from lib_rocm_sd.upscaler.steps import Network, read
from lib_rocm_sd.upscaler.store import PictureRows, ResultRows
from lib_rocm_sd.upscaler.trace import Chain
from lib_rocm_sd.upscaler.weights import SCALES, Ready, prepare
from lib_rocm_sd.vae.bands import Overflow
from lib_rocm_sd.vae.forecast import Chosen
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.policy import SizedPlans
from lib_rocm_sd.vae.program import BandedProgram, Request
from lib_rocm_sd.vae.readiness import Readiness, Told
from lib_rocm_sd.vae.trace import bands

PART = "Upscaler"
"""What the report calls it."""


class UpscalerPlans(SizedPlans[Planner]):
    """The plans of one network. `chosen` says how a convolution will be run."""

    def __init__(self, network: Network, dtype: torch.dtype, chosen: Chosen) -> None:
        super().__init__()
        self._network, self._dtype, self._chosen = network, dtype, chosen

    def _new_planner(self, size: tuple[int, int, int]) -> Planner:
        return Planner(chain_of(self._network, size, self._dtype), self._chosen)


def chain_of(network: Network, size: tuple[int, int, int], dtype: torch.dtype) -> Chain:
    """A network on pictures (batch, height, width)."""
    batch, *sides = size
    multiple, unshuffle = network.entry.multiple, network.entry.unshuffle
    rows, columns = (-(-side // multiple) * multiple // unshuffle for side in sides)
    return Chain(network, batch, rows, columns, dtype)


def _everything(chain: Chain) -> BandPlan:
    return BandPlan((Leg(0, chain.last, None, "output"),), 0, 0, 0.0, 1)


class Upscaler(BandedProgram[Network, Chain]):
    """Runs an upscaler's network, see hosts/read/upscaler.py, in `dtype`, whatever its weights are.

    A call gives (N, C, H s, W s) in the picture's dtype. It raises Overflow where fp16 overflows at
    any scale: the host's own is to be asked.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float16) -> None:
        self._in_dtype = dtype
        self._places: dict[int, Places] = {}
        super().__init__(module, Network())

    @property
    def network(self) -> Network:
        """What was read of the module."""
        return self._recipe

    @property
    def scale(self) -> int:
        """Sides of the result for one of the picture."""
        return self._recipe.scale

    @property
    def _part(self) -> str:
        return PART

    @property
    def dtype(self) -> torch.dtype:
        return self._in_dtype

    @property
    def _last_scale(self) -> int:
        return len(SCALES) - 1 if self._recipe.is_homogeneous else 0

    def work(self, height: int, width: int) -> Work:
        """The convolutions and attention of one whole picture. Those of its bands are of the same
        classes.
        """
        self._look()
        chain = chain_of(self._recipe, (1, height, width), self.dtype)
        ours = (ATTENTION, *CONVS.values())
        every = self._work_of(chain, _everything(chain))
        return [(op, problem) for op, problem in every if op in ours]

    def _read(self) -> Network:
        return read(self._module)

    def _check(self, image: torch.Tensor) -> None:
        super()._check(image)
        if min(image.shape[2:]) < 1:
            raise ValueError(f"a picture without pixels: {tuple(image.shape)}")

    def _prepared(self) -> dict[int, Ready]:
        self._places.clear()
        return prepare(self._recipe, SCALES[self._scale], self.dtype)

    def _scaled(self, request: Request) -> torch.Tensor:
        result = None if self._hopeless else super()._scaled(request)
        if result is None or self._hopeless:
            raise Overflow(f"the upscaler's values do not fit {self.dtype}")
        return result

    def _new_plans(
        self, size: tuple[int, int, int], dtype: torch.dtype, readiness: Readiness, told: Told
    ) -> UpscalerPlans:
        chain = chain_of(self._recipe, size, dtype)
        readiness.get_ready(self._work_of(chain, _everything(chain)), told)
        return UpscalerPlans(self._recipe, dtype, readiness.chosen)

    def _work_of(self, links: Chain, plan: BandPlan) -> Work:
        """Asks for the first two, the last two and one more of the many bands of an image."""
        kept = frozenset((0, *(leg.stop for leg in plan.legs)))
        work = dict[Any, Op[Any, Any]]()
        for leg in plan.legs:
            height = links.rows(leg.stop)[1]
            split = bands(height, leg.rows or height)
            for rows in (*split[:2], split[(len(split) - 1) // 2], *split[-2:]):
                stored = frozenset(image for image in kept if image <= leg.start)
                trace = links.trace(leg.stop, rows, stored)
                work |= {problem: CONVS[problem.kind] for problem in links.conv_problems(trace)}
                work |= windows.work(links, trace)
        return [(op, problem) for problem, op in work.items()]

    def _run(self, request: Request, plan: BandPlan, links: Chain, strict: bool) -> torch.Tensor:
        """As many pictures of the batch at once as `links` has, one after the other."""
        picture, group = request.image, links.batch
        batch, channels = picture.shape[0], self._recipe.exit.channels
        shape = (batch, channels, *links.result)
        if not batch:
            return picture.new_empty(shape)
        result: torch.Tensor | None = None
        overflow = torch.zeros(1, dtype=torch.int32, device=picture.device)
        for first in range(0, batch, group):
            part = picture[first : first + group]

            def of_part(first: int = first) -> torch.Tensor:
                nonlocal result
                result = picture.new_empty(shape) if result is None else result
                return result[first : first + group]

            run = Run(links, self._ready, picture.device, overflow, self._places)
            run.session, run.progress = request.session, request.progress
            run.interrupt = request.interrupt
            run.done, run.total = plan.ticks * first // group, plan.ticks * batch // group
            source = PictureRows(part, self._recipe.entry, links.dtype)
            run_plan(run, plan, source, ResultRows(of_part, self._recipe.exit, part))
        assert result is not None
        if strict and overflow.item():
            raise Overflow("a value does not fit")
        sides = (side * self.scale for side in picture.shape[2:])
        rows, columns = map(slice, sides)  # without what was added to make whole pixels of channels
        return result[:, :, rows, columns]
