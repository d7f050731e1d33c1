"""kernels/group_norm_whole.hip, unchanged, executed on the CPU with waves of 32 and 64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.group_norm import formula, whole
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs, NormInputs
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.problem import ADDED, ODD, GroupNormProblem
from lib_rocm_sd.ops.group_norm.torch import TorchGroupNorm
from lib_rocm_sd.ops.group_norm.whole import CONFIGS, WholeConfig
from tests import executed
from tests.ops.attention.judge import Errors
from tests.ops.running import compute, sanitized
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

CPU = torch.device("cpu")
FEW = GroupNormProblem(2, 120, 7, 9, "float16", True, True, 8, "float16")
"""A work-group of all channels, whose groups are merged by a wave each."""
MANY = GroupNormProblem(1, 88, 5, 31, "bfloat16", True, True, 11, "float32")
"""Groups of eight, four to a work-group and three to the last, merged by two waves each."""
SINGLE = GroupNormProblem(1, 35, 5, 13, "float16", True, False, 7, "none")
"""Channels that are no multiple of eight."""
EACH = (FEW, MANY, SINGLE)


def config_of(gfx: str, problem: GroupNormProblem) -> WholeConfig:
    arch, p = by_gfx(gfx), problem
    assert arch is not None
    (config,) = whole.configs(arch, p.channels, p.pixels, p.groups, p.form.vector)
    return config


@dataclass(frozen=True)
class Setting:
    """How a kernel is run: as which GPU, in which order, with which sanitizer and sources."""

    gfx: str = "gfx1100"
    seed: int = 1
    sanitize: str | None = None
    kernels_dir: Path = KERNELS_DIR

    def run(self, config: WholeConfig, *inputs: Any) -> torch.Tensor:
        arch = by_gfx(self.gfx)
        assert arch is not None
        launch = ShimLaunch(arch, self.seed, self.sanitize, self.kernels_dir)
        with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
            return launches.launch_whole(launch, config, *inputs)

    def both(self, config: WholeConfig, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The image, and its norm."""
        return self.run(config, *inputs), self.run(config, *inputs[:5], None)


def faults(setting: Setting, problem: GroupNormProblem, inputs: tuple[Any, ...]) -> list[str]:
    """What is wrong: a largest error of more than twice torch's own, an rms of more than 1.2 times;
    of the norm, more than 2e-6 of its largest value. NaN anywhere is wrong too.
    """
    exact = formula.reference(*inputs)
    exact_norm = NORM.reference(NormInputs(*inputs[:5]))
    output, norm = setting.both(config_of(setting.gfx, problem), *inputs)
    ours = Errors.of(output, exact)
    given = GroupNormInputs(*inputs)
    theirs = Errors.of(compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, given), exact)
    good = ours.largest <= 2 * theirs.largest + 1e-7 and ours.rms <= 1.2 * theirs.rms + 1e-8
    kept = output.dtype == inputs[0].dtype and output.stride() == inputs[0].stride()
    found = [] if good and kept else [f"{ours}, torch's own {theirs}; layout kept: {kept}"]
    if not (norm - exact_norm).abs().max() <= 2e-6 * exact_norm.abs().max():
        found.append(f"the norm is off by {(norm - exact_norm).abs().max()}")
    return found


def draw(problem: GroupNormProblem, seed: int = 1) -> Any:
    return GROUP_NORM_SILU.make_inputs(problem, CPU, seed)


@pytest.mark.parametrize("gfx", UNITS)
@pytest.mark.parametrize("problem", EACH, ids=str)
def test_every_unit(gfx: str, problem: GroupNormProblem) -> None:
    assert faults(Setting(gfx, 2), problem, draw(problem)) == []


@pytest.mark.parametrize("problem", [p for p in ODD if p.channels_last], ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: GroupNormProblem) -> None:
    assert faults(Setting(gfx), problem, draw(problem)) == []


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_every_config(gfx: str, config: WholeConfig) -> None:
    """Images that it just holds: some work-items have one pixel less."""
    rows = config.threads // 5
    pixels = rows * config.held - 3
    problem = GroupNormProblem(1, 80, 1, pixels, "bfloat16", True, True, 8, "bfloat16")
    assert config_of(gfx, problem) == config
    assert faults(Setting(gfx), problem, draw(problem)) == []


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(8, 1), (8, 8), (24, 8), (40, 8), (96, 32), (320, 32), (96, 3), (264, 11), (1280, 1), (7, 7)],
)
def test_groups(channels: int, groups: int) -> None:
    """Narrower than a vector and not, that end between two; wide ones; as many as channels."""
    problem = GroupNormProblem(2, channels, 3, 7, "float16", True, True, groups, "float16")
    assert faults(Setting(), problem, draw(problem)) == []
    assert faults(Setting("gfx942"), problem, draw(problem)) == []


@pytest.mark.parametrize("pixels", [1, 2, 50, 51, 52, 102, 204])
def test_pixels(pixels: int) -> None:
    """Fewer than rows of a work-group, as many, one more."""
    problem = GroupNormProblem(1, 40, 1, pixels, "float16", True, True, 4, "float32")
    assert faults(Setting(), problem, draw(problem)) == []


def test_an_image_that_is_not_aligned_or_has_gaps_is_copied() -> None:
    x, *rest = draw(FEW)
    storage = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
    view = storage[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    expected = Setting().run(config_of("gfx1100", FEW), x, *rest)
    assert torch.equal(Setting().run(config_of("gfx1100", FEW), view, *rest), expected)
    wide, *rest = draw(replace(FEW, height=14))
    made = Setting().run(config_of("gfx1100", FEW), wide[:, :, ::2], *rest)
    whole_image = wide[:, :, ::2].contiguous(memory_format=torch.channels_last)
    assert torch.equal(made, Setting().run(config_of("gfx1100", FEW), whole_image, *rest))


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [("float16", 60.0, 0.1), ("float16", -2000.0, 3.0), ("bfloat16", 1000.0, 20.0)],
)
def test_a_mean_far_from_zero(dtype: str, mean: float, std: float) -> None:
    problem = GroupNormProblem(1, 16, 31, 33, dtype, True, False, 4, "float32")
    x, *rest = draw(problem)
    x = ((x.float() - x.float().mean((2, 3), keepdim=True)) * std + mean).to(x.dtype)
    config = config_of("gfx1100", problem)
    exact = formula.reference(x, *rest)
    theirs = compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, GroupNormInputs(x, *rest))
    ours = Errors.of(Setting().run(config, x, *rest), exact)
    assert ours.largest <= 2 * Errors.of(theirs, exact).largest


def test_an_outlier_first_spoils_nothing() -> None:
    problem = replace(FEW, silu=False)
    x, *rest = draw(problem)
    x = x * 0.01 + 5
    x[:, :, 0, 0] = -60000
    exact = formula.reference(x, *rest)
    theirs = compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, GroupNormInputs(x, *rest))
    ours = Errors.of(Setting().run(config_of("gfx1100", problem), x, *rest), exact)
    assert ours.largest <= 2 * Errors.of(theirs, exact).largest


def test_a_constant_image_gives_beta() -> None:
    problem = replace(MANY, silu=False)
    x, _, beta, groups, _, silu, _ = draw(problem)
    config = config_of("gfx1100", problem)
    output = Setting().run(config, x.fill_(3.0), None, beta, groups, 1e-5, silu)
    expected = beta.float()[:, None, None].expand(x.shape[1:])
    torch.testing.assert_close(output[0].float(), expected, rtol=8e-3, atol=1e-4)


@pytest.mark.parametrize("problem", ADDED, ids=str)
@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx942"])
def test_what_is_added_first(gfx: str, problem: GroupNormProblem) -> None:
    assert faults(Setting(gfx), problem, draw(problem)) == []


def test_what_is_added_may_be_columns_of_a_longer_row() -> None:
    problem = ADDED[0]
    inputs = draw(problem)
    longer = torch.full((2, 64 + 200), math.nan)
    longer[:, 100:164] = inputs.added
    apart = inputs._replace(added=longer[:, 100:164])
    assert faults(Setting(), problem, apart) == []
    turned = inputs._replace(added=inputs.added.t().contiguous().t())
    assert faults(Setting(), problem, turned) == []


@pytest.mark.parametrize("value", [60000.0, math.nan, math.inf])
def test_what_is_added_may_be_more_than_halves_hold(value: float) -> None:
    """One channel is far from those of its group, or is no number: its group's are then."""
    problem = replace(ADDED[0], silu=False)
    inputs = draw(problem)
    inputs.added[1, 5] = value
    if math.isfinite(value):
        assert faults(Setting(), problem, inputs) == []
        return
    lost = Setting().run(config_of("gfx1100", problem), *inputs).isnan()
    assert lost[1, 4:6].all() and lost.sum() == 2 * problem.pixels


@pytest.mark.parametrize("forgotten", ["moments.mean[k] + added[k]", "added_to(p, place)[channel]"])
def test_what_is_added_and_forgotten_is_found(forgotten: str) -> None:
    right = {"moments.mean[k] + added[k]": "moments.mean[k]"}.get(forgotten, "0.0f")
    kernels_dir = simt.planted("group_norm_whole.hip", forgotten, right)
    setting = Setting(kernels_dir=kernels_dir)
    assert faults(setting, ADDED[0], draw(ADDED[0])) != []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("problem", EACH, ids=str)
def test_nan_and_infinity_reach_their_group_and_no_other(
    problem: GroupNormProblem, value: float
) -> None:
    inputs = draw(problem)
    inputs[0][0, 17, 3, 7] = value
    output, norm = Setting().both(config_of("gfx1100", problem), *inputs)
    group = problem.channels // problem.groups
    first = 17 // group * group
    for lost in (output.isnan(), norm.isnan()):
        assert lost[0, first : first + group].all()
        lost[0, first : first + group] = False
        assert not lost.any()


@pytest.mark.parametrize("affine", ["none", "float16", "bfloat16", "float32"])
def test_kinds_of_gamma(affine: str) -> None:
    problem = replace(FEW, affine=affine)
    inputs = draw(problem)
    assert faults(Setting(), problem, inputs) == []
    x, gamma, beta, *rest = inputs
    assert faults(Setting(), problem, (x, None, beta, *rest)) == []
    assert faults(Setting(), problem, (x, gamma, None, *rest)) == []


def test_the_order_of_waves_changes_nothing() -> None:
    inputs, config = draw(MANY), config_of("gfx1100", MANY)
    outputs = [Setting("gfx1100", seed).run(config, *inputs) for seed in range(4)]
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_memory_and_undefined_behaviour(problem: GroupNormProblem) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    setting = Setting("gfx942", 2, sanitized("address,undefined"))
    assert faults(setting, problem, draw(problem)) == []


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_no_races(problem: GroupNormProblem) -> None:
    assert faults(Setting("gfx1100", 1, sanitized("thread")), problem, draw(problem)) == []


BARRIERS = (KERNELS_DIR / "group_norm_whole.hip").read_text(encoding="utf-8").count("barrier();")


@pytest.mark.parametrize("barrier", range(BARRIERS))
def test_a_removed_barrier_is_a_race(barrier: int) -> None:
    kernels_dir = simt.planted("group_norm_whole.hip", "barrier();", "(void)0;", barrier)
    setting = Setting("gfx1100", 1, sanitized("thread"), kernels_dir)
    with pytest.raises(simt.SimtError, match="data race"):
        setting.run(config_of("gfx1100", MANY), *draw(MANY))


def test_a_pixel_behind_the_image_is_seen() -> None:
    clamped, wanted = "min2(row + (u32)i * rows, p.pixels - 1)", "(row + (u32)i * rows)"
    kernels_dir = simt.planted("group_norm_whole.hip", clamped, wanted)
    setting = Setting("gfx1100", 1, sanitized("address,undefined"), kernels_dir)
    problem = replace(FEW, batch=1)
    with pytest.raises(simt.SimtError, match="AddressSanitizer"):
        setting.run(config_of("gfx1100", problem), *draw(problem))
