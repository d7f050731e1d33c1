"""Whether ours or the host's own is faster for whole calls of a model: measured once on a card.

Who computes is decided when a picture begins and holds until the next one does, so no picture is
made by both. The first picture of a kind is ours, the next one the host's, each call timed by the
device's events. Where ours comes out slower, both have another picture: a card that wakes up was
slow in the first. Then the faster one makes all pictures of that kind, also in later processes,
until the card, its driver, torch or our kernels are others.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd import cache
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.engine.engine import engine, is_compiling
from lib_rocm_sd.engine.measure import stamp
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.graphs.device import obstacle
from lib_rocm_sd.modules.compared import without_search
from lib_rocm_sd.modules.patches import is_the_classs, named
from lib_rocm_sd.ops.conv.torch import searches
from lib_rocm_sd.runtime import background
from lib_rocm_sd.trials import place
from lib_rocm_sd.trials.gate import GateState

VARIABLE = "ROCM_SD_COMPARE_SPEED"
"""0: nothing is timed, and ours computes whatever it can. The WebUI has a setting for it."""
SETTLING = {True: 4, False: 2}
"""Calls after a switch to ours, and to the host's, that do not count: weights are laid, launches
are recorded.
"""
TIMED = 5
"""Calls of each side that are compared."""
PAIRS = 2
"""Pairs of pictures after which it is decided, where ours was slower in the first."""
DISTURBED = 3
"""Times that plans or sizes changed after the host was timed, until a kind is timed no more."""
MARGIN = 0.03
SUBJECTS = ("sample", "hidden_states")
"""What models call the image that they are given."""
MOST_KEPT = 400
KIND, FILE = "tune", "models.json"
"""Where verdicts are kept (cache.py), for each GPU."""
OURS = __name__.partition(".")[0]

Took = Callable[[], float]
"""How many ms a call took, when the device has done it."""


_of_thread = threading.local()


def is_wanted() -> bool:
    """Whether whole models are compared, where a host has no setting for it."""
    return os.environ.get(VARIABLE, "") != "0"


def is_resting() -> bool:
    """Whether this thread has ours whatever is faster."""
    return getattr(_of_thread, "rests", False)


@contextmanager
def ours_whatever() -> Iterator[None]:
    """Within this, ours computes what it can in this thread, also what is slower: to measure it."""
    before = is_resting()
    _of_thread.rests = True
    try:
        yield
    finally:
        _of_thread.rests = before


@dataclass(frozen=True)
class Verdict:
    """Medians of a call's time, and who computes calls of this kind. Not `sure`: ours was slower,
    by less than times vary.
    """

    ours_ms: float
    theirs_ms: float
    ours: bool
    sure: bool = True

    @classmethod
    def of(cls, ours_ms: list[float], theirs_ms: list[float]) -> Verdict:
        """Ours, unless it is slower by more than the margin. Where times vary by more than they
        are apart, the second fastest of each decide: what disturbs a call makes it slower.
        """
        mine, theirs = statistics.median(ours_ms), statistics.median(theirs_ms)
        vary = max(_varies(ours_ms), _varies(theirs_ms))
        if MARGIN * theirs < mine - theirs <= vary:
            quick, host = (sorted(times)[:2][-1] for times in (ours_ms, theirs_ms))
            return cls(mine, theirs, quick - host <= MARGIN * host, False)
        return cls(mine, theirs, mine - theirs <= MARGIN * theirs)

    def against_ours(self, theirs: str) -> str:
        """What the host has, by its name for people, and both times."""
        return f"{theirs} is faster here, {self.theirs_ms:.1f} ms for {self.ours_ms:.1f}"


def _varies(times: list[float]) -> float:
    """From the second fastest to the second slowest."""
    ordered = sorted(times)[1:-1]
    return ordered[-1] - ordered[0] if ordered else 0.0


@dataclass
class _Kind:
    """One kind of call on one device, of all models that look alike. `took`: calls of ours and of
    the host's that count; `shape`, `quiet`: of the image, and of plans, that these hold for;
    `pairs`: in which ours was slower.
    """

    key: str
    device: torch.device
    verdict: Verdict | None
    took: dict[bool, list[Took]] = field(default_factory=lambda: {True: [], False: []})
    shape: tuple[int, ...] = ()
    quiet: Hashable = None
    pairs: int = 0
    disturbed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are timed: it is not decided, and can be."""
        return self.verdict is None and self.disturbed < DISTURBED

    def forget(self) -> None:
        """Count nothing of what was timed."""
        self.disturbed += bool(self.took[False])
        self.took = {True: [], False: []}

    def is_quiet(self) -> bool:
        """Whether plans are those of the last call. If not, what was timed counts no more."""
        quiet = _quiet()
        same = quiet is not None and quiet == self.quiet
        if not same:
            self.quiet = quiet
            self.forget()
        return same

    def is_ours(self, shape: tuple[int, ...]) -> bool:
        """Whether ours makes the picture that begins, of an image of this shape. Waits for calls of
        the last one.
        """
        quiet = self.is_open and self.is_quiet()
        if quiet and not (self.lacks(True) or self.lacks(False)):
            self._decide()
        if self.verdict is not None:
            return self.verdict.ours
        if shape != self.shape:
            self.shape = shape
            self.forget()
        return not quiet or self.lacks(True)

    def lacks(self, ours: bool) -> bool:
        """Whether too few calls of a side were timed."""
        return len(self.took[ours]) < TIMED

    def _decide(self) -> None:
        ours_ms, theirs_ms = ([took() for took in self.took[ours]] for ours in (True, False))
        verdict = Verdict.of(ours_ms, theirs_ms)
        self.took = {True: [], False: []}
        self.pairs += 1
        if (verdict.ours and verdict.sure) or self.pairs >= PAIRS:
            self.verdict = verdict
            _save(self)


_lock = threading.RLock()
_kinds: dict[tuple[str, torch.device], _Kind] = {}
"""All kinds that this process has met: models come and go."""


class Contest:
    """Decides for one model, which is not held. Threads may call it at once.

    `switch(True)` puts ours into the model, which has it at first; `switch(False)` leaves it as the
    host's. `setting()` says what beside the model decides how fast calls are: the level, who
    computes attention; None where nothing is to be compared. `theirs` is what the host has in the
    place of ours, for people; `tell` is told of each verdict against ours.
    """

    def __init__(
        self,
        model: nn.Module,
        switch: Callable[[bool], None],
        setting: Callable[[], str | None],
        theirs: str,
        tell: Callable[[str], None],
    ) -> None:
        self.model, self._switch, self._setting = ref(model), switch, setting
        self._theirs, self._tell = theirs, tell
        self._pictures = threading.local()
        self._kind: _Kind | None = None
        self._asked: tuple[str, tuple[int, ...]] = "", ()
        self._calls = self._running = self._overlaps = 0
        self._ended = False
        self._slower: dict[str, str] = {}
        self.holds = True
        """Whether ours is in the model now."""

    @property
    def slower(self) -> list[str]:
        """Why the host makes pictures of some kinds, for people."""
        return list(dict.fromkeys(list(self._slower.values())))

    @property
    def why_theirs(self) -> str:
        """Why the host computes now; empty while ours does."""
        kind = self._kind
        if self.holds or is_resting():
            return ""
        timed = f"{self._theirs} is being timed, once"
        return timed if kind is None else self._slower.get(kind.key, timed)

    @property
    def is_timing_theirs(self) -> bool:
        """Whether the host makes this picture to be timed."""
        return not self.holds and self._kind is not None and self._kind.is_open

    def end(self) -> None:
        """Switch no more, and leave the calls as they come."""
        self._ended = True

    def before(self, picture: Any, args: Any, kwargs: Mapping[str, Any]) -> Callable[[bool], None]:
        """The model is about to be called with these arguments. `picture` is another object where
        a picture begins; None where that is not known. Then its first call decides who makes it.

        The function that is given is to be called when the call ends, with whether that has a
        result.
        """
        subject = _subject(args, kwargs)
        if is_compiling() or is_resting() or subject is None or is_recording(subject.device):
            return _nothing
        asked = _description(subject, args, kwargs), tuple(subject.shape)
        with _lock:
            if self._begins(picture):
                self._asked = asked
                self._begin(*asked, subject.device)
            took, stack = self._kind.took[self.holds] if self._kind else [], ExitStack()
            if self.is_timing_theirs:
                stack.enter_context(without_search())
            timed = asked == self._asked and self._is_timed()
            end = begin(subject.device) if timed else None
            self._overlaps += bool(self._running)
            self._running += 1
            overlaps = self._overlaps

        def after(done: bool) -> None:
            stack.close()
            with _lock:
                self._running -= 1
                if end is not None and done and overlaps == self._overlaps:
                    took.append(end())

        return after

    def _begins(self, picture: Any) -> bool:
        """Whether this thread's picture is another one now. Nobody's is switched amid a call."""
        last = getattr(self._pictures, "last", None)
        self._pictures.last = picture
        return not (picture is None or picture is last or self._running or self._ended)

    def _begin(self, description: str, shape: tuple[int, ...], device: torch.device) -> None:
        """A picture begins by such a call."""
        kind, can = None, not torch.is_grad_enabled() and is_compared_on(device)
        setting = self._setting() if can else None
        if setting is not None:
            kind = _kind_of(f"{_looks(self.model())}; {setting}; {description}", device)
        ours = kind is None or kind.is_ours(shape)
        if ours != self.holds or kind is not self._kind:
            self._calls = 0
        self._kind = kind
        if kind is not None and kind.verdict is not None and not kind.verdict.ours:
            self._say(kind.key, kind.verdict)
        if ours != self.holds:
            self.holds = ours
            self._switch(ours)

    def _say(self, key: str, verdict: Verdict) -> None:
        if key not in self._slower:
            self._slower[key] = verdict.against_ours(self._theirs)
            self._tell(self._slower[key])

    def _is_timed(self) -> bool:
        """Whether a call of the picture's kind counts, by what it is called after."""
        kind = self._kind
        if kind is None or not kind.is_open:
            return False
        if not kind.is_quiet():
            self._calls = 0
            return False
        self._calls += 1
        return self._calls > SETTLING[self.holds] and kind.lacks(self.holds)


def _nothing(done: bool) -> None:
    """A call that no contest looks at ends."""


def begin(device: torch.device) -> Callable[[], Took]:
    """A call begins on `device`. When it has returned, the function that is given is called."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        first.record()

    def end() -> Took:
        with torch.cuda.device(device):
            last.record()
        return took

    def took() -> float:
        last.synchronize()
        return first.elapsed_time(last)

    return end


def is_compared_on(device: torch.device) -> bool:
    """Whether kernels of ours run there, and the host's convolutions without a search, which would
    be timed, or would have to be kept from what they are to find.
    """
    info = identify(device)
    can = info.arch is not None and not info.reasons
    return can and not searches() and not torch.backends.cudnn.benchmark


def _quiet() -> Hashable:
    """Equal while plans stay as they are; None while kernels are being compiled, tried or measured,
    or wait to be.
    """
    state: GateState = getattr(engine.gate, "state", GateState)()
    busy = state.running or background.state().running or engine.unmeasured
    return None if busy else engine.drops


def _subject(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The image that a model is given."""
    named_so = (kwargs[name] for name in SUBJECTS if name in kwargs)
    first = next(named_so, args[0] if args else None)
    return first if isinstance(first, torch.Tensor) else None


def _description(subject: torch.Tensor, args: Any, kwargs: Mapping[str, Any]) -> str:
    """What kind of call it is: the batch, the image's size to a power of two, and what else is
    given. Lengths of prompts are not told apart, since a step may have two.
    """
    batch = subject.shape[0] if subject.ndim else 1
    size = f"{batch} x 2^{(subject.numel() // max(batch, 1)).bit_length()}"
    more = sorted(name for name, value in kwargs.items() if value is not None)
    return f"{size} values in {subject.dtype}, {len(args)} given, {', '.join(more)}"


def _looks(model: nn.Module | None) -> str:
    """What a model is made of: adapters, processors with weights, and forwards that others have
    replaced among it; and where its weights are when a picture begins.
    """
    if model is None:
        return "no model"
    found, count, places = Counter[str](), 0, set[str]()
    for module in model.modules():
        found[type(module).__qualname__] += 1
        forward = vars(module).get("forward")
        if forward is not None and not _is_plain(forward, module):
            found[named(forward)] += 1
    for parameter in model.parameters():
        found[str(parameter.dtype)] += 1
        places.add(parameter.device.type)
        count += parameter.numel()
    digest = cache.key_of(*(f"{name} {times}" for name, times in sorted(found.items())))
    where = " and ".join(sorted(places))
    return f"{type(model).__name__} {digest[:16]}, {count} parameters on {where}"


def _is_plain(forward: Any, module: nn.Module) -> bool:
    """Whether a module's forward is ours, or its class's."""
    return type(forward).__module__.startswith(OURS) or is_the_classs(forward, module)


def _kind_of(key: str, device: torch.device) -> _Kind:
    """A kind of this process, with what earlier ones have found out."""
    key = f"{key}; graphs: {obstacle(device) or 'on'}"
    kind = _kinds.get((key, device))
    if kind is None:
        kind = _kinds[key, device] = _Kind(key, device, _load(device).get(key))
    return kind


def verdicts(info: DeviceInfo) -> dict[str, Verdict]:
    """What was found out on a card by this torch and these kernels, by kind of call."""
    content = _content(info)
    return _rows(content) if str(content.get("stamp")).startswith(stamp(info)) else {}


def _load(device: torch.device) -> dict[str, Verdict]:
    """What is known of calls on this card."""
    content = _content(identify(device))
    return _rows(content) if content.get("stamp") == _stamp(device) else {}


def _content(info: DeviceInfo) -> dict[str, Any]:
    try:
        content = json.loads(cache.read(KIND, _file(info)) or b"{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _rows(content: Mapping[str, Any]) -> dict[str, Verdict]:
    try:
        rows = content.get("rows", {}).items()
        return {key: Verdict(float(a), float(b), bool(ours)) for key, (a, b, ours) in rows}
    except (AttributeError, TypeError, ValueError):
        return {}


def _save(kind: _Kind) -> None:
    assert kind.verdict is not None
    rows = {**_load(kind.device), kind.key: kind.verdict}
    newest = list(rows.items())[-MOST_KEPT:]
    kept = {key: (each.ours_ms, each.theirs_ms, each.ours) for key, each in newest}
    document = {"stamp": _stamp(kind.device), "rows": kept}
    data = json.dumps(document, indent=1).encode()
    cache.write(KIND, _file(identify(kind.device)), data)


def _file(info: DeviceInfo) -> str:
    return f"{info.gfx or info.backend}/{FILE}"


def _stamp(device: torch.device) -> str:
    """What verdicts are valid for."""
    here = place.of(device, engine.launcher(device))
    return f"{stamp(identify(device))}, {here.key if here else 'no driver'}"
