"""What the parts of a speed test share: the program around it, what a request comes to, how much
time they have, and whether to go on. Knows neither gradio nor a WebUI.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Protocol, TypeVar

import torch

from lib_rocm_sd.engine.measure import NumberedCall, timed
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import RocmSdError
from lib_rocm_sd.lab import timing
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import WHAT, Pair, Request
from lib_rocm_sd.ops.attention.problem import AttentionProblem

PROMPT = "a red circle left of a blue square"
SEED = 0
"""Seed of every whole image, so that the images of two machines show the same."""

Attention = Callable[..., Any]
"""q (B, Sq, H, D), k and v (B, Sk, H, D), strided views: the output (B, Sq, H*D)."""


class Busy(RocmSdError):  # noqa: N818 - nothing went wrong
    """No test can start now; `str()` says why."""


class Cancelled(Exception):  # noqa: N818 - nothing went wrong
    """The test was cancelled. No error that a part, or a host, has a reason for."""


@dataclass(frozen=True)
class Picture:
    """A whole image (PIL.Image.Image, RGB). `seconds`: from prompt to image, `it_per_s` of its
    steps alone (NaN: not known). `peak_mib`: the most device memory (NaN: the device cannot tell).
    """

    image: Any
    seconds: float
    it_per_s: float
    peak_mib: float


@dataclass(frozen=True)
class HostCall:
    """A step of a host's UNet, or a picture upscaled. `call(*args, **kwargs)`, with what
    `arguments(size)` gives for two latents, or a picture, of size x size pixels. Within `theirs()`
    nothing of this extension works. Within `ours()` the UNet's blocks, or the network, are ours, or
    entering or calling it raises ValueError with a reason. `dtype`: of the results, such as
    "float16". `note`: what else is to be known of the calls. `compared_at`: the size at which
    results are compared, where the host's own has seams, or else, at others; 0: at each.
    """

    call: Callable[..., Any]
    arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    theirs: Callable[[], AbstractContextManager[Any]]
    ours: Callable[[], AbstractContextManager[Any]]
    dtype: str
    note: str = ""
    compared_at: int = 0


@dataclass(frozen=True)
class PictureWish:
    """PROMPT with SEED at `size` x `size` pixels, with this extension on or off, and where it is on
    with the UNet's blocks ours or not. `progress` is told 0 to 1.
    """

    steps: int
    size: int
    enabled: bool
    unet: bool
    progress: Callable[[float], None]
    cancelled: Callable[[], bool]


class Steps:
    """The steps of a picture that is made on `device`: how fast they are, how far it is, when it
    ends.
    """

    def __init__(self, wish: PictureWish, device: torch.device) -> None:
        self._wish, self._device = wish, device
        self._marks: list[Any] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)

    def note(self, done: int) -> None:
        """Note a call of the UNet, after `done` steps. Raises Cancelled."""
        if self._wish.cancelled():
            raise Cancelled("cancelled")
        mark: Any = perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))
        self._marks.append(mark)
        self._wish.progress(min(done / (self._wish.steps + 1), 1.0))

    def per_second(self) -> float:
        """Steps a second between the first and the last call; a step may be several calls.

        NaN where that cannot be told.
        """
        calls = len(self._marks)
        if calls < 2:
            return math.nan
        first, last = self._marks[0], self._marks[-1]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            past_s = first.elapsed_time(last) / 1000
        else:
            past_s = last - first
        return (calls - 1) * self._wish.steps / calls / past_s if past_s > 0 else math.nan

    def peak_mib(self) -> float:
        """The most device memory so far; NaN where the device cannot tell."""
        if self._device.type != "cuda":
            return math.nan
        return torch.cuda.max_memory_allocated(self._device) / 2**20


class HostSide(Protocol):
    """The program around a speed test. All but `busy` is called in the test's own thread.

    One that is not a WebUI may have a `host_name`. What one derives from this without saying how is
    never busy, has no queue and no attention of its own.
    """

    @property
    def device(self) -> torch.device:
        """What the host computes on."""
        ...

    @property
    def session(self) -> Session:
        """By which level, and with how much memory, ours runs."""
        ...

    def busy(self) -> str:
        """Why no test may start now, such as that a picture is being made; empty if one may."""
        return ""

    def queue(self) -> AbstractContextManager[Any]:
        """What keeps the host from making pictures meanwhile; held while the test runs.

        Entering it raises Busy where that cannot be had at once.
        """
        return nullcontext()

    def attention_methods(self) -> dict[str, Attention]:
        """The host's own attention, by its name; empty where that cannot be called alone."""
        return {}

    def vae(self) -> Any:
        """The host's decoder module on `device`, or None. Raises ValueError with a reason."""
        ...

    def unet(self) -> HostCall | None:
        """The host's UNet, on `device`. Raises ValueError with a reason."""
        ...

    def upscaler(self) -> HostCall | None:
        """An upscaling network of the host's. Raises ValueError with a reason."""
        return None

    def image(self, wish: PictureWish) -> Picture:
        """Raises Cancelled soon after `wish.cancelled()` is true, ValueError with a reason ("no
        checkpoint is loaded"); "out of memory" is passed on.
        """
        ...

    def output_directory(self) -> Path | None:
        """Where results are kept, whether it exists or not; None for nowhere."""
        ...


GPU_SIZES = {"quick": (512,), "standard": (512, 1024)}
CPU_SIZES = {"quick": (64,), "standard": (64, 128)}


@dataclass(frozen=True)
class Effort:
    """`parts_s`: about how long each part takes on a GPU. `runs`: most timed calls of a row.

    `limit_s`: a row that takes longer is given up; a first run may search for convolutions for a
    minute. `pictures`: timed of each method. `steps` of a picture.
    """

    parts_s: dict[str, float]
    runs: int
    limit_s: float
    pictures: int
    steps: int


def _parts(*seconds: float) -> dict[str, float]:
    return dict(zip(WHAT, seconds, strict=True))


EFFORTS = {
    "quick": Effort(_parts(6.0, 6.0, 4.0, 4.0, 18.0), 20, 90.0, 2, 8),
    "standard": Effort(_parts(45.0, 40.0, 15.0, 15.0, 95.0), 50, 120.0, 5, 20),
    "custom": Effort(_parts(50.0, 60.0, 20.0, 20.0, 150.0), 50, 180.0, 3, 20),
}
CPU_EFFORTS = {
    "quick": Effort(_parts(0.5, 0.5, 0.5, 0.5, 2.0), 5, 10.0, 1, 2),
    "standard": Effort(_parts(3.0, 3.0, 3.0, 3.0, 10.0), 20, 30.0, 3, 8),
    "custom": Effort(_parts(3.0, 3.0, 3.0, 3.0, 10.0), 5, 30.0, 1, 4),
}


def effort_of(request: Request, device: torch.device) -> Effort:
    """How much is measured; on a CPU little, since nothing is learned there."""
    return (CPU_EFFORTS if device.type == "cpu" else EFFORTS)[request.preset]


def sizes(request: Request, device: torch.device) -> tuple[int, ...]:
    """Sides of pictures in pixels."""
    usual = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    return request.sizes or usual[request.preset]


def half(device: torch.device) -> torch.dtype:
    """What a host computes in: float16, on a CPU float32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def attention_cases(
    request: Request, device: torch.device
) -> list[tuple[str, int, AttentionProblem]]:
    """Name, side of the picture in pixels, problem: of SD 1.5's, SDXL's UNet and of the VAE."""
    dtype = str(half(device)).removeprefix("torch.")
    cases = []
    for size in sizes(request, device):
        fine, middle, coarse = ((-(-size // step)) ** 2 for step in (8, 16, 32))
        every = (
            ("SD1.5 {} self", AttentionProblem(2, 8, fine, fine, 40, dtype)),
            ("SD1.5 {} text", AttentionProblem(2, 8, fine, 77, 40, dtype)),
            ("SDXL {} self", AttentionProblem(2, 10, middle, middle, 64, dtype)),
            ("SD1.5 {} self, half", AttentionProblem(2, 8, middle, middle, 80, dtype)),
            ("SDXL {} self, half", AttentionProblem(2, 20, coarse, coarse, 64, dtype)),
            ("SDXL {} text", AttentionProblem(2, 10, middle, 77, 64, dtype)),
            ("VAE {} middle", AttentionProblem(1, 1, fine, fine, 512, dtype)),
        )
        for name, problem in every if request.preset == "standard" else every[:3]:
            cases.append((name.format(side(size)), size, problem))
    return cases


def side(size: int) -> str:
    """The size of a square picture, in words."""
    return f"{size}x{size}"


FAILED = (*timing.FAILED, LookupError, ArithmeticError, AssertionError, ImportError)
"""What a method, or a host, may die of: the reason of a row, not the end of the test."""
CHUNK_S = 0.25
"""About how long calls are timed without asking whether to go on."""
LONG_S = 0.7
"""A call that takes longer is waited for from beside, so that Cancel need not wait for it."""
POLL_S = 0.05
LEAST = 3
BESIDE = "rocm_sd speed test, kernels"

T = TypeVar("T")


class InBackground:
    """What is done in a thread of its own, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def _begin(self, name: str, work: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing runs; False where something still does after `timeout_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return not self.running


class TooLongError(RuntimeError):
    """A call did not end within its limit."""


class Guard:
    """Asked between calls. `limit_s`: how long a row may take altogether.

    `long`: calls may take long, so it is worth to be asked within them.
    """

    def __init__(self, cancelled: Callable[[], bool], limit_s: float = math.inf) -> None:
        self.cancelled = cancelled
        self.limit_s = limit_s
        self.long = False
        self.end = monotonic() + limit_s

    def check(self) -> None:
        """Raises Cancelled, TooLongError."""
        if self.cancelled():
            raise Cancelled("cancelled")
        if monotonic() > self.end:
            raise TooLongError(f"not finished within {self.limit_s:.0f} s")

    def stop(self) -> bool:
        """Whether `check` would raise."""
        return self.cancelled() or monotonic() > self.end

    def beside(self, work: Callable[[], T], limited: bool = False) -> T:
        """The result of `work`, which cannot be stopped: once cancelled, nobody waits for it.

        What it compiles and tests is kept by the engine all the same. `limited`: nor is it waited
        for beyond the row's limit.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with torch.no_grad():
                    results.append(work())
            except (Cancelled, *FAILED) as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=BESIDE, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if limited or self.cancelled():
                self.check()
        if errors:
            raise errors[0]
        if not results:
            raise RuntimeError("kernels could not be made ready")
        return results[0]

    def timed(
        self, call: NumberedCall, runs: int, device: torch.device, expected_s: float
    ) -> list[float]:
        """Times in µs of `runs` calls that take about `expected_s` each."""
        if expected_s < LONG_S:
            return timed(call, runs, device)
        return self.beside(lambda: timed(call, runs, device), limited=True)

    def times_us(
        self,
        call: NumberedCall,
        device: torch.device,
        share_s: float,
        most: int,
        expected_s: float = 0.0,
    ) -> list[float]:
        """Sorted times of as many calls as `share_s` has room for, LEAST to `most`.

        Fewer where the row's limit ends them. The call has been run before: the first is like the
        others.
        """
        times: list[float] = []
        begin, runs = monotonic(), 1
        while len(times) < most:
            if not times or self.cancelled():
                self.check()
            count = min(runs, most - len(times))
            times += self.timed(call, count, device, times[-1] / 1e6 if times else expected_s)
            past_s = monotonic() - begin
            if (len(times) >= LEAST and past_s >= share_s) or monotonic() > self.end:
                break
            each_s = max(past_s / len(times), 1e-7)
            runs = max(1, int(min(CHUNK_S, share_s - past_s) / each_s))
        return sorted(times)


def why(failure: BaseException, at: str) -> str:
    """The reason of a row that was not measured, in one line. `at`: where memory was short."""
    if isinstance(failure, (TooLongError, ValueError)) and str(failure).strip():
        return str(failure).strip().splitlines()[0]
    if isinstance(failure, ImportError) and failure.name:
        return f"this needs {failure.name}, which is not installed"
    return timing.why(failure, f"out of memory at {at}")


@dataclass
class Job:
    """One test. `told(fraction, text)`: progress. `shots`: pairs of pictures made so far."""

    request: Request
    side: HostSide
    cancelled: Callable[[], bool]
    told: Callable[[float, str], None]
    shots: list[Pair] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.side.device

    @property
    def effort(self) -> Effort:
        """As `effort_of` has it."""
        return effort_of(self.request, self.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sides of pictures in pixels."""
        return sizes(self.request, self.device)

    def guard(self, long: bool = False) -> Guard:
        """For one row. `long`: its calls may take long."""
        guard = Guard(self.cancelled, self.effort.limit_s)
        guard.long = long
        return guard

    def row(self, row: Row, size: int, measure: Callable[..., Row], *args: Any) -> Row:
        """What `measure` makes of the row, or the row with the reason why not. Raises Cancelled."""
        try:
            return measure(row, *args)
        except FAILED as failure:
            return replace(row, reason=why(failure, side(size)))
        finally:
            self.clean()

    def clean(self) -> None:
        """After a row. A cancelled test does not wait for the device: its end cleans up."""
        if not self.cancelled():
            timing.clean(self.device)


class Shares:
    """Deals a part's time out to its rows: what one leaves, the next ones have."""

    def __init__(self, part_s: float, rows: int) -> None:
        self.end = monotonic() + part_s
        self.left = self.rows = rows

    def next_s(self) -> float:
        """The next row's share."""
        share_s = max(0.0, self.end - monotonic()) / max(self.left, 1)
        self.left -= 1
        return share_s

    @property
    def fraction(self) -> float:
        """Fraction of the rows that were begun."""
        return min(1.0, (self.rows - self.left) / max(self.rows, 1))


Part = Callable[[Job], Iterator[Row]]
