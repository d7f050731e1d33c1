"""The process in which kernels are tried: an access outside of memory or a hang ends it, and not
the host's.

It reads messages (recording.py) from standard input until that ends, and ends with it, so also when
its parent dies. It answers in lines of JSON. Without torch, unless it is asked to take it.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError, RocmSdError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import compile_worker, cuda
from lib_rocm_sd.runtime.card import BareCard, BareLauncher, CudaCard, HipCard
from lib_rocm_sd.trials import recording
from lib_rocm_sd.trials.recording import Recording
from lib_rocm_sd.trials.replay import Outcome, replay
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, REFUSED, WRONG

FAULTS = frozenset({700, 702, 710, *range(714, 720)})
"""Statuses of HIP and CUDA after which the process can do nothing more on the card."""
_NO_DIALOGS = 0x0001 | 0x0002  # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX

Message = tuple[dict[str, Any], list[bytes]]
Say = Callable[[dict[str, Any]], None]


class Tester:
    """Tries classes on one card."""

    def __init__(self, card: BareCard, index: int, arch: Arch, say: Say) -> None:
        self._card, self._index, self._say = card, index, say
        self._codes: dict[KernelSpec, bytes] = {}
        self._launch = BareLauncher(card.driver, index, arch, self._codes.__getitem__)
        self._stream = 0

    def test(self, head: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        """The verdict of one class. After a fault the card cannot be used any more."""
        for spec, place in head["codes"]:
            self._codes[recording.spec_of(spec)] = blobs[place]
        found: dict[str, Any] = {"outcome": PASSED, "error": 0.0, "notes": []}
        try:
            for each, stream in self._runs(list(recording.unpacked(head["rows"], blobs))):
                self._say({"kind": "trying", "problem": each.name})
                came = self._one(each, stream)
                _add(found, each, came)
                if came.reason:
                    return found | {"outcome": WRONG, "reason": came.reason}
        except DeviceOutOfMemoryError as error:
            return found | {"outcome": REFUSED, "reason": str(error), "lasting": False}
        except LaunchError as error:
            outcome = FAULTED if error.status in FAULTS else REFUSED
            return found | {"outcome": outcome, "reason": str(error), "error": None}
        return found

    def _runs(self, found: list[Recording]) -> list[tuple[Recording, int]]:
        """All on the default stream, which the WebUI uses; the first also on another."""
        if not self._stream:
            self._stream = self._card.new_stream()
        return [*((each, 0) for each in found), *((each, self._stream) for each in found[:1])]

    def _one(self, each: Recording, stream: int) -> Outcome:
        self._launch.stream = stream
        try:
            return replay(each, self._card, self._launch, self._index)
        except DeviceOutOfMemoryError:
            if each.far:
                return Outcome(skipped=f"{each.name}: the card has too little memory")
            raise


def _add(found: dict[str, Any], each: Recording, outcome: Outcome) -> None:
    """Keep the one that came nearest to its tolerance; JSON has no infinity."""
    if outcome.skipped:
        found["notes"].append(outcome.skipped)
        return
    share = outcome.error / each.tolerance if each.tolerance else outcome.error
    if outcome.reason or share >= found.get("share", 0.0):
        error = outcome.error if outcome.error < float("inf") else None
        found |= {"share": min(share, 1e300), "error": error, "tolerance": each.tolerance}
    found["time_ms"] = outcome.time_ms


def opened(head: dict[str, Any], say: Say) -> Any:
    """What tests classes on the card that `head` names. Raises RuntimeError or OSError."""
    row = head["arch"]
    arch = Arch(**{**row, "names": tuple(row["names"])})
    index = int(head["index"])
    if head.get("torch"):
        from lib_rocm_sd.trials.torch_child import TorchTester

        return TorchTester(index, arch, say)
    card: BareCard
    if head["backend"] == "cuda":
        card = CudaCard(cuda.library(), index)
    else:
        card = HipCard(compile_worker.load(Path(head["library"])), index)
    return Tester(card, index, arch, say)


def quiet() -> None:
    """A crash leaves no dialog and no file behind."""
    if sys.platform == "win32":
        ctypes.WinDLL("kernel32").SetErrorMode(_NO_DIALOGS)
    else:
        import resource

        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answers() -> Say:
    """Standard output, for the protocol alone: what libraries print goes to standard error."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(row: dict[str, Any]) -> None:
        stream.write(json.dumps(row).encode() + b"\n")

    return say


def _inbox(stream: BinaryIO) -> queue.SimpleQueue[Message]:
    """Messages as they come; the process ends where they end."""
    found: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def read() -> None:
        with suppress(ValueError, OSError):
            while (message := recording.received(stream)) is not None:
                found.put(message)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return found


def main() -> int:
    """Serve until the parent ends it."""
    quiet()
    say = _answers()
    inbox = _inbox(sys.stdin.buffer)
    head, _ = inbox.get()
    try:
        tester = opened(head, say)
    except (RocmSdError, OSError, RuntimeError, ImportError, AttributeError) as error:
        say({"kind": "unusable", "reason": f"{type(error).__name__}: {error}"})
        return 0
    say({"kind": "ready"})
    while True:
        head, blobs = inbox.get()
        try:
            verdict = tester.test(head, blobs)
        except Exception as error:  # of ours: no fault of the kernel
            reason = f"the trial itself failed: {type(error).__name__}: {error}"
            verdict = {"outcome": REFUSED, "reason": reason, "lasting": False}
        say({"kind": "verdict", **verdict})
        if verdict["outcome"] == FAULTED:
            os._exit(0)  # Python would wait for the thread that reads, and abort
