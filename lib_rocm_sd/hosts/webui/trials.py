"""Kernels are tried in a process of their own before the WebUI launches them: its gate.

What attention, the VAE and the UNet need is tried ahead, part by part, each when its kernels are
compiled; until a part is through, the WebUI's own code makes the pictures. What comes up later (a
mask, a new head_dim) is tried when it does. Answers become valid between two pictures.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from lib_rocm_sd import first_trials
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.ui.status import counted
from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.shipped import AT_START, in_order
from lib_rocm_sd.trials import place, stamp, zluda
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.gate import Gate, GateState
from lib_rocm_sd.trials.subject import Subject

PENDING = "kernels are being tried"
MAY_FREEZE = (
    "This may freeze the screen for some seconds, or until you restart the machine. Save your work "
    "first."
)
RISK = (
    'Some kernels are not used because testing them went wrong. "Check this card" tests them '
    f"again, one by one, in separate processes. {MAY_FREEZE}"
)
ZLUDA_RISK = (
    'Nothing runs on our kernels because ZLUDA did not pass its test. "Check this card" tests it '
    f"again in a separate process. {MAY_FREEZE}"
)
ZLUDA_AGAIN = "ZLUDA will be tested again in a separate process, which may take minutes."
TRAINING = "training"
"""Beside the parts of AT_START."""
ORDER = "order"
"""No part: what waits is put in another order."""
AT_WORK = "Kernels are already being tried."
NOTHING = "None of our kernels is blocked on this card."

Left = Callable[[], int]


class Trials:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._gate: Gate | None = None
        self._expected: dict[str, Left | None] = {}
        self._todo: deque[str] = deque()
        self._working = self._settling = False
        self._waited: frozenset[str] = frozenset()
        """Parts that were not through when answers were made valid last."""
        self._settled: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Put the gate before the engine, once; says what a WebUI that died was trying."""
        zluda.say, zluda.busy = host.say, host.is_busy
        with self._lock:
            if self._gate is None:
                self._gate = Gate(
                    renew=self._renew,
                    say=host.say,
                    busy=host.is_busy,
                    turn=host.between_generations,
                    place_of=place.of,
                    conductor=Conductor,
                )
                self._gate.start()
        if engine.gate is not self._gate:
            engine.gate = self._gate

    def expect(self, part: str, settled: Callable[[], None]) -> None:
        """Have tried what `part` needs, once, in the background; returns at once. `settled` is
        called, between two pictures and in another thread, whenever something was decided.
        """
        with self._lock:
            self._settled = settled
            gate = self._gate
            if gate is None or part in self._expected:
                return
            info = identify(host.device())
            launch = engine.launcher(host.device())
            none_left = gate.expect(host.device(), launch)  # tells of a halt
            tried = part in AT_START and stamp.is_whole(str(info.gfx))
            if tried or not gate.serves(host.device()):
                self._expected[part] = none_left
                return
            self._expected[part] = None
            self._begin(part)

    def order(self) -> None:
        """Another checkpoint is there: have tried first what it needs, of what waits."""
        with self._lock:
            if not self._through() and ORDER not in self._todo:
                self._begin(ORDER)

    def expect_training(self) -> None:
        """Have tried the kernels of attention's gradients where the WebUI trains with ours, when
        all parts are through: a training on its page lets nothing be tried before it ends.
        """
        with self._lock:
            if TRAINING not in self._expected and self._through() and settings.trains_with_ours():
                self._expected[TRAINING] = int
                self._begin(TRAINING)

    def _through(self) -> bool:
        """Whether nothing that is tried ahead for pictures is left."""
        return all(part in self._expected and not self.waits(part) for part in AT_START)

    def _begin(self, part: str) -> None:
        """Ask for what `part` needs. The lock is held."""
        self._todo.append(part)
        if not self._working:
            self._working = True
            threading.Thread(target=self._work, name="rocm_sd trials", daemon=True).start()

    def pending(self, part: str) -> str:
        """Why `part` has to wait for its first trials; empty where it does not. Takes no lock."""
        if not self.waits(part):
            return ""
        state = self.state()
        return f"{PENDING} ({state.done} of {state.total})" if state.total else PENDING

    def waits(self, part: str) -> bool:
        """Whether the first trials of `part` are still under way. Takes no lock."""
        left = self._expected.get(part, int)
        return left is None or left() > 0

    def state(self) -> GateState:
        """How far it is."""
        return self._gate.state() if self._gate is not None else GateState()

    def risk(self) -> str:
        """What may happen if the owner has tried again what is barred; empty where nothing is."""
        state = self.state()
        if zluda.is_refused():
            return ZLUDA_RISK
        return RISK if (state.refused or state.halted) and not state.running else ""

    def check(self) -> str:
        """The owner wants what is barred to be tried again; what was done, in a sentence."""
        gate = self._gate
        if zluda.is_running():
            return AT_WORK
        if zluda.ask():
            return ZLUDA_AGAIN
        if gate is None:
            return NOTHING
        if gate.state().running:
            return AT_WORK
        launch = engine.launcher(host.device())
        gate.expect(host.device(), launch, first_trials.all_classes)
        count = gate.ask()
        if not count:
            return AT_WORK if gate.state().running else NOTHING
        return f"{counted(count, 'kernel')} will be tested again, one by one."

    def forget(self) -> None:
        """Kernels are compiled again: look for every verdict anew."""
        with self._lock:
            self._expected.clear()
            self._todo.clear()
            if self._gate is not None:
                self._gate.forget()

    def look_again(self) -> None:
        """The card's self-test has tried all classes in another process: from the next picture on
        its verdicts hold.
        """
        with self._lock:
            if self._gate is None:
                return
            self._gate.forget()
        self._renew()

    def _work(self) -> None:
        while (part := self._next()) is not None:
            try:
                self._ask(part)
            except Exception as error:
                host.say_once(f"kernels were not tried ahead: {trouble.once(error)}")
                with self._lock:
                    self._expected[part] = int
            self._renew()

    def _next(self) -> str | None:
        with self._lock:
            self._working = bool(self._todo)
            return self._todo.popleft() if self._todo else None

    def _ask(self, part: str) -> None:
        gate, device = self._gate, host.device()
        assert gate is not None
        if part == ORDER:
            arch = identify(device).arch
            assert arch is not None
            parts = in_order(host.checkpoint_kind())
            gate.order(each for name in parts for each in first_trials.classes(name, arch))
            return
        classes: Callable[[Arch], Sequence[Subject]] = partial(first_trials.classes, part)
        if part == TRAINING:
            classes = first_trials.gradient_classes
        left = gate.expect(device, engine.launcher(device), classes)
        with self._lock:
            self._expected[part] = left

    def _renew(self) -> None:
        """Called by the gate's thread: what it says now holds from the next picture on. While parts
        are tried ahead, only the end of one changes that: all plans are made anew then.
        """
        with self._lock:
            waited = frozenset(part for part in self._expected if self.waits(part))
            if self._settling or (waited and waited == self._waited):
                return
            self._settling, self._waited = True, waited
        threading.Thread(target=self._settle, name="rocm_sd settling", daemon=True).start()

    def _settle(self) -> None:
        with host.between_generations():
            with self._lock:
                self._settling = False
            engine.renew()
        gfx = str(identify(host.device()).gfx)
        if self._through() and not stamp.is_whole(gfx):
            stamp.put(gfx)
        self._settled()
        self.expect_training()


trials = Trials()
"""The one of the process; survives "Reload UI"."""
