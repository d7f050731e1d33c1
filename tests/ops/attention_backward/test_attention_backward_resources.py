"""What the newest compiler here makes of attention's gradients, and of the forward pass for them:
nothing that is shipped spills.
"""

from __future__ import annotations

import pytest

from lib_rocm_sd.arch import table
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.runtime import clang, codeobject
from lib_rocm_sd.runtime.compiler import Compiler
from tests import compiled, executed

ONE_OF_EACH = ("gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942", "gfx950")
pytestmark = executed.known(by=executed.NEWEST)


def newest(gfx: str) -> Compiler:
    """ziglang's clang, whose LLVM is mostly newer than a system's, else the one in PATH."""
    for each in (*clang.zig_clangs(), *clang.path_clangs()):
        if isinstance(each, clang.Clang) and not each.refusals(table()[gfx]):
            return each
    pytest.skip(f"no clang for {gfx}")


def check(gfx: str, head_dim: int, dtype: str, mask: str) -> None:
    arch = table()[gfx]
    specs = [
        spec
        for config in kernel.configs(arch, head_dim)
        for spec in kernel.specs(dtype, head_dim, mask, config)
    ]
    if mask == "none":
        specs += kernel.forward_specs(arch, dtype, head_dim)
    for spec in specs:
        (found,) = codeobject.resources(compiled.code(newest(gfx), spec, arch))
        what = f"{gfx} {spec}: {found}"
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0), what
        assert found.lds_bytes <= 65536, what


@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_nothing_that_is_shipped_spills(gfx: str) -> None:
    for head_dim in kernel.SHIPPED_HEAD_DIMS:
        for dtype in kernel.DTYPES:
            check(gfx, head_dim, dtype, "none")


@pytest.mark.parametrize("gfx", ONE_OF_EACH[:-1])
def test_nothing_spills_with_a_mask_up_to_head_dim_80(gfx: str) -> None:
    for head_dim in (40, 64, 80):
        check(gfx, head_dim, "float16", "float32")


@pytest.mark.parametrize("gfx", ONE_OF_EACH[:-1])
def test_nothing_spills_at_the_largest_head_dim(gfx: str) -> None:
    check(gfx, 256, "float16", "none")
