"""Makes images of a chain from stored ones: whole, or in bands of rows that come to the same.

A band is computed from all the rows that it depends on, so each of its values is what it would be
in the whole image. A GroupNorm needs statistics of the whole image first: they are gathered in a
pass over the bands of the image that it reads, which is kept or made again later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.errors import RocmSdError
from lib_rocm_sd.functional import conv
from lib_rocm_sd.ops.conv.problem import Band
from lib_rocm_sd.vae.attention import attend
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.steps import Rows, rows_above
from lib_rocm_sd.vae.store import DeviceRows, HostRows, InputRows, OutputRows, Source
from lib_rocm_sd.vae.trace import Action, Chain, bands, parts
from lib_rocm_sd.vae.weights import Ready, ReadyAttention, ReadyConv


class Interrupted(RocmSdError):  # noqa: N818 - nothing went wrong
    """The caller's `interrupt` said so, between two bands."""


class Overflow(RocmSdError):  # noqa: N818 - answered by a smaller scale
    """A value did not fit the dtype."""


class Sink(Protocol):
    """Takes rows in order."""

    def write(self, first: int, rows: torch.Tensor) -> None: ...


def nothing(done: int, total: int) -> None:
    """A progress callback that shows nothing."""


@dataclass(eq=False)
class Run:
    """One image (or, whole, one batch) on its way. `norms`: of images whose reader wants one.

    `strict`: raise Overflow where the statistics of an image are not finite. `sweeping`: the image
    that is made in bands, whose `statistics` are gathered.
    """

    chain: Chain
    ready: tuple[Ready, ...]
    dtype: torch.dtype
    device: torch.device
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    progress: Callable[[int, int], None] = nothing
    interrupt: Callable[[], bool] = bool
    session: Session = DEFAULT
    strict: bool = False
    sweeping: int | None = None
    statistics: list[torch.Tensor] = field(default_factory=list)
    total: int = 1
    done: int = 0

    def tick(self) -> None:
        """One band is done. Raises Interrupted if the caller wants no more."""
        self.done += 1
        self.progress(self.done, max(self.total, self.done))
        if self.interrupt():
            raise Interrupted("interrupted between two bands")


def make(
    run: Run,
    image: int,
    rows: Rows,
    stored: Mapping[int, Source],
    release: Mapping[int, int] | None = None,
) -> torch.Tensor:
    """Rows of an image (N, rows, W, C) from those that are `stored`.

    `release`: per stored image the row below which nothing will be read after this. Where a whole
    image is made on the way, the norm for its reader is noted in `run.norms`.
    """
    chain = run.chain
    values: dict[int, tuple[Rows, torch.Tensor]] = {}
    for action in chain.actions(image, rows, frozenset(stored)):
        if action.source is None:
            values[action.image] = (action.rows, stored[action.image].read(action.rows))
            if release is not None:
                stored[action.image].release(release[action.image])
        else:
            values[action.image] = (action.rows, _compute(run, action, values))
        for used in action.drop:
            del values[used]
    return values[image][1]


def _compute(
    run: Run, action: Action, values: Mapping[int, tuple[Rows, torch.Tensor]]
) -> torch.Tensor:
    """The action's rows of its image; notes the norm where that is the whole image."""
    image, source = action.image, action.source
    assert source is not None
    ready = run.ready[image - 1]
    x = _cut(values[image - 1], source)
    if isinstance(ready, ReadyAttention):
        y, norm = attend(ready, x, run.norms.get(image - 1), run.session)
    else:
        whole = source == run.chain.rows(image - 1) and action.made == run.chain.rows(image)
        y, norm = _convolve(run, action, x, values, whole)
    if norm is not None:
        run.norms[image] = norm
    return _cut((action.made, y), action.rows)


def _convolve(
    run: Run,
    action: Action,
    x: torch.Tensor,
    values: Mapping[int, tuple[Rows, torch.Tensor]],
    whole: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that an action makes, and the norm of a whole image that has none yet.

    The last action of a sweep leaves its band's statistics in `run.statistics` instead.
    """
    image = action.image
    needs_norm = image not in run.norms and (whole or image == run.sweeping)
    shortcut = out = None
    if run.chain.steps[image - 1].residual:
        shortcut = _cut(values[image - 2], action.made)
    if action.in_place and shortcut is not None:
        out = shortcut[..., : run.chain.sizes[image].channels]
    pieces = parts(run.chain, action)
    if len(pieces) == 1:
        y, sums = launch(run, action, x, shortcut, out, needs_norm, whole)
        if not whole and sums is not None:
            run.statistics.append(sums)
            sums = None
        return y, sums
    size = run.chain.sizes[image]
    y = x.new_empty((x.shape[0], size.height, size.width, size.channels)) if out is None else out
    statistics = []
    for piece in pieces:
        assert piece.source is not None
        first, last = piece.made
        part = None if shortcut is None else shortcut[:, first:last]
        source = x[:, piece.source[0] : piece.source[1]]
        _, sums = launch(run, piece, source, part, y[:, first:last], needs_norm, False)
        statistics += [] if sums is None else [sums]
    return y, norm_of(run, image, statistics) if needs_norm else None


def launch(
    run: Run,
    action: Action,
    x: torch.Tensor,
    shortcut: torch.Tensor | None,
    out: torch.Tensor | None,
    wanted: bool,
    whole: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that an action makes, and, if `wanted`, their norm or, of a part, statistics."""
    image, rows = action.image, action.made
    ready, source = run.ready[image - 1], action.source
    assert isinstance(ready, ReadyConv) and source is not None
    step = ready.step
    return conv(
        step.kind,
        x if ready.rms is None else functional.rms_norm(x, *ready.rms, True, run.session),
        ready.weights,
        norm=None if step.norm is None else run.norms[image - 1],
        shortcut=shortcut,
        next_norm=ready.next_norm if wanted else None,
        band=None if whole else Band(rows_above(step.kind, rows, source), rows[1] - rows[0]),
        out=out,
        session=run.session,
    )


def _cut(have: tuple[Rows, torch.Tensor], rows: Rows) -> torch.Tensor:
    (first, last), values = have
    if (first, last) == rows:
        return values
    return values[:, rows[0] - first : rows[1] - first]


def sweep(
    run: Run,
    image: int,
    rows: int,
    stored: Mapping[int, Source],
    sink: Sink | None = None,
    consume: bool = False,
) -> None:
    """One pass over an image in bands of `rows`: its norm is noted, its rows go to `sink`.

    `consume`: nothing `stored` is read again later, so its memory is given back on the way.
    """
    sizes = run.chain.sizes
    ahead = bands(sizes[image].height, rows)
    run.sweeping, run.statistics = image, []
    try:
        for band, following in zip(ahead, [*ahead[1:], None], strict=True):
            reads = _reads(run, image, following, stored)
            for index, following_rows in reads.items():
                source = stored[index]
                if isinstance(source, HostRows):  # sends them while this band is computed
                    source.prefetch(following_rows)
            unread = {i: reads[i][0] if i in reads else sizes[i].height for i in stored}
            y = make(run, image, band, stored, unread if consume else None)
            if sink is not None:
                sink.write(band[0], y)
            del y
            run.tick()
    finally:
        for store in (*stored.values(), sink):
            if isinstance(store, HostRows):
                store.settle()
    _note_norm(run, image)


def _note_norm(run: Run, image: int) -> None:
    """The norm of an image that was swept over, from its bands' statistics."""
    if run.ready[image - 1].next_norm is None:
        return
    norm = norm_of(run, image, run.statistics)
    if norm is not None:
        run.norms[image] = norm
    run.sweeping, run.statistics = None, []
    if run.strict and not bool(run.norms[image].isfinite().all()):
        raise Overflow(f"image {image} does not fit {run.chain.recipe.role}'s dtype")


def joined(statistics: Sequence[torch.Tensor]) -> torch.Tensor:
    """(N, all parts, C, 4) of bands' (N, phases, parts, C, 4), in the whole image's order where
    all have as many phases. Variants differ: ours has four of an enlarged image, torch's one.
    """
    if len({one.shape[1] for one in statistics}) == 1:
        return torch.cat(list(statistics), 2).flatten(1, 2)
    return torch.cat([one.flatten(1, 2) for one in statistics], 1)


def norm_of(run: Run, image: int, statistics: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The norm of an image from the statistics of its bands, in order."""
    norm = run.ready[image - 1].next_norm
    if norm is None or not statistics:
        return None
    together = joined(statistics)
    return functional.group_norm_finalize(
        together, norm.gamma, norm.beta, norm.groups, norm.eps, run.session
    )


def _reads(
    run: Run, image: int, band: Rows | None, stored: Mapping[int, Source]
) -> dict[int, Rows]:
    """The rows of stored images that a band of `image` is made from; none for no band."""
    if band is None:
        return {}
    actions = run.chain.actions(image, band, frozenset(stored))
    return {action.image: action.rows for action in actions if action.source is None}


def run_plan(
    run: Run, plan: BandPlan, image: torch.Tensor, output: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The chain's output for the input (N, C, H, W); `output()` gives the tensor to be filled."""
    store: Source = InputRows(image, run.dtype)
    for leg in plan.legs:
        sink = _sink(leg.keep, image.device, output)
        _run_leg(run, leg, store, sink)
        store = sink  # type: ignore[assignment]
    assert isinstance(store, OutputRows)
    return store.image


def _run_leg(run: Run, leg: Leg, store: Source, sink: Sink) -> None:
    """Make the leg's last image from its first, which is given back."""
    stored: dict[int, Source] = {leg.start: store}
    if leg.rows is None:
        everything = run.chain.rows(leg.stop)
        release = {leg.start: run.chain.sizes[leg.start].height}
        sink.write(0, make(run, leg.stop, everything, stored, release))
        run.tick()
        return
    for image in leg.passes(run.chain):
        rows = leg.band_rows(run.chain, image)
        hidden = _sink(leg.hidden, run.device, None) if leg.hidden and image != leg.stop else None
        sweep(run, image, rows, stored, hidden if image != leg.stop else sink, image == leg.stop)
        if hidden is not None:
            stored[image] = hidden  # type: ignore[assignment]


def _sink(
    keep: str, device: torch.device, output: Callable[[], torch.Tensor] | None
) -> DeviceRows | HostRows | OutputRows:
    if keep == "output":
        assert output is not None
        return OutputRows(output)
    return HostRows(device) if keep == "host" else DeviceRows()
