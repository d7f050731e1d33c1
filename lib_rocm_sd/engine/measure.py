"""Times measured on the user's own card, for Performance: once per problem, then cached."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from itertools import chain, zip_longest
from time import perf_counter
from typing import Any

import torch

from lib_rocm_sd import __version__, cache
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.memory import is_recording, synchronize
from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.base import SEED, Call, I, Launch, Op, Variant
from lib_rocm_sd.ops.keys import tensors_of
from lib_rocm_sd.report import config_fields
from lib_rocm_sd.runtime import source

BUDGET_S = 2.0
MOST_RUNS = 50
LEAST_RUNS = 3
LEAST_US = 1e-3
"""What a call counts as that took less than a clock can tell."""
ROTATED_BYTES = 128 << 20
ROTATED_SETS = 4


PROBLEM = "problem"
"""A stored row's key of the problem's fields, beside the variants' names."""


class InterruptedMeasurement(Exception):  # noqa: N818 - nothing went wrong
    """The user wants no more of it, or its time is over."""


@dataclass(frozen=True)
class Contender:
    """A verified variant with one config, ready to be measured."""

    variant: Variant[Any, Any]
    config: Any
    launch: Launch | None


@dataclass(frozen=True)
class Timing:
    """The fastest config of a variant for a problem; `time_us` is the median of one call.

    `each`: every config that was measured, with its time.
    """

    config: Any
    time_us: float
    each: tuple[tuple[Any, float], ...] = ()

    @classmethod
    def of(cls, each: Sequence[tuple[Any, float]]) -> Timing:
        """The fastest of these."""
        return cls(*min(each, key=lambda pair: pair[1]), tuple(each))


Times = dict[str, Timing]
"""By variant name."""


def measure(
    op: Op[Any, Any],
    problem: Any,
    device: torch.device,
    contenders: Sequence[Contender],
    budget_s: float = BUDGET_S,
    interrupt: Callable[[], bool] = bool,
    times: Times | None = None,
    until: float = math.inf,
) -> tuple[Times, list[tuple[Contender, Exception]]]:
    """Time every contender on random inputs of the problem's size, in about `budget_s` for all.

    Returns the fastest timing per variant, and the contenders that failed with their errors. "Out
    of memory" is such an error here: the memory that is short is the measurement's own. Raises
    InterruptedMeasurement, also where `until` (of perf_counter) is over and something was timed.
    `times`: what was timed before; the others' times are put there.
    """
    times = {} if times is None else times
    done = {(name, config) for name, earlier in times.items() for config, _ in earlier.each}
    contenders = [each for each in contenders if (each.variant.name, each.config) not in done]
    failures: list[tuple[Contender, Exception]] = []
    end = perf_counter() + budget_s
    with torch.no_grad():
        if interrupt():
            raise InterruptedMeasurement
        timed = False
        sets = input_sets(op, problem, device)
        for place, contender in enumerate(contenders):
            if interrupt() or (timed and perf_counter() >= until):
                raise InterruptedMeasurement
            share_s = max(0.0, end - perf_counter()) / (len(contenders) - place)
            try:
                time_us = _time_us(contender, problem, sets, device, share_s)
            except FAILURES as error:
                failures.append((contender, error))
                continue
            if not math.isfinite(time_us):
                failures.append((contender, RuntimeError(f"its time came out as {time_us}")))
                continue
            timed = True
            earlier = times.get(contender.variant.name)
            pair = (contender.config, max(time_us, LEAST_US))
            times[contender.variant.name] = Timing.of((*(earlier.each if earlier else ()), pair))
    return times, failures


def few_sets(size_bytes: int) -> int:
    """How many copies of inputs of this size are made where memory is the user's."""
    return max(1, min(ROTATED_SETS, ROTATED_BYTES // max(1, size_bytes)))


def input_sets(
    op: Op[Any, I], problem: Any, device: torch.device, sets: Callable[[int], int] = few_sets
) -> list[I]:
    """Copies of the inputs in different memory, so that no run finds all it reads in a cache.

    `sets`: how many, by the bytes of one.
    """
    first = op.make_inputs(problem, device, SEED)
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(first))
    return [first, *(_copied(first) for _ in range(sets(size) - 1))]


def _copied(inputs: I) -> I:
    """A copy in memory of its own, which lies as the original does; what is broadcast by stride 0
    is shared.
    """
    memo: dict[int, Any] = {}

    def copied(item: Any) -> Any:
        if type(item) is tuple:
            return tuple(map(copied, item))
        shared = not isinstance(item, torch.Tensor) or 0 in item.stride()
        return item if shared else deepcopy(item, memo)

    return type(inputs)(*map(copied, inputs))  # type: ignore[call-arg, misc]


def _time_us(
    contender: Contender,
    problem: Any,
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    share_s: float,
) -> float:
    """Median time of a call in µs, from as many calls as `share_s` has room for; one at least.

    In a step of a model the device has its work queued, so it has here.
    """

    def call(number: int) -> None:
        inputs = sets[number % len(sets)]
        contender.variant.run(Call(problem, inputs, contender.launch, contender.config))

    first = timed(call, 1, device)[0]
    if first > 1e6 * share_s:
        return first
    begin = perf_counter()
    second = timed(call, 1, device)[0]
    once_s = max(1e-7, perf_counter() - begin)
    runs = min(MOST_RUNS, int(share_s / once_s))
    if runs < LEAST_RUNS:
        return second
    submit_s = _submit_s(call, device)
    return statistics.median(queued(call, runs, device, submit_s))


def _submit_s(call: NumberedCall, device: torch.device) -> float:
    """What a call takes until it returns."""
    begin = perf_counter()
    call(0)
    submit_s = perf_counter() - begin
    if device.type == "cuda":
        synchronize(device)
    return submit_s


def stamp(info: DeviceInfo) -> str:
    """What measured times are valid for: another card, torch, kernel or version measures anew."""
    ours = f"rocm_sd {__version__}, kernels {source.digest()[:12]}"
    return f"{ours}, torch {torch.__version__}, {info.name}"


def load(op: Op[Any, Any], info: DeviceInfo, problem: Any) -> tuple[Times, str]:
    """Stored times of `problem`, and why stored ones were ignored ('' where none were)."""
    rows, reason = _rows(op, info)
    row = rows.get(str(problem))
    if row is None:
        return {}, reason
    times: Times = {}
    for variant in op.every:
        entry = row.get(variant.name) if isinstance(row, dict) else None
        if entry is None:
            continue
        timing = _timing(entry, variant.configs(info.arch, problem))
        if timing is None:
            reason = f"a damaged or outdated tuning entry of {variant.name} is ignored"
        else:
            times[variant.name] = timing
    return times, reason


def save(op: Op[Any, Any], info: DeviceInfo, problem: Any, times: Times) -> None:
    """Add the times of `problem` to the cache; without a usable cache nothing is kept."""
    rows, _ = _rows(op, info)
    entries = {name: _entry(timing) for name, timing in times.items()}
    rows[str(problem)] = {PROBLEM: config_fields(problem), **entries}
    data = json.dumps({"stamp": stamp(info), "rows": rows}, indent=1, sort_keys=True)
    cache.write("tune", _key(op, info), data.encode())


def _entry(timing: Timing) -> dict[str, Any]:
    each = [{"config": config_fields(config), "time_us": time} for config, time in timing.each]
    return {"config": config_fields(timing.config), "time_us": timing.time_us, "each": each}


def stored_problems(op: Op[Any, Any], info: DeviceInfo) -> list[str]:
    """The problems that have stored times, as text."""
    return list(_rows(op, info)[0])


def stored_like(op: Op[Any, Any], info: DeviceInfo, problem: Any) -> Iterator[Any]:
    """The problems that have stored times, as objects like `problem`. Damaged ones are left out."""
    for text, row in _rows(op, info)[0].items():
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            # an earlier version kept no fields; JSON has lists where a problem has tuples
            fields = row[PROBLEM].items()
            candidate = replace(
                problem, **{k: tuple(v) if type(v) is list else v for k, v in fields}
            )
            if str(candidate) == text:
                yield candidate


def _key(op: Op[Any, Any], info: DeviceInfo) -> str:
    return f"{info.gfx or info.backend}/{op.name}.json"


def _rows(op: Op[Any, Any], info: DeviceInfo) -> tuple[dict[str, Any], str]:
    """All stored rows by problem; the string says why a file that exists was ignored."""
    data = cache.read("tune", _key(op, info))
    if data is None:
        return {}, ""
    try:
        content = json.loads(data)
    except ValueError as error:
        return {}, f"the tuning file of {op.name} is damaged and ignored: {describe(error)}"
    if not isinstance(content, dict) or not isinstance(content.get("rows"), dict):
        return {}, f"the tuning file of {op.name} is not one of ours and ignored"
    if content.get("stamp") != stamp(info):
        return {}, ""
    return content["rows"], ""


def _timing(entry: Any, configs: Sequence[Any]) -> Timing | None:
    """A stored entry, if it names a config that the variant still has and a possible time."""
    pair = _pair(entry, configs)
    if pair is None:
        return None
    rows = entry.get("each")
    each = [_pair(row, configs) for row in rows] if isinstance(rows, list) else []
    return Timing(*pair, tuple(part for part in each if part is not None))


def _pair(entry: Any, configs: Sequence[Any]) -> tuple[Any, float] | None:
    if not isinstance(entry, dict):
        return None
    time_us = entry.get("time_us")
    if not isinstance(time_us, (int, float)) or not math.isfinite(time_us) or time_us <= 0:
        return None
    for config in configs:
        if json.loads(json.dumps(config_fields(config))) == entry.get("config"):
            return config, float(time_us)
    return None


MOST_BUSY_S = 0.1
CYCLES = 1 << 20

NumberedCall = Callable[[int], object]
"""Given the number of the run."""


def timed(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    """Times in µs of `runs` calls, each given its number: device events, or the clock on a CPU."""
    return (_timed_on_gpu if device.type == "cuda" else _timed_on_cpu)(call, runs, device)


def _timed_on_gpu(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        synchronize(device)
        marks[0].record()
        for number in range(runs):
            call(number)
            marks[number + 1].record()
        synchronize(device)
    pairs = zip(marks, marks[1:], strict=False)
    return [1000.0 * begin.elapsed_time(end) for begin, end in pairs]


def _timed_on_cpu(call: NumberedCall, runs: int, device: torch.device) -> list[float]:
    times = []
    for number in range(runs):
        begin = perf_counter()
        call(number)
        times.append(1e6 * (perf_counter() - begin))
    return times


def queued(call: NumberedCall, runs: int, device: torch.device, submit_s: float) -> list[float]:
    """Times in µs of `runs` calls on the device, which is kept busy until all are submitted: what
    the CPU does between two launches does not count. `submit_s`: what a call is expected to take
    until it returns.
    """
    if device.type != "cuda":
        return timed(call, runs, device)
    with torch.cuda.device(device):
        for _ in range(3):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
            synchronize(device)
            begin = perf_counter()
            keep_busy(min(1.5 * submit_s * runs + 2e-4, MOST_BUSY_S))
            marks[0].record()
            for number in range(runs):
                call(number)
                marks[number + 1].record()
            late = marks[0].query()
            needed_s = (perf_counter() - begin) / runs
            synchronize(device)
            if not late or needed_s * runs > MOST_BUSY_S:
                break
            submit_s = max(submit_s, needed_s)
    pairs = zip(marks, marks[1:], strict=False)
    return [1000.0 * first.elapsed_time(second) for first, second in pairs]


def keep_busy(seconds: float) -> None:
    """Let the current device spin, so that what is submitted meanwhile stands in its queue."""
    sleep = getattr(torch.cuda, "_sleep", None)
    rate = _cycles_per_s(torch.cuda.current_device())
    if sleep is not None and math.isfinite(rate):
        sleep(int(seconds * rate))


@functools.cache
def _cycles_per_s(index: int) -> float:
    """How fast a device, the current one, counts; infinite where it cannot be kept busy."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is None:
        return math.inf
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):
        torch.cuda.synchronize(index)
        marks[0].record()
        sleep(CYCLES)
        marks[1].record()
        torch.cuda.synchronize(index)
    return 1000.0 * CYCLES / max(marks[0].elapsed_time(marks[1]), 1e-3)


class KnownTimes:
    """Known times of all ops on all devices. Not thread-safe: the engine holds its lock."""

    def __init__(self, identify: Callable[[torch.device], DeviceInfo]) -> None:
        self._identify = identify
        self._times: dict[Hashable, Times] = {}
        self._alike: dict[Hashable, dict[Any, None]] = {}
        """By class: problems that have, or had in an earlier process, times."""
        self._looked: set[Hashable] = set()
        self._tried: set[Hashable] = set()

    def of(self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device) -> Times:
        """What is known, or stored, of the variants' times for `problem`."""
        key = (op.name, problem, device)
        if key not in self._times and not is_recording(device):
            self._times[key], reason = load(op, self._identify(device), problem)
            if reason:
                session.report.event(reason)
        return self._times.get(key, {})

    def nearest(
        self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device
    ) -> tuple[Any, Times]:
        """The problem with times of `problem`'s class, the one that a self-test vouches for, that
        is `apart` least, and its times; no times where there is none.
        """
        if (op.name, device) not in self._looked:
            self._looked.add((op.name, device))
            for stored in stored_like(op, self._identify(device), problem):
                self._class(op, stored, device)[stored] = None
        alike = self._class(op, problem, device)
        for other in sorted(alike, key=lambda each: apart(problem, each)):
            times = self.of(session, op, other, device)
            if times:
                return other, times
        return problem, {}

    def _class(self, op: Op[Any, Any], problem: Any, device: torch.device) -> dict[Any, None]:
        key = (op.name, op.test_problems(problem)[0], device)
        return self._alike.setdefault(key, {})

    def note(
        self,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        times: Times,
        tried: Sequence[Variant[Any, Any]],
    ) -> None:
        """Keep what was measured, for this process and the next ones. `tried`: also in vain."""
        all_times = {**self._times.get((op.name, problem, device), {}), **times}
        self._times[op.name, problem, device] = all_times
        self._class(op, problem, device)[problem] = None
        self._tried.update((op.name, variant.name, problem, device) for variant in tried)
        save(op, self._identify(device), problem, all_times)

    def was_tried(
        self, op: Op[Any, Any], variant: Variant[Any, Any], problem: Any, device: torch.device
    ) -> bool:
        """True if this process has tried to time `variant`."""
        return (op.name, variant.name, problem, device) in self._tried


def apart(one: Any, other: Any) -> float:
    """How far two problems of an op are apart: the ratios of their numbers, in powers of two,
    together.
    """
    pairs = zip_longest(_numbers(one), _numbers(other), fillvalue=0)
    return sum(abs(math.log2((a + 1) / (b + 1))) for a, b in pairs)


def _numbers(problem: Any) -> Iterator[int]:
    fields = (each if isinstance(each, tuple) else (each,) for each in astuple(problem))
    return (each for each in chain.from_iterable(fields) if type(each) is int)
