"""A host's Decoder or Encoder as our own program: read once, run whole or in exact bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from lib_rocm_sd import policy as levels
from lib_rocm_sd.engine import engine
from lib_rocm_sd.ops.conv import CONVS
from lib_rocm_sd.planner import free_bytes
from lib_rocm_sd.report import report
from lib_rocm_sd.selftest import is_out_of_memory
from lib_rocm_sd.vae import policy
from lib_rocm_sd.vae.bands import Overflow, Run, nothing, run_plan
from lib_rocm_sd.vae.plan import Plan
from lib_rocm_sd.vae.read import read
from lib_rocm_sd.vae.steps import Recipe
from lib_rocm_sd.vae.trace import Chain
from lib_rocm_sd.vae.weights import Ready, Scales, Signature, all_finite, prepare

_EXPONENTS = ((0, 0), (-5, 0), (-10, 0), (-15, 0), (-5, -5), (-15, -5), (-15, -10))
SCALES = tuple(Scales(2.0**stream, 2.0**hidden) for stream, hidden in _EXPONENTS)
"""Tried in order where fp16 overflows."""


@dataclass(frozen=True)
class _Request:
    """What the caller asked for."""

    image: torch.Tensor
    level: str
    budget_bytes: int | None
    progress: Callable[[int, int], None]
    interrupt: Callable[[], bool]


class UnknownModuleError(ValueError):
    """The module has a structure that is not known; `reasons` say what."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(f"this module cannot be run: {'; '.join(reasons)}")
        self.reasons = reasons


class _ChangedError(Exception):
    """The module is not what was run."""


class Program:
    """Runs `module` (a Decoder or Encoder, see read.py) without calling it.

    Nothing of the module is changed. Its weights are looked at before each run and its structure
    while the device works; what has changed is read, and run, again. Not thread-safe.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._recipe = Recipe("decoder", ())
        self._signature: Signature | None = None
        self._ready: tuple[Ready, ...] = ()
        self._scale = 0
        self._hopeless = False
        self._plans: policy.Plans | None = None
        self._held: dict[object, int | None] = {}
        """Budgets that held where memory was short, so that it is not tried again each time."""
        self.last_plan: Plan | None = None
        self.refresh()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the module cannot be run, as of the last look; empty if it can."""
        return self._recipe.reasons

    @property
    def scales(self) -> Scales:
        """What the images between the steps are multiplied by; found by running."""
        return SCALES[self._scale]

    def refresh(self) -> tuple[str, ...]:
        """Look at the module; forget what was made of it where it has changed. Gives `reasons`."""
        recipe = read(self._module)
        if self._outdated(recipe) or not self._same_weights():
            self._recipe = recipe
            self._signature = Signature(recipe)
            self._scale, self._hopeless, self._plans = 0, False, None
            self._held = {}
            self.release()
        return self.reasons

    def _outdated(self, recipe: Recipe) -> bool:
        """True if the module as read now is not what was read last."""
        return recipe.reasons != self.reasons or recipe.layout() != self._recipe.layout()

    def _same_weights(self) -> bool:
        return self._signature is not None and self._signature.matches(self._recipe)

    def release(self) -> None:
        """Give back the packed weights, as a host short of memory wants; made again when needed."""
        self._ready = ()

    def __call__(
        self,
        image: torch.Tensor,
        *,
        level: str = "Auto",
        budget_bytes: int | None = None,
        progress: Callable[[int, int], None] = nothing,
        interrupt: Callable[[], bool] = bool,
    ) -> torch.Tensor:
        """What the module gives for `image` (N, C, H, W): (N, C', H', W') in the weights' dtype.

        `budget_bytes`: device memory to keep to beside the weights, None: by `level`.
        `progress(done, total)` and `interrupt()` are called between bands. Raises
        UnknownModuleError; ValueError, with shapes, on a caller's mistake; Interrupted; "out of
        memory" when the smallest bands do not fit.
        """
        budget = policy.checked_budget(budget_bytes)
        levels.by_name(level)
        request = _Request(image, level, budget, progress, interrupt)
        with torch.no_grad(), _autocast_off(image.device):
            while True:
                if self.reasons or not self._same_weights():
                    self.refresh()
                if self.reasons:
                    raise UnknownModuleError(self.reasons)
                self._check(image)
                with suppress(_ChangedError):
                    return self._scaled(request)
                self.refresh()

    @property
    def _weight(self) -> torch.Tensor:
        return next(self._module.parameters())

    def _check(self, image: torch.Tensor) -> None:
        channels = self._recipe.in_channels
        if image.ndim != 4 or image.shape[1] != channels or not image.is_floating_point():
            raise ValueError(f"expected (N, {channels}, H, W): {tuple(image.shape)} {image.dtype}")
        if image.device != self._weight.device:
            where = f"the image is on {image.device}, the weights are on {self._weight.device}"
            raise ValueError(where)

    def _scaled(self, request: _Request) -> torch.Tensor:
        """Run, and where fp16 overflows run again with smaller values between the steps."""
        fallible = self._weight.dtype == torch.float16
        while fallible and not self._hopeless:
            output = self._attempt(request)
            if output is not None and _finite(output):
                return output
            if not _finite(request.image):
                report.event(f"the {self._recipe.role}'s input has NaN or infinity")
                return self._within(request, strict=False) if output is None else output
            del output
            self.release()
            if self._scale == len(SCALES) - 1 or not all_finite(self._recipe):
                report.event(f"the {self._recipe.role} gives NaN or infinity at any scale")
                self._scale, self._hopeless = 0, True
            else:
                self._scale += 1
        return self._within(request, strict=False)

    def _attempt(self, request: _Request) -> torch.Tensor | None:
        """The output, or None where an overflow was seen before the end."""
        try:
            return self._within(request, strict=True)
        except Overflow:
            return None

    def _within(self, request: _Request, strict: bool) -> torch.Tensor:
        """Run the plan; where memory is short after all, plan with half, until that is no less."""
        if not self._ready:
            self._ready = prepare(self._recipe, self.scales)
        key = (request.image.shape, request.level, request.budget_bytes)
        budget = self._held.get(key, request.budget_bytes)
        while True:
            plan, links = self._plan(request, budget)
            self.last_plan = plan
            try:
                output = self._run(request, plan, links, strict)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                budget = min(plan.peak_bytes, budget or plan.peak_bytes) // 2
                if budget == 0 or self._plan(request, budget)[0].peak_bytes >= plan.peak_bytes:
                    raise
                report.event(f"out of memory ({plan}): planned again within {budget >> 20} MiB")
            else:
                if budget != request.budget_bytes:
                    self._held[key] = budget
                if self._outdated(read(self._module)):  # here, where the device is still at work
                    raise _ChangedError
                return output
            if request.image.device.type == "cuda":
                torch.cuda.empty_cache()

    def _plan(self, request: _Request, budget_bytes: int | None) -> tuple[Plan, Chain]:
        image = request.image
        if self._plans is None:
            fused = self._weight.dtype in (torch.float16, torch.bfloat16)
            fused = fused and not engine.usable(image.device, CONVS["3x3"])
            self._plans = policy.Plans(self._recipe, self._weight.element_size(), fused)
        host = 0 if image.device.type == "cpu" else policy.host_available_bytes()
        batch, _, height, width = image.shape
        size = (max(batch, 1), height, width)
        return self._plans.plan(size, request.level, budget_bytes, free_bytes(image.device), host)

    def _run(self, request: _Request, plan: Plan, links: Chain, strict: bool) -> torch.Tensor:
        """As many images of the batch at once as `links` has, one after the other."""
        image, dtype, group = request.image, self._weight.dtype, links.batch
        batch, size = image.shape[0], links.sizes[-1]
        shape = (batch, self._recipe.out_channels, size.height, size.width)
        output = torch.empty(0, dtype=dtype, device=image.device)
        ticks = plan.ticks * max(batch // group, 1)
        for first in range(0, batch, group):

            def part(first: int = first) -> torch.Tensor:
                nonlocal output
                if output.shape != shape:
                    output = image.new_empty(shape, dtype=dtype)
                return output[first : first + group]

            run = Run(links, self._ready, dtype, image.device, strict=strict)
            run.progress, run.interrupt = request.progress, request.interrupt
            run.done, run.total = plan.ticks * first // group, ticks
            run_plan(run, plan, image[first : first + group], part)
        return output if batch else image.new_empty(shape, dtype=dtype)


def _finite(tensor: torch.Tensor) -> bool:
    """True without NaN and infinity. A sum in float32 of what fits fp16 cannot overflow."""
    return math.isfinite(float(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))


@contextmanager
def _autocast_off(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if device.type in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
