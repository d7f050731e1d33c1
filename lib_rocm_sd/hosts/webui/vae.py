"""The VAE in the WebUI: its decoder and encoder run as our program while a generation of ours runs.

The seam is `forward` of first_stage_model.decoder and .encoder, on the instances: everything that
decodes or encodes in full passes there (pictures, hires fix, previews by the "Full" method,
img2img, inpainting; SD1, SD2, SDXL, SD3), and neither TAESD nor the cheap previews do.

A Forge's VAE says what a decode or an encode will take, which is made true while ours runs it. Read
in lllyasviel/stable-diffusion-webui-forge dfdcbab6, backend/patcher/vae.py, and
Panchovix/stable-diffusion-webui-reForge 3b56b268, ldm_patched/modules/sd.py: class VAE.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lib_rocm_sd import policy, report
from lib_rocm_sd.cards.decoding import SeveralProgram
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.ui.options import VAE_MODES, Options
from lib_rocm_sd.hosts.vae import ESTIMATES, ROLES, Estimate, VaeStandIn, VaeWish
from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.progress import Watch
from lib_rocm_sd.modules.patches import Patch, put, take
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.vae.bands import Interrupted

PREVIEW_WAIT_S = 0.5
"""So long may a live preview wait for its turn; the WebUI's progress bar waits with it."""
ROUGH_PIXELS = 64
"""Latent pixels a side of what stands for an interrupted decode."""
PREVIEW = "Live preview"
"""The part of the report's rows that are no picture's."""
Lend = Callable[[SeveralProgram], None]


@dataclass(frozen=True)
class GenerationWish(VaeWish):
    """What a generation asks of the VAE; its level is the session's. `gives_back`: packed weights
    leave the device when the generation ends.
    """

    gives_back: bool = False


@dataclass
class Turn:
    """One generation: in which thread it runs, what it did, and whether it was told to stop."""

    thread: int = 0
    stopped: bool = False
    ran: dict[str, None] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """True in the generation's own thread; live previews come from the web server's."""
        return self.thread in (0, threading.get_ident())


class BusyError(RuntimeError):
    """A live preview came while a picture is being decoded. The WebUI goes on without it."""


class CoderStandIn(VaeStandIn):
    """Our program in the place of a decoder or encoder while it is put in.

    `lend(program)`: lets other cards help with the picture that a decoder is about to make.
    """

    passed_on = (MemoryError, BusyError)

    def __init__(self, module: nn.Module, role: str, lend: Lend) -> None:
        super().__init__(module, role)
        self.wish, self._lend = VaeWish(), lend
        self._turn = Turn()
        self._program: SeveralProgram | None = None
        self._barred = ""
        self._lock = threading.RLock()
        self._unwanted = False
        self._was_left = False

    def serve_from(self, wish: VaeWish, turn: Turn) -> None:
        """Serve the module's calls from now on, unless another extension does."""
        if turn is not self._turn:
            self._barred = ""
        self.wish, self._turn = wish, turn
        other = self.put_in()
        if other:
            self.tell(f"another extension has replaced its forward ({other})")

    def release(self) -> None:
        """Give back the memory of the packed weights: at once, or when the run that reads them
        ends.
        """
        self._unwanted = True
        self._tidy()

    def release_stale(self) -> None:
        """Give back what was packed of weights that have left the device, or were replaced."""
        if self._program is not None and self._program.is_stale:
            self.release()

    def _tidy(self) -> None:
        """Release if that is wanted and nobody runs the program."""
        if self._unwanted and self._lock.acquire(blocking=False):
            try:
                self._unwanted = False
                if self._program is not None:
                    self._program.release()
            finally:
                self._lock.release()

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        """One image; a live preview's only where the settings say so."""
        wanted = self._turn.is_here or settings.current().previews
        return super().asked(*args, **kwargs) if wanted else None

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        image = args[0]
        if self._barred:
            return self._barred
        if not isinstance(image, torch.Tensor):
            return f"it is called with a {type(image).__name__}"
        weights = next(self.module.parameters())
        why = super().refusal(image)
        return why or _unfit(weights.dtype, weights.device)

    @property
    def compares(self) -> bool:
        return self._turn.is_here and settings.current().spot_check and super().compares

    def again(self, part: torch.Tensor) -> torch.Tensor:
        try:
            with self._alone():
                return super().again(part)
        finally:
            self._unwanted |= host.is_short_of_memory()
            self._tidy()

    @property
    def program(self) -> SeveralProgram:  # type: ignore[override]
        """Read when it is first asked for."""
        if self._program is None:
            self._program = SeveralProgram(self.module)
        return self._program

    @property
    def session(self) -> Session:
        """What a live preview runs is no part of what the generation did."""
        now = a1111_session.current()
        return now if self._turn.is_here else now.of_part(PREVIEW)

    def renew(self) -> None:
        with self._alone():
            super().renew()

    def serve(self, asked: torch.Tensor) -> torch.Tensor:
        """What the module gives for one image (N, C, H, W)."""
        try:
            with self._alone():
                return self._run(asked)
        except (RuntimeError, MemoryError) as error:
            hosts = host.out_of_memory()
            if hosts is None or isinstance(error, hosts) or not is_out_of_memory(error):
                raise
            raise hosts(str(error)) from None
        finally:
            self._tidy()

    def bytes_to_free(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> int | None:
        """Device memory that has to be free for one image; None where the module's own will run, or
        ran last time: it may be for how its weights are loaded when this is known.
        """
        if not self.is_put_in or self._barred or self._was_left or _unfit(dtype, device):
            return None
        with self._alone():
            if self.program.reasons and self.program.refresh():
                return None
            return self.needed_bytes(height, width, dtype, device, self.wish, self.session)

    def failed(self, error: Exception) -> str:
        """Bars ours until the next generation; a live preview that fails is its own matter."""
        why = super().failed(error)
        if self._turn.is_here:
            self._barred = why
        return why

    def tell(self, why: str) -> None:
        """A live preview is no part of what the generation did."""
        if self._turn.is_here:
            message = f"the VAE's {self.role} was left to the WebUI: {why}"
            self._turn.left[message] = None
            self._was_left = True
        else:
            message = f"a live preview was left to the WebUI: {why}"
        report.event(message)
        host.say_once(message)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One run at a time. A preview does not wait for a long one."""
        wait_s = -1.0 if self._turn.is_here else PREVIEW_WAIT_S
        if not self._lock.acquire(timeout=wait_s):
            raise BusyError("no preview: the VAE is decoding a picture")
        try:
            yield
        finally:
            self._lock.release()

    def _run(self, image: torch.Tensor) -> torch.Tensor:
        program, turn = self.program, self._turn
        try:
            if turn.stopped and self.role == "decoder" and turn.is_here:
                return self._rough(image)
            if self.role == "decoder" and turn.is_here:
                self._lend(program)
            with Watch("VAE", may_stop=self.role == "decoder", visible=turn.is_here) as watch:
                output = self.run(image, progress=watch.progress, interrupt=watch.interrupt)
        except Interrupted:
            program.decoding = None
            turn.stopped = turn.stopped or turn.is_here
            return self._rough(image)
        else:
            self._was_left = False
            self._note(program)
            return output
        finally:
            program.decoding = None
            if host.is_short_of_memory():
                program.release()

    def _note(self, program: SeveralProgram) -> None:
        """Keep for the infotext what ran; say so where the budget was not enough.

        Live previews are not written about.
        """
        plan = program.last_plan
        if plan is None or not self._turn.is_here:
            return
        self._turn.ran["whole frame" if plan.whole else "bands"] = None
        message = self.shortage()
        if message:
            self._turn.left[message] = None
            report.event(message)

    def _rough(self, image: torch.Tensor) -> torch.Tensor:
        """What an interrupted decode gives: a small decode, enlarged."""
        if self._turn.is_here:
            self._turn.ran["interrupted: a rough picture"] = None
        height, width = image.shape[2:]
        shrink = -(-max(height, width) // ROUGH_PIXELS)
        size = (max(height // shrink, 1), max(width // shrink, 1))
        small = functional.interpolate(image.float(), size=size, mode="area").to(image.dtype)
        output = self.program(small, session=self.session, budget_bytes=self.wish.budget_bytes)
        factor = output.shape[2] // small.shape[2]
        size = (height * factor, width * factor)
        return functional.interpolate(output, size=size, mode="bilinear")


def _unfit(dtype: torch.dtype, device: torch.device) -> str:
    """Why ours cannot run with weights of this dtype on a device; empty where it can."""
    if dtype not in HALVES:
        return float32_reason(dtype)
    return "; ".join(engine.usable(device, CONVS["3x3"]))


def float32_reason(dtype: torch.dtype | None = torch.float32) -> str:
    """Why a VAE whose weights are `dtype` is the WebUI's; names the flag that asks for it, or a
    Forge's, which asks for half.
    """
    flags: Any = host.attribute("modules.shared", "cmd_opts")
    asked = [name for name in ("no_half_vae", "no_half") if getattr(flags, name, False)]
    name = str(dtype).removeprefix("torch.")
    half = host.half_vae_flag()
    if half:
        return f"its weights are {name}; with {half} it can be ours, and does not overflow"
    if not asked:
        return f"its weights are {name}"
    flag = "--" + asked[0].replace("_", "-")
    return f"its weights are {name} by {flag}, which costs speed and is not needed with ours"


class ForgeEstimate(Estimate):
    """One of a Forge's VAE. A copy of the VAE that keeps it has the VAE's own where ours does not
    run.
    """

    def __init__(self, theirs: Callable[[Any, Any], float], coder: CoderStandIn, vae: Any) -> None:
        super().__init__(theirs, getattr(vae, "device", None))
        self._coder = coder

    def ours(self, height: int, width: int, dtype: torch.dtype, device: torch.device) -> int | None:
        return self._coder.bytes_to_free(height, width, dtype, device)

    def tell(self, why: str) -> None:
        report.event(f"a VAE's {why}")


class VaeSession:
    """Who runs the VAE, for this process. Its coders live as long as the WebUI's VAE does."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._coders: weakref.WeakKeyDictionary[nn.Module, tuple[CoderStandIn, ...]]
        self._coders = weakref.WeakKeyDictionary()
        self._estimates: list[Patch] = []
        self._wish: GenerationWish | None = None
        self._told: set[str] = set()
        self.turn = Turn()
        self.lend: Lend = lambda program: None
        """See CoderStandIn; set by those who have other cards."""
        self.can_serve = False
        """Whether our kernels could run a VAE here, as of the last `establish`."""

    def begin(self) -> None:
        """A generation begins: forget what the last one did."""
        self.turn = Turn()

    def establish(self, options: Options) -> None:
        """Make what `options` ask for hold from now on, for the generation of this thread."""
        wish = wish_of(options)
        allowed = any(settings.current().vae(role) for role in ROLES)
        asked = options.enable and allowed and not host.shortcomings()
        self.can_serve = asked and not refusals()
        with self._lock:
            self._release_stale()
            self._wish = wish if self.can_serve else None
            self.turn.thread = threading.get_ident()
            if self._wish is None:
                self._take_out()
            else:
                self._put_into(host.loaded_model(), self._wish)

    def end(self) -> None:
        """Leave the WebUI's VAE as it is without us."""
        with self._lock:
            wish, self._wish = self._wish, None
            self._take_out()
            self._release_stale()
            if wish is not None and wish.gives_back:
                for coder in self._all():
                    coder.release()

    def news(self) -> list[str]:
        """What went otherwise than asked in this generation, and has not been told before."""
        found = [message for message in self.turn.left if message not in self._told]
        self._told.update(found)
        return found

    def model_loaded(self, model: Any) -> None:
        """Callback: the WebUI has another model from now on, or the same with another VAE, maybe
        amid a generation.
        """
        with self._lock:
            self._release_stale()
            if self._wish is not None:
                self._put_into(model, self._wish)

    def _put_into(self, model: Any, wish: GenerationWish) -> None:
        vae = host.vae_of(model)
        if not isinstance(vae, nn.Module):
            return
        known = self._coders.get(vae, ())
        modules = [getattr(vae, role, None) for role in ROLES]
        if [coder.module for coder in known] != [m for m in modules if isinstance(m, nn.Module)]:
            for coder in known:
                coder.take_out()
            known = tuple(
                CoderStandIn(module, role, lambda program: self.lend(program))
                for module, role in zip(modules, ROLES, strict=True)
                if isinstance(module, nn.Module)
            )
            self._coders[vae] = known
        for coder in known:
            if settings.current().vae(coder.role):
                coder.serve_from(wish, self.turn)
            else:
                coder.take_out()
        self._put_estimates(host.patcher_of(model, "vae"), known)

    def _put_estimates(self, vae: Any, coders: Iterable[CoderStandIn]) -> None:
        """Into a Forge's VAE that has estimates; nothing where they are ours."""
        for coder in coders:
            name = ESTIMATES[coder.role]
            theirs = getattr(vae, name, None)
            if callable(theirs) and not isinstance(theirs, ForgeEstimate):
                self._estimates.append(put(vae, name, ForgeEstimate(theirs, coder, vae)))

    def _take_out(self) -> None:
        while self._estimates:
            take(self._estimates.pop())
        for coder in self._all():
            coder.take_out()

    def _release_stale(self) -> None:
        """A checkpoint that the WebUI keeps in main memory keeps nothing of ours on the GPU."""
        for coder in self._all():
            coder.release_stale()

    def _all(self) -> list[CoderStandIn]:
        return [coder for coders in self._coders.values() for coder in coders]


def wish_of(options: Options) -> GenerationWish | None:
    """What the options ask of the VAE; None for nothing."""
    mode = VAE_MODES[options.vae] if options.enable else ""
    if not mode:
        return None
    budget_bytes = options.budget_mib << 20 or None
    return GenerationWish(mode, budget_bytes, options.level == policy.MEMORY.name)


def refusals() -> list[str]:
    """Why our kernels cannot run a VAE on this machine; compiles and tests at the first use."""
    return a1111_session.refusals(
        CONVS["3x3"], "the VAE's kernels; the first use of each compiles it"
    )


def why_not() -> list[str]:
    """Why no VAE can be run on this machine as the WebUI is now; empty where one can."""
    why = refusals()
    if not why and host.vae_dtype() == torch.float32:
        return [float32_reason()]
    return why


def status() -> str:
    """A sentence or two for people; empty where the device is not ours anyway."""
    if identify(host.device()).reasons:
        return ""
    why = why_not()
    if why:
        return f"The WebUI's own code runs the VAE: {why[0]}."
    trouble = " ".join(f"Last time {message}." for message in session.turn.left)
    return f"The VAE runs on our kernels. {trouble}".strip()


session = VaeSession()
"""The session of the process; survives "Reload UI"."""
