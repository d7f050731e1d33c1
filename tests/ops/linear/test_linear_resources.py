"""What a compiler makes of linear layers: no spills, LDS and waves enough; what is chosen first."""

from __future__ import annotations

import pytest

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.problem import FEW_WEIGHTS, USUAL
from lib_rocm_sd.runtime import codeobject
from tests import compiled, executed
from tests.ops.conv.test_conv_resources import ONE_OF_EACH, clang

AMD = [gfx for gfx, arch in table().items() if arch.is_amd]


def check(arch: Arch, specs: list[kernel.KernelSpec]) -> None:
    for spec in specs:
        (found,) = codeobject.resources(compiled.code(clang(arch), spec, arch))
        what = f"{arch.gfx} {spec}: {found}"
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0), what
        assert found.lds_bytes <= 65536, what
        assert codeobject.waves_per_simd(arch, found, found.max_block) >= 2, what


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_nothing_that_is_shipped_or_searched_spills_and_two_waves_fit_a_simd(gfx: str) -> None:
    arch = table()[gfx]
    shipped, searched = kernel.shipped_specs(arch), kernel.searched_specs(arch)
    assert {*shipped} <= {*searched}
    check(arch, searched)


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_bfloat16_and_a_gate_over_parts_of_k_spill_nothing(gfx: str) -> None:
    arch = table()[gfx]
    check(
        arch,
        [
            spec
            for config in kernel.sizes(arch, "bfloat16")
            for gate in (False, True)
            for spec in (
                kernel.spec("bfloat16", gate, False, config),
                kernel.spec("bfloat16", gate, True, config),
                kernel.sum_spec("bfloat16", gate),
            )
        ],
    )


@pytest.mark.parametrize("gfx", table())
def test_configs_are_apt(gfx: str) -> None:
    """All rows and all of k are made; few rows not by a work-group of many."""
    arch = table()[gfx]
    for _, layer in USUAL:
        shape = (layer.rows, layer.k, layer.columns, layer.gate)
        found = kernel.configs(arch, "float16", *shape)
        assert len(set(found)) == len(found) >= len(kernel.sizes(arch, "float16", layer.gate))
        for config in found:
            cut = kernel.tiling(*shape, config)
            assert config.block <= 1024 and config.chunk_k % 16 == 0
            assert config.lds_bytes <= arch.lds_bytes
            assert (cut.parts - 1) * cut.part_chunks * config.chunk_k < layer.k
            assert cut.row_blocks % cut.together == 0 and cut.together <= kernel.MOST_TOGETHER
            assert (cut.row_blocks - cut.together) * config.block_rows < layer.rows
        if layer.rows == 2:
            assert found[0].block_rows <= 64


@pytest.mark.parametrize("gfx", AMD)
def test_what_is_shipped_is_what_the_layers_launch_first(gfx: str) -> None:
    arch = table()[gfx]
    shipped = kernel.shipped_specs(arch)
    assert len(shipped) <= 20
    for _, layer in USUAL:
        shape = (layer.rows, layer.k, layer.columns, layer.gate)
        first = kernel.configs(arch, "float16", *shape)[0]
        many = len(layer.columns) > FEW_WEIGHTS
        made = kernel.specs("float16", layer.gate, first.parts > 1, first, many)
        assert {*made} <= {*shipped}
