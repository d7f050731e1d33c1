"""What nobody has written is read as a plain number by no format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.attention.layouts import lay_out
from tests.poison import POISON, poisoned
from tests.verify.amdgpu.hazards import LdsMemory
from tests.verify.amdgpu.state import Waves
from tests.verify.simt.launch import Allocations

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_nan_in_each_float_format(dtype: torch.dtype) -> None:
    words = torch.full((4,), POISON, dtype=torch.int32)
    assert words.view(dtype).isnan().all()


def test_poison_is_no_size_no_offset_and_no_address() -> None:
    word = POISON.to_bytes(4, "little")
    assert min(np.frombuffer(word * 2, kind)[0] for kind in ("<i4", "<u4")) > 1 << 30
    assert np.frombuffer(word * 2, "<u8")[0] >= 1 << 57, "canonical addresses have 57 bits at most"


@pytest.mark.parametrize("dtype", DTYPES)
def test_registers_and_lds_are_poison_until_they_are_written(dtype: torch.dtype) -> None:
    waves = Waves(2, 1, 32)
    for words in (waves.v, waves.s[:106], LdsMemory(1, 64).words):
        assert torch.from_numpy(words.view(np.int32)).view(dtype).isnan().all()


@pytest.mark.parametrize("written", DTYPES)
@pytest.mark.parametrize("read", DTYPES)
def test_outputs_are_poison_until_they_are_written(written: torch.dtype, read: torch.dtype) -> None:
    x = torch.zeros((2, 3, 4), dtype=written)
    with Allocations():
        made = (x.new_empty((3, 2)), torch.empty_like(x), torch.empty(6, dtype=written))
    assert all(each.flatten().view(read).isnan().all() for each in made)


def test_flags_that_nobody_sets_are_seen() -> None:
    with Allocations():
        flag = torch.empty(1, dtype=torch.int32)
    assert flag.item() == POISON


@pytest.mark.parametrize("layout", ["packed", "every second row", "misaligned", "ragged rows"])
@pytest.mark.parametrize("read", DTYPES)
def test_what_a_layout_leaves_unused_is_poison(layout: str, read: torch.dtype) -> None:
    made = lay_out(torch.zeros((1, 3, 2, 8), dtype=torch.float16), layout)
    whole = torch.empty(0, dtype=torch.float16).set_(made.untyped_storage())
    unused = whole[whole.isnan()]
    assert len(unused) == len(whole) - made.numel() > 0
    pairs = unused[: len(unused) // 2 * 2]
    assert pairs.view(read).isnan().all()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_an_odd_number_of_bytes_is_filled_to_the_last(count: int) -> None:
    made = poisoned(torch.zeros(count, dtype=torch.uint8))
    assert made.tolist() == list(POISON.to_bytes(4, "little") * 2)[:count]
