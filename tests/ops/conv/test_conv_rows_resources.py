"""What a compiler makes of convolutions with weights as they lie, and how they are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lib_rocm_sd.arch import table
from lib_rocm_sd.ops.conv import kernel, rows
from lib_rocm_sd.ops.conv.problem import ConvProblem
from tests import executed
from tests.ops.conv.test_conv_resources import ONE_OF_EACH, check, clang
from tests.ops.conv.unet_layers import launched, searched

AMD = [gfx for gfx, arch in table().items() if arch.is_amd]
PLAIN = ConvProblem("3x3", 2, 32, 32, 64, 64, norm=True, statistics=True, in_rows=True)
STRIDED = ConvProblem("3x3 stride 2 padded", 2, 64, 64, 64, 64, in_rows=True)


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_what_a_unet_launches_spills_nothing_and_two_waves_fit_a_simd(gfx: str) -> None:
    arch = table()[gfx]
    compiler = clang(arch)
    for spec, block in searched(arch).items():
        check(compiler, spec, arch, block)
    fused = ("bfloat16", True, "conv", 1280)
    halves = ConvProblem("3x3", 2, 16, 16, 1280, 1280, *fused, in_rows=True)
    for config in rows.configs(arch, halves):
        check(compiler, kernel.spec(halves, config), arch, config.block)


@pytest.mark.parametrize("gfx", AMD)
def test_no_channel_of_a_unet_is_computed_in_vain(gfx: str) -> None:
    arch = table()[gfx]
    for channels in (320, 640, 960, 1280):
        for kind in (PLAIN, STRIDED):
            problem = replace(kind, in_channels=channels, out_channels=channels)
            config = rows.configs(arch, problem)[0]
            assert channels % config.block_co == 0, config


@pytest.mark.parametrize("gfx", AMD)
def test_configs_are_apt(gfx: str) -> None:
    """Whole chunks of both inputs; few work-groups are split, and each has channels enough."""
    arch = table()[gfx]
    for p in launched():
        found = rows.configs(arch, p)
        assert found and len(set(found)) == len(found)
        for config in found:
            assert config.block <= 1024 and 16 % config.rows == 0
            assert p.in_channels % config.chunk_c == p.through % config.chunk_c == 0
            assert config.splits * kernel.LEAST_CHANNELS <= max(p.in_channels, 64)
            assert config.splits <= p.in_channels // config.chunk_c
        groups = rows._groups(found[0], p)
        assert groups * found[0].splits <= max(kernel.wanted_groups(arch), groups)
        if groups * 2 <= kernel.wanted_groups(arch):
            assert found[0].splits > 1


def test_odd_numbers_of_channels_have_smaller_chunks_or_none() -> None:
    arch = table()["gfx1100"]
    for channels, shortcut, chunk in ((64, 0, 64), (96, 0, 32), (64, 48, 16), (80, 64, 16)):
        small = replace(PLAIN, batch=1, height=9, width=9, in_channels=channels)
        problem = replace(small, shortcut="conv", shortcut_channels=shortcut)
        assert rows.chunk_of(problem) == chunk
        assert all(config.chunk_c <= chunk for config in rows.configs(arch, problem))
    for channels in (4, 9, 8, 40):
        assert rows.configs(arch, replace(small, in_channels=channels)) == ()
