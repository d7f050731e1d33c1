"""Global memory of the executor: which places are there, of buffers small and sparse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.verify.amdgpu import sparse
from tests.verify.amdgpu.errors import OutOfBoundsError
from tests.verify.amdgpu.memory import Memory

needs_sparse = pytest.mark.skipif(bool(sparse.missing()), reason=str(sparse.missing()))


def at(*addresses: int) -> np.ndarray:
    return np.array(addresses, np.uint64)


def memory() -> Memory:
    """Buffers at 0x1000, 0x1020 (right after it) and 0x2000, added in another order."""
    made = Memory()
    for address, first in ((0x2000, 64), (0x1020, 32), (0x1000, 0)):
        made.add(address, np.arange(first, first + 32, dtype=np.uint8), name=hex(address))
    return made


def test_each_lane_reads_from_its_own_buffer() -> None:
    found = memory().load(at(0x201C, 0x1000, 0x103C, 0x1004), 4)
    assert found.view(np.uint8)[:, 0].tolist() == [92, 0, 60, 4]


def test_each_lane_writes_to_its_own_buffer() -> None:
    made = memory()
    made.store(at(0x2000, 0x101F), np.array([[1], [2]], np.uint8))
    assert made.load(at(0x2000, 0x101F, 0x1020), 1)[:, 0].tolist() == [1, 2, 32]


@pytest.mark.parametrize(
    ("address", "near"),
    [
        (0x101C, "0x1000"),  # begins in one buffer and ends in the next
        (0x2010, "0x2000"),
        (0x201C, "0x2000"),
        (0x0FFC, "0x1000"),
        (0x1800, "0x1020"),
        ((1 << 64) - 8, "0x2000"),  # the end of which is a small number
    ],
)
def test_what_lies_in_no_buffer_is_named(address: int, near: str) -> None:
    size = 32
    with pytest.raises(OutOfBoundsError, match=rf"^\[1\] 32 bytes .* the nearest is {near} "):
        memory().load(at(0x1000, address), size)


def test_what_overlaps_is_no_buffer() -> None:
    for address in (0x0FE1, 0x1000, 0x103F, 0x1FFF):
        with pytest.raises(ValueError, match="overlap"):
            memory().add(address, np.zeros(32, np.uint8), name="new")
    memory().add(0x0FE0, np.zeros(32, np.uint8), name="new")


# -- sparse tensors


@pytest.mark.parametrize(
    ("shape", "strides", "runs"),
    [
        ((2, 3), (3, 1), [(0, 12)]),
        ((2, 3), (5, 1), [(0, 6), (10, 6)]),
        ((2, 3), (1, 2), [(0, 12)]),
        ((2, 3), (0, 2), [(0, 2), (4, 2), (8, 2)]),
        ((3, 4), (2, 1), [(0, 16)]),  # rows overlap
        ((1, 1), (7, 9), [(0, 2)]),
    ],
)
def test_runs_are_the_bytes_of_the_elements(
    shape: tuple[int, int], strides: tuple[int, int], runs: list[tuple[int, int]]
) -> None:
    tensor = torch.zeros(32, dtype=torch.float16).as_strided(shape, strides)
    assert list(sparse.united(sparse.runs(tensor))) == runs
    places = {
        2 * (row * strides[0] + column * strides[1]) + byte
        for row in range(shape[0])
        for column in range(shape[1])
        for byte in (0, 1)
    }
    assert places == {start + each for start, length in runs for each in range(length)}


@needs_sparse
def test_a_sparse_tensor_takes_what_is_touched_of_it() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensor = sparse.sparse((1 << 20, 1 << 18), torch.float16)
    tensor[-1, -3:] = 1
    assert tensor.untyped_storage().nbytes() == 1 << 39
    assert tensor[-1, -4:].tolist() == [0, 1, 1, 1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18


@needs_sparse
def test_spread_elements_are_the_same_and_lie_where_the_strides_say() -> None:
    few = torch.arange(6.0).view(2, 3)
    made = sparse.spread(few, (sparse.FAR, 5))
    assert torch.equal(made, few)
    assert made.stride() == (sparse.FAR, 5)
    assert [start for start, _ in sparse.runs(made)][-1] == 4 * (sparse.FAR + 10)
