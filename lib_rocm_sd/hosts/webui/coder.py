"""Stands in for `forward` of one VAE decoder or encoder while a generation of ours runs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd import report
from lib_rocm_sd.cards.decoding import SeveralProgram
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host, session, settings
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.checked import CheckedStandIn
from lib_rocm_sd.vae.estimate import needed_bytes
from lib_rocm_sd.vae.policy import shortfall

PATIENCE_S = 3.0
"""A decode that will be done sooner than this is not worth interrupting: its picture is kept."""
PREVIEW_WAIT_S = 0.5
"""So long may a live preview wait for its turn; the WebUI's progress bar waits with it."""
ROUGH_PIXELS = 64
"""Latent pixels a side of what stands for an interrupted decode."""
PREVIEW = "Live preview"
"""The part of the report's rows that are no picture's."""
Lend = Callable[[SeveralProgram], None]


@dataclass(frozen=True)
class VaeWish:
    """What a generation asks of the VAE; its level is the session's. `mode`: "auto" or "banded" of
    vae.policy. `gives_back`: packed weights leave the device when the generation ends.
    """

    mode: str
    budget_bytes: int | None = None
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


class CoderStandIn(CheckedStandIn):
    """Our program in the place of a decoder or encoder, as `role` says, while it is put in.

    `lend(program)`: lets other cards help with the picture that a decoder is about to make.
    """

    passed_on = (MemoryError, BusyError)

    def __init__(self, module: nn.Module, role: str, lend: Lend) -> None:
        super().__init__(module)
        self.role, self._lend = role, lend
        self._wish = VaeWish("auto")
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
        self._wish, self._turn = wish, turn
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
        return args[0] if len(args) == 1 and not kwargs and wanted else None

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
                return self.program(part, session=self._session())
        finally:
            self._unwanted |= host.is_short_of_memory()
            self._tidy()

    @property
    def program(self) -> SeveralProgram:  # type: ignore[override]
        return self._made()

    def renew(self) -> None:
        with self._alone():
            super().renew()

    def serve(self, asked: torch.Tensor) -> torch.Tensor:
        """What the module gives for one image (N, C, H, W)."""
        try:
            with self._alone():
                return self._run(asked, self._wish)
        except (RuntimeError, MemoryError) as error:
            hosts = host.out_of_memory()
            if hosts is None or isinstance(error, hosts) or not is_out_of_memory(error):
                raise
            raise hosts(str(error)) from None
        finally:
            self._tidy()

    def needed_bytes(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> int | None:
        """Device memory that has to be free for one image; None where the module's own will run, or
        ran last time: it may be for how its weights are loaded when this is known.

        Kernels are compiled and tested now where they were not. Raises as Program.prepare does.
        """
        if not self.is_put_in or self._barred or self._was_left or _unfit(dtype, device):
            return None
        with self._alone():
            program, wish = self._made(), self._wish
            if program.reasons and program.refresh():
                return None
            return needed_bytes(
                *(program, self.module, height, width, dtype, device),
                session=self._session(),
                mode=wish.mode,
                budget_bytes=wish.budget_bytes,
            )

    def failed(self, error: Exception) -> str:
        """Bars ours until the next generation; a live preview that fails is its own matter."""
        why = f"ours failed: {trouble.once(error)}"
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

    def _made(self) -> SeveralProgram:
        if self._program is None:
            self._program = SeveralProgram(self.module)
        return self._program

    def _run(self, image: torch.Tensor, wish: VaeWish) -> torch.Tensor:
        program, turn = self._made(), self._turn
        try:
            if turn.stopped and self.role == "decoder" and turn.is_here:
                return self._rough(program, image, wish)
            if self.role == "decoder" and turn.is_here:
                self._lend(program)
            with Watch(may_stop=self.role == "decoder", visible=turn.is_here) as watch:
                made = program(
                    image,
                    session=self._session(),
                    mode=wish.mode,
                    budget_bytes=wish.budget_bytes,
                    progress=watch.progress,
                    interrupt=watch.interrupt,
                )
        except Interrupted:
            program.decoding = None
            turn.stopped = turn.stopped or turn.is_here
            return self._rough(program, image, wish)
        else:
            self._was_left = False
            self._note(program, wish)
            return made
        finally:
            program.decoding = None
            if host.is_short_of_memory():
                program.release()

    def _session(self) -> Session:
        """What a live preview runs is no part of what the generation did."""
        now = session.current()
        return now if self._turn.is_here else now.of_part(PREVIEW)

    def _note(self, program: SeveralProgram, wish: VaeWish) -> None:
        """Keep for the infotext what ran; say so where the budget was not enough.

        Live previews are not written about.
        """
        plan = program.last_plan
        if plan is None or not self._turn.is_here:
            return
        self._turn.ran["whole frame" if plan.whole else "bands"] = None
        message = shortfall(self.role, plan, wish.budget_bytes)
        if message:
            self._turn.left[message] = None
            report.event(message)

    def _rough(self, program: SeveralProgram, image: torch.Tensor, wish: VaeWish) -> torch.Tensor:
        """What an interrupted decode gives: a small decode, enlarged."""
        if self._turn.is_here:
            self._turn.ran["interrupted: a rough picture"] = None
        height, width = image.shape[2:]
        shrink = -(-max(height, width) // ROUGH_PIXELS)
        size = (max(height // shrink, 1), max(width // shrink, 1))
        small = functional.interpolate(image.float(), size=size, mode="area").to(image.dtype)
        made = program(small, session=self._session(), budget_bytes=wish.budget_bytes)
        factor = made.shape[2] // small.shape[2]
        return functional.interpolate(made, size=(height * factor, width * factor), mode="bilinear")


class Watch:
    """Shows the progress of one decode in the WebUI's progress bar, and heeds its Interrupt.

    The WebUI decodes also what an interrupted sampler has got so far: only an Interrupt that comes
    during the decode stops it, and only where much is left to do.
    """

    def __init__(
        self, *, may_stop: bool, visible: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._state: Any = host.attribute("modules.shared", "state")
        self._may_stop = may_stop and not self._interrupted()
        self._visible = visible
        self._clock = clock
        self._begin = clock()
        self._left_s = math.inf

    def __enter__(self) -> Watch:
        self._text = getattr(self._state, "textinfo", None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._visible and self._state is not None:
            self._state.textinfo = self._text

    def progress(self, done: int, total: int) -> None:
        """Report that `done` of `total` parts are done; 0 while kernels are compiled and tested."""
        self._left_s = (self._clock() - self._begin) / max(done, 1) * (total - done)
        if self._visible and (total > 1 or not done) and self._state is not None:
            shown = f"VAE: {done} of {total} parts." if done else "VAE: preparing."
            self._state.textinfo = shown

    def interrupt(self) -> bool:
        """True if the decode is to stop here."""
        return self._may_stop and self._interrupted() and self._left_s > PATIENCE_S

    def _interrupted(self) -> bool:
        return bool(getattr(self._state, "interrupted", False))


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
