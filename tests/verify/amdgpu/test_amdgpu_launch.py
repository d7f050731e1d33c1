"""A launch that is not what a kernel was compiled for, or that its GPU cannot have, is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.ops.attention.ours import THREADS, SoftmaxParams, softmax_spec
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.runtime.codeobject import KernelResources
from tests.verify import simt
from tests.verify.amdgpu import limits, loader
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.errors import LaunchError
from tests.verify.amdgpu.judge import execute, specs_of
from tests.verify.amdgpu.launch import CodeLaunch, built, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a")
AT = 0x1000


def case(gfx: str) -> Case:
    return Case(gfx, "attention", AttentionProblem(1, 1, 33, 131, 40, "float16", "none"))


def program(gfx: str) -> loader.Program:
    (spec,) = specs_of(case(gfx))
    return loader.load(built(spec, case(gfx).arch), spec.entry)


@pytest.mark.parametrize("gfx", GPUS)
def test_a_kernel_compiled_for_half_of_its_block_is_not_launched(gfx: str) -> None:
    size = "amdgpu_flat_work_group_size({0}, {0})"
    plant = ("common/platform.h", size.format("threads"), size.format("(threads) / 2"))
    (said,) = execute(case(gfx), simt.planted(*plant)).faults
    block = program(gfx).resources.max_block
    assert said.startswith("LaunchError")
    assert f"compiled for {block // 2} work-items, launched with {block}" in said


def said(
    gfx: str, given: int = 0, at: int = AT, grid: int = 3, block: int = 0, **needs: Any
) -> str:
    """What is wrong with a launch of this program, if a kernel like it had these needs."""
    made = program(gfx)
    size, most = given or made.resources.kernarg_bytes, block or made.resources.max_block
    made = replace(made, resources=replace(made.resources, **needs))
    try:
        limits.check(made, b"\0" * size, at, grid, most)
    except LaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("gfx", GPUS)
def test_what_is_right_is_launched(gfx: str) -> None:
    block = program(gfx).resources.max_block
    assert said(gfx) == ""
    assert said(gfx, required_block=(block, 1, 1)) == ""
    assert said(gfx, grid=limits.MOST_WORK_ITEMS // block) == ""
    assert said(gfx, lds_bytes=65536, kernarg_align=16) == ""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no groups": ({"grid": 0}, "a launch of 0 work-groups"),
    "too many work-items": ({"grid": 1 << 31}, "more than one launch may have"),
    "a larger block": ({"block": 513}, "launched with 513"),
    "another block than required": (
        {"required_block": (64, 1, 1)},
        "(64, 1, 1) work-items",
    ),
    "too many registers": ({"vgprs": 4096}, "4096 registers are more"),
    "too much LDS": ({"lds_bytes": 65552}, "65552 bytes of LDS"),
    "too much scratch": ({"scratch_bytes": 1 << 22}, "4194304 bytes of scratch"),
    "a stack without end": ({"dynamic_stack": True}, "a stack of which"),
    "arguments cut short": ({"given": 176}, "176 bytes of arguments, 184 expected"),
    "arguments that are too many": ({"given": 192}, "192 bytes of arguments, 184 expected"),
    "arguments that want more than drivers give": ({"kernarg_align": 64}, "multiples of 64"),
    "arguments that lie askew": ({"at": 0x1004}, "arguments at 0x1004, no multiple of 8"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("gfx", GPUS)
def test_what_is_wrong_is_named(gfx: str, wrong: str) -> None:
    changes, message = WRONG[wrong]
    assert message in said(gfx, **changes)


def test_another_wave_size_than_the_rows_is_refused() -> None:
    """As with a row of arch.json that says 64 where the compiler makes waves of 32."""
    launch = CodeLaunch(replace(case("gfx1100").arch, wave_size=64))
    spec = softmax_spec("float16", 1)
    with pytest.raises(LaunchError, match="waves of 32, gfx1100 has 64"):
        launch(spec, 1, THREADS, SoftmaxParams(), torch.device("cpu"))


FIELDS = {"lds": 64, "scratch": 32, "kernarg": 16, "rsrc1": 3, "rsrc2": 1}
NEEDS = KernelResources("kernel", 32, 0, 16, 0, 0, 64, 32, 32, 16)
"""Four granules of eight registers."""


def test_a_descriptor_that_sets_up_what_is_used_is_taken() -> None:
    loader.agree(FIELDS, NEEDS, "rdna3")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lds", 32, r"LDS \(32, 64 bytes\)"),
        ("scratch", 0, r"scratch \(0, 32 bytes\)"),
        ("kernarg", 8, r"arguments \(8, 16 bytes\)"),
        ("rsrc1", 2, "32 registers are used, 24 allocated"),
        ("rsrc2", 0, "32 bytes of scratch, which is not set up"),
    ],
)
def test_a_descriptor_that_sets_up_less_is_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader.agree({**FIELDS, field: value}, NEEDS, "rdna3")
