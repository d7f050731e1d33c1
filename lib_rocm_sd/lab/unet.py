"""`bench unet`: every way to run a UNet's step, in one run: with its blocks as our programs, and as
torch does.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd import first_trials, functional
from lib_rocm_sd.catalog.unet import FACTOR
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import with_index
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.models import Case, Runner, Unet, Way, compiled, refused
from lib_rocm_sd.lab.rows import (
    OURS,
    Column,
    Columns,
    Countdown,
    Row,
    TextTable,
    between,
    field,
    is_named,
    say,
    spread,
)
from lib_rocm_sd.lab.timing import (
    FAILED,
    Peak,
    allocated,
    clean,
    no_tf32,
    tried,
    wait,
    wall_ms,
    why,
)
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.report import Report
from lib_rocm_sd.report import report as process_report
from lib_rocm_sd.trials.gate import put_before
from lib_rocm_sd.unet.takeover import take_over

RUNS, QUICK_RUNS = 7, 3
STEPS = 10
"""Steps in one wall-clock timing: a sampler's steps follow one another without a wait."""
LONG_MS = 2000.0
"""A step longer than this is timed by itself, and few times."""
TRIALS_S = 300.0
"""For all trials of a card that has tried nothing yet."""
COLUMNS = Columns(
    "case way runs wall_ms=median p10_ms=p10 p90_ms=p90 gpu_ms submit_ms launches first_ms "
    "second_ms prepare_s peak_mib kept_mib error rms told reason"
)
"""`wall_ms`: of a step, of `STEPS` in a row; `submit_ms` waits for nothing. `first_ms`,
`second_ms`: with everything prepared at another size, and for Auto all tried that a host's start
tries; `prepare_s`: the very first step. `kept_mib`: with all that graphs have reserved for what
lies in between. Errors are to the step in float32.
"""
TEXT = TextTable(
    (field("case", -16, "case"), field("way", -24, "way")),
    (
        field("wall ms", 8, "median", ".2f", "-"),
        between(15, ".2f"),
        field("GPU ms", 8, "gpu_ms", ".2f", "-"),
        field("submit", 7, "submit_ms", ".2f", "-"),
        Column("launches", 8, lambda row: str(row.launches)),
        field("first", 8, "first_ms", ".1f", "-"),
        field("second", 8, "second_ms", ".1f", "-"),
        field("MiB", 6, "peak_mib", ".0f", "-"),
        field("kept", 6, "kept_mib", ".0f", "-"),
        field("error", 8, "error", ".1e", "-"),
        field("rms", 8, "rms", ".1e", "-"),
    ),
    absent="not measured",
)


def _rows(args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """Raises UsageError where nothing can be measured."""
    if importlib.util.find_spec("diffusers") is None:
        raise UsageError("bench unet needs diffusers: `pip install diffusers`")
    every = models.CASES[:1] if args.quick else models.CASES
    every = models.SMALL_CASES if args.small else every
    cases = [case for case in every if is_named(args.case, str(case))]
    # Without those that compile for a minute where the run is to be short.
    usual = [way for way in WAYS if not (way.slow and (args.quick or args.small))]
    ways = [way for way in WAYS if way.key in args.ways] if args.ways else usual
    if not cases or not ways:
        raise UsageError("no case or no way is left")
    return _measured(cases, ways, setting.device, getattr(torch, args.dtype), setting.runs)


def _measured(
    cases: Sequence[Case], ways: Sequence[Way], device: torch.device, dtype: torch.dtype, runs: int
) -> Iterator[Row]:
    progress = Countdown([1.0] * (len(cases) * len(ways)))
    for model in dict.fromkeys(case.model for case in cases):
        unet = models.unet(model, device, dtype)
        own = [case for case in cases if case.model == model]
        exact_steps = {case: exact(unet, case) for case in own}
        for way in ways:
            for case in own:
                progress.next(f"{case}: {way.name}")
                row = Row(case=str(case), way=way.name)
                if way.slow and case != own[0]:
                    reason = f"compiled for {own[0]} only: it takes a minute for each size"
                    yield replace(row, reason=reason)
                    continue
                try:
                    with way.make(unet) as runner:
                        row = measure(unet, case, way, runner, runs, exact_steps[case])
                except FAILED as failure:
                    row = replace(row, reason=why(failure))
                yield row
        del unet
        clean(device)


def render(heading: str, rows: Sequence[Row]) -> str:
    """The table that a person reads, and below it what was not ours and why."""
    lines = [heading, *TEXT.lines(rows)]
    for row in rows:
        notes = (f"  {note}" for note in row.told)
        lines += ["", f"{row.case}, {row.way}:", *notes] if row.told else []
    return "\n".join(lines)


# -- measuring ------------------------------------------------------------------------------------


def exact(unet: Unet, case: Case) -> torch.Tensor | None:
    """The step in float32, on the CPU; None where it does not fit."""
    args, kwargs = unet.arguments(case.width, case.height)
    latents, step, text, added = *args, kwargs.pop("added_cond_kwargs", None)
    if added is not None:
        kwargs["added_cond_kwargs"] = {**added, "text_embeds": added["text_embeds"].float()}
    weights = {name: p.data for name, p in unet.module.named_parameters()}
    try:
        with torch.no_grad(), no_tf32():
            unet.module.float()
            output: torch.Tensor = unet.module(latents.float(), step, text.float(), **kwargs)[0]
            return output.cpu()
    except FAILED as failure:
        if not is_out_of_memory(failure):
            raise
        return None
    finally:
        for name, parameter in unet.module.named_parameters():
            parameter.data = weights[name]
        clean(unet.device)


def measure(
    unet: Unet, case: Case, way: Way, runner: Runner, runs: int, right: torch.Tensor | None
) -> Row:
    """The row of `way`, which is ready, for this case: a step at a size never met, compared with
    float32, timed.
    """
    args, kwargs = unet.arguments(case.width, case.height)
    device = unet.device

    def step() -> Any:
        return runner.call(*args, **kwargs)[0]

    def figures(row: Row) -> Row:
        before = allocated(device)
        row = replace(row, prepare_s=wall_ms(step, device) / 1000)
        if not way.slow:
            other, more = unet.arguments(case.width, case.height + 8 * FACTOR)
            gc.collect()  # of the first step's garbage, which is not this one's
            fresh = [wall_ms(lambda: runner.call(*other, **more), device) for _ in range(2)]
            row = replace(row, first_ms=fresh[0], second_ms=fresh[1])
        clean(device)
        row = replace(row, kept_mib=(allocated(device) + _pooled(device) - before) / 2**20)
        row = compared(row, step().cpu(), right)
        row = replace(row, told=tuple(runner.told()))
        if row.reason:
            return row
        count = 1 if wall_ms(step, device) > LONG_MS else STEPS
        times = [wall_ms(step, device, count) for _ in range(runs if count > 1 else 2)]
        row = replace(row, **spread(times), submit_ms=submit_ms(step, device, runs))
        peak = Peak(device)
        if device.type == "cuda":
            step()
        row = replace(row, peak_mib=peak.mib())
        gpu_ms, launches = _device_work(step, device)
        return replace(row, gpu_ms=gpu_ms, launches=launches)

    return tried(Row(case=str(case), way=way.name), device, figures)


def compared(row: Row, output: torch.Tensor, right: torch.Tensor | None) -> Row:
    """The row with its errors to what is `right`, or with the reason why its output is wrong."""
    if not bool(output.isfinite().all()):
        return replace(row, reason="wrong: the output has NaN or infinity")
    if right is None:
        return row
    gap = output.double() - right.double()
    largest = float(gap.abs().max()) / float(right.abs().max())
    rms = float(gap.square().mean().sqrt()) / float(right.double().square().mean().sqrt())
    return replace(row, error=largest, rms=rms)


def submit_ms(step: Any, device: torch.device, runs: int) -> float:
    """What a step takes until it returns, of a device that has nothing to do; NaN of the CPU."""
    if device.type != "cuda":
        return math.nan
    times = []
    for _ in range(runs):
        wait(device)
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1000)
    wait(device)
    return statistics.median(times)


def _device_work(step: Any, device: torch.device) -> tuple[float, int]:
    """What the device worked in one step, in ms, and its kernels and copies, by torch's profiler.

    What launches without torch is seen too: the profiler asks the driver.
    """
    if device.type != "cuda":
        return math.nan, 0
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        wait(device)
    on_device = [e for e in profile.events() or () if e.device_type.name in ("CUDA", "PrivateUse1")]
    total_us = sum(event.time_range.elapsed_us() for event in on_device)
    return total_us / 1000, len(on_device)


def _pooled(device: torch.device) -> int:
    """Bytes that only graphs may use, and that no tensor takes now."""
    if device.type != "cuda":
        return 0
    segments = torch.cuda.memory_snapshot()
    here = [s for s in segments if s["device"] == with_index(device).index]
    own = [s for s in here if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in own)


# -- ways -----------------------------------------------------------------------------------------


@contextmanager
def ours(
    unet: Unet, level: str, own_only: bool = False, as_in_a_host: bool = False
) -> Iterator[Runner]:
    """The blocks by our programs, in a session of their own."""
    report = Report()
    session = Session.of(level, report=report)
    with ExitStack() as stack:
        if own_only:
            variants = (variant for op in ops() for variant in op.every)
            others = (variant for variant in variants if variant.name != OURS)
            stack.enter_context(refused(others, "own kernels only"))
        if as_in_a_host:
            stack.enter_context(tried_ahead(unet.device))
            session = session.patiently()
        taken = take_over(unet.module, session)

        def told() -> list[str]:
            rows = [*map(str, taken.report()), *map(str, taken.graphs.known()), report.summary()]
            return ["; ".join(line.strip() for line in row.splitlines()) for row in rows]

        try:
            yield Runner(unet.module, told)
        finally:
            taken.give_back()


@contextmanager
def tried_ahead(device: torch.device) -> Iterator[None]:
    """As a host's start leaves it: what a start tries was tried in processes of its own, and what
    was not tried is not launched.
    """
    if engine.launcher(device) is None:
        yield
        return
    for here in first_trials.places():
        first_trials.try_all(here, TRIALS_S, say)
    before, gate = engine.gate, put_before(engine, say)
    try:
        yield
    finally:
        engine.gate = before
        gate.stop()


class Attended:
    """An attention processor of diffusers for its UNets' attentions without masks, by
    functional.py: what torch.compile then finds in it is `torch.ops.rocm_sd.attention`.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states (B, S, C), encoder_hidden_states (B, S', C') or None, the same."""
        if attention_mask is not None:
            raise ValueError("a mask: a UNet's step has none")
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q = attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1))
        k, v = (layer(text).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_k, attn.to_v))
        project, dropout = attn.to_out
        output: torch.Tensor = dropout(project(functional.attention(q, k, v)))
        return output


@contextmanager
def compiled_with_ours(unet: Unet, mode: str) -> Iterator[Runner]:
    """Compiled with attention as our operator, in the place of torch's own. Level Auto."""
    importlib.import_module("lib_rocm_sd.torch_ops")  # no host has it for what it measures itself
    module: Any = unet.module
    before = dict(module.attn_processors)
    module.set_attn_processor(Attended())
    try:
        with compiled(unet, mode=mode) as runner:
            yield Runner(runner.call, lambda: process_report.summary().splitlines())
    finally:
        module.set_attn_processor(before)


_GRAPHS = "reduce-overhead"
WAYS = (
    Way("auto", "rocm_sd Auto", partial(ours, level="Auto", as_in_a_host=True)),
    Way("performance", "rocm_sd Performance", partial(ours, level="Performance")),
    Way("own", "rocm_sd own kernels", partial(ours, level="Performance", own_only=True)),
    Way("memory", "rocm_sd Memory", partial(ours, level="Memory")),
    Way("eager", "eager", models.eager),
    Way("channels-last", "eager channels-last", models.channels_last),
    Way("compiled", "compiled channels-last", partial(compiled, mode="default"), True),
    Way("graphs", "compiled with graphs", partial(compiled, mode=_GRAPHS), True),
    Way("compiled-ours", "compiled with ours", partial(compiled_with_ours, mode="default"), True),
    Way("graphs-ours", "compiled, graphs, ours", partial(compiled_with_ours, mode=_GRAPHS), True),
)
"""In the order in which they are measured."""
KEYS = tuple(way.key for way in WAYS)
BENCHMARK = Benchmark(COLUMNS, _rows, render, (RUNS, QUICK_RUNS), TEXT.line)
