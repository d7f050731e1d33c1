"""Another card's process as its owner sees it: started, given copies of the UNet and of the VAE's
decoder, asked, ended. Its words go to our log.

Messages are lines of JSON, none longer than what a pipe holds; what is large goes through shared
memory. Every wait has a limit. After a LostError it is of no use any more; after a FailedError it
is.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, cast

import torch

from lib_rocm_sd import cache, console
from lib_rocm_sd.cards.memory import Shared, aligned, settle
from lib_rocm_sd.cards.ranks import FailedError, LostError
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.read.blueprint import UNET, Blueprint, Manner
from lib_rocm_sd.runtime import process

log = console.Log()
GONE_S = 5.0
START_S = 20.0
"""How long the operating system may take to start a process."""
WORDS = 20
"""Lines of a process that are kept, to say how it ended."""
_START = "from lib_rocm_sd.cards.child import main; raise SystemExit(main())"


class Link:
    """A process that gets and gives lines of JSON. It ends with this one, however this one ends: by
    its input, and on Linux by the kernel. Raises OSError where it cannot be started.

    Each line that it prints goes to the log, under `name`.
    """

    _process: subprocess.Popen[bytes]

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers = process.Answers()
        self._words: deque[str] = deque(maxlen=WORDS)
        self._error: OSError | None = None
        started = threading.Event()
        keeper, self._listener = (
            threading.Thread(target=work, args=(started,), name="rocm_sd replica", daemon=True)
            for work in (self._keep, self._listen)
        )
        keeper.start()
        self._listener.start()
        if not started.wait(START_S):
            self._error = OSError("its process does not start")
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Raises LostError where the process has ended."""
        try:
            stream = cast("BinaryIO", self._process.stdin)
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
        except (OSError, ValueError):
            raise LostError(self.ending()) from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next answer. Raises LostError at the process's end, TimeoutError at the limit."""
        answer = self._answers.next(limit_s)
        if answer is None:
            raise LostError(self.ending())
        self._words.clear()  # of what has gone well
        return answer

    def ending(self) -> str:
        """How it ended, in a few words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)
        status = self._process.returncode
        if status is None:
            return "its process does not answer and does not end"
        self._listener.join(GONE_S)  # its last words may still be on their way
        last = f": {self._words[-1]}" if self._words else ""
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"its process ended {how}{last}"

    def end(self) -> None:
        """Let it end by itself, and end it where it does not; returns at once."""
        running = self._process
        with suppress(OSError, ValueError):
            cast("BinaryIO", running.stdin).close()
        threading.Thread(target=self._end, name="rocm_sd replica", daemon=True).start()

    def kill(self) -> None:
        """End it now."""
        process.kill(self._process)

    def _end(self) -> None:
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _keep(self, started: threading.Event) -> None:
        """Starts it, since it ends with the thread that does, and reads its answers."""
        try:
            self._process = process.spawn(
                command(), subprocess.PIPE, subprocess.PIPE, subprocess.PIPE
            )
        except OSError as error:
            self._error = error
            return
        finally:
            started.set()
        self._answers.read(cast("BinaryIO", self._process.stdout))

    def _listen(self, started: threading.Event) -> None:
        if not started.wait(START_S) or self._error is not None:
            return
        stream = cast("BinaryIO", self._process.stderr)
        with suppress(ValueError, OSError):
            for line in stream:
                text = line.decode("utf-8", errors="replace").rstrip()
                if text:
                    self._words.append(text)
                    log.info("%s: %s", self._name, text)
        stream.close()


def command() -> list[str]:
    """What starts a replica's process."""
    return process.with_packages(_START)


SHARED_BYTES = 64 << 20
PIECES = 24
"""Most pieces of weights in one message, which has to fit into a pipe."""


@dataclass(frozen=True)
class Limits:
    """Seconds. A first call may compile kernels; nobody waits for it but in a test."""

    start_s: float = 180.0
    build_s: float = 60.0
    weights_s: float = 30.0
    call_s: float = 30.0
    first_call_s: float = 900.0


@dataclass(frozen=True)
class Made:
    """A call's result, in memory that the next call overwrites; what it took over there."""

    tensor: torch.Tensor
    ms: float


class Replica:
    """On `device`, for an owner on `home`. Raises OSError where it cannot be started.

    `start` returns at once. One thing is asked at a time: who begins a call fetches it.
    """

    def __init__(
        self,
        device: torch.device,
        home: torch.device,
        limits: Limits | None = None,
        size: int = SHARED_BYTES,
    ) -> None:
        self.device, self._home = device, home
        self.limits = limits or Limits()
        self._shared = Shared(size)
        self.asked = time.monotonic()
        """When it was asked for something last."""
        self._number = self._out = self._after = 0
        self._expected: torch.Tensor | None = None
        self._copied: Any = None
        self._early: dict[str, Any] | None = None
        """An answer that came while its part of an exchange was waited for."""
        self.waits_for = ""
        """What it was asked and has not answered; empty where it is free."""
        self.free_bytes: int | None = None
        """Free memory of its card, in bytes, as last told; None where it cannot tell."""
        try:
            self._link = Link(f"replica on {device}")
            folder = cache.host_directory()
            self._ask(
                "open",
                device=str(device),
                home=kind_of(home),
                cache=None if folder is None else str(folder),
                bytes=size,
                memory=self._shared.name,
            )
        except LostError as error:
            self._shared.close()
            raise OSError(str(error)) from None
        except OSError:
            self._shared.close()
            raise
        if home.type == "cuda":
            self._shared.pin(home)

    @property
    def pid(self) -> int:
        return self._link.pid

    def poll(self) -> dict[str, Any] | None:
        """The answer to what was asked if it is there. Raises LostError and FailedError."""
        if not self.waits_for:
            return None
        try:
            answer = self._link.receive(0.0)
        except TimeoutError:
            return None
        return self._understood(answer)

    def fetch(self, limit_s: float) -> dict[str, Any]:
        """The answer to what was asked. Raises LostError, after the limit too, and FailedError."""
        early, self._early = self._early, None
        if early is not None:
            return early
        try:
            return self._understood(self._link.receive(limit_s))
        except TimeoutError:
            raise self._late("to", limit_s) from None

    def build(self, blueprint: Blueprint, manner: Manner, part: str = UNET) -> None:
        """Make it another such module, without weights. Raises LostError and FailedError."""
        settle(self._home)  # a result may still be on its way out of the memory
        tested = {"kind": kind_of(self._home), "passed": engine.passed(self._home)}
        text = json.dumps({**asdict(blueprint), **tested}).encode()
        if len(text) > self._shared.size:
            raise FailedError(f"this {part} has too many modules")
        raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._shared.tensor(0, raw.shape, torch.uint8).copy_(raw)
        self._ask("build", part=part, bytes=len(text), **asdict(manner))
        self.fetch(self.limits.build_s)

    def fill(self, tensors: Sequence[torch.Tensor], places: Iterable[int], part: str = UNET) -> int:
        """Give it the values of those `places` in `tensors`; how many bytes. Raises as `build`."""
        n_bytes = 0
        batches = list(_batches(tensors, places, self._shared.size))
        for number, batch in enumerate(batches):
            pieces = []
            for place, first, count, offset in batch:
                tensor = tensors[place].detach()
                values = tensor if count == tensor.numel() else _rows(tensor, first, count)
                piece = self._shared.tensor(offset, values.shape, values.dtype)
                piece.copy_(values, non_blocking=True)
                pieces.append([place, first, count, offset])
                n_bytes += values.nbytes
            settle(self._home)
            self._ask("weights", part=part, pieces=pieces, last=number == len(batches) - 1)
            self.fetch(self.limits.weights_s)
        return n_bytes

    def begin(
        self, tensors: Mapping[str, torch.Tensor], out_bytes: int, more: Mapping[str, Any]
    ) -> None:
        """Ask for a call; `fetch` or `poll` gives what `made` understands. `more`: more of the
        message. ValueError where it does not fit into shared memory.
        """
        inputs, offset = [], 0
        for name, tensor in tensors.items():
            place = self._shared.tensor(offset, tensor.shape, tensor.dtype)
            place.copy_(tensor, non_blocking=True)
            inputs.append([name, *_described(tensor), offset])
            offset += aligned(tensor.nbytes)
        if offset + out_bytes > self._shared.size:
            raise ValueError(f"a call takes more than the {self._shared.size >> 20} MiB shared")
        settle(self._home)
        self._out, self._after = offset, offset + aligned(out_bytes)
        self._ask("call", inputs=inputs, out=offset, **more)

    def expect(self, expected: torch.Tensor) -> None:
        """Begin to copy what the call that was begun has to give to where `compare` finds it.
        ValueError where it does not fit into shared memory.
        """
        self._expected = self._shared.tensor(self._after, expected.shape, expected.dtype)
        self._expected.copy_(expected, non_blocking=True)
        if self._home.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._home))

    def has_expected(self) -> bool:
        """Whether the copy is there."""
        return self._copied is None or self._copied.query()

    def compare(self, answer: Mapping[str, Any], most: float) -> None:
        """Ask how far the result of a call, by its answer, is from what was expected: its own
        answer says `why` where that is more than `most`, and whether it is worth `again`.
        """
        assert self._expected is not None
        expected = [self._after, *_described(self._expected)]
        result = [self._out, answer["dtype"], answer["shape"]]
        self._ask("compare", result=result, expected=expected, most=most)

    def waited(self, waited_s: float) -> None:
        """Amid a call, after so long for its part of an exchange: raises LostError, after the limit
        too, and FailedError where it will not come.
        """
        if self._early is None:
            self._early = self.poll()  # its part was the last, and came while this side looked
        if waited_s > self.limits.call_s:
            raise self._late("amid", self.limits.call_s)

    def stop(self) -> None:
        """Let it make no more of the call that it is amid. Raises LostError."""
        self._link.send({"kind": "stop", "number": self._number})

    def _late(self, when: str, limit_s: float) -> LostError:
        """It is ended, since it has not answered."""
        self._link.kill()
        return LostError(f"no answer {when} '{self.waits_for}' within {limit_s:g} s")

    def made(self, answer: Mapping[str, Any]) -> Made:
        """The result of a call, by its answer."""
        dtype = getattr(torch, answer["dtype"])
        return Made(self._shared.tensor(self._out, answer["shape"], dtype), float(answer["ms"]))

    def close(self, wait: Callable[[], None] = lambda: None) -> None:
        """Give its card's memory back. `wait()`: until nobody uses what is shared with a process
        that ends.
        """
        self._link.end()
        wait()
        if self._shared.is_pinned:
            with suppress(RuntimeError):
                settle(self._home)  # a result may still be on its way out of it
        self._shared.close()

    def _ask(self, kind: str, **more: Any) -> None:
        self._number += 1
        self.waits_for, self.asked, self._early = kind, time.monotonic(), None
        self._link.send({"kind": kind, "number": self._number, **more})

    def _understood(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.waits_for = ""
        if answer.get("number") != self._number:
            self._link.kill()
            raise LostError("its process answers something that was not asked")
        if answer["kind"] == "unusable":
            raise LostError(str(answer["reason"]))
        if answer["kind"] == "failed":
            raise FailedError(str(answer["reason"]), bool(answer["memory"]))
        self.free_bytes = answer.get("free", self.free_bytes)
        return answer


def _described(tensor: torch.Tensor) -> tuple[str, list[int]]:
    """For a message: its dtype and shape."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def kind_of(device: torch.device) -> list[str]:
    """What cards have in common that compute alike, with the same software."""
    info = identify(device)
    return [info.backend, str(info.gfx), info.name]


def _rows(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    each = tensor[0].numel()
    return tensor[first // each : (first + count) // each]


def _batches(
    tensors: Sequence[torch.Tensor], places: Iterable[int], size: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Pieces that fit into `size` bytes together: a tensor's place, its first element and how many,
    and the offset. Tensors that are larger come in pieces of whole rows.
    """
    batch: list[tuple[int, int, int, int]] = []
    offset = 0
    for place in places:
        tensor = tensors[place]
        for first, count in _pieces(tensor, size):
            needed = aligned(count * tensor.element_size())
            if batch and (offset + needed > size or len(batch) >= PIECES):
                yield batch
                batch, offset = [], 0
            batch.append((place, first, count, offset))
            offset += needed
    if batch:
        yield batch


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[tuple[int, int]]:
    total = tensor.numel()
    if tensor.nbytes <= size:
        yield 0, total
        return
    each = tensor[0].numel()
    rows = size // (each * tensor.element_size())
    if not rows:
        raise FailedError("a row of a weight is larger than the shared memory")
    for first in range(0, total, rows * each):
        yield first, min(rows * each, total - first)
