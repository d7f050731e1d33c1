"""The speed test's VAE: the decoder as our program, the host's module, tilings; each verified.

Verified: compared with the same module in float32, up to CHECKED_SIZE at the very size, beyond at
CHECKED_INSTEAD; at less where float32 does not fit into memory. Tilings change the picture by their
nature: their error is told, not judged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.catalog.unet import FACTOR
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.lab import vae_ways as tilings
from lib_rocm_sd.lab.rows import Row, spread
from lib_rocm_sd.lab.speed_job import FAILED, LONG_S, Guard, Job, Shares, side, why
from lib_rocm_sd.lab.speed_result import OURS
from lib_rocm_sd.lab.timing import Peak, clean, no_tf32, wait
from lib_rocm_sd.lab.vae import FLOOR
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.program import Program

CHECKED_SIZE, CHECKED_INSTEAD, CHECKED_ELSE = 1024, 512, (512, 256)
SINGLE_FLOOR = 1e-3
"""An error in float32 up to this is not asked about; FLOOR has the half types'."""
EAGER, OVERLAP, PER_TILE = "eager (the module itself)", "overlap-blend tiling", "tiling, own norms"
Call = Callable[[torch.Tensor, Guard], torch.Tensor]


@dataclass(frozen=True)
class _Method:
    """`program`: ours, of which an error counts as wrong. All others end soon after their guard
    says so.
    """

    name: str
    call: Call
    program: Program | None = None


class _Decoder:
    """The host's module, its inputs and exact results, in a job."""

    def __init__(self, module: nn.Module, job: Job) -> None:
        self.module, self.job, self.device = module, job, job.device
        self.dtype = next(module.parameters()).dtype
        self.channels = int(getattr(getattr(module, "conv_in", None), "in_channels", 4))
        self._exact: dict[int, torch.Tensor] = {}

    def latent(self, size: int) -> torch.Tensor:
        """Seeded latent for a picture of size x size pixels."""
        shape = (1, self.channels, size // FACTOR, size // FACTOR)
        values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(size))
        return values.to(self.device, self.dtype)

    def exact(self, size: int) -> torch.Tensor:
        """In float32, by a copy of the module; on the CPU."""
        if size not in self._exact:
            single = copy.deepcopy(self.module).float()
            with no_tf32(), self.watched(single, self.job.guard(long=True), True):
                self._exact[size] = single(self.latent(size).float()).cpu()
            del single
            clean(self.device)
        return self._exact[size]

    def eager(self, latent: torch.Tensor, guard: Guard) -> torch.Tensor:
        """By the module itself."""
        with self.watched(self.module, guard, guard.long):
            return self.module(latent)  # type: ignore[no-any-return]

    @contextmanager
    def watched(self, module: nn.Module, guard: Guard, waits: bool) -> Iterator[None]:
        """Within this, the module asks before each of its layers whether to go on. `waits`: the
        device has done what came before, as costs some time.
        """

        def ask(*_: object) -> None:
            if waits:
                wait(self.device)
            guard.check()

        hooks = [part.register_forward_pre_hook(ask) for part in module.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def rows(job: Job) -> Iterator[Row]:
    """One row per size and method. Raises Cancelled."""
    try:
        module = job.side.vae()
        if module is None:
            raise ValueError("there is no VAE to run")  # noqa: TRY301
        decoder = _Decoder(module, job)
        methods = _methods(decoder)
        usable = partial(engine.usable, job.device, CONVS["3x3"])
        lacking = "; ".join(Guard(job.cancelled).beside(usable))
    except FAILED as failure:
        for size in job.sizes:
            reason = why(failure, side(size))
            yield Row("vae", f"decode {side(size)}", OURS["vae"], reason=reason)
        return
    shares = Shares(job.effort.parts_s["vae"], len(job.sizes) * len(methods))
    for size in job.sizes:
        eager_error = math.nan
        for method in methods:
            share_s = shares.next_s()
            row = Row("vae", f"decode {side(size)}", method.name)
            if method.name in (OVERLAP, PER_TILE) and size <= tilings.TILE:
                continue
            if method.name == OURS["vae"] and lacking:  # no host would run ours
                yield replace(row, reason=lacking)
                continue
            job.told(shares.fraction, f"VAE, {side(size)}: {method.name}")
            row = job.row(row, size, _measured, method, decoder, size, share_s, eager_error)
            eager_error = row.error if method.name == EAGER else eager_error
            yield row


def _methods(decoder: _Decoder) -> list[_Method]:
    """The module itself first: ours is judged by its error."""
    methods = [_Method(EAGER, decoder.eager), _ours(decoder)]
    if decoder.job.request.preset == "quick":
        return methods
    scale, tile, margin = (FACTOR, 1), tilings.TILE // FACTOR, tilings.DECODER_MARGIN // FACTOR

    def overlap_blend(latent: torch.Tensor, guard: Guard) -> torch.Tensor:
        return tilings.overlap_blend(partial(decoder.eager, guard=guard), latent, scale, tile)

    def per_tile_norm(latent: torch.Tensor, guard: Guard) -> torch.Tensor:
        call = partial(decoder.eager, guard=guard)
        return tilings.per_tile_norm(call, latent, scale, tile, margin)

    return [*methods, _Method(OVERLAP, overlap_blend), _Method(PER_TILE, per_tile_norm)]


def _ours(decoder: _Decoder) -> _Method:
    program, session = Program(decoder.module), decoder.job.side.session

    def run(latent: torch.Tensor, guard: Guard) -> torch.Tensor:
        try:
            return program(latent, session=session, interrupt=guard.stop)
        except Interrupted:
            guard.check()
            raise

    return _Method(OURS["vae"], run, program)


def _measured(
    row: Row, method: _Method, decoder: _Decoder, size: int, share_s: float, eager_error: float
) -> Row:
    job, program, side = decoder.job, method.program, size // FACTOR
    if program is not None:
        what = (side, side, decoder.dtype, decoder.device)
        job.guard().beside(partial(program.prepare, *what, session=job.side.session))
    row = _verified(row, method, decoder, size, eager_error)
    return row if row.reason else _timed(row, method, decoder, size, share_s)


def _verified(row: Row, method: _Method, decoder: _Decoder, size: int, eager_error: float) -> Row:
    """The row with its error, and a reason where that is too large."""
    at, right = _right(decoder, size)
    job = decoder.job
    call = partial(method.call, decoder.latent(at), job.guard(long=True))
    output = job.guard(long=True).beside(call, limited=True).float().cpu()
    if output.shape != right.shape:
        raise ValueError(f"the output is {tuple(output.shape)}, expected {tuple(right.shape)}")
    error = float((output - right).abs().max() / right.abs().max())
    if not math.isfinite(error):
        return replace(row, reason="wrong: the output has NaN or infinity")
    row = replace(row, error=error)
    floor = FLOOR.get(str(decoder.dtype).removeprefix("torch."), SINGLE_FLOOR)
    most = max(floor, 0.0 if math.isnan(eager_error) else 2 * eager_error)
    if method.program is not None and error > most:
        return replace(row, reason=f"wrong: error {error:.1e}, at most {most:.1e} is right")
    return row if at == size else replace(row, note=f"checked at {side(at)}")


def _right(decoder: _Decoder, size: int) -> tuple[int, torch.Tensor]:
    """The exact result at `size` or at the first smaller one that fits into memory."""
    first = size if size <= CHECKED_SIZE else CHECKED_INSTEAD
    candidates = [first, *(smaller for smaller in CHECKED_ELSE if smaller < first)]
    for at in candidates:
        try:
            return at, decoder.exact(at)
        except (RuntimeError, MemoryError) as error:
            if at == candidates[-1] or not is_out_of_memory(error):
                raise
            decoder.job.clean()
    raise AssertionError("unreachable")


def _timed(row: Row, method: _Method, decoder: _Decoder, size: int, share_s: float) -> Row:
    """A first run from beside, since it may search or compile; a second for the peak; the rest."""
    job, device, latent = decoder.job, decoder.device, decoder.latent(size)
    guard = job.guard(long=True)

    def first() -> None:
        output = method.call(latent, guard)
        if not math.isfinite(float(output.sum(dtype=torch.float32))):
            raise FloatingPointError("wrong: the output has NaN or infinity")

    def run(number: int) -> None:
        method.call(latent, guard)

    begin = monotonic()
    guard.beside(first, limited=True)
    first_s = 0.0 if method.program is None else monotonic() - begin
    peak = Peak(device)
    each_s = guard.timed(run, 1, device, first_s)[0] / 1e6
    row = replace(row, peak_mib=peak.mib())
    guard.long = each_s > LONG_S
    expected_s = 0.0 if method.program is None else each_s
    times = guard.times_us(run, device, share_s, job.effort.runs, expected_s=expected_s)
    plan = str(method.program.last_plan or "") if method.program is not None else ""
    notes = "; ".join(filter(None, (row.note, plan)))
    return replace(row, **spread(times, 1e-3), note=notes)
