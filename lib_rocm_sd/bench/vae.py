"""The VAE's decoder timed: as a host runs it, channels-last, compiled, and as our own program."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lib_rocm_sd.engine import engine
from lib_rocm_sd.selftest import FAILURES, describe, is_out_of_memory
from lib_rocm_sd.tune import timed
from lib_rocm_sd.vae.program import Program

SIZES = (512, 1024, 2048)
MEMORY_SIZES = (1024, 2048, 4096)
SMALL_SIZES = (64,)
"""Pixels a side: of all ways, of the Memory level, and of all with `--small`."""
WARM_UP = 2


@dataclass(frozen=True)
class VaeRow:
    """One way to decode one size. Times in ms; `peak_mib` is over the weights.

    `error` is max |out - float32| / max |float32|; `first_ms` is the first decode at this size.
    """

    size: int
    way: str
    median_ms: float = math.nan
    p10_ms: float = math.nan
    p90_ms: float = math.nan
    first_ms: float = math.nan
    peak_mib: float = math.nan
    error: float = math.nan
    plan: str = ""
    reason: str = ""


def sd_decoder(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Stable Diffusion's decoder with random weights, seeded. Needs diffusers (a dev extra)."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    decoder: nn.Module = vae.decoder
    return decoder.to(device, dtype).eval().requires_grad_(False)


Way = Callable[[torch.Tensor], torch.Tensor]


def ways(decoder: nn.Module, with_compile: bool) -> dict[str, Callable[[], Way]]:
    """How each way is made ready, by name. Later ones may change the module's memory format."""

    def program(level: str) -> Callable[[], Way]:
        def make() -> Way:
            made = Program(decoder)

            def run(latent: torch.Tensor) -> torch.Tensor:
                engine.level = level
                output = made(latent, level=level)
                run.plan = str(made.last_plan)  # type: ignore[attr-defined]
                return output

            return run

        return make

    def channels_last() -> Way:
        decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return lambda latent: decoder(latent.contiguous(memory_format=torch.channels_last))

    def compiled() -> Way:
        function = torch.compile(decoder)
        return lambda latent: function(latent.contiguous(memory_format=torch.channels_last))

    found: dict[str, Callable[[], Way]] = {
        "rocm_sd Auto": program("Auto"),
        "rocm_sd Performance": program("Performance"),
        "rocm_sd Memory": program("Memory"),
        "eager": lambda: decoder,
        "eager channels-last": channels_last,
    }
    return {**found, "compiled channels-last": compiled} if with_compile else found


def measure(
    device: torch.device, dtype: torch.dtype, runs: int, small: bool, with_compile: bool
) -> list[VaeRow]:
    """One row per size and way; every output is compared with a float32 decode of the same.

    A row is printed to stderr as soon as it is there.
    """
    decoder = sd_decoder(device, dtype)
    sizes = SMALL_SIZES if small else SIZES
    exact = {size: _reference(decoder, device, size) for size in sizes}
    rows = []
    with torch.no_grad():
        for name, prepare in ways(decoder, with_compile).items():
            way = prepare()
            for size in MEMORY_SIZES if name.endswith("Memory") and not small else sizes:
                row = _row(name, way, _latent(size, device, dtype), exact.get(size), runs)
                print(_line(row), file=sys.stderr, flush=True)
                rows.append(row)
    return sorted(rows, key=lambda row: row.size)


def _latent(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(size)
    return torch.randn((1, 4, size // 8, size // 8), generator=generator).to(device, dtype)


def _reference(decoder: nn.Module, device: torch.device, size: int) -> torch.Tensor:
    """The decode in float32 by torch, on the CPU's memory."""
    wide = sd_decoder(device, torch.float32)
    wide.load_state_dict({name: t.float() for name, t in decoder.state_dict().items()})
    with torch.no_grad():
        output: torch.Tensor = wide(_latent(size, device, next(decoder.parameters()).dtype).float())
    return output.cpu()


def _row(
    name: str, way: Way, latent: torch.Tensor, exact: torch.Tensor | None, runs: int
) -> VaeRow:
    size, device = latent.shape[2] * 8, latent.device
    try:
        first = timed(lambda _: _discard(way(latent)), 1, device)[0] / 1000
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        output = way(latent)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else math.nan
        error = _error(output, exact)
        del output
        timed(lambda _: _discard(way(latent)), WARM_UP, device)
        times = sorted(t / 1000 for t in timed(lambda _: _discard(way(latent)), runs, device))
    except FAILURES as failure:
        kind = "out of memory: " if is_out_of_memory(failure) else ""
        return VaeRow(size, name, reason=f"{kind}{describe(failure)}")
    return VaeRow(
        size,
        name,
        statistics.median(times),
        times[len(times) // 10],
        times[len(times) * 9 // 10],
        first,
        (peak - before) / 2**20,
        error,
        getattr(way, "plan", ""),
    )


def _discard(output: torch.Tensor) -> None:
    del output


def _error(output: torch.Tensor, exact: torch.Tensor | None) -> float:
    if exact is None:
        return math.nan
    return ((output.cpu().float() - exact).abs().max() / exact.abs().max()).item()


def render(heading: str, rows: Sequence[VaeRow]) -> str:
    """The table that a person reads."""
    lines = [
        f"{heading}; Stable Diffusion's decoder with random weights, batch 1",
        f"{'pixels':>6} {'way':<24} {'ms':>9} {'p10..p90':>17} {'first ms':>9} {'peak MiB':>9} "
        f"{'error':>8}",
    ]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: VaeRow) -> str:
    if row.reason:
        return f"{row.size:>6} {row.way:<24} not run: {row.reason}"
    spread = f"{row.p10_ms:.1f}..{row.p90_ms:.1f}"
    return (
        f"{row.size:>6} {row.way:<24} {row.median_ms:>9.1f} {spread:>17} {row.first_ms:>9.0f} "
        f"{row.peak_mib:>9.0f} {row.error:>8.1e}  {row.plan}"
    )
