"""A host's Decoder or Encoder as our own program: read once, run whole or in exact bands.

`BandedProgram` is what this and an upscaler's program have in common.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from lib_rocm_sd import device as devices
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import empty_cache, free_bytes, with_index
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.modules.watch import Structure
from lib_rocm_sd.ops.base import Work
from lib_rocm_sd.vae import policy
from lib_rocm_sd.vae.bands import Interrupted, Overflow, Run, nothing, run_plan
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.policy import Plans, Shortage, SizedPlans, Wish, halved
from lib_rocm_sd.vae.readiness import Readiness, Told, of_plan, of_whole
from lib_rocm_sd.vae.steps import Recipe, read
from lib_rocm_sd.vae.trace import Chain, chain
from lib_rocm_sd.vae.weights import Ready, Scales, Signature, all_finite, prepare

_EXPONENTS = ((0, 0), (-5, 0), (-10, 0), (-15, 0), (-5, -5), (-15, -5), (-15, -10))
SCALES = tuple(Scales(2.0**stream, 2.0**hidden) for stream, hidden in _EXPONENTS)
"""Tried in order where fp16 overflows."""
MOST_CHANGES = 3
"""Runs that are thrown away because the module changed meanwhile."""
KINDS_KNOWN = 64
SESSIONS_KNOWN = 16
"""Who comes with ever new sessions begins anew."""
PARTS = {"decoder": "VAE decode", "encoder": "VAE encode"}
"""Names of the model's parts in the report, where the caller's session names none."""


@dataclass(frozen=True)
class Request:
    """What the caller asked for."""

    image: torch.Tensor
    wish: Wish
    session: Session
    progress: Callable[[int, int], None]
    interrupt: Callable[[], bool]

    def told(self, done: int, total: int) -> None:
        """While kernels are made ready, nothing of the image is done yet."""
        self.progress(0, total)
        if self.interrupt():
            raise Interrupted("interrupted while kernels were made ready")


class _ChangedError(Exception):
    """The module is not what was run."""


class Reading(Protocol):
    """What was read of a module. `role`: what people call it. `layout()`: equal for what does the
    same with the same modules. `leaves`: the modules whose parameters it uses.
    """

    @property
    def role(self) -> str: ...
    @property
    def reasons(self) -> tuple[str, ...]: ...
    @property
    def leaves(self) -> Sequence[nn.Module]: ...
    @property
    def in_channels(self) -> int: ...
    def layout(self) -> list[Any]: ...


R = TypeVar("R", bound=Reading)
L = TypeVar("L")
"""What a plan is for: a recipe at one size."""


class BandedProgram(ABC, Generic[R, L]):
    """Runs `module` without calling it.

    Nothing of the module is changed. It is looked at before each run, and again while the device
    works; what has changed is read, and run, again. Not thread-safe.
    """

    def __init__(self, module: nn.Module, unread: R) -> None:
        self._module = module
        self._recipe = unread
        self._signature: Signature | None = None
        self._structure: Structure
        self._ready: Any = ()
        self._scale = 0
        self._hopeless = False
        self._readiness: dict[object, Readiness] = {}
        self._plans: dict[object, SizedPlans[Any]] = {}
        self._kinds: dict[object, None] = {}
        """Kinds of plans for which all was made ready."""
        self._short: dict[object, Shortage] = {}
        """Where memory was short: more is not tried again each time."""
        self.last_plan: BandPlan | None = None
        """How the last image was made, and the memory that this was predicted to take."""
        self.refresh()

    @abstractmethod
    def _read(self) -> R:
        """What the module does now."""

    @property
    @abstractmethod
    def _part(self) -> str:
        """The model's part in the report, where the caller's session names none."""

    @property
    @abstractmethod
    def _last_scale(self) -> int:
        """The number of the smallest scale, from 0 on."""

    @abstractmethod
    def _prepared(self) -> Any:
        """The weights as steps read them, at the scale of now; false where there is nothing."""

    @abstractmethod
    def _new_plans(
        self, size: tuple[int, int, int], dtype: torch.dtype, readiness: Readiness, told: Told
    ) -> SizedPlans[Any]:
        """Plans, once all is ready that inputs of any size launch; this is the first."""

    @abstractmethod
    def _work_of(self, links: L, plan: BandPlan) -> Work:
        """All that a plan asks of the engine."""

    @abstractmethod
    def _run(self, request: Request, plan: BandPlan, links: L, strict: bool) -> torch.Tensor:
        """The result by a plan. `strict`: raise Overflow where values did not fit."""

    @property
    def module(self) -> nn.Module:
        """What is run."""
        return self._module

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the module cannot be run, as of the last look; empty if it can."""
        return self._recipe.reasons

    def refresh(self) -> tuple[str, ...]:
        """Look at the module; forget what was made of it where it has changed. Gives `reasons`."""
        self._structure = Structure(self._module)
        recipe = self._read()
        if self._outdated(recipe) or not self._same_weights(known=True):
            self._recipe = recipe
            self._signature = Signature(recipe.leaves)
            self._scale, self._hopeless = 0, False
            self._plans, self._kinds, self._short = {}, {}, {}
            self.release()
        elif not self._same_weights():  # inference tensors may hold others in the same places
            self._hopeless = False
            self.release()
        return self.reasons

    def _outdated(self, recipe: R) -> bool:
        """True if the module as read now is not what was read last."""
        return recipe.reasons != self.reasons or recipe.layout() != self._recipe.layout()

    def _same_weights(self, known: bool = False) -> bool:
        return self._signature is not None and self._signature.matches(known)

    def _changed(self) -> bool:
        """True if the module is not what was run."""
        if not self._structure.same():
            self._structure = Structure(self._module)
            if self._outdated(self._read()):
                return True
        return not self._same_weights(known=True)

    @property
    def is_stale(self) -> bool:
        """True if packed weights are kept of others than the module has now, and where it has them.

        A host moves modules without a word: it asks when it may have done so.
        """
        return bool(self._ready) and not self._same_weights(known=True)

    def release(self) -> None:
        """Give back the packed weights, as a host short of memory wants; made again when needed."""
        self._ready = ()

    def __call__(
        self,
        image: torch.Tensor,
        *,
        session: Session = DEFAULT,
        mode: str = "auto",
        budget_bytes: int | None = None,
        progress: Callable[[int, int], None] = nothing,
        interrupt: Callable[[], bool] = bool,
    ) -> torch.Tensor:
        """What the module gives for `image` (N, C, H, W): (N, C', H', W'), of a VAE in the weights'
        dtype, of an upscaler in the image's.

        `mode`: one of policy.MODES. `budget_bytes`: device memory to keep to beside the weights,
        None: by the session's level; "whole" keeps to none. `progress(done, total)` and
        `interrupt()` are called between bands, and with 0 done while kernels are made ready. Raises
        UnknownModuleError; ValueError, with shapes, on a caller's mistake; Interrupted; "out of
        memory" when the smallest bands do not fit.
        """
        wish = policy.wish(session.level, mode, budget_bytes)
        session = session.of_part(session.part or self._part)
        request = Request(image, wish, session, progress, interrupt)
        with torch.no_grad(), _autocast_off(image.device):
            for _ in range(MOST_CHANGES):
                self._look()
                self._check(image)
                try:
                    return self._scaled(request)
                except _ChangedError:
                    self.refresh()
        raise RuntimeError(f"the {self._recipe.role} changes whenever it is run")

    def prepare(
        self,
        height: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        batch: int = 1,
        *,
        session: Session = DEFAULT,
        mode: str = "auto",
        budget_bytes: int | None = None,
        progress: Told = nothing,
    ) -> BandPlan:
        """Compile and test all that inputs of this size will launch; the plan by which they run.

        `dtype` and `device` are those that the weights will have; they need not be there yet.
        Raises UnknownModuleError; ValueError on a caller's mistake.
        """
        wish = policy.wish(session.level, mode, budget_bytes)
        if not dtype.is_floating_point or min(height, width, batch) < 1:
            raise ValueError(f"cannot prepare for {batch} x {height} x {width}, {dtype}")
        self._look()
        device = with_index(device)
        with torch.no_grad(), _autocast_off(device):
            size = (batch, height, width)
            return self._planned(size, dtype, device, wish, session, progress, thoroughly=True)[0]

    def _look(self) -> None:
        if self.reasons or self._signature is None or not self._signature.seems_to_match():
            self.refresh()
        if self.reasons:
            raise UnknownModuleError(self.reasons)

    @property
    def _weight(self) -> torch.Tensor:
        return next(self._module.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """In which images are computed."""
        return self._weight.dtype

    def _check(self, image: torch.Tensor) -> None:
        channels = self._recipe.in_channels
        if image.ndim != 4 or image.shape[1] != channels or not image.is_floating_point():
            raise ValueError(f"expected (N, {channels}, H, W): {tuple(image.shape)} {image.dtype}")
        if image.device != self._weight.device:
            where = f"the image is on {image.device}, the weights are on {self._weight.device}"
            raise ValueError(where)

    def _scaled(self, request: Request) -> torch.Tensor:
        """Run, and where fp16 overflows run again with smaller values between the steps."""
        role = self._recipe.role
        fallible = self.dtype == torch.float16
        while fallible and not self._hopeless:
            try:
                output: torch.Tensor | None = self._within(request, strict=True)
            except Overflow:
                output = None
            if output is not None and is_finite(output):
                return output
            if not is_finite(request.image):
                request.session.report.event(f"the {role}'s input has NaN or infinity")
                return self._within(request, strict=False) if output is None else output
            del output
            self.release()
            if self._scale == self._last_scale or not all_finite(self._recipe.leaves):
                request.session.report.event(f"the {role} gives NaN or infinity at any scale")
                self._scale, self._hopeless = 0, True
            else:
                self._scale += 1
        output = self._within(request, strict=False)
        if not (fallible or is_finite(output) or is_finite(request.image)):
            request.session.report.event(f"the {role}'s input has NaN or infinity")
        return output

    def _within(self, request: Request, strict: bool) -> torch.Tensor:
        """Run the plan; where memory is short after all, plan with half, until that is no less."""
        if not self._ready:
            self._ready = self._prepared()
        image, dtype, session = request.image, self.dtype, request.session
        size = (max(image.shape[0], 1), *image.shape[2:])
        key = (size, request.wish, session.headroom_bytes)
        short = self._short.get(key)
        again = short is not None and short.is_over(free_bytes(image.device))
        wish = request.wish if short is None or again else short.wish
        while True:
            plan, links = self._planned(size, dtype, image.device, wish, session, request.told)
            self.last_plan = plan
            try:
                output = self._run(request, plan, links, strict)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                wish = halved(wish, plan)
                less = self._planned(size, dtype, image.device, wish, session, request.told)[0]
                if wish.budget_bytes == 0 or less.peak_bytes >= plan.peak_bytes:
                    self._short.pop(key, None)
                    session.report.event(f"out of memory ({plan}), and there is no smaller way")
                    raise
                if short is None:
                    short = Shortage(wish, plan.peak_bytes)
                elif again:
                    short, again = short.again(wish, plan), False
                short.wish, self._short[key] = wish, short
                session.report.event(f"out of memory ({plan}): {short}")
            else:
                if again and short is not None and plan.peak_bytes >= short.peak_bytes:
                    del self._short[key]
                if self._changed():  # here, where the device is still at work
                    raise _ChangedError
                return output
            empty_cache(image.device)
            short.free_bytes = max(short.free_bytes, free_bytes(image.device))

    def _planned(
        self,
        size: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        wish: Wish,
        session: Session,
        told: Told,
        thoroughly: bool = False,
    ) -> tuple[BandPlan, L]:
        """The plan for an input (batch, height, width), all that it launches made ready.

        Of two sizes in one kind of plan the second needs next to nothing, which is looked for only
        where it is wanted `thoroughly`; else a launch does it.
        """
        session = session.of_part(self._part)  # one plan, for whatever part it is run
        where = (dtype, device, session, engine.renewals)
        if where not in self._readiness:
            if len(self._readiness) >= SESSIONS_KNOWN:
                self._readiness, self._plans, self._kinds = {}, {}, {}
            self._readiness[where] = Readiness(device, session)
            self._remark(dtype, device, session)
        readiness = self._readiness[where]
        if where not in self._plans:
            self._plans[where] = self._new_plans(size, dtype, readiness, told)
        host = 0 if device.type == "cpu" else policy.host_available_bytes()
        plan, links = self._plans[where].plan(
            size, wish, free_bytes(device, session.headroom_bytes), host
        )
        kind = (where, plan.legs, self._told_apart(links), size if thoroughly else None)
        if kind not in self._kinds:
            readiness.get_ready(self._work_of(links, plan), told)
            self._kinds[kind] = None
            while len(self._kinds) > KINDS_KNOWN:
                del self._kinds[next(iter(self._kinds))]
        return plan, links

    def _told_apart(self, links: L) -> object:
        """What else of `links` decides what is launched."""
        return None

    def _remark(self, dtype: torch.dtype, device: torch.device, session: Session) -> None:
        """Says, once, what costs the user something."""


class Program(BandedProgram[Recipe, Chain]):
    """Runs a Decoder or Encoder, see hosts/read/vae.py, in the weights' dtype."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, Recipe("decoder", ()))

    @property
    def scales(self) -> Scales:
        """What the images between the steps are multiplied by; found by running."""
        return SCALES[self._scale]

    @property
    def is_over_time(self) -> bool:
        """True if the module takes frames (N, C, T, H, W). We take a single one, (N, C, H, W)."""
        return self._recipe.is_over_time

    @property
    def _part(self) -> str:
        return PARTS[self._recipe.role]

    @property
    def _last_scale(self) -> int:
        return len(SCALES) - 1

    def _read(self) -> Recipe:
        return read(self._module)

    def _prepared(self) -> tuple[Ready, ...]:
        return prepare(self._recipe, self.scales)

    def _new_plans(
        self, size: tuple[int, int, int], dtype: torch.dtype, readiness: Readiness, told: Told
    ) -> Plans:
        readiness.get_ready(of_whole(chain(self._recipe, *size, dtype)), told)
        readiness.get_ready_for_other_sizes(self._recipe, dtype, told)
        return Plans(self._recipe, dtype, readiness.chosen)

    def _work_of(self, links: Chain, plan: BandPlan) -> Work:
        return of_plan(links, plan)

    def _told_apart(self, links: Chain) -> object:
        return links.in_place

    def _remark(self, dtype: torch.dtype, device: torch.device, session: Session) -> None:
        info = devices.identify(device)
        if dtype.itemsize > 2 and info.arch is not None and not info.reasons:
            session.report.event(
                f"the {self._recipe.role}'s weights are {str(dtype).removeprefix('torch.')}: that "
                "costs speed and memory, and is not needed, since half precision does not overflow "
                "here"
            )

    def _run(self, request: Request, plan: BandPlan, links: Chain, strict: bool) -> torch.Tensor:
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
            run.session = request.session
            run.progress, run.interrupt = request.progress, request.interrupt
            run.done, run.total = plan.ticks * first // group, ticks
            run_plan(run, plan, image[first : first + group], part)
        return output if batch else image.new_empty(shape, dtype=dtype)


def is_finite(tensor: torch.Tensor) -> bool:
    """True without NaN and infinity. A sum in float32 of what fits fp16 cannot overflow."""
    return math.isfinite(float(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))


@contextmanager
def _autocast_off(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if device.type in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
