"""One row of `bench vae`: a way made ready, run at one size, compared with float32, timed.

The ways are our program at each level, torch's, and two tilings that other extensions use, written
anew from their description. Both run the coder on pieces of its input, so each GroupNorm sees the
statistics of a piece, and the mid-block's attention no further than the piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.catalog.unet import FACTOR
from lib_rocm_sd.engine.measure import timed
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.lab.models import Coder, Runner, Way, channels_last, compiled, eager, refused
from lib_rocm_sd.lab.rows import Row, spread
from lib_rocm_sd.lab.timing import FAILED, Peak, allocated, clean, no_tf32, tried, why
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.report import report
from lib_rocm_sd.vae.program import Program

TIMED_MS = 4000.0
"""About how long the timed runs of a row may take together; there is at least one."""
LONG_MS = 15000.0
"""A run longer than this is not timed again, nor compared with our whole frame; above
REFERENCE_MOST the first such run is the row's only one."""
FRESH_MOST = 1024
"""Up to this size the first run is timed at a resolution of its own, beyond at the row's own."""
PREPARED = (320, 256)
"""Height and width of what is run before anything is timed."""
REFERENCE_MOST = 2048
"""Up to this size everything is compared with float32."""
LIMIT = 4.0
"""The most that values of a slice are compared at once, in millions."""


@dataclass(frozen=True)
class Reference:
    """A run in float32, on the CPU, and what computed it. `image` is None where nothing could."""

    image: torch.Tensor | None
    source: str


FRUGAL = Session.of("Memory")


def exact(coder: Coder, size: int) -> Reference:
    """The result in float32: torch's, where that does not fit our program's in bands."""
    if size > REFERENCE_MOST:
        return Reference(None, "")
    image = coder.random_input(size, size).float()
    try:
        with torch.no_grad(), no_tf32():
            wide = coder.module.to(torch.float32)
            try:
                return Reference(wide(image).cpu(), "torch float32")
            except FAILED as failure:
                if not is_out_of_memory(failure):
                    raise
            clean(coder.device)
            return Reference(Program(wide)(image, session=FRUGAL).cpu(), "rocm_sd float32 in bands")
    except FAILED as failure:
        return Reference(None, f"none: {why(failure)}")
    finally:
        coder.module.to(coder.dtype)
        clean(coder.device)


def prepare(coder: Coder, way: Way, runner: Runner) -> float:
    """Compile what a resolution that is never timed needs; MiB that the way keeps after it.

    What fails here is the rows' to tell. A way that is compiled anew for each size is left alone.
    """
    if way.slow:
        return math.nan
    height, width = (side // 4 for side in PREPARED) if coder.small else PREPARED
    before = allocated(coder.device)
    with torch.no_grad(), suppress(*FAILED):
        runner.call(coder.random_input(height, width))
    clean(coder.device)
    return (allocated(coder.device) - before) / 2**20 if coder.device.type == "cuda" else math.nan


def measure(
    coder: Coder, way: Way, runner: Runner, size: int, fresh: int, runs: int, reference: Reference
) -> Row:
    """The row of `way` at `size` x `size`. `fresh`: rows by which its first run's image is lower.

    So each way meets a resolution that nothing before it has met. `runs` are fewer where one takes
    long.
    """

    def figures(row: Row) -> Row:
        height = size if size > FRESH_MOST or way.slow else max(size - fresh, FACTOR)
        other = coder.random_input(height, size)
        ran = _run(runner, other)
        row = replace(row, first_at=f"{height}x{size}", first_ms=ran.time_ms)
        if ran.time_ms < LONG_MS or size <= REFERENCE_MOST:
            del ran
            ran = _run(runner, other)
            ratio = row.first_ms / ran.time_ms
            row = replace(row, second_ms=ran.time_ms, first_ratio=ratio)
        image = other
        if height < size:
            image = coder.random_input(size, size)
            runner.call(image)
            del ran
            ran = _run(runner, image)
        used = report.summary() if way.level else ""
        row = replace(row, plan=runner.plan(), ran=used, peak_mib=ran.peak_mib)
        row = _compared(row, ran.output, reference)
        if row.reason:
            return row
        count = min(runs, int(TIMED_MS / ran.time_ms)) if ran.time_ms < LONG_MS else 0
        times = timed(lambda _: call(image), count, coder.device) if count else []
        row = replace(row, **spread(times or [1000 * ran.time_ms], 1e-3))
        row = replace(row, ms_per_megapixel=row.median / (size**2 / 1e6))
        if way.slow:
            row = replace(row, compile_s=max(row.first_ms - row.second_ms, 0) / 1000)
        return _against_whole(row, runner, image, ran.output)

    def call(image: torch.Tensor) -> None:
        runner.call(image)

    return tried(Row(role=coder.role, size=size, way=way.name), coder.device, figures)


class _Ran(NamedTuple):
    """One run. The peak is over what was held before."""

    output: torch.Tensor
    time_ms: float
    peak_mib: float


def _run(runner: Runner, image: torch.Tensor) -> _Ran:
    outputs: list[torch.Tensor] = []
    report.begin()
    peak = Peak(image.device)
    time_us = timed(lambda _: outputs.append(runner.call(image)), 1, image.device)[0]
    return _Ran(outputs[0], time_us / 1000, peak.mib())


def _compared(row: Row, output: torch.Tensor, reference: Reference) -> Row:
    """`row` with how far `output` is from the reference, or why it counts for nothing."""
    if not math.isfinite(float(output.sum(dtype=torch.float32))):
        return replace(row, reason="wrong: the output has NaN or infinity")
    if reference.image is None:
        return replace(row, reference=reference.source)
    if output.shape != reference.image.shape:
        shapes = f"{tuple(output.shape)}, expected {tuple(reference.image.shape)}"
        return replace(row, reason=f"wrong: the output is {shapes}")
    right = reference.image.to(output.device)
    gap = output.float() - right
    top = float(right.abs().max())
    error, shift = float(gap.abs().max()) / top, float(gap.mean((0, 2, 3)).abs().max()) / top
    return replace(row, error=error, shift=shift, reference=reference.source)


def _against_whole(row: Row, runner: Runner, image: torch.Tensor, output: torch.Tensor) -> Row:
    """`row` with the difference to our whole frame at the same level, where there were bands."""
    whole = runner.whole()
    if whole is None:
        return row
    if row.median >= LONG_MS:
        return replace(row, note="not compared with the whole frame, which takes long")
    try:
        most, share = steps(output, whole(image))
    except FAILED as failure:
        return replace(row, note=f"no whole frame to compare with: {why(failure)}")
    return replace(row, steps=most, steps_share=share)


def steps(output: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """The largest difference after quantisation to 8 bits, and the share of values that differ.

    0..255 is the range -m..m, where m is the largest absolute value of `whole`.
    """
    top, most, count = float(whole.abs().max()), 0.0, 0
    each = max(int(LIMIT * 1e6) // max(whole[0, 0, 0].numel(), 1), 1)
    for x, y in zip(output.split(each, 2), whole.split(each, 2), strict=True):
        gap = (_quantised(x, top) - _quantised(y, top)).abs()
        most, count = max(most, float(gap.max())), count + int((gap > 0).sum())
    return most, count / whole.numel()


def _quantised(values: torch.Tensor, top: float) -> torch.Tensor:
    return ((values.float() / top + 1) * 127.5).round_().clamp_(0, 255)


# -- two tilings ----------------------------------------------------------------------------------


TILE = 512
"""Pixels a side of a tile."""
DECODER_MARGIN, ENCODER_MARGIN = 88, 32
"""Pixels beyond each edge of a tile that per-tile GroupNorm tiling computes and crops."""

Call = Callable[[torch.Tensor], torch.Tensor]
Scale = tuple[int, int]


def overlap_blend(call: Call, image: torch.Tensor, scale: Scale, tile: int) -> torch.Tensor:
    """Tiles of `tile` rows and columns of the input, a quarter overlapping, blended linearly.

    image (N, C, H, W) to (N, C', H * scale, W * scale). `scale` is a fraction; `tile` is a multiple
    of four times its denominator.
    """
    step, overlap = tile - tile // 4, tile // 4
    total = weight = None
    for top, left in _corners(image, step, overlap):
        part = call(image[:, :, top : top + tile, left : left + tile]).float()
        rows, columns = (_scaled(place, scale) for place in (top, left))
        if total is None or weight is None:
            height, width = (_scaled(size, scale) for size in image.shape[2:])
            total = part.new_zeros((*part.shape[:2], height, width))
            weight = part.new_zeros((height, width))
        ramp = _scaled(overlap, scale)
        share = _share(rows, part.shape[2], total.shape[2], ramp, part.device)[:, None]
        share = share * _share(columns, part.shape[3], total.shape[3], ramp, part.device)
        bottom, right = rows + part.shape[2], columns + part.shape[3]
        total[:, :, rows:bottom, columns:right] += part * share
        weight[rows:bottom, columns:right] += share
    if total is None or weight is None:
        raise ValueError(f"an image without pixels: {tuple(image.shape)}")
    return (total / weight).to(image.dtype)


def per_tile_norm(
    call: Call, image: torch.Tensor, scale: Scale, tile: int, margin: int
) -> torch.Tensor:
    """Tiles of `tile` rows and columns of the input, computed with `margin` more on each side.

    The margin is cropped, nothing is blended. Sizes as in `overlap_blend`; `margin` is a multiple
    of the scale's denominator.
    """
    height, width = image.shape[2:]
    output = None
    for top, left in _corners(image, tile, 0):
        above, before = max(top - margin, 0), max(left - margin, 0)
        bottom, right = min(top + tile, height), min(left + tile, width)
        piece = image[:, :, above : bottom + margin, before : right + margin]
        part = call(piece)
        if output is None:
            size = (_scaled(height, scale), _scaled(width, scale))
            output = part.new_empty((*part.shape[:2], *size))
        rows = slice(_scaled(top, scale), _scaled(bottom, scale))
        columns = slice(_scaled(left, scale), _scaled(right, scale))
        skip = (_scaled(top - above, scale), _scaled(left - before, scale))
        output[:, :, rows, columns] = part[
            :,
            :,
            skip[0] : skip[0] + rows.stop - rows.start,
            skip[1] : skip[1] + columns.stop - columns.start,
        ]
    if output is None:
        raise ValueError(f"an image without pixels: {tuple(image.shape)}")
    return output


def _corners(image: torch.Tensor, step: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Where tiles begin; none that lies wholly in the overlap with the one before."""
    height, width = image.shape[2:]
    for top in range(0, max(height - overlap, min(height, 1)), step):
        for left in range(0, max(width - overlap, min(width, 1)), step):
            yield top, left


def _share(place: int, length: int, end: int, ramp: int, device: torch.device) -> torch.Tensor:
    """The weight of each row of a tile: rising and falling over `ramp` but at the image's edges."""
    share = torch.ones(length, device=device)
    rising = (torch.arange(min(ramp, length), device=device) + 0.5) / ramp
    if place > 0:
        share[: rising.numel()] *= rising
    if place + length < end:
        share[length - rising.numel() :] *= rising.flip(0)
    return share


def _scaled(pixels: int, scale: Scale) -> int:
    return pixels * scale[0] // scale[1]


# -- ways -----------------------------------------------------------------------------------------


SMALL_TILE = 32


@contextmanager
def ours(coder: Coder, level: str, own_only: bool = False) -> Iterator[Runner]:
    """Our program at a level, in a session of its own; `own_only`: without torch's convolutions."""
    session, program = Session.of(level), Program(coder.module)

    def whole() -> Call | None:
        plan = program.last_plan
        return None if plan is None or plan.whole else whole_frame

    def whole_frame(image: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = program(image, session=session, mode="whole")
        if program.last_plan is None or not program.last_plan.whole:
            raise RuntimeError("out of memory")
        return output

    with ExitStack() as stack:
        if own_only:
            stack.enter_context(own_convolutions_only())
        try:
            yield Runner(
                partial(program, session=session),
                plan=lambda: str(program.last_plan or ""),
                whole=whole,
            )
        finally:
            program.release()


def own_convolutions_only() -> AbstractContextManager[None]:
    """Within this, each variant that calls torch's convolution refuses whatever is planned."""
    variants = (variant for op in CONVS.values() for variant in op.variants)
    return refused((v for v in variants if v.name.startswith("torch")), "own convolutions only")


@contextmanager
def in_blended_tiles(coder: Coder) -> Iterator[Runner]:
    """Tiles of 512 pixels, a quarter overlapping, blended linearly."""
    tile = _of_input(coder, SMALL_TILE if coder.small else TILE)
    yield Runner(
        lambda image: overlap_blend(coder.module, image, coder.scale, tile),
        plan=lambda: f"tiles of {tile * coder.scale[0]}, a quarter overlaps",
    )


@contextmanager
def in_tiles_of_own_norms(coder: Coder) -> Iterator[Runner]:
    """Tiles of 512 pixels with a margin that is cropped, each with its own statistics."""
    decodes = coder.role == "decoder"
    margin = DECODER_MARGIN if decodes else ENCODER_MARGIN
    sizes = (SMALL_TILE, FACTOR) if coder.small else (TILE, margin)
    tile, around = (_of_input(coder, pixels) for pixels in sizes)
    yield Runner(
        lambda image: per_tile_norm(coder.module, image, coder.scale, tile, around),
        plan=lambda: f"tiles of {sizes[0]}, {sizes[1]} more around",
    )


def _of_input(coder: Coder, pixels: int) -> int:
    return pixels // FACTOR if coder.role == "decoder" else pixels


def _of_level(key: str, name: str, level: str, most: int, own_only: bool = False) -> Way:
    make = partial(ours, level=level, own_only=own_only)
    return Way(key, name, make, most=most, level=level)


WAYS = (
    _of_level("auto", "rocm_sd Auto", "Auto", 4096),
    _of_level("performance", "rocm_sd Performance", "Performance", 2048),
    _of_level("own", "rocm_sd own convolutions", "Performance", 2048, own_only=True),
    _of_level("memory", "rocm_sd Memory", "Memory", 8192),
    Way("eager", "eager", eager, most=4096),
    Way("channels-last", "eager channels-last", channels_last, most=4096),
    Way("overlap-blend", "overlap-blend tiling", in_blended_tiles, most=4096),
    Way("per-tile-norm", "per-tile GroupNorm tiling", in_tiles_of_own_norms, most=4096),
    Way("compiled", "compiled channels-last", compiled, slow=True, most=2048),
)
"""In the order in which they are measured. Compiling goes last: it may take long."""
KEYS = tuple(way.key for way in WAYS)
