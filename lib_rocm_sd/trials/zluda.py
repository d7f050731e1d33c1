"""Whether our kernels run beside ZLUDA: asked of a child once, whose verdict is kept.

`judge` is what `device.identify` asks. It answers at once: by the verdict, or that there is none
yet, and then the child works in the background (zluda_child.py). The verdict holds for this card
with this nvcuda, HIP library, driver and torch (place.py), and for our version and kernels, which
may be at fault. ROCM_SD_ALLOW_ZLUDA=0 and =1 overrule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import __version__, cache, console, device
from lib_rocm_sd.device import ALLOW_ZLUDA, DeviceInfo
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import describe
from lib_rocm_sd.errors import CompileError, LaunchError
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.trials import place as places
from lib_rocm_sd.trials import torch_child, verdicts
from lib_rocm_sd.trials.conductor import ended
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import subjects
from lib_rocm_sd.trials.verdicts import FAULTED, HUNG, KILLED, REFUSED, Verdict

if TYPE_CHECKING:
    import torch

TESTED = AttentionProblem(1, 2, 256, 1, 64)
"""Over one key."""
SUBJECT = "kernels beside ZLUDA"
WAITS = "ZLUDA is tested in a process of its own first"
LIMIT_S = 120.0
COMPILING_LIMIT_S = 900.0
"""ZLUDA compiles torch's kernels before their first use."""

say: Callable[[str], object] = console.Log().info
"""Gets a line when a test begins, and one with what came of it; a host's own where it has one."""

busy: Callable[[], bool] = bool
"""Whether somebody needs the card now; a host's own where it has one."""
PATIENCE_S = 120.0
"""How long a pause is waited for."""

_Card = tuple[str, int]
_lock = threading.RLock()
_infos: dict[_Card, DeviceInfo] = {}
_answers: dict[_Card, tuple[str, ...]] = {}
_running: dict[_Card, threading.Thread] = {}
_untestable: set[_Card] = set()
"""Cards of which something is not known that a test needs."""
_tell: Callable[[], object] = bool


def judge(info: DeviceInfo) -> tuple[str, ...]:
    """Why nothing is launched on the card that is `info`; see `device.judge_zluda`."""
    card = (info.name, info.index)
    answer = _answers.get(card)
    if answer is not None:
        return answer
    with _lock:
        if card not in _answers and card not in _running:
            _begin(info, card)
        return _answers.get(card, (WAITS,))


def _begin(info: DeviceInfo, card: _Card, anew: bool = False) -> None:
    """Read the verdict, or have it found out; `anew`: whatever it is. The lock is held."""
    assert info.arch is not None
    _infos[card] = info
    _untestable.discard(card)
    try:
        here = places.here(info, info.index, info.arch)
    except (LaunchError, OSError) as error:
        _untestable.add(card)
        _answers[card] = (f"torch runs through ZLUDA: {error}",)
        return
    key = cache.key_of("zluda 1", __version__, here.halt_key, str(here.index))
    if anew:
        verdicts.forget(key)
    verdict = verdicts.read(key)
    if verdict is not None and not verdict.asks_again:
        _answers[card] = _reasons(verdict)
        return
    work = partial(_find_out, here, key, card)
    thread = threading.Thread(target=work, name="rocm_sd ZLUDA", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the process ends, or has too many
        _answers[card] = (f"ZLUDA cannot be tested: {error}",)
    else:
        _running[card] = thread


def is_refused() -> bool:
    """Whether `ask` has something to ask for. Takes no lock."""
    return not _running and any(
        reasons and card not in _untestable for card, reasons in list(_answers.items())
    )


def ask() -> bool:
    """The user wants what was refused to be tested again; False where no test has begun."""
    with _lock:
        if _running:
            return False
        for card in [card for card, reasons in _answers.items() if reasons]:
            del _answers[card]
            _begin(_infos[card], card, anew=True)
        return bool(_running)


def is_running() -> bool:
    """Whether an answer is still to come. Takes no lock."""
    return bool(_running)


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until the answers for these have come; each child has its limits."""
    device.judge_zluda = judge
    for each in devices:
        device.identify(each)
    for thread in list(_running.values()):
        thread.join()


def listen(tell: Callable[[], object]) -> bool:
    """Have `tell`, and nobody else, called in another thread whenever an answer has come; False
    where none is to come now.
    """
    global _tell
    with _lock:
        _tell = tell
        return bool(_running)


def _find_out(here: Place, key: str, card: _Card) -> None:
    end = time.monotonic() + PATIENCE_S
    try:
        say(f"{here}: {WAITS}, once. ZLUDA may compile for minutes.")
        while busy() and time.monotonic() < end:
            time.sleep(0.1)
        reasons = _reasons(probe(here, key))
    except Exception as error:  # of ours: no fault of ZLUDA's
        reasons = (f"the test beside ZLUDA itself failed: {describe(error)}",)
    with suppress(OSError, ValueError):  # no console, or one that is closed
        say(f"{here}: {'; '.join(reasons) or 'kernels may run beside ZLUDA'}")
    with _lock:
        _answers[card] = reasons
        del _running[card]
        tell = _tell
    engine.renew()
    tell()


def _reasons(verdict: Verdict) -> tuple[str, ...]:
    if verdict.passed:
        return ()
    what = f"tested beside ZLUDA in a process of its own: {verdict.outcome}: {verdict.reason}"
    return (f"{what}; {ALLOW_ZLUDA}=1 overrules this",)


def probe(
    here: Place,
    key: str,
    spawn: Callable[[], Link] = Link,
) -> Verdict:
    """Have a child go through its steps; the verdict, kept under `key` unless its reason passes."""

    def made(outcome: str, reason: str) -> Verdict:
        return Verdict(SUBJECT, outcome, verdicts.clean(reason), device=str(here))

    def kept(verdict: Verdict, lasting: bool) -> Verdict:
        return verdicts.write(key, verdict) if lasting else verdict

    try:
        head, blobs = _letter(here)
    except CompileError as error:
        return made(REFUSED, f"its kernel does not compile: {error.reason}")
    try:
        child = spawn()
    except OSError as error:
        return made(REFUSED, f"no process for the test: {error}")
    step = first = "loading ZLUDA and torch"
    try:
        child.send({"kind": "load", "libraries": here.before_torch})
        child.send({"kind": "open", **here.as_dict(), "torch": "zluda"})
        child.send(head, blobs)
        while True:
            answer = child.receive(COMPILING_LIMIT_S if "compiles" in step else LIMIT_S)
            if answer is None:
                outcome, reason = ended(child.status(), child.words())
                if outcome == KILLED:
                    return verdicts.interrupted(
                        key, SUBJECT, str(here), f"{step}: {reason}", KILLED
                    )
                # Before a step: a full disk, a short memory, a scanner; all of them may pass.
                lasting = step != first or outcome == FAULTED
                return kept(made(outcome, f"{step}: {reason}"), lasting)
            step = str(answer.get("problem", step))
            if answer["kind"] in ("verdict", "unusable"):
                verdict = made(answer.get("outcome", REFUSED), str(answer.get("reason", "")))
                lasting = answer["kind"] == "verdict" and answer.get("lasting", True)
                return kept(verdict, lasting)
    except TimeoutError:
        child.kill()
        return kept(made(HUNG, f"{step}: no answer within its time limit"), step != first)
    finally:
        child.end()


def _letter(here: Place) -> tuple[dict[str, Any], list[bytes]]:
    """The class of attention that the child launches. Raises CompileError."""
    subject = next(iter(subjects([(ATTENTION, TESTED)], here.arch)), None)
    if subject is None:
        raise CompileError("here", f"there is none for {here.arch.gfx}")
    codes = subject.codes(here.arch)
    s, problems = subject, (TESTED, *ATTENTION.test_problems(TESTED))
    rows = [
        [[spec.source, spec.entry, [list(pair) for pair in spec.defines]], number]
        for number, spec in enumerate(codes)
    ]
    described = torch_child.description(s.op, s.variant, s.config, problems)
    head = {"kind": "class", "library": here.library, "codes": rows, "torch": described}
    return head, list(codes.values())
