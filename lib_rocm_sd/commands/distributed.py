"""`torchrun --nproc-per-node 2 -m lib_rocm_sd bench distributed`: what ranks take beside one
of them, in one run: the link, a step split in each way, a decode.

A time is from when all are ready until the slowest has its result. What is given by all is compared
with what one gives.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lib_rocm_sd.cards.batch import guidance_split, image_of, mapped
from lib_rocm_sd.cards.group import Group, joined, under_torchrun
from lib_rocm_sd.cards.patch import patch_parallel
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.catalog.unet import BATCH
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.diffusers.ranks import vae_bands
from lib_rocm_sd.hosts.diffusers.unet import patched_unet
from lib_rocm_sd.hosts.diffusers.vae import patched_vae
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab.rows import say

SESSION = DEFAULT.patiently()
BLOCKS, EAGER = "our blocks", "eager"


@dataclass(frozen=True)
class Row:
    """One test; ms are medians of `runs`, p10 and p90 those of all ranks together.

    `one_ms`: one rank alone, the others idle; NaN where there is nothing of the kind. `sent_mib`,
    `exchanges`: of rank 0, for one call. `error`: the largest difference to one rank's result over
    its largest value; `equal`: they are the same bits.
    """

    test: str
    case: str
    way: str
    ranks: int
    runs: int
    one_ms: float
    ms: float
    p10_ms: float
    p90_ms: float
    sent_mib: float
    exchanges: float
    equal: bool | None
    error: float
    told: str = ""

    @property
    def speedup(self) -> float:
        return self.one_ms / self.ms


@dataclass(frozen=True)
class Size:
    """What is measured: models by name with their pictures' sizes, sizes of decodes, messages.

    `steps`: calls of a UNet in a row; `warmups`: calls before the first that counts.
    """

    guidance: tuple[tuple[str, int], ...]
    rows: tuple[tuple[str, int], ...]
    decodes: tuple[int, ...]
    messages: tuple[int, ...]
    steps: int
    warmups: int
    small: bool = False


FULL = Size(
    (("SD 1.5", 512), ("SDXL", 1024)),
    (("SDXL", 1024), ("SDXL", 2048)),
    (1024, 2048),
    (8, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
    10,
    3,
)
SMALL = Size((("small", 128),), (("small", 128),), (256,), (8, 1 << 16), 1, 1, True)


def measured(group: Group, size: Size, runs: int) -> Iterator[Row]:
    """All tests, one by one; each rank has to take all rows."""
    gate.begin()
    yield from _links(group, size, runs)
    for model, side in size.guidance:
        unet = models.unet(model, group.device, _dtype(group))
        for way in (EAGER, BLOCKS):
            with _way(unet, way):
                yield _guidance(group, unet, f"{model} {side}x{side}", way, side, 1, size, runs)
                yield _guidance(
                    *(group, unet, f"{model} {side}x{side}", way, side, group.size, size, runs)
                )
        del unet
    for model, side in size.rows:
        unet = models.unet(model, group.device, _dtype(group))
        yield _rows(group, unet, f"{model} {side}x{side}", side, size, runs)
        del unet
    yield from _decodes(group, size, runs)


def _dtype(group: Group) -> torch.dtype:
    return torch.float16 if group.device.type == "cuda" else torch.float32


def _way(unet: models.Unet, way: str) -> AbstractContextManager[Any]:
    return patched_unet(unet.module, SESSION) if way == BLOCKS else nullcontext()


def _links(group: Group, size: Size, runs: int) -> Iterator[Row]:
    """Messages between neighbours, both ways at once, and gathered by all."""
    for count in size.messages:
        own = torch.zeros(count, dtype=torch.uint8, device=group.device)
        others = {(group.rank + step) % group.size for step in (1, -1)} - {group.rank}

        def swap(own: torch.Tensor = own, others: set[int] = others) -> None:
            received = {other: torch.empty_like(own) for other in others}
            group.start_swap(dict.fromkeys(others, own), received).wait()

        def gather(own: torch.Tensor = own) -> None:
            group.gather(own)

        for test, call in (("swap", swap), ("gather", gather)):
            timing = _timed(group, call, 10, size, runs)
            yield _row(group, test, f"{count} bytes", "", timing, math.nan, None)


def _guidance(
    group: Group,
    unet: models.Unet,
    case: str,
    way: str,
    side: int,
    pictures: int,
    size: Size,
    runs: int,
) -> Row:
    """A step for one picture, or for as many as there are ranks, whose batch is split."""
    args, given = unet.arguments(side, side)
    args, given = _repeated((args, given), BATCH, pictures)

    def step() -> torch.Tensor:
        return image_of(unet.module(*args, **given))

    alone = _alone(group, step, size.steps, size, runs)
    with guidance_split(unet.module, group):
        timing = _timed(group, step, size.steps, size, runs)
    test = "guidance split" if pictures == 1 else f"batch split, {pictures} pictures"
    return _row(group, test, case, way, timing, *alone)


def _rows(group: Group, unet: models.Unet, case: str, side: int, size: Size, runs: int) -> Row:
    """A step whose images are split by rows, by the host's own modules."""
    args, given = unet.arguments(side, side)

    def step() -> torch.Tensor:
        return image_of(unet.module(*args, **given))

    alone = _alone(group, step, size.steps, size, runs)
    with patch_parallel(unet.module, group) as parallel:
        timing = _timed(group, step, size.steps, size, runs)
    told = "" if parallel.split_calls else "not split: too few rows"
    return _row(group, "patch parallel", case, EAGER, timing, *alone, told)


def _decodes(group: Group, size: Size, runs: int) -> Iterator[Row]:
    coder = models.coder("decoder", group.device, _dtype(group), size.small)
    vae = SimpleNamespace(decoder=coder.module)
    for side in size.decodes:
        latent = coder.random_input(side, side)

        def decode(latent: torch.Tensor = latent) -> torch.Tensor:
            picture: torch.Tensor = coder.module(latent)
            return picture

        with patched_vae(vae, "whole", None, SESSION):
            alone = _alone(group, decode, 1, size, runs)
        with vae_bands(vae, group, SESSION) as programs:
            timing = _timed(group, decode, 1, size, runs)
        told = "" if programs["decoder"].shared_runs else "not split: too few rows"
        yield _row(group, "VAE bands", f"decode {side}x{side}", "rocm_sd", timing, *alone, told)


@dataclass(frozen=True)
class _Found:
    times_ms: list[float]
    sent_bytes: float
    exchanges: float
    made: Any


def _timed(group: Group, call: Callable[[], Any], steps: int, size: Size, runs: int) -> _Found:
    """`steps` calls in a row, `runs` times; of each run the slowest rank's time, for one call."""
    with torch.no_grad():
        for _ in range(size.warmups):
            result = call()
        times = []
        sent, exchanges = 0, 0
        for _ in range(runs):
            group.objects(None)
            before = (group.traffic.sent_bytes, group.traffic.exchanges)
            times.append(_run(group.device, call, steps))
            sent += group.traffic.sent_bytes - before[0]
            exchanges += group.traffic.exchanges - before[1]
    slowest = [max(each) for each in zip(*group.objects(times), strict=True)]
    return _Found(slowest, sent / runs / steps, exchanges / runs / steps, result)


def _alone(
    group: Group, call: Callable[[], Any], steps: int, size: Size, runs: int
) -> tuple[float, torch.Tensor | None]:
    """Rank 0's ms and result, while the others wait."""
    times, result = [math.nan], None
    if group.rank == 0:
        with torch.no_grad():
            for _ in range(size.warmups):
                result = call()
            times = [_run(group.device, call, steps) for _ in range(runs)]
    return statistics.median(group.objects(times)[0]), result


def _run(device: torch.device, call: Callable[[], Any], steps: int) -> float:
    """ms for one call of `steps`."""
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        call()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    group: Group,
    test: str,
    case: str,
    way: str,
    timing: _Found,
    one_ms: float,
    wanted: torch.Tensor | None,
    told: str = "",
) -> Row:
    ordered = sorted(timing.times_ms)
    equal, error = None, math.nan
    if wanted is not None:
        equal = torch.equal(timing.made, wanted)
        error = float((timing.made.float() - wanted.float()).abs().max() / wanted.abs().max())
    return Row(
        test=test,
        case=case,
        way=way,
        ranks=group.size,
        runs=len(ordered),
        one_ms=one_ms,
        ms=statistics.median(ordered),
        p10_ms=ordered[len(ordered) // 10],
        p90_ms=ordered[-1 - len(ordered) // 10],
        sent_mib=timing.sent_bytes / 2**20,
        exchanges=timing.exchanges,
        equal=equal,
        error=error,
        told=told,
    )


def _repeated(thing: Any, batch: int, times: int) -> Any:
    """Tensors that have something for each image of a batch, for `times` as many."""
    return mapped(thing, lambda t: torch.cat([t] * times) if t.ndim and len(t) == batch else t)


RUNS = 7
QUICK_RUNS = 3
LIMIT_S = 600.0
"""One rank may compile and test kernels while the others wait."""
ERROR = 0.02
"""What all ranks give may differ by so much of the largest value from what one gives, in half."""


def run(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Measure on all ranks; rank 0 prints and writes. 1 where a result was wrong, 2 on bad use."""
    if not under_torchrun():
        print(
            "bench: start this by torchrun, a process for each GPU: "
            "torchrun --nproc-per-node 2 -m lib_rocm_sd bench distributed --json FILE",
            file=sys.stderr,
        )
        return 2
    try:
        with joined(args.device, limit_s=LIMIT_S) as group:
            return _measure(group, args, machine)
    except (ValueError, RankError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _measure(group: Group, args: argparse.Namespace, machine: dict[str, Any]) -> int:
    small = args.small or group.device.type == "cpu"
    runs = args.runs or (QUICK_RUNS if args.quick or small else RUNS)
    facts = {
        **machine,
        "runs": runs,
        "members": [asdict(member) for member in group.members],
        "timing": "perf_counter between two waits for the device, the slowest rank",
    }
    rows: list[Row] = []
    for row in measured(group, SMALL if small else FULL, runs):
        rows.append(row)
        if group.rank == 0:
            say(line(row))
            if args.json:
                _write(args.json, facts, rows)
    wrong = [row for row in rows if row.error > ERROR]
    if group.rank == 0:
        print("\n".join([f"{len(group.members)} ranks: {group.members[0]} ..", *map(line, rows)]))
        for row in wrong:
            print(f"bench: wrong: {row.test}, {row.case}, {row.way}", file=sys.stderr)
    return int(bool(wrong))


def line(row: Row) -> str:
    """A row as text."""
    beside = ""
    if not math.isnan(row.one_ms):
        same = "same bits" if row.equal else f"differs by {row.error:.1e}"
        beside = f", alone {row.one_ms:.3f} ms: {row.speedup:.2f} times; {same}"
    rate = row.sent_mib * 2**20 / row.ms / 1e6
    sent = f", {row.sent_mib:.2f} MiB sent in {row.exchanges:.0f} exchanges, {rate:.2f} GB/s"
    name = ", ".join(part for part in (row.test, row.case, row.way, row.told) if part)
    return f"{name}: {row.ms:.3f} ms{beside}{sent}"


def _write(path: str, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    numbers = [
        {key: None if value != value else value for key, value in asdict(row).items()}
        for row in rows
    ]
    document = {"machine": machine, "rows": numbers}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
