"""What a variant launched, as bytes: buffers, launches, outputs and what they should be.

The process that has torch makes it (recorder.py); the child, which has none, replays it. A message
between them is one line of JSON and the bytes that it announces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lib_rocm_sd.ops.base import KernelSpec

Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Run = tuple[int, int]
"""First byte and length of bytes that lie in a row."""
Contents = Bytes | dict[Run, bytes]
"""All of a buffer, or of a large one what its runs hold."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MOST_BYTES = 1 << 31
"""One message has no more."""
MOST_PIECES = 4096


@dataclass(frozen=True)
class Buffer:
    """Device memory of `size` bytes. `pieces`: (offset, contents); the rest is poison."""

    size: int
    pieces: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True)
class Address:
    """Where in the arguments (byte `at`) the address of a buffer's byte `offset` belongs."""

    at: int
    buffer: int
    offset: int


@dataclass(frozen=True)
class Start:
    """One launch. `arguments`: the parameter struct; what `addresses` name is filled in."""

    spec: KernelSpec
    grid: int
    block: int
    arguments: bytes
    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class Output:
    """A tensor in a buffer: byte offset, shape, strides in elements, dtype.

    `expected`: float64 of this shape, C-contiguous bytes.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    expected: bytes

    @property
    def order(self) -> list[int]:
        """Its dimensions as they lie in memory, the outermost first."""
        return sorted(range(len(self.shape)), key=lambda each: -self.strides[each])

    def runs(self) -> Iterator[Run]:
        """What its elements fill, in the order of its dimensions in memory."""
        shape, strides = ([of[each] for each in self.order] for of in (self.shape, self.strides))
        return runs(shape, strides, self.offset, ITEM_BYTES[self.dtype])


@dataclass(frozen=True)
class Recording:
    """One problem run once. `far`: it needs gigabytes, and is left out where they are not free.
    `unmade`: why there is nothing in it.
    """

    name: str
    tolerance: float
    buffers: tuple[Buffer, ...]
    starts: tuple[Start, ...]
    outputs: tuple[Output, ...]
    far: bool = False
    unmade: str = ""

    @property
    def size_bytes(self) -> int:
        """Device memory for all buffers."""
        return sum(buffer.size for buffer in self.buffers)

    def runs(self, number: int) -> Iterator[Run]:
        """What of a buffer outputs fill, and what is known to lie there."""
        for output in self.outputs:
            if output.buffer == number:
                yield from output.runs()
        for offset, data in self.buffers[number].pieces:
            yield offset, len(data)

    def error(self, contents: Mapping[int, Contents]) -> float:
        """The worst of the outputs; infinity where one is not finite. `contents`: by buffer."""
        return max(
            (_relative_error(output, contents[output.buffer]) for output in self.outputs),
            default=0.0,
        )

    def misplaced(self, contents: Mapping[int, Contents]) -> str:
        """What was written that is no output's: beside one in its buffer, or into an input. Beside
        an output in a large buffer nothing is looked at.
        """
        for number, found in contents.items():
            buffer = self.buffers[number]
            outputs = [output for output in self.outputs if output.buffer == number]
            if not outputs and not buffer.pieces:
                continue  # of passing use
            if isinstance(found, dict):
                if not outputs and any(found[at, len(data)] != data for at, data in buffer.pieces):
                    return "wrote into its input"
                continue
            if not outputs and [len(data) for _, data in buffer.pieces] == [buffer.size]:
                if not np.array_equal(found, np.frombuffer(buffer.pieces[0][1], np.uint8)):
                    return "wrote into its input"
                continue
            before, after = filled(buffer), found.copy()
            for output in outputs:
                view(output, after)[...] = view(output, before)
            if not np.array_equal(before, after):
                return "wrote beside its output" if outputs else "wrote into its input"
        return ""


POISON = 0xFF
"""Every half and float made of it is NaN."""


def filled(buffer: Buffer) -> Bytes:
    """What a buffer holds before the first launch."""
    contents = np.full(buffer.size, POISON, np.uint8)
    for offset, data in buffer.pieces:
        contents[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return contents


def view(output: Output, contents: Bytes) -> npt.NDArray[Any]:
    """The output's elements, raw, in its buffer's bytes."""
    size = ITEM_BYTES[output.dtype]
    whole = contents[output.offset :]
    raw = whole[: len(whole) // size * size].view(f"<u{size}")
    strides = tuple(stride * size for stride in output.strides)
    return np.lib.stride_tricks.as_strided(raw, output.shape, strides)


def runs(
    shape: Sequence[int], strides: Sequence[int], offset: int, item_bytes: int
) -> Iterator[Run]:
    """What a tensor's elements fill; `strides` in elements, `offset` in bytes."""
    length, inner = item_bytes, len(shape)
    while inner and (shape[inner - 1] == 1 or strides[inner - 1] * item_bytes in (length, 0)):
        if strides[inner - 1]:
            length *= shape[inner - 1]
        inner -= 1
    outer = shape[:inner]
    if prod(outer) > MOST_PIECES:
        raise ValueError(f"more than {MOST_PIECES} runs of bytes in {tuple(shape)}")
    for place in product(*map(range, outer)):
        steps = sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield offset + steps * item_bytes, length


def _elements(output: Output, contents: Contents) -> npt.NDArray[Any]:
    if not isinstance(contents, dict):
        return view(output, contents)
    dense = b"".join(contents[run] for run in output.runs())
    raw, order = np.frombuffer(dense, f"<u{ITEM_BYTES[output.dtype]}"), output.order
    return raw.reshape([output.shape[each] for each in order]).transpose(np.argsort(order))


def _relative_error(output: Output, contents: Contents) -> float:
    values = _doubles(_elements(output, contents), output.dtype)
    expected = np.frombuffer(output.expected, np.float64).reshape(output.shape)
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():
        return float("inf")
    size = float(np.abs(expected).max())
    error = float(np.abs(values - expected).max())
    ratio = error / size if size else error
    return ratio if np.isfinite(ratio) else float("inf")


def _doubles(raw: npt.NDArray[Any], dtype: str) -> Doubles:
    raw = np.ascontiguousarray(raw)
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.dtype(dtype)).astype(np.float64)


# -- on the wire


def send(stream: BinaryIO, head: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one message."""
    head = {**head, "blobs": [len(blob) for blob in blobs]}
    stream.write(json.dumps(head).encode() + b"\n")
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def received(stream: BinaryIO) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next message; None at the end. ValueError where it is none."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    sizes = head.get("blobs", [])
    if sum(sizes) > MOST_BYTES:
        raise ValueError(f"a message of {sum(sizes)} bytes")
    blobs = [stream.read(size) for size in sizes]
    if [len(blob) for blob in blobs] != sizes:
        return None
    return head, blobs


def packed(recordings: Sequence[Recording]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Recordings as JSON and bytes; what several have in common is there once."""
    places: dict[bytes, int] = {}

    def place(blob: bytes) -> int:
        return places.setdefault(blob, len(places))

    rows = [
        {
            "name": r.name,
            "tolerance": r.tolerance,
            "far": r.far,
            "unmade": r.unmade,
            "buffers": [[b.size, [[at, place(data)] for at, data in b.pieces]] for b in r.buffers],
            "starts": [
                {
                    "spec": [s.spec.source, s.spec.entry, [list(pair) for pair in s.spec.defines]],
                    "sizes": [s.grid, s.block],
                    "arguments": place(s.arguments),
                    "addresses": [[a.at, a.buffer, a.offset] for a in s.addresses],
                }
                for s in r.starts
            ],
            "outputs": [
                [o.buffer, o.offset, o.shape, o.strides, o.dtype, place(o.expected)]
                for o in r.outputs
            ],
        }
        for r in recordings
    ]
    return rows, list(places)


def unpacked(rows: Sequence[dict[str, Any]], blobs: Sequence[bytes]) -> Iterator[Recording]:
    """What `packed` was given. ValueError, TypeError, KeyError or IndexError where it was not."""
    for row in rows:
        buffers = tuple(
            Buffer(int(size), tuple((int(at), blobs[place]) for at, place in pieces))
            for size, pieces in row["buffers"]
        )
        starts = tuple(
            Start(
                spec_of(each["spec"]),
                int(each["sizes"][0]),
                int(each["sizes"][1]),
                blobs[each["arguments"]],
                tuple(Address(*address) for address in each["addresses"]),
            )
            for each in row["starts"]
        )
        outputs = tuple(
            Output(buffer, offset, tuple(shape), tuple(strides), dtype, blobs[place])
            for buffer, offset, shape, strides, dtype, place in row["outputs"]
        )
        about = (row["far"], row["unmade"])
        yield Recording(row["name"], row["tolerance"], buffers, starts, outputs, *about)


def spec_of(row: Sequence[Any]) -> KernelSpec:
    """A spec as `packed` wrote it."""
    source, entry, defines = row
    return KernelSpec(source, entry, tuple((str(name), int(value)) for name, value in defines))
