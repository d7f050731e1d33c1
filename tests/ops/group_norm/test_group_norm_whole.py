"""Which images are normalised in one launch, how they are cut, what is compiled for them."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.group_norm import formula, kernel, whole
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.problem import ODD, GroupNormProblem, NormProblem
from lib_rocm_sd.ops.group_norm.whole import CONFIGS, WholeConfig
from lib_rocm_sd.runtime import build, codeobject
from tests import executed
from tests.ops.toy_op import CPU

TABLE = arch.table()
ROW = TABLE["gfx1100"]
AMD = sorted(gfx for gfx, row in TABLE.items() if row.is_amd)


def chosen(channels: int, side: int, gfx: str = "gfx1100") -> tuple[WholeConfig, ...]:
    return whole.configs(TABLE[gfx], channels, side * side, 32, 8)


@pytest.mark.parametrize("gfx", AMD)
@pytest.mark.parametrize(
    ("channels", "side", "threads", "held"),
    [
        (1280, 8, 256, 4),
        (2560, 8, 256, 4),
        (1280, 16, 256, 8),
        (1920, 16, 512, 8),
        (2560, 16, 512, 8),
        (320, 32, 512, 12),
        (640, 32, 512, 12),
        (1280, 32, 512, 12),
        (960, 32, 512, 32),
        (1920, 32, 512, 32),
        (2560, 32, 512, 32),
    ],
)
def test_a_unets_images_up_to_32x32_are_held(
    gfx: str, channels: int, side: int, threads: int, held: int
) -> None:
    assert chosen(channels, side, gfx) == (WholeConfig(threads, held),)


def test_others_take_steps() -> None:
    for channels, side in ((320, 64), (640, 64), (1920, 64), (320, 128)):
        assert chosen(channels, side) == ()
    assert whole.configs(ROW, 320, 0, 32, 8) == ()
    problems: tuple[Any, ...] = (GroupNormProblem(2, 320, 64, 64), NormProblem(2, 320, 64, 64))
    variants: tuple[Any, ...] = (GROUP_NORM_SILU.variants[0], NORM.variants[0])
    for ours, problem in zip(variants, problems, strict=True):
        steps = kernel.configs(ROW)
        assert ours.configs(ROW, problem) == steps
        small = replace(problem, height=32, width=32)
        assert ours.configs(ROW, small) == (*chosen(320, 32), *steps)
        assert ours.configs(None, small) == ()
        assert ours.configs(ROW, replace(small, channels_last=False)) == steps


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx942", "gfx950", "sm_80"])
def test_what_is_held_fits_registers_and_lds(gfx: str) -> None:
    row = TABLE[gfx]
    for config in CONFIGS:
        waves = config.threads // row.wave_size // whole.SIMDS
        assert whole.registers(row, config.threads) * waves <= row.vgprs_per_simd
        held = 4 * config.held + whole.REGISTERS_BESIDE
        assert whole.fits(row, config, 8) == (held <= whole.registers(row, config.threads))
        assert whole.lds_bytes(config, 8) <= row.lds_bytes
    few = replace(row, lds_bytes=32768)
    assert not whole.fits(few, CONFIGS[-1], 8) and whole.fits(few, CONFIGS[0], 8)


def test_a_card_with_few_registers_takes_steps_for_more() -> None:
    assert chosen(2560, 32, "sm_90") == () and chosen(1280, 32, "sm_90") != ()


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8, 32])
def test_work_groups_cover_the_channels_in_whole_groups(groups: int) -> None:
    for each in range(1, 130):
        channels = each * groups
        vector = kernel.form_of("float16", channels, True).vector
        t = whole.tiling(channels, groups, vector)
        assert (t.blocks - 1) * t.run < channels <= t.blocks * t.run
        assert t.run % vector == 0 and t.width == t.run // vector
        assert t.run % lcm(each, vector) == 0
        assert t.run >= min(channels, whole.LEAST_RUN)
        assert t.run // each <= whole.MOST_GROUPS
        smaller = t.run - lcm(each, vector)
        assert smaller < whole.LEAST_RUN or smaller == 0


def test_bytes_of_an_image_that_is_held_have_32_bits() -> None:
    """The kernel counts them so, from a work-group's first channel on."""
    most = max(config.threads * config.held for config in CONFIGS)
    assert whole.configs(ROW, 1 << 20, most // 4, 1 << 15, 8) == ()
    assert whole.configs(ROW, 1 << 20, 1, 1 << 15, 8) != ()


def test_what_a_unet_needs_is_compiled_ahead() -> None:
    shipped = set(kernel.shipped_specs(ROW))
    ours = GROUP_NORM_SILU.variants[0]
    for dtype in ("float16", "bfloat16"):
        for channels, side in ((320, 64), (640, 32), (1920, 32), (1280, 16), (2560, 8)):
            problem = GroupNormProblem(2, channels, side, side, dtype, silu=True, affine=dtype)
            assert shipped >= set(ours.specs(ROW, problem, ours.configs(ROW, problem)[0]))
            norm = NormProblem(2, channels, side, side, dtype, affine=dtype)
            config = NORM.variants[0].configs(ROW, norm)[0]
            assert shipped >= set(NORM.variants[0].specs(ROW, norm, config))


def test_a_self_test_is_held_by_the_config_that_it_vouches_for() -> None:
    """Its image is another, of as many channels."""
    ours = GROUP_NORM_SILU.variants[0]
    held = 0
    for problem in (GroupNormProblem(2, 2560, 8, 8), GroupNormProblem(1, 640, 16, 16), *ODD):
        for config in ours.configs(ROW, problem):
            for p in GROUP_NORM_SILU.test_problems(problem):
                if isinstance(config, WholeConfig):
                    width = whole.tiling(p.channels, p.groups, p.form.vector).width
                    assert 0 < p.pixels <= config.pixels(width)
                    held += 1
    assert held > 10


def test_trial_inputs_fill_work_groups_and_lie_otherwise() -> None:
    for problem in (GroupNormProblem(2, 64, 32, 32), NormProblem(2, 64, 32, 32)):
        op: Any = GROUP_NORM_SILU if isinstance(problem, GroupNormProblem) else NORM
        odd, gaps, full = (make() for _, make in op.trial_inputs(problem))
        assert odd.x.data_ptr() % 16 == 2 and formula.is_channels_last(odd.x)
        assert formula.dense(gaps.x)[0] is not gaps.x
        (config,) = chosen(64, 32)
        assert full.x.shape[2] * full.x.shape[3] == config.pixels(4)
        assert len(op.trial_inputs(replace(problem, height=256))) == 2
        for inputs in (odd, gaps, full):
            assert op.problem_of(inputs).channels_last


def test_an_image_that_is_not_held_is_not_launched() -> None:
    inputs = GROUP_NORM_SILU.make_inputs(GroupNormProblem(1, 32, 33, 8), CPU, 1)
    with pytest.raises(ValueError, match="does not hold 264 pixels of 32 channels"):
        launches.launch_whole(lambda *words: None, CONFIGS[0], *inputs)
    first = inputs._replace(x=inputs.x[:, :, :8].contiguous())
    with pytest.raises(ValueError, match="channels-last images alone"):
        launches.launch_whole(lambda *words: None, CONFIGS[0], *first)


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942"])
def test_the_kernels_compile_without_spills(gfx: str) -> None:
    """With the registers that `fits` counts on."""
    row = TABLE[gfx]
    singles = [whole.spec("bfloat16", 1, True, config) for config in CONFIGS]
    for spec in (*whole.specs(row, kernel.DTYPES), *singles):
        try:
            code = build.build(spec, row).code
        except CompileError as error:
            pytest.skip(f"no compiler for {gfx}: {error}")
        (found,) = codeobject.resources(code)
        values = dict(spec.defines)
        config = WholeConfig(values["THREADS"], values["HELD"])
        assert found.name == spec.entry and found.wave_size == row.wave_size
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0)
        held = config.held * -(-values["VECTOR"] // 2)
        assert found.vgprs <= held + whole.REGISTERS_BESIDE
        assert found.lds_bytes <= whole.lds_bytes(config, values["VECTOR"])
        assert codeobject.waves_per_simd(row, found, found.max_block) >= 2
