"""Whether ours or the host's own is faster for whole calls of a model: measured once on a card.

The first calls of a kind are made by ours, the next ones by the host's own, each timed by the
device's events, for which nobody waits. Where ours comes out slower, both have another turn: a card
that wakes up was slow in the first. Then the faster one computes all calls of that kind, also in
later processes, until the card, its driver, torch or our kernels are others.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd import cache
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine, is_compiling
from lib_rocm_sd.engine.measure import stamp
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.modules.compared import without_search
from lib_rocm_sd.trials import place
from lib_rocm_sd.trials.gate import GateState

VARIABLE = "ROCM_SD_COMPARE_SPEED"
"""0: nothing is timed, and ours computes whatever it can."""
SETTLING = {True: 4, False: 2}
"""Calls at the beginning of a turn of ours, and of the host's, that do not count: weights are laid,
launches are recorded.
"""
TIMED = 5
PAIRS = 2
"""Pairs of turns after which ours is left: the first may have been a card's that wakes up."""
MARGIN = 0.03
LOOKED_AFTER = 20
"""Calls after which it is looked whether the model is still the same."""
OTHERS = 4
"""Calls of other kinds in a row after which a kind is measured no more, until it comes again."""
SUBJECTS = ("sample", "hidden_states")
"""What models call the image that they are given."""
MOST_KEPT = 400
KIND, FILE = "tune", "models.json"
"""Where verdicts are kept (cache.py), for each GPU."""
FASTER = "the host's own is faster here"
BEING_TIMED = "the host's own is being timed, once"

Took = Callable[[], "float | None"]
"""How many ms a call took; None where the device has not done it yet."""


_of_thread = threading.local()


def is_wanted() -> bool:
    """Whether whole models are compared: where somebody asks for it, until a card has shown that
    verdicts are right beside offloading, other levels and MIOpen.
    """
    return os.environ.get(VARIABLE, "") == "1" and not getattr(_of_thread, "rests", False)


@contextmanager
def ours_whatever() -> Iterator[None]:
    """Within this, ours computes what it can in this thread, also what is slower: to measure it."""
    before = getattr(_of_thread, "rests", False)
    _of_thread.rests = True
    try:
        yield
    finally:
        _of_thread.rests = before


@dataclass(frozen=True)
class Verdict:
    """Medians of a call's time, and who computes calls of this kind."""

    ours_ms: float
    theirs_ms: float
    ours: bool

    @classmethod
    def of(cls, ours_ms: list[float], theirs_ms: list[float]) -> Verdict:
        """Ours, unless it is slower by more than the margin and more than times vary."""
        mine, theirs = statistics.median(ours_ms), statistics.median(theirs_ms)
        vary = max(_varies(ours_ms), _varies(theirs_ms))
        return cls(mine, theirs, mine - theirs <= max(MARGIN * theirs, vary))


def _varies(times: list[float]) -> float:
    """From the second fastest to the second slowest."""
    ordered = sorted(times)[1:-1]
    return ordered[-1] - ordered[0] if ordered else 0.0


@dataclass
class _Kind:
    """One kind of call. `turn`: whether ours has it; `calls`: made in it."""

    key: str
    device: torch.device
    verdict: Verdict | None
    turn: bool = True
    calls: int = 0
    pairs: int = 0
    seen: int = 0
    under_way: list[tuple[bool, Took]] = field(default_factory=list)
    times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def begin(self, pairs: int = 0) -> None:
        """A pair of turns begins, ours first."""
        self.turn, self.calls, self.pairs = True, 0, pairs
        self.under_way, self.times = [], {True: [], False: []}

    def collect(self) -> None:
        """Take in what the device has done."""
        while self.under_way:
            whose, took = self.under_way[0]
            ms = took()
            if ms is None:
                return
            self.times[whose].append(ms)
            del self.under_way[0]

    def is_timed(self) -> bool:
        """Whether the call that is made now counts."""
        return SETTLING[self.turn] < self.calls <= SETTLING[self.turn] + TIMED


class Contest:
    """Decides for one model, whose calls all come through `call`. Threads may call at once.

    `switch(True)` puts ours into the model, which has it at first; `switch(False)` leaves it as the
    host's. `content()` says what of ours is in it. `tell` is told of each verdict against ours. The
    model is not held, but by what `switch` and `content` hold.
    """

    def __init__(
        self,
        model: nn.Module,
        switch: Callable[[bool], None],
        content: Callable[[], str],
        tell: Callable[[str], None],
    ) -> None:
        self.model, self._switch, self._tell = ref(model), switch, tell
        self._content, self._is = content, ""
        self._lock = threading.RLock()
        self._kinds: dict[Hashable, _Kind] = {}
        self._measured: _Kind | None = None
        self._others = 0
        self._quiet: Hashable = None
        self._ended = False
        self.holds = True
        """Whether ours is in the model now."""

    @property
    def slower(self) -> list[str]:
        """Why the host computes calls of some kinds, for people."""
        verdicts = [kind.verdict for kind in list(self._kinds.values())]
        return [_words(each) for each in verdicts if each is not None and not each.ours]

    @property
    def why_theirs(self) -> str:
        """Why the host computes now; empty while ours does."""
        return "" if self.holds else "; ".join(self.slower) or BEING_TIMED

    @property
    def is_measuring(self) -> bool:
        """Whether calls of some kind are timed now."""
        return self._measured is not None

    def end(self) -> None:
        """Switch no more, and leave the calls as they come."""
        with self._lock:
            self._ended = True

    def call(self, args: Any, kwargs: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """What `compute` gives: the model's forward of these arguments."""
        after, done = self.before(args, kwargs), False
        try:
            made = compute()
            done = True
        finally:
            after(done)
        return made

    def before(self, args: Any, kwargs: Mapping[str, Any]) -> Callable[[bool], None]:
        """The model's forward is about to be called with these arguments: ours is put into it, or
        taken out of it. The function that is given is to be called at the end, with whether the
        call has come to one.
        """
        subject = _subject(args, kwargs)
        if subject is None or torch.is_grad_enabled() or not is_card(subject.device):
            return _nothing
        device = subject.device
        if is_compiling() or is_recording(device):
            return _nothing
        with self._lock:
            if self._ended:
                return _nothing
            kind = self._kind(_description(subject, args, kwargs), device)
            self._others = 0 if kind is self._measured else self._others + 1
            if self._others > OTHERS:
                self._measured = None
            timed = kind.verdict is None and self._advance(kind)
            ours = self._whose(kind)
            if ours != self.holds:
                self.holds = ours
                self._switch(ours)
        if kind is not self._measured:
            return _nothing
        end, stack = begin(device) if timed else None, ExitStack()
        if not ours:
            stack.enter_context(without_search())

        def after(done: bool) -> None:
            stack.close()
            if end is not None and done:
                kind.under_way.append((ours, end()))

        return after

    def _whose(self, kind: _Kind) -> bool:
        """Ours or the host's. While another kind is measured nothing is switched."""
        if self._measured is not None and kind is not self._measured:
            return self.holds
        return kind.turn if kind.verdict is None else kind.verdict.ours

    def _kind(self, description: str, device: torch.device) -> _Kind:
        """The kind of a call, another one where the model was changed meanwhile."""
        kind = self._kinds.get((description, device))
        if kind is not None:
            kind.seen += 1
            if kind.seen % LOOKED_AFTER:
                return kind
        if self.holds:
            self._is = self._content()
        key = f"{_looks(self.model())}; {self._is}; {description}"
        if kind is None or kind.key != key:
            if kind is self._measured:
                self._measured = None
            kind = _Kind(key, device, _load(device).get(key))
            self._kinds[description, device] = kind
            self._say(kind)
        return kind

    def _advance(self, kind: _Kind) -> bool:
        """Another call of a kind without a verdict comes: whether it is timed."""
        quiet = _quiet()
        if self._measured is None:
            self._measured = kind
            kind.begin()
        if kind is not self._measured:
            return False
        if quiet is None or (kind.turn and quiet != self._quiet):
            self._quiet = quiet
            kind.begin(kind.pairs)
            return False
        kind.collect()
        kind.calls += 1
        if kind.calls <= SETTLING[kind.turn] + TIMED:
            return kind.is_timed()
        if kind.turn:
            kind.turn, kind.calls = False, 1
        elif not (kind.under_way or all(kind.times.values())):  # calls failed
            kind.begin(kind.pairs)
        elif not kind.under_way:
            self._decide(kind)
        return False

    def _decide(self, kind: _Kind) -> None:
        verdict = Verdict.of(kind.times[True], kind.times[False])
        if not verdict.ours and kind.pairs + 1 < PAIRS:
            kind.begin(kind.pairs + 1)
            kind.calls = 1
            return
        kind.verdict, self._measured = verdict, None
        _save(kind, verdict)
        self._say(kind)

    def _say(self, kind: _Kind) -> None:
        if kind.verdict is not None and not kind.verdict.ours:
            self._tell(f"{type(self.model()).__name__}: {_words(kind.verdict)}")


def _words(verdict: Verdict) -> str:
    return f"{FASTER}, {verdict.theirs_ms:.1f} ms for {verdict.ours_ms:.1f}"


def _nothing(done: bool) -> None:
    """A call that is not for a contest ends."""


def begin(device: torch.device) -> Callable[[], Took]:
    """A call begins on `device`. When it has returned, the function that is given is called."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        first.record()

    def end() -> Took:
        with torch.cuda.device(device):
            last.record()
        return lambda: first.elapsed_time(last) if last.query() else None

    return end


def is_card(device: torch.device) -> bool:
    """Whether kernels of ours run there."""
    info = identify(device)
    return info.arch is not None and not info.reasons


def _quiet() -> Hashable:
    """Equal while plans stay as they are; None while kernels are being tried."""
    state: GateState = getattr(engine.gate, "state", GateState)()
    return None if state.running else engine.drops


def _subject(args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The image that a model is given."""
    named = (kwargs[name] for name in SUBJECTS if name in kwargs)
    first = next(named, args[0] if args else None)
    return first if isinstance(first, torch.Tensor) else None


def _description(subject: torch.Tensor, args: Any, kwargs: Mapping[str, Any]) -> str:
    """What kind of call it is: the image's shape, and what else is given. Lengths of prompts are
    not told apart, since a step may have two.
    """
    more = sorted(name for name, value in kwargs.items() if value is not None)
    return f"{tuple(subject.shape)} {subject.dtype}, {len(args)} given, {', '.join(more)}"


def _looks(model: nn.Module | None) -> str:
    """What a model is made of, adapters and processors with weights among it."""
    if model is None:
        return "no model"
    names = Counter(type(module).__qualname__ for module in model.modules())
    count = sum(parameter.numel() for parameter in model.parameters())
    digest = cache.key_of(*(f"{name} {times}" for name, times in sorted(names.items())))
    return f"{type(model).__name__} {digest[:16]}, {count} parameters"


def _load(device: torch.device) -> dict[str, Verdict]:
    """What is known of calls on this card; nothing where the file is damaged, or of other times."""
    data = cache.read(KIND, _file(device))
    try:
        content = json.loads(data or b"{}")
        if content.get("stamp") != _stamp(device):
            return {}
        rows = content["rows"].items()
        return {key: Verdict(float(a), float(b), bool(ours)) for key, (a, b, ours) in rows}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _save(kind: _Kind, verdict: Verdict) -> None:
    rows = {**_load(kind.device), kind.key: verdict}
    kept = {key: astuple(each) for key, each in list(rows.items())[-MOST_KEPT:]}
    document = {"stamp": _stamp(kind.device), "rows": kept}
    cache.write(KIND, _file(kind.device), json.dumps(document, indent=1).encode())


def _file(device: torch.device) -> str:
    info = identify(device)
    return f"{info.gfx or info.backend}/{FILE}"


def _stamp(device: torch.device) -> str:
    """What verdicts are valid for."""
    here = place.of(device, engine.launcher(device))
    return f"{stamp(identify(device))}, {here.key if here else 'no driver'}"
