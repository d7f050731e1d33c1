"""`torchrun --nproc-per-node 2 -m lib_rocm_sd bench distributed`: what ranks take beside one
of them, in one run: the link, a step split in each way, a decode.

A time is from when all are ready until the slowest has its result. What is given by all is compared
with what one gives.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lib_rocm_sd.cards.batch import guidance_split, image_of, mapped
from lib_rocm_sd.cards.group import Group, joined, under_torchrun
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.catalog.unet import BATCH
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.diffusers.patch import PatchParallel, patch_parallel
from lib_rocm_sd.hosts.diffusers.ranks import vae_bands
from lib_rocm_sd.hosts.diffusers.unet import patched_unet
from lib_rocm_sd.hosts.diffusers.vae import patched_vae
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab.rows import OURS, Columns, Result, Row, say, spread
from lib_rocm_sd.lab.timing import wall_ms

SESSION = DEFAULT.patiently()
BLOCKS, EAGER = "our blocks", "eager"
RUNS = 7
QUICK_RUNS = 3
LIMIT_S = 600.0
"""One rank may compile and test kernels while the others wait."""
ERROR = 0.02
"""What all ranks give may differ by so much of the largest value from what one gives, in half."""
NOT_SPLIT = "not split: too few rows"


COLUMNS = Columns(
    "test case way ranks runs one_ms ms=median p10_ms=p10 p90_ms=p90 sent_mib exchanges equal "
    "error told=note"
)
"""`one_ms`: one rank alone, the others idle; null where there is nothing of the kind. `sent_mib`,
`exchanges`: of rank 0, for one call. `error`: the largest difference to one rank's result over its
largest value; `equal`: they are the same bits.
"""


def _line(row: Row) -> str:
    """A test in words."""
    beside = ""
    if not math.isnan(row.one_ms):
        same = "same bits" if row.equal else f"differs by {row.error:.1e}"
        times = row.one_ms / row.median
        beside = f", alone {row.one_ms:.3f} ms: {times:.2f} times; {same}"
    rate = row.sent_mib * 2**20 / row.median / 1e6
    sent = f"{row.sent_mib:.2f} MiB sent in {row.exchanges:.0f} exchanges, {rate:.2f} GB/s"
    name = ", ".join(filter(None, (row.test, row.case, row.way, row.note)))
    return f"{name}: {row.median:.3f} ms{beside}, {sent}"


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


def run(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Measure on all ranks; rank 0 prints and writes. 1 where a result was wrong."""
    if not under_torchrun():
        raise UsageError(
            "start this by torchrun, a process for each GPU: "
            "torchrun --nproc-per-node 2 -m lib_rocm_sd bench distributed --json FILE"
        )
    try:
        with joined(args.device, limit_s=LIMIT_S) as group:
            return _measure(group, args, machine)
    except (ValueError, RankError) as error:
        raise UsageError(str(error)) from error


def _measure(group: Group, args: argparse.Namespace, machine: dict[str, Any]) -> int:
    small = args.small or group.device.type == "cpu"
    runs = args.runs or (QUICK_RUNS if args.quick or small else RUNS)
    facts = {
        **machine,
        "runs": runs,
        "members": [asdict(member) for member in group.members],
        "timing": "perf_counter between two waits for the device, the slowest rank",
    }
    result = Result(COLUMNS, facts, args.json if group.rank == 0 else None)
    for row in Ranks(group, SMALL if small else FULL, runs).rows():
        result.rows.append(row)
        if group.rank == 0:
            say(_line(row))
            result.write()
    wrong = [row for row in result.rows if row.error > ERROR]
    if group.rank == 0:
        heading = f"{len(group.members)} ranks: {group.members[0]} .."
        print("\n".join([heading, *map(_line, result.rows)]))
        for row in wrong:
            print(f"bench: wrong: {row.test}, {row.case}, {row.way}", file=sys.stderr)
    return int(bool(wrong))


@dataclass(frozen=True)
class Ranks:
    """The tests of a group, each timed `runs` times."""

    group: Group
    size: Size
    runs: int

    def rows(self) -> Iterator[Row]:
        """All tests, one by one; each rank has to take all rows."""
        gate.begin()
        group, steps = self.group, self.size.steps
        yield from self._links()
        for model, side in self.size.guidance:
            unet = models.unet(model, group.device, torch.float16)
            for way in (EAGER, BLOCKS):
                with _by(way, unet):
                    for pictures in (1, group.size):
                        batch = f"batch split, {pictures} pictures"
                        test = "guidance split" if pictures == 1 else batch
                        row = Row(test, f"{model} {side}x{side}", way)
                        split = guidance_split(unet.module, group)
                        yield self._compared(row, _step(unet, side, pictures), split, steps)
            del unet
        for model, side in self.size.rows:
            unet = models.unet(model, group.device, torch.float16)
            for way in (EAGER, BLOCKS):
                with _by(way, unet):
                    row = Row("patch parallel", f"{model} {side}x{side}", way)
                    rows, note = patch_parallel(unet.module, group), partial(_note, way)
                    yield self._compared(row, _step(unet, side), rows, steps, note=note)
            del unet
        dtype = torch.float16 if group.device.type == "cuda" else torch.float32
        yield from self._decodes(models.coder("decoder", group.device, dtype, self.size.small))

    def _links(self) -> Iterator[Row]:
        """Messages between neighbours, both ways at once, and gathered by all."""
        group = self.group
        for count in self.size.messages:
            own = torch.zeros(count, dtype=torch.uint8, device=group.device)
            others = {(group.rank + step) % group.size for step in (1, -1)} - {group.rank}

            def swap(own: torch.Tensor = own, others: set[int] = others) -> None:
                received = {other: torch.empty_like(own) for other in others}
                group.start_swap(dict.fromkeys(others, own), received).wait()

            def gather(own: torch.Tensor = own) -> None:
                group.gather(own)

            for test, call in (("swap", swap), ("gather", gather)):
                yield self._timed(Row(test, f"{count} bytes"), call, 10)[0]

    def _decodes(self, coder: models.Coder) -> Iterator[Row]:
        vae = SimpleNamespace(decoder=coder.module)
        for side in self.size.decodes:
            decode = partial(coder.module, coder.random_input(side, side))
            whole = patched_vae(vae, "whole", None, SESSION)
            bands = vae_bands(vae, self.group, SESSION)
            row = Row("VAE bands", f"decode {side}x{side}", OURS)
            yield self._compared(
                *(row, decode, bands, 1, whole),
                lambda programs: "" if programs["decoder"].shared_runs else NOT_SPLIT,
            )

    def _compared(
        self,
        row: Row,
        call: Callable[[], torch.Tensor],
        split: AbstractContextManager[Any],
        steps: int,
        whole: AbstractContextManager[Any] | None = None,
        note: Callable[[Any], str] = lambda parts: "",
    ) -> Row:
        """The row of `call` by one rank alone, within `whole`, and by all, within `split`."""
        with whole or nullcontext():
            one_ms, wanted = self._alone(call, steps)
        with split as parts:
            row, result = self._timed(row, call, steps)
        row = replace(row, one_ms=one_ms, note=note(parts))
        if wanted is None:
            return row
        gap = (result.float() - wanted.float()).abs().max()
        equal = torch.equal(result, wanted)
        return replace(row, equal=equal, error=float(gap / wanted.abs().max()))

    def _timed(self, row: Row, call: Callable[[], Any], steps: int) -> tuple[Row, Any]:
        """The row with times of `steps` calls in a row, `runs` times: of each run the slowest
        rank's for a call. And the last result.
        """
        group, traffic = self.group, self.group.traffic
        with torch.no_grad():
            for _ in range(self.size.warmups):
                result = call()
            times = []
            sent, exchanges = 0, 0
            for _ in range(self.runs):
                group.objects(None)
                before = (traffic.sent_bytes, traffic.exchanges)
                times.append(wall_ms(call, group.device, steps))
                sent += traffic.sent_bytes - before[0]
                exchanges += traffic.exchanges - before[1]
        slowest = [max(each) for each in zip(*group.objects(times), strict=True)]
        calls = self.runs * steps
        row = replace(row, ranks=group.size, sent_mib=sent / calls / 2**20)
        return replace(row, **spread(slowest), exchanges=exchanges / calls), result

    def _alone(self, call: Callable[[], Any], steps: int) -> tuple[float, torch.Tensor | None]:
        """Rank 0's ms and result, while the others wait."""
        times, result = [math.nan], None
        if self.group.rank == 0:
            with torch.no_grad():
                for _ in range(self.size.warmups):
                    result = call()
                times = [wall_ms(call, self.group.device, steps) for _ in range(self.runs)]
        return statistics.median(self.group.objects(times)[0]), result


def _by(way: str, unet: models.Unet) -> AbstractContextManager[Any]:
    """Within it the UNet's blocks are those of the way."""
    return patched_unet(unet.module, SESSION) if way == BLOCKS else nullcontext()


def _note(way: str, parallel: PatchParallel) -> str:
    """Why a row of patch parallel does not measure its way; empty where it does."""
    if not parallel.split_calls:
        return NOT_SPLIT
    return "no block is ours" if way == BLOCKS and not parallel.ours else ""


def _step(unet: models.Unet, side: int, pictures: int = 1) -> Callable[[], torch.Tensor]:
    """A step for so many pictures, each with its negative prompt."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        batched = tensor.ndim and len(tensor) == BATCH
        return torch.cat([tensor] * pictures) if batched else tensor

    args, options = mapped(unet.arguments(side, side), repeated)
    return lambda: image_of(unet.module(*args, **options))
