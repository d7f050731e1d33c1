"""A card on which kernels are tried by a child that a script stands for."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from conftest import FakeGpu, WebUI

PASSED = {"kind": "verdict", "outcome": "passed", "error": 1e-4, "tolerance": 1e-3, "time_ms": 1.0}
ABORTED = "Memory access fault by GPU node-1 (Agent handle: 0x5) on address 0x7f00. Aborted"


def verdict(**fields: Any) -> dict[str, Any]:
    return {**PASSED, **fields}


class Ends:
    """A child that ends in the middle: how, and what it wrote last."""

    def __init__(self, status: int | None, words: str = "") -> None:
        self.status, self.words = status, words


class Hangs:
    """A child that says nothing more."""


OUTCOMES: dict[str, Any] = {
    "abort": Ends(-6, ABORTED),
    "segv": Ends(-11),
    "hang": Hangs(),
    "status": verdict(outcome="faulted", reason="an illegal memory access was encountered (700)"),
    "wrong": verdict(outcome="wrong", reason="Usual: wrong by 0.5 of 0.001", error=0.5),
    "nan": verdict(outcome="wrong", reason="Usual: NaN or infinity", error=None),
    "oom": verdict(outcome="refused", reason="hipMalloc: out of memory", lasting=False),
    "killed": Ends(-9),
}
SAID = {
    "abort": "tried in a process of its own: faulted: Usual: Memory access fault by GPU node-1",
    "segv": "tried in a process of its own: faulted: Usual: its process crashed (SIGSEGV)",
    "hang": "tried in a process of its own: hung: Usual: no answer within",
    "status": "tried in a process of its own: faulted: Usual: an illegal memory access",
    "wrong": "tried in a process of its own: wrong: Usual: wrong by 0.5",
    "nan": "tried in a process of its own: wrong: Usual: NaN or infinity",
    "oom": "tried in a process of its own: refused: hipMalloc: out of memory",
    "killed": "tried in a process of its own: killed: Usual: ended from outside (SIGKILL)",
}
HALTS = ("abort", "segv", "hang", "status")


class Card:
    """What children on a FakeGpu do: class number N of this machine as `script` says, else it
    passes. Each class waits until `go` is set.
    """

    def __init__(self) -> None:
        self.script: dict[int, Any] = {}
        self.children = self.asked = self.classes = 0
        self.go = threading.Event()
        self.go.set()
        self.started: list[Any] = []
        self.gfx = "gfx1100"
        self.of_attention = 2
        """Classes that attention needs."""
        self.with_unet = self.with_sdxl = False
        """Whether the UNet, or SDXL's, needs a class that no other part does."""
        self.tried: list[str] = []
        """Classes, in words."""

    def install(self) -> None:
        """Before the WebUI executes the extension's script."""
        library = importlib.import_module
        trials: Any = library("lib_rocm_sd.hosts.webui.trials")
        conductor: Any = library("lib_rocm_sd.trials.conductor")
        place: Any = library("lib_rocm_sd.trials.place")
        row = library("lib_rocm_sd.arch").by_gfx(self.gfx)
        here = place.Place(0, "hip", "AMD Radeon RX 7900 XTX", row, "", ("driver 1",))
        letter = conductor._Letter
        card = self

        class Scripted(conductor.Conductor):  # type: ignore[misc]
            def __init__(self, place: Any, **how: Any) -> None:
                super().__init__(place, spawn=lambda: Link(card), **how)

            def _letter(self, subject: Any, key: str, codes: Any, deaths: int) -> Any:
                head = {"kind": "class", "subject": str(subject)}
                return letter(key, head, [], False, False, deaths)

        trials.Conductor = Scripted
        self.started.append(trials.trials)
        trials.place.of = lambda device, launch: None if launch is None else here
        attention = library("lib_rocm_sd.ops.attention.op").ATTENTION
        type(attention.variants[0]).defaults = lambda self, row, problem: (None,)
        work = {
            "attention": [
                (attention, problem) for _, problem in attention.usual[: self.of_attention]
            ],
            "vae": [(attention, attention.usual[-1][1])],
            "unet SD1.5": [(attention, attention.usual[2][1])] if self.with_unet else [],
            "unet SDXL": [(attention, attention.usual[4][1])] if self.with_sdxl else [],
            "unet SD3": [(attention, attention.usual[4][1])],
        }
        trials.first_trials.work = lambda part, arch: work[part]

    def end(self, until: Callable[[Callable[[], object]], None]) -> None:
        """No thread of any start goes on."""
        self.go.set()
        for ours in self.started:
            ours._gate.stop()
            ours._gate.wait(600)
            until(lambda ours=ours: not (ours._settling or ours._working))
        until(nobody_settles)

    def all(self, what: Any) -> None:
        """Whatever is tried from now on ends so."""
        self.script = dict.fromkeys(range(self.classes + 1, self.classes + 100), what)


class Link:
    """trials.link.Link without a process."""

    def __init__(self, card: Card) -> None:
        card.children += 1
        self._card = card
        self._answers: list[Any] = []
        self._end = Ends(0)

    def send(self, head: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        if head["kind"] == "open":
            self._answers.append({"kind": "ready"})
            return
        self._card.tried.append(head["subject"])
        self._card.asked += 1
        assert self._card.go.wait(600)
        self._card.classes += 1
        what = self._card.script.get(self._card.classes, PASSED)
        self._answers += [{"kind": "trying", "problem": "Usual"}, what]

    def receive(self, limit_s: float) -> dict[str, Any] | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Hangs):
            raise TimeoutError
        if isinstance(answer, Ends):
            self._end = answer
            return None
        found: dict[str, Any] = answer
        return found

    def status(self) -> int | None:
        return self._end.status

    def words(self) -> str:
        return self._end.words

    def end(self) -> None:
        """It has no process."""

    def kill(self) -> bool:
        return True


def trials(webui: WebUI) -> Any:
    return webui.library("hosts.webui.trials").trials


def nobody_settles() -> bool:
    """No thread of a start is about to change its WebUI, or, by the modules' names, the next."""
    return not any(thread.name == "rocm_sd settling" for thread in threading.enumerate())


def settled(webui: WebUI, until: Callable[[Callable[[], object]], None]) -> None:
    """All trials are over, and the WebUI knows."""
    ours = trials(webui)
    until(lambda: not (ours.state().running or ours._settling or ours._working))
    until(lambda: not any(map(ours.waits, ("attention", "vae"))))
    until(nobody_settles)


def tried(gpu: FakeGpu) -> Card:
    """The FakeGpu's kernels are tried first."""
    gpu.card = Card()
    return gpu.card
