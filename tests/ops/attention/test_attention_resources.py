"""What the newest compiler here makes of attention: no spills, with a mask or without."""

from __future__ import annotations

import pytest

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import clang, codeobject
from lib_rocm_sd.runtime.compiler import Compiler
from tests import compiled, executed

pytestmark = executed.known(by=executed.NEWEST)

ONE_OF_EACH = ("gfx1030", "gfx1100", "gfx1102", "gfx1201", "gfx90a", "gfx942")
"""gfx1102 stands for the RDNA3 chips with the smaller register file, whose forms differ."""


def newest(arch: Arch) -> Compiler:
    """ziglang's clang, whose LLVM is mostly newer than a system's, else the one in PATH."""
    for each in (*clang.zig_clangs(), *clang.path_clangs()):
        if isinstance(each, clang.Clang) and not each.refusals(arch):
            return each
    pytest.skip(f"no clang for {arch.gfx}")


def check(arch: Arch, spec: KernelSpec) -> None:
    code = compiled.code(newest(arch), spec, arch)
    (found,) = codeobject.resources(code)
    what = f"{arch.gfx} {spec}: {found}"
    assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0), what
    assert found.lds_bytes <= 65536, what


@pytest.mark.parametrize("gfx", ONE_OF_EACH)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_the_safe_default_spills_nothing_with_a_mask(gfx: str, head_dim: int) -> None:
    arch = table()[gfx]
    safe = kernel.configs(arch, head_dim)[0]
    check(arch, kernel.spec("float16", head_dim, "float32", safe))


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1102", "gfx1201"])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_no_config_spills_without_a_mask(gfx: str, head_dim: int) -> None:
    arch = table()[gfx]
    for config in kernel.configs(arch, head_dim):
        check(arch, kernel.spec("float16", head_dim, "none", config))
