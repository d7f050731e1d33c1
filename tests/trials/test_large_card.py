"""A card with tens of GiB free, on which nothing is left out: each problem of each op is judged."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.ops.base import KernelSpec, Op
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.trials import child, recorder, recording
from lib_rocm_sd.trials.recording import ITEM_BYTES, Output, Recording
from lib_rocm_sd.trials.subject import subjects
from tests.trials.doubles import HostCard, arch_of

ARCH = arch_of("gfx1100")
FREE_BYTES = 80 << 30
FILLED_BYTES = 64 << 20
IN_PLACE = LinearProblem(64, 328, (136,), residual=True, in_place=True)
Change = Callable[[Recording, dict[int, int]], None]


class LargeCard(HostCard):
    """Takes memory only for what is written. It fills no more than FILLED_BYTES at once."""

    def __init__(self) -> None:
        super().__init__(FREE_BYTES)

    def allocate(self, size: int) -> int:
        block = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self.blocks[address] = (block, size)
        return address

    def fill(self, address: int, byte: int, size: int) -> None:
        if size <= FILLED_BYTES:
            super().fill(address, byte, size)


class Giving:
    """Launches of which the last writes what is expected; `change` is told each buffer's place."""

    def __init__(self, found: Recording, change: Change) -> None:
        self._found, self._change = found, change
        self._starts, self._places = list(found.starts), dict[int, int]()

    def __call__(self, spec: KernelSpec, grid: int, block: int, params: Any, device: Any) -> None:
        for each in self._starts.pop(0).addresses:
            word = int.from_bytes(bytes(params)[each.at : each.at + 8], "little")
            self._places[each.buffer] = word - each.offset
        if not self._starts:
            for output in self._found.outputs:
                write(output, self._places[output.buffer])
            self._change(self._found, self._places)


def write(output: Output, place: int) -> None:
    size, count = ITEM_BYTES[output.dtype], len(output.expected) // 8
    exact = torch.frombuffer(bytearray(output.expected or bytes(8)), dtype=torch.float64)
    made = exact.to(getattr(torch, output.dtype))
    raw = np.frombuffer(ctypes.string_at(made.data_ptr(), count * size), f"<u{size}")
    last = sum((n - 1) * step for n, step in zip(output.shape, output.strides, strict=True))
    room = (ctypes.c_uint8 * ((last + 1) * size)).from_address(place + output.offset)
    here = recording.view(replace(output, offset=0), np.ctypeslib.as_array(room))
    here[...] = raw.reshape(output.shape)


def judged(found: Recording, change: Change = lambda found, places: None) -> child.Outcome:
    return child.replay(found, LargeCard(), Giving(found, change), 0)


def far_in_place() -> Recording:
    (subject,) = subjects([(LINEAR, IN_PLACE)], ARCH, ours=True)
    *_, last = recorder.recordings(LINEAR, subject.variant, subject.config, IN_PLACE)
    assert last.buffers[last.outputs[0].buffer].size > child.READ_BYTES
    return last


@pytest.mark.parametrize("op", list(ops()), ids=lambda op: op.name)
def test_every_problem_is_judged(op: Op[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then by parts, as if all buffers were too large to be read back whole."""
    whole, tried = child.READ_BYTES, 0
    for each in subjects([(op, problem) for _, problem in op.usual], ARCH, ours=True):
        with suppress(recorder.NeedsTorchError):
            for found in recorder.recordings(op, each.variant, each.config, each.problem):
                for read_bytes in (whole, 0):
                    monkeypatch.setattr(child, "READ_BYTES", read_bytes)
                    outcome = judged(found)
                    assert (outcome.skipped, outcome.reason) == ("", ""), read_bytes
                tried += 1
    assert tried


def test_a_residual_in_place_is_judged_beyond_2_gib() -> None:
    assert 0 < judged(far_in_place()).error < 1e-3


def spoil_last(found: Recording, places: dict[int, int]) -> None:
    (output,) = found.outputs
    *_, (at, count) = output.runs()
    ctypes.memset(places[output.buffer] + at + count - 2, 0x3C, 2)


def spoil_input(found: Recording, places: dict[int, int]) -> None:
    large = {n for n, each in enumerate(found.buffers) if each.size > child.READ_BYTES}
    (read,) = large - {found.outputs[0].buffer}
    ctypes.memset(places[read] + found.buffers[read].pieces[-1][0], 0x3C, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [(spoil_last, "wrong by"), (spoil_input, "wrote into its input")],
)
def test_what_is_wrong_beyond_2_gib_is_said(change: Change, said: str) -> None:
    assert said in judged(far_in_place(), change).reason
