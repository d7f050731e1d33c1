"""Kernels compiled, tested and, under Performance, measured before they are needed.

Done once per class of problems and not once per image size, so a new size finds all of it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lib_rocm_sd import device as devices
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.planner import VariantPlan, default_launcher
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops.base import KernelSpec, Op, Variant
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.vae import problems
from lib_rocm_sd.vae.forecast import ConvWay
from lib_rocm_sd.vae.problems import Work
from lib_rocm_sd.vae.steps import Recipe
from lib_rocm_sd.vae.trace import chain

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
        for done, (key, op, problem) in enumerate(missing, 1):
            self._planned(op, problem)
            self._ready.add(key)
            told(done, len(missing))

    def get_ready_for_other_sizes(self, recipe: Recipe, dtype: torch.dtype, told: Told) -> None:
        """Test what depends on how many pixels attention sees beyond a multiple of 128.

        Of pictures whose sides are multiples of 64, as a UI gives them, there are none or 64.
        """
        halved = sum(getattr(step, "kind", "") == "3x3 stride 2" for step in recipe.steps)
        for rows, columns in ((16, 8), (24, 8)):
            made = chain(recipe, 1, rows << halved, columns << halved, dtype)
            self.get_ready(problems.of_whole(made), told)

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
        for op, problem in work:
            for variant in _candidates(op, problem, info.arch, self.session.measures):
                for each in (problem, *op.test_problems(problem)):
                    configs = variant.configs(info.arch, each)
                    for config in configs if self.session.measures else configs[:1]:
                        specs.update(dict.fromkeys(variant.specs(info.arch, each, config)))
        try:
            launcher: Any = default_launcher(self.device, info.arch)
        except (RuntimeError, OSError):
            return  # the engine says why
        missing = launcher.missing(specs)
        if missing:
            self.session.report.event(
                f"compiling {len(missing)} kernels of the VAE for {info.gfx}, once"
            )
            launcher.build(missing)


def _candidates(
    op: Op[Any, Any], problem: Any, arch: Arch, measures: bool
) -> list[Variant[Any, Any]]:
    """Our variants that may run a problem: all that are measured, else the one preferred."""
    able = [variant for variant in op.able(arch, problem) if variant.ours]
    return able if measures else able[:1]
