"""Makes images of a network from stored ones: whole, or in bands of rows that come to the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from lib_rocm_sd.calls import Calls, Places, begin
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.functional import linear
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.upscaler.steps import ConvStep, EnlargeStep
from lib_rocm_sd.upscaler.trace import Action, Buffer, Chain
from lib_rocm_sd.upscaler.weights import Ready, ReadyConv
from lib_rocm_sd.upscaler.windows import ReadyNorm, ReadyWindows
from lib_rocm_sd.vae.bands import Interrupted, Sink, nothing
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.steps import Rows, rows_above
from lib_rocm_sd.vae.store import DeviceRows, HostRows, Source
from lib_rocm_sd.vae.trace import bands


@dataclass(eq=False)
class Run:
    """One picture, or, whole, one batch, on its way. `overflow` (1) int32: whether a value did not
    fit. `places`: of calls, by the image of which rows are made.
    """

    chain: Chain
    ready: Mapping[int, Ready]
    device: torch.device
    overflow: torch.Tensor
    places: dict[int, Places]
    progress: Callable[[int, int], None] = nothing
    interrupt: Callable[[], bool] = bool
    session: Session = DEFAULT
    total: int = 1
    done: int = 0
    _before: torch.cuda.Event | None = field(default=None, init=False)

    def tick(self) -> None:
        """One band is on its way and the one before it is done, for which this waits: what is said
        is true, and an interruption is heard. Raises Interrupted if the caller wants no more.
        """
        self.done += 1
        if self.device.type == "cuda":
            if self._before is not None:
                self._before.synchronize()
            self._before = torch.cuda.current_stream(self.device).record_event()
        self.progress(self.done, max(self.total, self.done))
        if self.interrupt():
            raise Interrupted("interrupted between two bands")


class _Values:
    """Rows of images that are there, alone or side by side in a buffer."""

    def __init__(self, chain: Chain, device: torch.device, buffers: tuple[Buffer, ...]) -> None:
        self._chain, self._device = chain, device
        self._buffers = {image: buffer for buffer in buffers for image in buffer.places}
        self._memory: dict[int, torch.Tensor] = {}
        """Memory of buffers, by any of their images."""
        self._rows: dict[int, tuple[Rows, torch.Tensor]] = {}

    def place(self, image: int, rows: Rows) -> torch.Tensor | None:
        """Where some rows of an image lie beside others; None where they lie alone."""
        buffer = self._buffers.get(image)
        if buffer is None:
            return None
        if image not in self._memory:
            chain, (first, last) = self._chain, buffer.rows
            columns = chain.width * chain.network.growth[image]
            shape = (chain.batch, last - first, columns, buffer.channels)
            memory = torch.empty(shape, dtype=chain.dtype, device=self._device)
            self._memory |= dict.fromkeys(buffer.places, memory)
        start, above = buffer.places[image], buffer.rows[0]
        part = self._memory[image][:, rows[0] - above : rows[1] - above]
        return part[..., start : start + self._chain.channels(image)]

    def put(self, image: int, rows: Rows, values: torch.Tensor) -> None:
        """`values` (N, rows, W, C) are these rows of the image."""
        self._rows[image] = (rows, values)

    def get(self, image: int, rows: Rows) -> torch.Tensor:
        """(N, rows, W, C), maybe a view."""
        (first, last), values = self._rows[image]
        return values if (first, last) == rows else values[:, rows[0] - first : rows[1] - first]

    def together(self, images: tuple[int, ...], rows: Rows) -> torch.Tensor:
        """Images that lie side by side, (N, rows, W, all their channels)."""
        if len(images) == 1:
            return self.get(images[0], rows)
        above = self._buffers[images[0]].rows[0]
        channels = sum(map(self._chain.channels, images))
        memory = self._memory[images[0]]
        return memory[:, rows[0] - above : rows[1] - above, :, :channels]

    def drop(self, image: int) -> None:
        """An image that is not read again."""
        del self._rows[image]
        buffer = self._buffers.get(image)
        if buffer is not None and not any(other in self._rows for other in buffer.places):
            for other in buffer.places:
                self._memory.pop(other, None)


def make(run: Run, image: int, rows: Rows, stored: Mapping[int, Source]) -> torch.Tensor:
    """Rows of an image (N, rows, W, C) from those that are `stored`."""
    chain = run.chain
    trace = chain.trace(image, rows, frozenset(stored))
    sizes = (chain.batch, chain.width, chain.dtype, run.device)
    places = run.places.setdefault(image, Places())
    calls = begin(run.session, places.of((*sizes, trace.facts, run.session)))
    values = _Values(chain, run.device, trace.buffers)
    for action in trace.actions:
        if action.source is None:
            read = stored[action.image].read(action.rows)
            place = values.place(action.image, action.rows)
            values.put(action.image, action.rows, read if place is None else place.copy_(read))
        else:
            values.put(action.image, action.made, _compute(run, calls, action, values))
        for used in action.drop:
            values.drop(used)
        if action.source is not None and action.image in chain.cuts:
            run.tick()
    return values.get(image, rows)


def _compute(run: Run, calls: Calls, action: Action, values: _Values) -> torch.Tensor:
    step, rows = run.chain.network.steps[action.image - 1], action.made
    assert action.source is not None
    if isinstance(step, ConvStep):
        x = values.together(step.reads, action.source)
        residuals = [values.get(residual.image, rows) for residual in step.residuals]
        out = values.place(action.image, rows)
        return _convolve(run, calls, action, x, residuals, out)
    x, ready = values.get(step.image, action.source), run.ready.get(action.image)
    if isinstance(ready, ReadyWindows):
        y = ready.transformed(x, run.session)
        if not run.chain.is_whole(action):
            above = action.source[0]
            y = y[:, rows[0] - above : rows[1] - above].clone()
    elif isinstance(ready, ReadyNorm):
        y = ready(x, run.session)
    else:
        assert isinstance(step, EnlargeStep)
        y = _enlarged(run.chain, step, x)
    place = values.place(action.image, rows)
    return y if place is None else place.copy_(y)


def _enlarged(chain: Chain, step: EnlargeStep, x: torch.Tensor) -> torch.Tensor:
    """(N, rows, W, C), contiguous."""
    factor = step.growth
    if not step.shuffles:
        return x.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    count = chain.network.channels[step.image]
    parts = x[..., :count].unflatten(3, (-1, factor, factor))
    y = parts.permute(0, 1, 4, 2, 5, 3)
    batch, rows, _, columns, _, channels = y.shape
    y = y.reshape(batch, rows * factor, columns * factor, channels)
    return F.pad(y, (0, -channels % 16)) if channels % 16 else y


def _convolve(
    run: Run,
    calls: Calls,
    action: Action,
    x: torch.Tensor,
    residuals: list[torch.Tensor],
    out: torch.Tensor | None,
) -> torch.Tensor:
    """By the ops themselves, not by functional.py: where tensors lie is known to be right."""
    ready, place, source = run.ready[action.image], str(action.image), action.source
    assert source is not None and isinstance(ready, ReadyConv)
    if not isinstance(ready.weights, ConvWeights):
        y: torch.Tensor = linear(x, *ready.weights, session=run.session)
        if ready.step.activation == "leaky relu":
            assert isinstance(ready.step.slope, float)
            y = F.leaky_relu_(y, ready.step.slope)
        return y if out is None else out.copy_(y)
    kind, (first, last) = ready.step.kind, action.made
    shortcut, second = [*residuals, None, None][:2]
    whole = run.chain.is_whole(action)
    inputs = ConvInputs(
        *(x, ready.weights),
        shortcut=shortcut,
        overflow=run.overflow,
        band=None if whole else Band(rows_above(kind, action.made, source), last - first),
        out=out,
        epilogue=ready.epilogue,
        second=second,
    )
    y, _ = calls.run(place, CONVS[kind], inputs)
    return y


def run_plan(run: Run, plan: BandPlan, picture: Source, result: Sink) -> None:
    """The network's last image, of a plan's legs, into `result`."""
    stored: dict[int, Source] = {0: picture}
    uses = run.chain.network.last_uses
    for leg in plan.legs:
        sink: Sink = result
        if leg.keep != "output":
            sink = HostRows(run.device) if leg.keep == "host" else DeviceRows()
        _run_leg(run, leg, stored, sink, [i for i in stored if i and uses[i] <= leg.stop])
        stored = {image: store for image, store in stored.items() if uses[image] > leg.stop}
        if leg.keep != "output":
            stored[leg.stop] = sink  # type: ignore[assignment]


def _run_leg(
    run: Run, leg: Leg, stored: Mapping[int, Source], sink: Sink, spent: list[int]
) -> None:
    """Make the leg's last image. `spent`: stored images that are given back on the way."""
    chain, height = run.chain, run.chain.rows(leg.stop)[1]
    ahead = bands(height, leg.rows or height)
    try:
        for band, following in zip(ahead, [*ahead[1:], None], strict=True):
            reads = {}
            if following is not None:
                trace = chain.trace(leg.stop, following, frozenset(stored))
                reads = {a.image: a.rows for a in trace.actions if a.source is None}
            for image, rows in reads.items():
                source = stored[image]
                if isinstance(source, HostRows):  # sends them while this band is computed
                    source.prefetch(rows)
            y = make(run, leg.stop, band, stored)
            for image in spent:
                stored[image].release(reads[image][0] if image in reads else 1 << 62)
            sink.write(band[0], y)
            del y
    finally:
        for store in (*stored.values(), sink):
            if isinstance(store, HostRows):
                store.settle()
