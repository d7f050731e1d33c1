"""`python -m lib_rocm_sd bench upscaler`: every way to enlarge a picture, in one run.

The host's way is written anew from what A1111 does: float32 in tiles of 192 that overlap by 8, each
brought to the CPU as 8-bit values and blended there; SwinIR's are averaged where they overlap.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the models' classes
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.lab.benchmark import Benchmark, Setting
from lib_rocm_sd.lab.models import Runner, Way, channels_last, compiled, eager
from lib_rocm_sd.lab.rows import (
    NAN,
    OURS,
    Columns,
    Countdown,
    Result,
    Row,
    TextTable,
    between,
    field,
    is_named,
    spread,
)
from lib_rocm_sd.lab.timing import FAILED, Peak, clean, no_tf32, tried, wall_ms, why
from lib_rocm_sd.lab.unet import compared
from lib_rocm_sd.lab.upscaler_models import (
    SWINIR_L,
    SWINIR_M,
    RRDBNet,
    SRVGGNetCompact,
    SwinIR,
    level,
    settle,
)
from lib_rocm_sd.lab.vae import why_not_compiled
from lib_rocm_sd.report import Report
from lib_rocm_sd.upscaler.program import Upscaler

SIZES, SMALL_SIZES, QUICK_SIZES = (512, 1024), (40,), (512,)
"""Pixels a side of the picture that is enlarged."""
RUNS, QUICK_RUNS = 5, 2
LONG_MS = 10000.0
"""A run longer than this is the row's only one."""
SCALE = 4
"""All MODELS enlarge by this."""
TILE, OVERLAP = 192, 8
SMALL_TILE = 24
BANDS_BYTES = 1 << 30
SMALL_BANDS_BYTES = 1 << 20
MOST_STEPS = 1
"""How far ours may be from the float32 picture, in 1/255."""
LARGEST = 1 << 14


@dataclass(frozen=True)
class Network:
    """A network in the dtype of the ways that are the host's in half precision. `tile`: pixels a
    side of the host's tiles.
    """

    name: str
    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    small: bool
    tiling: Tiling
    tile: int

    def borders(self, length: int) -> list[int]:
        """Where, along a side of the picture, a tile of the host's begins or ends to count."""
        return self.tiling.borders(length, self.tile, OVERLAP)

    def picture(self, side: int) -> torch.Tensor:
        """(1, 3, side, side) float32 of 8-bit values, drawn from the side."""
        generator = torch.Generator("cpu").manual_seed(side)
        values = torch.randint(0, 256, (1, 3, side, side), generator=generator)
        return (values / 255).to(self.device)


COLUMNS = Columns(
    "case size way runs median_ms=median p10_ms=p10 p90_ms=p90 prepare_s peak_mib error rms "
    "largest seam equal plan ran reason",
    ("size", "way"),
)
"""Wall-clock times of a picture in device memory; of the host's way what it does on the CPU is part
of it. `largest`: of the 8-bit picture to float32's, `equal`: bands to the whole picture. `seam`:
how much the difference to float32's changes from one pixel to the next at a border of the host's
tiles, at the most.
"""
TEXT = TextTable(
    (field("case", -18, "case"), field("side", 5, "size"), field("way", -22, "way")),
    (
        field("ms", 9, "median", ".1f"),
        between(17),
        field("peak MiB", 9, "peak_mib", ".0f"),
        field("of 255", 6, "largest", ".0f"),
        field("seam", 6, "seam", ".1f"),
        field("error", 8, "error", ".1e"),
        field("rms", 8, "rms", ".1e"),
    ),
    lambda row: f"  {row.plan}",
    absent="not measured",
    head_tail="  plan",
)


def _rows(args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """Raises UsageError where nothing can be measured."""
    usual = SMALL_SIZES if args.small else QUICK_SIZES if args.quick else SIZES
    sizes = tuple(dict.fromkeys(args.sizes or usual))
    if args.tile is None:
        args.tile = SMALL_TILE if args.small else TILE
    if args.tile < 2 * OVERLAP:
        raise UsageError(f"--tile: at least {2 * OVERLAP} pixels")
    if any(not args.tile <= size <= LARGEST for size in sizes):
        raise UsageError(f"--sizes: a side is from {args.tile} to {LARGEST} pixels")
    names = [name for name in MODELS if is_named(args.case, name)]
    short = args.quick or args.small
    ways = [way for way in WAYS if way.key in (args.ways or KEYS)]
    ways = ways if args.ways else [way for way in ways if not (way.slow and short)]
    if not names or not ways:
        raise UsageError(f"no case or no way is left: there are {', '.join(KEYS)}")
    return _measured(names, sizes, ways, args, setting)


def _measured(
    names: Sequence[str],
    sizes: Sequence[int],
    ways: Sequence[Way],
    args: argparse.Namespace,
    setting: Setting,
) -> Iterator[Row]:
    progress = Countdown([float(size**2) for _ in names for size in sizes for _ in ways])
    dtype, device = getattr(torch, args.dtype), setting.device
    for name in names:
        model = MODELS[name]
        module = level(settle((model.small if args.small else model.full)())).to(device)
        network = Network(name, module, device, dtype, args.small, model.tiling, args.tile)
        for size in sizes:
            right = exact(network, size)
            for way in ways:
                progress.next(f"{name} {size}x{size}: {way.name}")
                row = Row(case=name, size=size, way=way.name)
                lacking = why_not_compiled(device) if way.slow else []
                if way.slow and size != sizes[0]:
                    lacking.append(f"compiled for {sizes[0]}x{sizes[0]} only: it takes minutes")
                if lacking:
                    yield replace(row, reason="; ".join(lacking))
                    continue
                try:
                    with way.make(network) as runner:
                        row = measure(network, runner, row, setting.runs, right)
                except FAILED as failure:
                    row = replace(row, reason=why(failure))
                yield row
                clean(device)


def exact(network: Network, size: int) -> torch.Tensor | None:
    """The whole picture in float32, within 0 to 1 as hosts have it, brought to the CPU: torch's;
    where that does not fit, our program's; None where neither does.
    """
    picture = network.picture(size)
    frugal = partial(Upscaler(network.module, torch.float32), session=Session.of("Memory"))
    for way in (network.module, frugal):
        try:
            with torch.no_grad(), no_tf32():
                return way(picture).cpu().clamp(0, 1)  # type: ignore[no-any-return]
        except FAILED as failure:
            if not is_out_of_memory(failure):
                raise
        finally:
            clean(network.device)
    return None


def measure(
    network: Network, runner: Runner, row: Row, runs: int, right: torch.Tensor | None
) -> Row:
    """The row of a way that is ready."""
    device, picture = network.device, network.picture(row.size)

    def figures(row: Row) -> Row:
        row = replace(row, prepare_s=wall_ms(lambda: runner.call(picture), device) / 1000)
        clean(device)
        peak = Peak(device)
        output = runner.call(picture)
        row = replace(row, peak_mib=peak.mib(), plan=runner.plan(), ran="; ".join(runner.told()))
        whole = runner.whole()
        if whole is not None:
            row = replace(row, equal=torch.equal(output, whole(picture)))
        output = output.float().cpu()
        if bool(output.isfinite().all()):
            output = output.clamp(0, 1)
        row = compared(row, output, right)
        if row.reason:
            return row
        if right is not None:
            gap = (_quantised(output) - _quantised(right)).abs().max()
            row = replace(row, largest=float(gap), seam=seam(output - right, network.borders))
        first_ms = wall_ms(lambda: runner.call(picture), device)
        count = runs if first_ms < LONG_MS else 0
        times = [wall_ms(lambda: runner.call(picture), device) for _ in range(count)]
        return replace(row, **spread(times or [first_ms]))

    return tried(row, device, figures)


def seam(error: torch.Tensor, borders: Callable[[int], list[int]]) -> float:
    """The largest step of an error (1, C, H s, W s) at the `borders` along each side, of 255; NaN
    where there is one tile alone.
    """
    found = []
    for turned in (error, error.transpose(2, 3)):
        places = torch.tensor(borders(turned.shape[3] // SCALE), dtype=torch.int64) * SCALE
        found.append((turned[..., places] - turned[..., places - 1]).flatten())
    steps = torch.cat(found).abs()
    return 255 * float(steps.max()) if len(steps) else NAN


def _quantised(picture: torch.Tensor) -> torch.Tensor:
    return (picture.clamp(0, 1) * 255).round_()


# -- ways -----------------------------------------------------------------------------------------


def in_tiles(
    call: Callable[[torch.Tensor], torch.Tensor], picture: torch.Tensor, tile: int, overlap: int
) -> torch.Tensor:
    """Tiles of 8-bit values (1, C, H, W), brought to the CPU; each is blended with what lies to its
    left, and each row of them with what lies above.
    """
    height, width = picture.shape[2:]
    own, rows = picture.cpu(), []
    for top in _starts(height, tile, overlap):
        parts = []
        for left in _starts(width, tile, overlap):
            part = own[:, :, top : top + tile, left : left + tile].to(picture.device)
            parts.append((left, _quantised(call(part).float().cpu())))
        scale = parts[0][1].shape[3] // tile
        placed = [(left * scale, part) for left, part in parts]
        rows.append((top * scale, _joined(placed, width * scale, overlap * scale)))
    turned = [(top, row.transpose(2, 3)) for top, row in rows]
    joined = _joined(turned, height * scale, overlap * scale).transpose(2, 3)
    return joined.to(picture.device) / 255


def _starts(length: int, tile: int, overlap: int) -> list[int]:
    count = math.ceil((length - overlap) / (tile - overlap))
    step = (length - tile) / (count - 1) if count > 1 else 0
    return [min(int(number * step), length - tile) for number in range(count)]


def _joined(parts: Sequence[tuple[int, torch.Tensor]], length: int, overlap: int) -> torch.Tensor:
    """Parts side by side along the last dimension, the first `overlap` of each faded in."""
    (_, first), *_ = parts
    joined = first.new_zeros((*first.shape[:3], length))
    fade = torch.arange(overlap) * 255 // max(overlap, 1) / 255
    for place, part in parts:
        end = place + part.shape[3]
        if place:
            under = joined[..., place : place + overlap]
            part = part.clone()
            part[..., :overlap] = (under * (1 - fade) + part[..., :overlap] * fade).round_()
        joined[..., place:end] = part
    return joined


def averaged(
    call: Callable[[torch.Tensor], torch.Tensor], picture: torch.Tensor, tile: int, overlap: int
) -> torch.Tensor:
    """As `in_tiles`; tiles stay on the device in float32, and where they overlap it is their mean.
    The result has 8-bit values.
    """
    starts = [_strides(length, tile, overlap) for length in picture.shape[2:]]
    total = picture.new_zeros(*picture.shape[:2], *(side * SCALE for side in picture.shape[2:]))
    count = torch.zeros_like(total)
    for top, left in product(*starts):
        part = call(picture[..., top : top + tile, left : left + tile])
        rows, columns = (slice(start * SCALE, (start + tile) * SCALE) for start in (top, left))
        total[..., rows, columns] += part
        count[..., rows, columns] += 1
    return (_quantised((total / count).cpu()) / 255).to(picture.device)


def _strides(length: int, tile: int, overlap: int) -> list[int]:
    return [*range(0, length - tile, tile - overlap), length - tile]


def _fades(length: int, tile: int, overlap: int) -> list[int]:
    starts = _starts(length, tile, overlap)[1:]
    return [place for start in starts for place in (start, start + overlap)]


def _overlaps(length: int, tile: int, overlap: int) -> list[int]:
    starts = _strides(length, tile, overlap)
    return [*starts[1:], *(start + tile for start in starts[:-1])]


class Tiling(NamedTuple):
    """How the host makes a picture in tiles, and where along a side they begin or end to count."""

    make: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, int, int], torch.Tensor]
    borders: Callable[[int, int, int], list[int]]


FADED, AVERAGED = Tiling(in_tiles, _fades), Tiling(averaged, _overlaps)


class Model(NamedTuple):
    """A network as people have it, and a small one."""

    full: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    tiling: Tiling = FADED


def _swinir(kind: dict[str, Any]) -> Model:
    """With few channels, it ends in a single convolution: the others have 64 channels always."""
    small = {**kind, "embed_dim": 24, "depths": [2], "num_heads": [2]}
    small["upsampler"] = "pixelshuffledirect"
    return Model(partial(SwinIR, **kind), partial(SwinIR, **small), AVERAGED)


MODELS = {
    "RRDBNet x4": Model(RRDBNet, partial(RRDBNet, width=16, blocks=1)),
    "SRVGGNetCompact x4": Model(SRVGGNetCompact, partial(SRVGGNetCompact, width=16, convs=3)),
    "SwinIR-M x4": _swinir(SWINIR_M),
    "SwinIR-L x4": _swinir(SWINIR_L),
}


@contextmanager
def as_the_host(network: Network) -> Iterator[Runner]:
    """Float32 in the WebUI's tiles."""
    yield Runner(
        lambda picture: network.tiling.make(network.module, picture, network.tile, OVERLAP),
        plan=lambda: f"float32, tiles of {network.tile}, overlap {OVERLAP}",
    )


@contextmanager
def in_half(network: Network, make: Callable[[Any], Any]) -> Iterator[Runner]:
    """The module in half precision by one of torch's ways, the whole picture at once."""
    half = deepcopy(network.module).to(network.dtype)
    with make(replace(network, module=half)) as runner:
        yield Runner(lambda picture: runner.call(picture.to(network.dtype)))


@contextmanager
def ours(network: Network, banded: bool = False) -> Iterator[Runner]:
    """Our program under Auto, `banded`: within BANDS_BYTES."""
    report = Report()
    session, program = Session.of("Auto", report=report), Upscaler(network.module)
    budget = (SMALL_BANDS_BYTES if network.small else BANDS_BYTES) if banded else None

    def whole() -> Callable[[torch.Tensor], torch.Tensor] | None:
        plan = program.last_plan
        if plan is None or plan.whole:
            return None
        return partial(program, session=session, mode="whole")

    yield Runner(
        partial(program, session=session, budget_bytes=budget),
        told=lambda: report.summary().splitlines(),
        plan=lambda: str(program.last_plan or ""),
        whole=whole,
    )


WAYS = (
    Way("auto", f"{OURS} Auto", ours),
    Way("bands", f"{OURS} in 1 GiB", partial(ours, banded=True)),
    Way("host", "float32 tiles", as_the_host),
    Way("eager", "half eager", partial(in_half, make=eager)),
    Way("channels-last", "half channels-last", partial(in_half, make=channels_last)),
    Way("compiled", "half compiled", partial(in_half, make=compiled), slow=True),
)
"""In the order in which they are measured. Compiling goes last: it may take long."""
KEYS = tuple(way.key for way in WAYS)


# -- text -----------------------------------------------------------------------------------------


def render(heading: str, rows: Sequence[Row]) -> str:
    """All rows, a table."""
    return "\n".join([f"{heading}; random weights, one picture", "", *TEXT.lines(rows)])


def _is_wrong(result: Result) -> bool:
    """Also where no float32 picture says that ours is right."""
    wrong = [
        f"{row.case} {row.size} {row.way}: {row.reason or row.largest}, bands equal: {row.equal}"
        for row in result.rows
        if row.way.startswith(OURS)
        and (
            row.reason.startswith("wrong")
            or not (row.reason or row.largest <= MOST_STEPS)
            or row.equal is False
        )
    ]
    for complaint in wrong:
        print(f"wrong: {complaint}")
    return bool(wrong)


BENCHMARK = Benchmark(COLUMNS, _rows, render, (RUNS, QUICK_RUNS), TEXT.line, _is_wrong)
