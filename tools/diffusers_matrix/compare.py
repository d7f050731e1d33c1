"""A change of a model by the host alone and with ours, before, after and without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any
from zlib import crc32

import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.diffusers import patched
from lib_rocm_sd.hosts.diffusers.components import ServedForward
from lib_rocm_sd.modules.stand_in import StandIn
from lib_rocm_sd.report import Report
from tests.unet.unet_models import errors
from tools.diffusers_matrix.models import Row, Scene

ROUNDS = (
    "on step do step undo step off step",
    "on step do step off step undo step on step off",
    "do on step undo step off step",
)
"""What is done to a fresh scene, by word; `on` and `off` are ours. "do" comes after a first part of
each change that precedes all of them.
"""
STATES = ("plain", "changed", "undone")
LIES = (" strides", " hooks")
"""How names of facts end that are a matter of how a model lies."""
TIMES, SLACK = 2.0, 1e-3
"""Ours is right if its error to float32 is at most so many times the host's, and so much more."""
MOST, LONGEST = 3, 160
"""So many notes of a row are printed, each at most so long."""
SEEN = 3.0
"""A change is to be so many times as large as what is still right, or a row could not be wrong."""


@dataclass(frozen=True)
class Place:
    """Where results come from: `repeats` steps of each of `seeds` at a time."""

    device: torch.device
    seeds: Sequence[int] = (0,)
    repeats: int = 1
    exact: bool = True
    """Whether the same step gives the same bits."""
    rounds: Sequence[str] = ROUNDS


@dataclass(frozen=True)
class State:
    """What the host makes in a state: results, or what was raised; how its modules lie."""

    results: torch.Tensor | None
    raised: str
    facts: Mapping[str, Any]
    forwards: frozenset[str]
    """Of the modules that have a forward of their own."""


@dataclass(frozen=True)
class Seen:
    """A step in a round. Errors are the largest, as shares of the largest value in float32.

    `ours`: how many blocks are, of how many; `partly` how many within call something of the
    host's. `wrong` says what is.
    """

    when: str
    error: float
    host: float
    apart: float
    blocks: tuple[int, int, int] | None
    notes: tuple[str, ...]
    wrong: str = ""


@dataclass
class Verdict:
    """All steps of a row. `effect`: by how much the change changes a step of the host's."""

    row: str
    model: str
    effect: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    alone: str = ""
    """What diffusers raises by itself: there is nothing to judge then."""

    @property
    def word(self) -> str:
        """ "noticed" where other blocks are ours, or other parts of them, while it lasts."""
        if self.wrong or self.alone:
            return "WRONG" if self.wrong else "unjudged"
        found = {(one.blocks, one.notes) for one in self.seen if one.when.startswith("1 on")}
        return "right" if len(found) < 2 else "noticed"

    def line(self) -> str:
        """For people."""
        head = f"{self.word} {self.model}, {self.row}: changes {self.effect:.2g}"
        worst = max(self.seen, key=lambda one: one.error - one.host, default=None)
        if worst is not None:
            head += f", error {worst.error:.1e} (host's {worst.host:.1e})"
        blocks = [one.blocks for one in self.seen if one.blocks is not None]
        if any(blocks):
            head += ", blocks " + " -> ".join(f"{b[0]}/{b[1]} partly {b[2]}" for b in blocks[:3])
        notes = list(dict.fromkeys(note[:LONGEST] for one in self.seen for note in one.notes))
        return "; ".join(
            [head, *filter(None, [self.alone]), *self.wrong, *self.notes, *notes[:MOST]]
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.word}


def missing(row: Row, place: Place) -> str:
    """What the row needs and is not here, a package or "cuda"; empty if there is nothing."""
    if row.needs == "cuda":
        return "" if place.device.type == "cuda" else "cuda"
    return row.needs if row.needs and importlib.util.find_spec(row.needs) is None else ""


def judged(row: Row, place: Place) -> Verdict:
    """The row, in all rounds."""
    verdict = Verdict(row.name, row.model.name)
    try:
        host = _states(row, place, torch.float16)
        exact = _states(row, place, torch.float32)
    except Exception as error:
        verdict.alone = f"without ours it raises {type(error).__name__}: {error}"
        return verdict
    plain = exact[0].results
    others = [state.results for state in exact[1:] if state.results is not None]
    if plain is not None:
        verdict.effect = max((errors(other, plain)[0] for other in others), default=0.0)
    least = SEEN * (TIMES * _error(host[0], exact[0]) + SLACK)
    if row.changes and others and verdict.effect < least:
        verdict.wrong.append(f"the row cannot be judged: less than {least:.1e} changes")
    for number, words in enumerate(place.rounds, 1):
        try:
            verdict.seen += _round(row, place, words, number, host, exact, verdict)
        except Exception as error:
            verdict.wrong.append(f"round {number} raised {type(error).__name__}: {error}")
    verdict.wrong += [f"{one.when}: {one.wrong}" for one in verdict.seen if one.wrong]
    return verdict


def _states(row: Row, place: Place, dtype: torch.dtype) -> list[State]:
    scene = Scene(row.model, dtype, place.device)
    parts, made = row.change(scene), []
    try:
        for _ in STATES:
            next(parts, None)
            results, raised = _results(scene, place)
            own = frozenset(name for name, _ in _forwards(scene))
            made.append(State(results, raised, facts(scene), own))
    finally:
        _finish(parts)
    return made


def _finish(parts: Iterator[None]) -> None:
    """Undo what may have been done."""
    for _ in parts:
        pass


def _results(scene: Scene, place: Place) -> tuple[torch.Tensor | None, str]:
    try:
        steps = [scene.step(seed) for _ in range(place.repeats) for seed in place.seeds]
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return torch.stack(steps).cpu(), ""


def facts(scene: Scene) -> dict[str, Any]:
    """What each module has: names of its attributes, how its tensors lie, how many hooks."""
    found: dict[str, Any] = {}
    for name, module in scene.unet.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        names = sorted(vars(module).keys() - {"forward"})
        found[name] = (type(module).__qualname__, *hooks, *names)
        found[f"{name} hooks"] = (len(module._state_dict_hooks),)
    for name, tensor in scene.unet.named_parameters():
        found[f"{name} values"] = (tensor.dtype, _digest(tensor))
        found[f"{name} strides"] = tensor.stride()
    return found


def _forwards(scene: Scene) -> Iterator[tuple[str, Any]]:
    for name, module in scene.unet.named_modules():
        if "forward" in vars(module):
            yield name, vars(module)["forward"]


def _digest(tensor: torch.Tensor) -> int:
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    return crc32(values.cpu().numpy().tobytes())


def _round(
    row: Row,
    place: Place,
    words: str,
    number: int,
    host: Sequence[State],
    exact: Sequence[State],
    verdict: Verdict,
) -> Iterator[Seen]:
    scene = Scene(row.model, torch.float16, place.device)
    parts, state, patch = row.change(scene), 0, None
    next(parts)
    with ExitStack() as undoing:
        undoing.callback(_finish, parts)
        ours = undoing.enter_context(ExitStack())
        for word in words.split():
            if word in ("do", "undo"):
                next(parts, None)
                state += 1
            elif word == "on":
                session = Session(report=Report())
                wait = place.device.type != "cpu"
                with_ours = patched(
                    scene.pipeline, unet=True, session=session, wait=wait, compare=False
                )
                patch = ours.enter_context(with_ours)
            elif word == "off":
                ours.close()
                patch = None
            else:
                when = f"{number} {'off' if patch is None else 'on'} {STATES[state]}"
                yield _seen(scene, row, place, when, patch, host[state], exact[state])
    verdict.notes += [note for note in scene.notes if note not in verdict.notes]


def _seen(
    scene: Scene, row: Row, place: Place, when: str, patch: Any, host: State, exact: State
) -> Seen:
    results, raised = _results(scene, place)
    blocks, notes = (None, ()) if patch is None else _blocks(patch)
    if results is None or host.results is None:
        differs = f"raised {raised!r}, the host {host.raised!r}" if raised != host.raised else ""
        return Seen(when, 0.0, 0.0, 0.0, blocks, notes, differs)
    apart = errors(results, host.results)[0]
    if exact.results is None:
        error, least = apart, 0.0
    else:
        error, least = errors(results, exact.results)[0], errors(host.results, exact.results)[0]
    wrong: list[str] = []
    if patch is None and place.exact and row.lies and apart > 0:
        wrong.append(f"{apart:.1e} apart from the host that is alone again")
    elif not error <= TIMES * least + SLACK:
        wrong.append(f"error {error:.1e} where the host's is {least:.1e}")
    wrong += _dead(scene) if patch is not None else _left(scene, host, row.lies)
    return Seen(when, error, least, apart, blocks, notes, "; ".join(wrong))


def _error(host: State, exact: State) -> float:
    if host.results is None or exact.results is None:
        return 0.0
    return errors(host.results, exact.results)[0]


def _blocks(patch: Any) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    rows = patch.unet.rows()
    counts = (
        sum(one.ours for one in rows),
        sum(one.total for one in rows),
        sum(sum(one.partly.values()) for one in rows),
    )
    notes = [str(one) for one in rows if one.left or one.partly]
    notes += [f"{count} x {why} left alone" for why, count in patch.left_alone.items()]
    notes += [f"{name}: {why}" for name, found in patch.vae.left_alone.items() for why in found]
    return counts, tuple(" ".join(note.split()) for note in notes)


def _dead(scene: Scene) -> list[str]:
    """Stand-ins of ours that serve nothing while ours is on."""
    found = [
        name
        for name, forward in _forwards(scene)
        if isinstance(forward, StandIn) and not forward.is_put_in
    ]
    return [f"{len(found)} dead stand-ins, as {found[0]}"] if found else []


def _left(scene: Scene, host: State, lies: bool) -> list[str]:
    """What is not as it is by the host alone. A forward of ours may be where a change has put back
    what it had kept.
    """
    left = [
        name
        for name, forward in _forwards(scene)
        if isinstance(forward, (StandIn, ServedForward)) and name not in host.forwards
    ]
    if left:
        return [f"{len(left)} forwards of ours are left, as {left[0]}"]
    now = facts(scene)
    pairs = {name: (now.get(name), host.facts.get(name)) for name in {**now, **host.facts}}
    names = [
        name
        for name, (got, was) in pairs.items()
        if got != was and (lies or not name.endswith(LIES))
    ]
    if not names:
        return []
    got, was = (set(facts or ()) for facts in pairs[names[0]])
    return [f"{len(names)} are otherwise, as {names[0]}: {got - was} for {was - got}"]
