"""Kernels compiled, tested and, under Performance, measured before they are needed.

Done once per class of problems and not once per image size, so a new size finds all of it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lib_rocm_sd import device as devices
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.planner import VariantPlan, default_launcher
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec, Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS, ConvProblem
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import ApplyProblem, FinalizeProblem, ImageProblem
from lib_rocm_sd.ops.layer_norm.op import RMS_NORM
from lib_rocm_sd.vae import attention
from lib_rocm_sd.vae.forecast import ConvWay
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.steps import AttentionStep, Recipe, Rows
from lib_rocm_sd.vae.trace import (
    Action,
    Chain,
    bands,
    chain,
    conv_problem,
    normed,
    parts,
    rms_problem,
)

Told = Callable[[int, int], None]
"""Called with what is done and how much there is; may raise to end it."""


class Readiness:
    """What is known to be ready on one device, for one session."""

    def __init__(self, device: torch.device, session: Session) -> None:
        self.device = device
        self.session = session
        self._ready: set[object] = set()
        self._chosen: dict[ConvProblem, ConvWay] = {}

    def chosen(self, problem: ConvProblem) -> ConvWay:
        """How a convolution is run, and all that are measured as it is."""
        op = CONVS[problem.kind]
        key = op.measured_as(problem)
        if key not in self._chosen:
            plan = self._planned(op, problem)
            last = op.variants[-1]
            self._chosen[key] = ConvWay(plan.variant, plan.config) if plan else ConvWay(last, None)
        return self._chosen[key]

    def get_ready(self, work: Work, told: Told) -> None:
        """Compile all that `work` needs, several at a time; then test, and measure, one by one."""
        missing = [(self._key(op, problem), op, problem) for op, problem in work]
        missing = [item for item in missing if item[0] not in self._ready]
        if not missing:
            return
        told(0, len(missing))
        self._compile((op, problem) for _, op, problem in missing)
        for count, (key, op, problem) in enumerate(missing, 1):
            self._planned(op, problem)
            self._ready.add(key)
            told(count, len(missing))

    def get_ready_for_other_sizes(self, recipe: Recipe, dtype: torch.dtype, told: Told) -> None:
        """Test what depends on how many pixels attention sees beyond a multiple of 128.

        Of pictures whose sides are multiples of 64, as a UI gives them, there are none or 64.
        """
        halved = sum(getattr(step, "kind", "") == "3x3 stride 2" for step in recipe.steps)
        for rows, columns in ((16, 8), (24, 8)):
            made = chain(recipe, 1, rows << halved, columns << halved, dtype)
            self.get_ready(of_whole(made), told)

    def _key(self, op: Op[Any, Any], problem: Any) -> object:
        """Equal for problems that need no more than one of them."""
        measured = op.measured_as(problem) if self.session.measures else None
        return (op.name, *op.test_problems(problem), measured)

    def _planned(self, op: Op[Any, Any], problem: Any) -> VariantPlan | None:
        try:
            return engine.plan(problem, self.device, op, self.session)
        except NotSupportedError:
            return None  # said by the call itself

    def _compile(self, work: Iterable[tuple[Op[Any, Any], Any]]) -> None:
        info = devices.identify(self.device)
        if info.arch is None or info.reasons:
            return
        specs: dict[KernelSpec, None] = {}
        every = self.session.measures and not self.session.later()
        for op, problem in work:
            able = [variant for variant in op.able(info.arch, problem) if variant.ours]
            for variant in able if every else able[:1]:
                for each in (problem, *op.test_problems(problem)):
                    configs = variant.configs(info.arch, each)
                    for config in configs if every else configs[:1]:
                        specs.update(dict.fromkeys(variant.specs(info.arch, each, config)))
        try:
            launcher: Any = default_launcher(self.device, info.arch)
        except (RuntimeError, OSError):
            return  # the engine says why
        missing = launcher.missing(specs)
        if missing:
            self.session.report.event(
                f"{self.session.part}: compiling {len(missing)} kernels for {info.gfx}, once"
            )
            launcher.build(missing)


# What running a plan asks of the engine, as problems of its ops.


def of_plan(chain: Chain, plan: BandPlan) -> Work:
    """All that `plan` asks; of the many bands of an image the first two, the last two and one more.

    How many parts the statistics have that a norm is made from is told by whoever makes them: here
    it is a guess, which neither what is compiled nor what is tested depends on.
    """
    ops: dict[tuple[str, Any], Op[Any, Any]] = {}
    norms: set[int] = set()
    for leg in plan.legs:
        for image, cuts, stored in _passes(chain, leg):
            for rows in cuts:
                for action in chain.actions(image, rows, stored):
                    ops.update(_asked(chain, action, image, norms))
            norms.add(image)
    return [(op, problem) for (_, problem), op in ops.items()]


def of_whole(chain: Chain) -> Work:
    """All that the whole frame asks."""
    return of_plan(chain, BandPlan((Leg(0, chain.last, None, "output"),), 0, 0, 0.0, 1))


def _passes(chain: Chain, leg: Leg) -> Iterator[tuple[int, list[Rows], frozenset[int]]]:
    """An image that is made, its rows band by band, and the images that are read for it."""
    stored = frozenset({leg.start})
    for image in leg.passes(chain):
        if leg.rows is None:
            yield image, [chain.rows(image)], stored
            continue
        split = bands(chain.sizes[image].height, leg.band_rows(chain, image))
        middle = split[(len(split) - 1) // 2]
        yield image, list(dict.fromkeys((*split[:2], middle, *split[-2:]))), stored
        stored |= {image} if leg.hidden else set()


def _asked(
    chain: Chain, action: Action, made: int, norms: set[int]
) -> Iterator[tuple[tuple[str, Any], Op[Any, Any]]]:
    """What an action on the way to image `made` asks. `norms`: of images that have one by now."""
    if action.source is None:
        return
    image, step = action.image, chain.steps[action.image - 1]
    whole = action.source == chain.rows(image - 1) and action.made == chain.rows(image)
    needs_norm = normed(chain, image) and image not in norms and (whole or image == made)
    work: Work = []
    if isinstance(step, AttentionStep):
        work = list(_of_attention(chain, action))
    else:
        made_of = [conv_problem(chain, part, needs_norm) for part in parts(chain, action)]
        work = [(CONVS[problem.kind], problem) for problem in made_of]
        if step.rms is not None:
            rows = action.source[1] - action.source[0]
            work.append((RMS_NORM, rms_problem(chain, image, rows)))
    if needs_norm:
        work.append((FINALIZE, _finalize(chain, image)))
    if needs_norm and whole:
        norms.add(image)
    yield from (((op.name, each), op) for op, each in work)


def _finalize(chain: Chain, image: int) -> FinalizeProblem:
    norm, height = chain.steps[image].norm, chain.sizes[image].height
    assert norm is not None
    wide = DTYPE_NAMES[torch.promote_types(chain.dtype, torch.float32)]
    affine = DTYPE_NAMES[torch.promote_types(norm.weight.dtype, torch.float32)]
    parts = -(-height // STATISTICS_ROWS)
    return FinalizeProblem(chain.batch, parts, norm.num_channels, norm.num_groups, wide, affine)


def _of_attention(chain: Chain, action: Action) -> Iterator[tuple[Op[Any, Any], Any]]:
    step, size = chain.steps[action.image - 1], chain.sizes[action.image]
    assert isinstance(step, AttentionStep)
    batch, dtype, width = chain.batch, DTYPE_NAMES[chain.dtype], size.width
    rows = attention.chunk_rows(batch, width, size.channels, chain.itemsize)
    heights = {last - first for first, last in bands(size.height, rows)}
    pixels, per_head = size.height * width, step.head_dim
    for height in sorted(heights, reverse=True):
        if step.norm is None:
            yield RMS_NORM, rms_problem(chain, action.image, height)
        else:
            yield APPLY, ApplyProblem(batch, size.channels, height, width, dtype)
        queries = height * width
        yield ATTENTION, AttentionProblem(batch, step.heads, queries, pixels, per_head, dtype)
    if normed(chain, action.image):
        yield STATISTICS, ImageProblem(batch, size.channels, size.height, width, dtype)
