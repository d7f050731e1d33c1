"""Mistakes planted in kernels and in their machine code: the executor must catch each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ConvProblem
from tests import compiled, executed, noted
from tests.compiled import hash_of, text_of
from tests.verify import simt
from tests.verify.amdgpu import executor, mistakes, patch
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.gradients import specs_of
from tests.verify.amdgpu.judge import execute
from tests.verify.amdgpu.launch import built, compiler, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942")
PROBLEM = AttentionProblem(1, 1, 33, 131, 40, "float16", "none")
CONV = ConvProblem("3x3", 1, 9, 18, 64, 48, "float16", True, "identity", 48, True)


def attention(gfx: str, **changes: Any) -> Case:
    return Case(gfx, "attention", replace(PROBLEM, **changes))


def faults(case: Case, name: str, old: str, new: str, occurrence: int = 0) -> str:
    return " | ".join(execute(case, simt.planted(name, old, new, occurrence)).faults)


def unchanged(case: Case, kernels_dir: Path) -> bool:
    """Whether the mistake is in none of the kernels that the case launches."""
    if compiled.noting is not None:
        return False

    def text(spec: KernelSpec, folder: Path = KERNELS_DIR) -> bytes:
        return patch.text(built(spec, case.arch, folder), spec.entry)

    return all(text(spec) == text(spec, kernels_dir) for spec in specs_of(case))


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", GPUS)
def test_what_is_not_changed_is_right(gfx: str) -> None:
    assert execute(attention(gfx)).faults == ()
    assert execute(Case(gfx, "conv", CONV)).faults == ()


SOFTMAX = "common/attention_softmax.h"
BARRIER_GPUS = ("gfx1201", "gfx942")
"""Waves of 32 and of 64 lanes; a barrier of two instructions, and of one as elsewhere."""
BARRIERS = simt.places("barrier();", "attention.hip", "common/attention_tiles.h", SOFTMAX)


def each_barrier() -> Iterator[Any]:
    """On both GPUs; always on one of them, in turn."""
    for turn, (name, number) in enumerate(BARRIERS):
        for place, gfx in enumerate(BARRIER_GPUS):
            marks = executed.always if turn % 2 == place else ()
            yield pytest.param(gfx, name, number, marks=marks)


@executed.known(by="clang")
@pytest.mark.parametrize(("gfx", "name", "number"), each_barrier())
def test_a_removed_barrier_is_a_race(gfx: str, name: str, number: int) -> None:
    """Whichever form has it: waves with queries of their own, shared ones, tiles in parts. A form
    without it has the same machine code as before, which is right.
    """
    kernels_dir = simt.planted(name, "barrier();", "(void)0;", number)
    said = []
    for head_dim, config in ((40, 0), (40, 3), (256, 0), (512, 0)):
        case = replace(attention(gfx, head_dim=head_dim), config=config)
        if config >= len(MatrixAttention().configs(case.arch, case.problem)):
            continue
        if unchanged(case, kernels_dir):
            continue
        said.append(" | ".join(execute(case, kernels_dir).faults))
        if "RaceError" in said[-1] or "HazardError" in said[-1]:
            return
    pytest.fail(f"not caught: {said}")


def is_wait(name: str) -> bool:
    return re.match(r"S_WAITCNT$|S_WAIT_(LOAD|DS|KM)CNT|S_WAITCNT_VMCNT", name) is not None


@pytest.mark.parametrize("gfx", GPUS)
def test_a_removed_wait_is_a_hazard(gfx: str) -> None:
    """One at a time of the waits that are reached. A few have nothing to wait for, of LLVM 22's
    more than of 19's.
    """
    case = attention(gfx, head_dim=64)
    (spec,) = specs_of(case)
    code = built(spec, case.arch)
    reached = execute(case).reached[spec]
    waits = patch.found(
        code, spec.entry, lambda each: is_wait(each.name) and each.address in reached
    )
    assert len(waits) > 20
    chosen = waits[:: len(waits) // 10]
    said = [
        " ".join(execute(case, changed=partial(patch.without, instruction=each)).faults)
        for each in chosen
    ]
    caught = [text for text in said if "HazardError" in text]
    assert len(caught) >= 0.8 * len(chosen), said


LAYOUTS = {
    "gfx1030": ("return (lane_id() + 8 * (lane_id() / 16)) % 16;", "return lane_id() % 16;"),
    "gfx1100": ("return 8 * (lane_id() % 2) + lane_id() % 16 / 2;", "return lane_id() % 16;"),
    "gfx1201": (
        "return kElements * (lane_id() / 16) + e;",
        "return 2 * e + lane_id() / 16 % 2;",
    ),
    "gfx942": ("kHalves * (lane_id() / 16); }", "kHalves * (3 - lane_id() / 16); }"),
}


@pytest.mark.parametrize("gfx", GPUS)
def test_another_units_layout_gives_wrong_results(gfx: str) -> None:
    assert "largest error" in faults(attention(gfx), "common/mma.h", *LAYOUTS[gfx])


TAILS = {
    "one key too many": ("x = key_in < past ?", "x = key_in <= past ?", 131),
    "the last tile is not masked": (
        "tail = first_k + BLOCK_K > seq_k();",
        "tail = first_k + BLOCK_K > seq_k() + 1;",
        127,
    ),
}


@pytest.mark.parametrize("mistake", TAILS)
@pytest.mark.parametrize("gfx", GPUS)
def test_a_tail_that_is_off_by_one_gives_wrong_results(gfx: str, mistake: str) -> None:
    old, new, seq_k = TAILS[mistake]
    assert "largest error" in faults(attention(gfx, seq_k=seq_k), SOFTMAX, old, new)


OUTSIDE = {
    "rows of k after the last": ("common/tile.h", "aligned && rows >= Place::kRows", "aligned"),
    "an output row after the last": (
        "attention.hip",
        "else if (query(t) + n < (int)p.seq_q &&",
        "else if (query(t) + n <= (int)p.seq_q &&",
    ),
    "a mask's column after the last": (
        SOFTMAX,
        "+ key_in, seq_k() - 1);",
        "+ key_in, seq_k());",
    ),
}


@pytest.mark.parametrize("mistake", OUTSIDE)
@pytest.mark.parametrize("gfx", GPUS)
def test_one_element_out_of_bounds_is_seen(gfx: str, mistake: str) -> None:
    """By the config that fetches tiles ahead; where it does not, no load without a use is left.
    RDNA2 has no such one.
    """
    config = 0 if gfx == "gfx1030" else 3
    case = replace(attention(gfx, seq_q=33, seq_k=77, mask="float32"), config=config)
    said = faults(case, *OUTSIDE[mistake])
    assert "OutOfBoundsError" in said and "lane" in said


EPILOGUES = {
    "leaky relu": ("x < 0.0f ? x * slope : x", "x * slope"),
    "prelu": ("p.slopes[channel]", "p.slopes[channel ^ 1]"),
    "silu": ("return x * p.scale;", "return x;"),
    "none": (
        "add_identity(p.second, p.second_stride)",
        "add_identity(p.shortcut, p.second_stride)",
    ),
    "gate": ("sigmoid(before.v[e])", "sigmoid(acc[i][j].v[e])"),
}
"""By activation, old and new text."""


@executed.known(by="clang")
@pytest.mark.parametrize("activation", EPILOGUES)
@pytest.mark.parametrize("gfx", GPUS)
def test_a_mistake_after_a_convolution_is_seen(gfx: str, activation: str) -> None:
    added = {"shortcut": "identity", "shortcut_channels": 48}
    problem = ConvProblem("3x3", 1, 3, 18, 16, 48, epilogue=activation, **added)  # type: ignore[arg-type]
    assert "largest error" in faults(
        Case(gfx, "conv", problem), "common/conv.h", *EPILOGUES[activation]
    )


TWO = replace(PROBLEM, batch=2, heads=2)
ONCE_MISSED: dict[str, tuple[tuple[str, str, str], dict[str, Any]]] = {
    "the next image's row is overwritten": (
        ("attention.hip", "else if (query(t) + n < (int)p", "else if (query(t) + n <= (int)p"),
        {"problem": TWO},
    ),
    "a mask's stride of heads": (
        (SOFTMAX, " + head * p.mask_stride[1]", ""),
        {"problem": replace(TWO, mask="float16"), "mask_of": "whole"},
    ),
    "a mask's stride of images": (
        (SOFTMAX, "batch * p.mask_stride[0] + ", ""),
        {"problem": replace(TWO, mask="bool"), "mask_of": "turned"},
    ),
    "a negative scale": (("common/tile.h", "x.word[w] ^= flip;", ";"), {"scale": -0.3}),
    "half a wave of 64 is asked": (
        ("common/platform.h", "amdgcn_ballot_w64(x) != 0", "amdgcn_ballot_w64(x) << 32 != 0"),
        {"gfx": "gfx942", "values": "growing"},
    ),
    "rows after the last are not zero": (
        ("common/tile.h", "row < rows ? x.word[i] : 0", "x.word[i]"),
        {"values": "infinite"},
    ),
}
"""What only the shim saw, or only by luck: old and new text, and what the case has for it."""


@pytest.mark.parametrize("mistake", ONCE_MISSED)
def test_what_was_once_missed_is_seen(mistake: str) -> None:
    planted, changes = ONCE_MISSED[mistake]
    case = replace(attention("gfx1201"), **changes)
    assert not execute(case).faults
    assert faults(case, *planted)


def test_what_an_old_compiler_moves_behind_a_branch_is_caught() -> None:
    """LLVM before 22 or 23 moves WMMA, where only some lanes still take part."""
    found = compiler()
    assert found is not None
    version = re.search(r"-(\d+)$", found.path.resolve().parent.parent.name)
    if version is None or int(version[1]) > 21:
        pytest.skip(f"{found.path} is not known to move it")
    pin = ("common/platform.h", 'asm volatile("" : "+v"(x));', "")
    plain = replace(CONV, statistics=False)
    assert "inactive lanes" in faults(Case("gfx1201", "conv", plain), *pin)


def test_an_instruction_that_the_executor_lacks_is_no_mistake_that_was_found() -> None:
    case = attention("gfx1100")
    (spec,) = specs_of(case)
    first = patch.found(built(spec, case.arch), spec.entry, lambda each: each.size == 4)[0]
    halt = (0xBF820001).to_bytes(4, "little")  # s_sethalt 1
    with pytest.raises(UnsupportedError, match="S_SETHALT"):
        execute(case, changed=lambda code: patch.replaced(code, first.address, halt))


GPUS_OF_PLACES = ("gfx1201", "gfx942", "gfx1100", "gfx1030")


def each_place() -> Iterator[Any]:
    """Those that are no mistake, and those that only another test finds, are left out."""
    for place in mistakes.places():
        if not mistakes.excuse(place):
            yield pytest.param(place, id=str(place))


def place_parts(codes: noted.Codes, place: mistakes.Place) -> object:
    """The kernels with the mistake, and what each case launches of those without it."""
    kernels_dir = place.planted()
    cases = [case for gfx in GPUS_OF_PLACES for case in mistakes.CASES[place.name](gfx)]
    sources = sorted({spec.source for case in cases for spec in specs_of(case)})
    texts = [hash_of(text_of(kernels_dir / source)) for source in sources]
    return executor.VERSION, texts, [launched(codes, case) for case in cases]


@cache
def launched(codes: noted.Codes, case: Case) -> list[object]:
    return noted.steps_of(codes, lambda: execute(case))


@executed.known(by="clang", parts=place_parts)
@pytest.mark.parametrize("place", list(each_place()))
def test_each_barrier_tail_limit_fill_stride_and_lane_matters(place: mistakes.Place) -> None:
    """Removed or shifted, some case of its file shows it, on one of these GPUs."""
    kernels_dir = place.planted()
    for gfx in GPUS_OF_PLACES:
        for case in mistakes.CASES[place.name](gfx):
            if not unchanged(case, kernels_dir) and execute(case, kernels_dir).faults:
                return
    pytest.fail(f"nothing shows it: {place.text}")


def test_every_kernel_has_planted_mistakes() -> None:
    """A new file says which cases find the mistakes in it; what is excused is there."""
    assert set(mistakes.files()) == set(mistakes.CASES)
    found = list(mistakes.places())
    for excused in mistakes.EXCUSED:
        assert any(mistakes.fits(excused, place) for place in found), excused
    having = {place.name for place in found}
    assert {name for name in mistakes.files() if name not in having} == mistakes.NOTHING_MARKED
