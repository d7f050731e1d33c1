"""What a compiler makes of the convolutions that are shipped: no spills, LDS and waves enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.runtime import codeobject, compilers
from lib_rocm_sd.runtime.compiler import Compiler
from tests import compiled, executed


def conv(kind: str, taken: int, out: int, **fused: Any) -> ConvProblem:
    """A problem of some size: neither kernels nor configs depend on it."""
    return ConvProblem(kind, 1, 64, 64, taken, out, **fused)


SPLIT = (
    conv("3x3", 1280, 1280, norm=True, shortcut="conv"),
    conv("3x3", 640, 640, norm=True),
    conv("3x3 stride 2 padded", 1280, 1280),
    conv("upsample", 1280, 1280),
)
"""Whose channels are split."""
ONE_OF_EACH = ("gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942")
LARGEST = (
    conv("3x3", 512, 512, norm=True, shortcut="conv", statistics=True),
    conv("3x3", 256, 256, norm=True, shortcut="identity", statistics=True, in_place=True),
    conv("3x3", 256, 256, norm=True, shortcut="conv", statistics=True, in_place=True),
    conv("3x3", 128, 128, norm=True, shortcut="conv", statistics=True),
    conv("3x3", 128, 128, norm=True, shortcut="identity"),
    conv("3x3", 128, 3, norm=True),
    conv("3x3", 16, 512, statistics=True),
    conv("3x3 stride 2", 512, 512, statistics=True),
    conv("upsample", 512, 512, statistics=True),
)
"""The others leave something out."""
ADDED = {"shortcut": "identity", "shortcut_channels": 64}
UPSCALERS = (
    conv("3x3", 160, 32, epilogue="leaky relu"),
    conv("3x3", 192, 64, epilogue="none", **ADDED),
    conv("3x3", 64, 64, epilogue="prelu"),
    conv("3x3", 64, 64, epilogue="gate", **ADDED),
    conv("upsample", 64, 64, epilogue="leaky relu"),
    conv("3x3", 64, 16, epilogue="none"),
)
"""With what comes after them in upscalers."""


def clang(arch: Arch) -> Compiler:
    """One that was verified for this GPU, if any was: LLVM 22 spills one form on gfx1201."""
    refused: list[str] = []
    known = arch.gfx in compilers._verified()
    for compiler in compilers.in_order(arch):
        if compiler.name == "clang":
            why = compiler.refusals(arch) or ([compilers.note(compiler, arch)] if known else [])
            if not any(why):
                return compiler
            refused += why
    pytest.skip(f"no clang for {arch.gfx}: {'; '.join(refused)}")


def check(compiler: Compiler, spec: KernelSpec, arch: Arch, block: int) -> None:
    code = compiled.code(compiler, spec, arch)
    (found,) = codeobject.resources(code)
    what = f"{arch.gfx} {spec}: {found}"
    assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0), what
    assert found.lds_bytes <= 65536, what
    assert codeobject.waves_per_simd(arch, found, block) >= 2, what


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_the_largest_forms_spill_nothing_and_two_waves_fit_a_simd(gfx: str) -> None:
    arch = table()[gfx]
    compiler = clang(arch)
    for problem in LARGEST:
        config = kernel.configs(arch, problem)[0]
        assert kernel.spec(problem, config) in kernel.shipped_specs(arch)
        check(compiler, kernel.spec(problem, config), arch, config.block)
    for problem in SPLIT:
        for config in kernel.configs(arch, problem):
            spec = kernel.spec(problem, replace(config, splits=2))
            assert spec in kernel.searched_specs(arch)
            check(compiler, spec, arch, config.block)
    for problem in UPSCALERS:
        for config in kernel.configs(arch, problem):
            check(compiler, kernel.spec(problem, config), arch, config.block)
    check(compiler, kernel.sum_spec("float16"), arch, kernel.SUM_THREADS)
    problem = replace(LARGEST[0], dtype="bfloat16")
    config = kernel.configs(arch, problem)[0]
    check(compiler, kernel.spec(problem, config), arch, config.block)


@pytest.mark.parametrize("gfx", [gfx for gfx, arch in table().items() if arch.is_amd])
def test_no_config_makes_many_more_channels_than_there_are(gfx: str) -> None:
    """Of the UNet's; of the VAE's the largest work-group that has no more than there are."""
    arch = table()[gfx]
    for channels in (320, 640, 1280, 1920):
        config = kernel.configs(arch, conv("3x3", channels, channels, norm=True))[0]
        made = -(-channels // config.block_co) * config.block_co
        assert made <= 1.25 * channels and config.block_co >= 128, config
    for channels in (128, 256, 512):
        found = kernel.configs(arch, conv("3x3", channels, channels, norm=True))
        apt = [config.block_co for config in found if config.block_co <= channels]
        assert found[0].block_co == max(apt)


@pytest.mark.parametrize("gfx", [gfx for gfx, arch in table().items() if arch.is_amd])
def test_configs_are_apt(gfx: str) -> None:
    arch = table()[gfx]
    for p in kernel.vae_problems():
        found = kernel.configs(arch, p)
        assert found and len(set(found)) == len(found)
        for config in found:
            assert config.block <= 1024 and config.rows >= kernel.LEAST_ROWS
            assert 16 % config.rows == 0  # a band begins and ends with rows of work-groups
            if p.in_place and p.shortcut == "conv":
                assert config.block_co >= p.out_channels
