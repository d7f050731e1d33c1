"""Copies of the UNet and of the VAE's decoder on another card, as their owner sees them: started,
filled, asked, given back.

Every wait has a limit. After a LostError it is of no use any more; after a FailedError it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lib_rocm_sd.several.blueprint import Blueprint
from lib_rocm_sd.several.link import Link, LostError
from lib_rocm_sd.several.memory import Shared, aligned, room, settle

UNET, DECODER = "UNet", "VAE's decoder"
"""What there may be copies of, each by itself."""
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
class Manner:
    """How a replica computes: as the host's own session does. `switches`: torch's."""

    level: str
    headroom: int
    graphs: bool | None
    switches: Mapping[str, Any]


class FailedError(Exception):
    """It could not do what was asked; the message says why."""

    def __init__(self, reason: str, memory: bool = False) -> None:
        super().__init__(reason)
        self.memory = memory
        """Whether its card is out of memory."""


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
        self._number = self._out = 0
        self._waits = ""
        self.free_bytes: int | None = None
        """Free memory of its card, in bytes, as last told; None where it cannot tell."""
        try:
            self._link = Link(f"replica on {device}")
            self._ask("open", device=str(device), bytes=size, memory=self._shared.name)
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

    @property
    def is_pinned(self) -> bool:
        return self._shared.is_pinned

    @property
    def waits_for(self) -> str:
        """What it was asked and has not answered; empty where it is free."""
        return self._waits

    def poll(self) -> dict[str, Any] | None:
        """The answer to what was asked if it is there. Raises LostError and FailedError."""
        if not self._waits:
            return None
        answer = self._link.ready()
        return None if answer is None or self._is_amid(answer) else self._understood(answer)

    def fetch(self, limit_s: float) -> dict[str, Any]:
        """The answer to what was asked. Raises LostError, after the limit too, and FailedError."""
        what, end = self._waits, time.monotonic() + limit_s
        while True:
            try:
                answer = self._link.receive(end - time.monotonic())
            except TimeoutError:
                self._link.kill()
                raise LostError(f"no answer to '{what}' within {limit_s:g} s") from None
            if not self._is_amid(answer):
                return self._understood(answer)

    def build(self, blueprint: Blueprint, manner: Manner, part: str = UNET) -> None:
        """Make it another such module, without weights. Raises LostError and FailedError."""
        text = json.dumps(asdict(blueprint)).encode()
        if len(text) > self._shared.size:
            raise FailedError(f"this {part} has too many modules")
        raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._shared.tensor(0, raw.shape, torch.uint8).copy_(raw)
        self._ask("build", part=part, bytes=len(text), **asdict(manner))
        self.fetch(self.limits.build_s)

    def fill(self, tensors: Sequence[torch.Tensor], places: Iterable[int], part: str = UNET) -> int:
        """Give it the values of those `places` in `tensors`; how many bytes. Raises as `build`."""
        sent = 0
        batches = list(_batches(tensors, places, self._shared.size))
        for number, batch in enumerate(batches):
            pieces = []
            for place, first, count, offset in batch:
                tensor = tensors[place].detach()
                values = tensor if count == tensor.numel() else _rows(tensor, first, count)
                piece = self._shared.tensor(offset, values.shape, values.dtype)
                piece.copy_(values, non_blocking=True)
                pieces.append([place, first, count, offset])
                sent += count * tensor.element_size()
            settle(self._home)
            self._ask("weights", part=part, pieces=pieces, last=number == len(batches) - 1)
            self.fetch(self.limits.weights_s)
        return sent

    def begin(
        self, given: Mapping[str, torch.Tensor], out_bytes: int, asked: Mapping[str, Any]
    ) -> None:
        """Ask for a call; `fetch` or `poll` gives what `made` understands. `asked`: more of the
        message. ValueError where it does not fit into shared memory.
        """
        inputs, offset = [], 0
        for name, tensor in given.items():
            place = self._shared.tensor(offset, tensor.shape, tensor.dtype)
            place.copy_(tensor, non_blocking=True)
            dtype = str(tensor.dtype).removeprefix("torch.")
            inputs.append([name, dtype, list(tensor.shape), offset])
            offset += room(tensor)
        if offset + out_bytes > self._shared.size:
            raise ValueError(f"a call takes more than the {self._shared.size >> 20} MiB shared")
        settle(self._home)
        self._out = offset
        self._ask("call", inputs=inputs, out=offset, **asked)

    def arrived(self, limit_s: float) -> None:
        """Wait until it has written its part of an exchange. Raises as `fetch`, and FailedError
        where it cannot.
        """
        try:
            answer = self._link.receive(limit_s)
        except TimeoutError:
            self._link.kill()
            raise LostError(f"no answer amid '{self._waits}' within {limit_s:g} s") from None
        if not self._is_amid(answer):
            self._understood(answer)
            raise FailedError("it is done before the others are")

    def say(self, kind: str) -> None:
        """Amid a call: `go`, all have written, or `stop`. Raises LostError."""
        self._link.send({"kind": kind, "number": self._number})

    def _is_amid(self, answer: Mapping[str, Any]) -> bool:
        return answer["kind"] == "met" and answer.get("number") == self._number

    def made(self, answer: Mapping[str, Any]) -> Made:
        """The result of a call, by its answer."""
        dtype = getattr(torch, answer["dtype"])
        return Made(self._shared.tensor(self._out, answer["shape"], dtype), float(answer["ms"]))

    def close(self) -> None:
        """Give its card's memory back; returns at once."""
        self._link.end()
        if self._shared.is_pinned:
            with suppress(RuntimeError):
                settle(self._home)  # a result may still be on its way out of it
        self._shared.close()

    def _ask(self, kind: str, **more: Any) -> None:
        self._number += 1
        self._waits, self.asked = kind, time.monotonic()
        self._link.send({"kind": kind, "number": self._number, **more})

    def _understood(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._waits = ""
        if answer.get("number") != self._number:
            self._link.kill()
            raise LostError("its process answers something that was not asked")
        if answer["kind"] == "unusable":
            raise LostError(str(answer["reason"]))
        if answer["kind"] == "failed":
            raise FailedError(str(answer["reason"]), bool(answer["memory"]))
        self.free_bytes = answer.get("free", self.free_bytes)
        return answer


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
            wanted = aligned(count * tensor.element_size())
            if batch and (offset + wanted > size or len(batch) >= PIECES):
                yield batch
                batch, offset = [], 0
            batch.append((place, first, count, offset))
            offset += wanted
    if batch:
        yield batch


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[tuple[int, int]]:
    total = tensor.numel()
    if total * tensor.element_size() <= size:
        yield 0, total
        return
    each = tensor[0].numel()
    rows = size // (each * tensor.element_size())
    if not rows:
        raise FailedError("a row of a weight is larger than the shared memory")
    for first in range(0, total, rows * each):
        yield first, min(rows * each, total - first)
