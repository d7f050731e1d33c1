"""Each kernel's machine code on tensors beyond 2 and 4 GiB; and for each 64-bit number in the
kernels' sources, the mistake of making it 32 bits wide.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lib_rocm_sd.arch import KERNELS_DIR
from tests import executed
from tests.verify import simt
from tests.verify.amdgpu import (
    far_attention,
    far_attention_backward,
    far_conv,
    far_layer_norm,
    far_linear,
    far_norm,
    sparse,
)
from tests.verify.amdgpu.errors import ExecutionError, UnsupportedError
from tests.verify.amdgpu.far_gradients import ALL as OF_GRADIENTS
from tests.verify.amdgpu.launch import missing

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a")
OF_NORMS = {**far_norm.ALL, **far_layer_norm.ALL}
ALL = {**far_attention.ALL, **far_conv.ALL, **OF_NORMS, **far_linear.ALL, **OF_GRADIENTS}
ALL |= far_attention_backward.ALL

needs_machine_code = pytest.mark.skipif(
    bool(missing() or sparse.missing()), reason=str(missing() or sparse.missing())
)
known = executed.known(by="clang")


def faults(gfx: str, case: str, kernels_dir: Path = KERNELS_DIR) -> str:
    try:
        return " | ".join(ALL[case](gfx, kernels_dir))
    except UnsupportedError:
        raise
    except ExecutionError as error:
        return f"{type(error).__name__}: {error}"


@known
@needs_machine_code
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("gfx", GPUS)
def test_what_lies_beyond_4_gib_is_right(gfx: str, case: str) -> None:
    assert faults(gfx, case) == ""


KEY = "batch * p.k_stride[0] + head * p.k_stride[2]"
MASK = "batch * p.mask_stride[0] + head * p.mask_stride[1] + query * p.mask_stride[2]"
IMAGE = "((i64)image * p.h + first_row) * p.w * p.in_stride"
MISTAKES = {
    "a key's": ("common/attention_tiles.h", KEY, "batches and heads of q, k and v"),
    "a mask's": ("common/attention_softmax.h", MASK, "a mask's strides"),
    "an image's": ("common/conv.h", IMAGE, "images of a 3x3 convolution"),
    "a row's": ("layer_norm.hip", "row * p.x_stride", "rows of a layer norm far apart"),
    "an output's": ("attention.hip", "first * HEAD_DIM", "queries and rows of the output"),
}


@known
@needs_machine_code
@pytest.mark.parametrize("offset", MISTAKES)
@pytest.mark.parametrize("width", ["int", "u32"])
@pytest.mark.parametrize("gfx", GPUS)
def test_an_offset_in_32_bits_is_seen(gfx: str, width: str, offset: str) -> None:
    """With a sign and without."""
    name, old, case = MISTAKES[offset]
    assert faults(gfx, case, simt.planted(name, old, f"({width})({old})"))


# -- every number of 64 bits

HEADS, APART = "batches and heads of q, k and v", "rows read one by one"
TILES, MASK_CASE = "rows of tiles", "a mask's strides"
BACKWARD, BACKWARD_MASK = "batches and heads of a backward", "a backward's mask"
SCORES, CONV = "rows of scores", "images of a 3x3 convolution"
IN_ROWS = "images of 3x3 with weights as they lie"
SPLIT = "pixels after a split convolution"
NORMS = "norms and statistics of a convolution"
LAST, FIRST = "images of a norm, channels last", "images of a norm, channels first"
WHOLE = "images of a whole norm"
MERGED, AFTER = "images of parts of statistics", "images after a library's convolution"
ROWS, ROWS_APART = "rows of a layer norm", "rows of a layer norm far apart"
LINEAR, IN_PARTS = "rows of a linear layer", "rows of a linear layer in parts"
BACK_ROWS, BACK_PARTS, BACK_PIXELS, BACK_LAST, BACK_FIRST, BACK_EIGHTS = (
    *("rows of a layer norm's gradients", "parts of a layer norm's gradients"),
    "pixels of a norm's gradients",
    *(f"images of a norm's gradients, {how}" for how in ("channels last", "channels first")),
    "images of a norm's gradients, eights of pixels",
)
FEW_PARTS = "never: 256 parts of so many channels are of tensors that no card holds"
UNREAD = "never: nothing reads it"
WITH_GAPS, GATE = "rows of a linear layer with gaps", "rows of a gate"
COUNTED = "never: what is counted are rows, or parts, and there are no more of them than work-items"
WEIGHTS = "never: weights of 4 GiB"
PART = "never: pixels of an image or of a part, which have 32 bits"
LANES = "never: what takes it keeps 32 bits, which suffice for rows of a tile"
SEEN_BY: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention.hip", "i64"): ("batches of the output", COUNTED),
    ("attention.hip", "p.k_stride["): (LANES,),
    ("attention.hip", "p.v_stride["): (LANES,),
    ("attention_backward.hip", "i64"): ("batches of gradients",),
    ("common/attention_backward.h", "i64"): (BACKWARD, BACKWARD_MASK, BACKWARD_MASK),
    ("common/attention_backward.h", "p.mask_stride["): (BACKWARD_MASK,) * 4,
    ("softmax.hip", "i64"): (SCORES, SCORES),
    ("conv_sum.hip", "i64"): (SPLIT, SPLIT, COUNTED),
    ("linear.hip", "i64"): (LINEAR, LINEAR, IN_PARTS, IN_PARTS, GATE, WITH_GAPS, IN_PARTS),
    ("pack.hip", "i64"): (WEIGHTS, WEIGHTS),
    ("group_norm_silu.hip", "i64"): (
        *(LAST, LAST, LAST, "pixels of a norm", LAST),
        *(AFTER, AFTER, "images after a library's upsampling", COUNTED, AFTER, AFTER),
        *(LAST, FIRST, COUNTED, COUNTED, COUNTED, PART, FIRST, PART, FIRST, COUNTED, FIRST),
        *(MERGED, "parts of statistics", MERGED),
        *("statistics of a norm", "never: what is left of very many parts", "statistics of a norm"),
    ),
    ("group_norm_whole.hip", "i64"): (WHOLE, WHOLE, WHOLE, WHOLE),
    ("layer_norm.hip", "i64"): (ROWS_APART, ROWS, ROWS),
    ("layer_norm_backward.hip", "i64"): (
        *(BACK_ROWS, BACK_ROWS, COUNTED, BACK_PARTS, BACK_PARTS, COUNTED, FEW_PARTS),
    ),
    ("group_norm_backward.hip", "i64"): (
        *(*(BACK_LAST,) * 10, BACK_PIXELS, UNREAD, BACK_LAST, BACK_LAST),
        *(BACK_FIRST, BACK_FIRST, BACK_EIGHTS, UNREAD, BACK_FIRST, COUNTED),
        *(BACK_EIGHTS, BACK_FIRST),
    ),
    ("common/pair_sums.h", "i64"): (FEW_PARTS,),
    ("common/attention_layout.h", "i64"): (HEADS, MASK_CASE),
    ("common/attention_softmax.h", "i64"): (MASK_CASE, MASK_CASE, MASK_CASE),
    ("common/attention_softmax.h", "p.mask_stride["): (MASK_CASE,) * 4,
    ("common/attention_tiles.h", "p.mask_stride["): ("key lengths far apart",),
    ("common/attention_tiles.h", "p.q_stride["): (HEADS, HEADS, TILES, LANES, APART),
    ("common/attention_tiles.h", "p.k_stride["): (HEADS, HEADS, TILES, APART),
    ("common/attention_tiles.h", "p.v_stride["): (HEADS, HEADS, TILES, APART),
    ("common/conv.h", "i64"): (
        *(WEIGHTS, CONV, NORMS, IN_ROWS, CONV, WEIGHTS, NORMS, CONV, COUNTED, NORMS),
    ),
    ("common/platform.h", "i64"): ("never: the type itself",),
    ("common/tile.h", "i64"): (APART, LANES, APART, LANES, APART),
}
"""By file and word, for each place where it stands: the case that sees it cut to 32 bits."""


def test_each_number_of_64_bits_has_a_case_or_a_reason() -> None:
    """In the kernels' own sources; those for the development card alone have other tests."""
    found: dict[tuple[str, str], int] = {}
    for folder in (KERNELS_DIR, KERNELS_DIR / "common"):
        for path in sorted(each for each in folder.iterdir() if each.suffix in (".hip", ".h")):
            words = re.findall(r"\bi64\b|p\.\w+_stride\[", path.read_text(encoding="utf-8"))
            name = path.relative_to(KERNELS_DIR).as_posix()
            found |= {(name, word): words.count(word) for word in words}
    assert found == {place: len(cases) for place, cases in SEEN_BY.items()}
    named = {case for cases in SEEN_BY.values() for case in cases}
    assert not {case for case in named if not case.startswith("never: ")} - set(ALL)


PLACES = [
    (name, word, number, case)
    for (name, word), cases in SEEN_BY.items()
    for number, case in enumerate(cases)
    if case in ALL
]


@known
@needs_machine_code
@pytest.mark.parametrize(
    ("gfx", "place"),
    [(GPUS[turn % len(GPUS)], place) for turn, place in enumerate(PLACES)],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each[:3])),
)
def test_each_number_of_64_bits_is_seen_where_it_has_32(
    gfx: str, place: tuple[str, str, int, str]
) -> None:
    """Each on one GPU, in turn."""
    name, word, number, case = place
    cut = "u32" if word == "i64" else f"(u32){word}"
    assert faults(gfx, case, simt.planted(name, word, cut, number))
