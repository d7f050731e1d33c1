"""kernels/group_norm_silu.hip, unchanged, executed on the CPU with waves of 32 and 64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.group_norm import formula, kernel
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs
from lib_rocm_sd.ops.group_norm.op import FINALIZE, GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import ODD, FinalizeProblem, GroupNormProblem
from lib_rocm_sd.ops.group_norm.torch import TorchGroupNorm
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
NHWC = GroupNormProblem(2, 40, 19, 37, "float16", True, True, 8, "float16")
NCHW = GroupNormProblem(1, 6, 131, 127, "bfloat16", False, True, 2, "float32")
"""Several parts, the last one shorter; channels that begin between two multiples of 16 bytes."""


@dataclass(frozen=True)
class Setting:
    """How a kernel is run: as which GPU, in which order, with which sanitizer and sources."""

    gfx: str = "gfx1100"
    seed: int = 1
    sanitize: str | None = None
    kernels_dir: Path = KERNELS_DIR
    config: int = 0

    def run(self, call: Any, *inputs: Any) -> torch.Tensor:
        """call(launch, config, *inputs)."""
        arch = by_gfx(self.gfx)
        assert arch is not None
        launch = ShimLaunch(arch, self.seed, self.sanitize, self.kernels_dir)
        with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
            return call(launch, kernel.configs(arch)[self.config], *inputs)


def group_norm(launch: Any, config: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """All steps."""
    *affine, silu = rest
    statistics = launches.launch_statistics(launch, config, x)
    norm = launches.launch_finalize(launch, config, statistics, *affine)
    return launches.launch_apply(launch, config, x, norm, silu)


def faults(setting: Setting, *inputs: Any) -> list[str]:
    """What is wrong: a largest error of more than twice torch's own, an rms of more than 1.2 times.

    NaN anywhere is wrong too.
    """
    exact = formula.reference(*inputs)
    output = setting.run(group_norm, *inputs)
    ours = Errors.of(output, exact)
    given = GroupNormInputs(*inputs)
    theirs = Errors.of(compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, given), exact)
    good = ours.largest <= 2 * theirs.largest + 1e-7 and ours.rms <= 1.2 * theirs.rms + 1e-8
    kept = (
        output.dtype == inputs[0].dtype and output.stride() == formula.dense(inputs[0])[0].stride()
    )
    return [] if good and kept else [f"{ours}, torch's own {theirs}; layout kept: {kept}"]


def draw(problem: GroupNormProblem, seed: int = 1) -> tuple[Any, ...]:
    return GROUP_NORM_SILU.make_inputs(problem, CPU, seed)[:6]


@pytest.mark.parametrize("problem", [*ODD, NHWC, NCHW], ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: GroupNormProblem) -> None:
    assert faults(Setting(gfx), *draw(problem)) == []


@pytest.mark.parametrize("gfx", sorted({*UNITS} - {"gfx1100", "gfx942"}))
def test_the_other_units(gfx: str) -> None:
    for problem in (NHWC, NCHW):
        assert faults(Setting(gfx, 2), *draw(problem)) == []


@pytest.mark.parametrize("config", [1, 2])
def test_every_config(config: int) -> None:
    for problem in (NHWC, NCHW):
        assert faults(Setting("gfx942", config=config), *draw(problem)) == []


@pytest.mark.parametrize("channels", [4, 8, 24, 512, 520, 1000])
def test_channels(channels: int) -> None:
    """A row of a work-group is one work-item, a few, or all; the last columns may be idle."""
    problem = replace(NHWC, batch=1, channels=channels, groups=channels // 4, silu=False)
    assert faults(Setting(), *draw(problem)) == []
    assert faults(Setting(), *draw(replace(problem, height=2, width=3, groups=1))) == []


@pytest.mark.parametrize("pixels", [1, 7, 8, 63, 64, 65, 255, 4099])
def test_lengths_of_a_channel(pixels: int) -> None:
    problem = GroupNormProblem(1, 6, 1, pixels, "float16", False, False, 3, "float32")
    assert faults(Setting(), *draw(problem)) == []


@pytest.mark.parametrize("problem", [NHWC, NCHW], ids=str)
def test_misaligned_views(problem: GroupNormProblem) -> None:
    """The image begins one half after a multiple of 16 bytes; the result must not differ."""
    x, *rest = draw(problem)
    storage = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
    view = storage[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    assert faults(Setting(), view, *rest) == []
    aligned, misaligned = (Setting().run(group_norm, image, *rest) for image in (x, view))
    if problem.channels_last:
        assert torch.equal(aligned, misaligned)


def test_views_with_gaps() -> None:
    x, *rest = draw(replace(NHWC, height=38, batch=1))
    assert faults(Setting(), x[:, :, ::2], *rest) == []
    x, *rest = draw(replace(NHWC, channels_last=False, width=21))
    assert faults(Setting(), x[..., 1:], *rest) == []


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [("float16", 60.0, 0.1), ("float16", -2000.0, 3.0), ("bfloat16", 1000.0, 20.0)],
)
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_mean_far_from_zero(channels_last: bool, dtype: str, mean: float, std: float) -> None:
    problem = GroupNormProblem(1, 16, 61, 83, dtype, channels_last, False, 4, "float32")
    x, *rest = draw(problem)
    x = ((x.float() - x.float().mean((2, 3), keepdim=True)) * std + mean).to(x.dtype)
    assert faults(Setting(), x, *rest) == []


def test_an_outlier_first_spoils_nothing() -> None:
    x, *rest = draw(replace(NHWC, silu=False))
    x = x * 0.01 + 5
    x[:, :, 0, 0] = -60000
    assert faults(Setting(), x, *rest) == []


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_constant_image_gives_beta(channels_last: bool) -> None:
    problem = replace(NHWC, channels_last=channels_last, dtype="bfloat16", silu=False)
    x, _, beta, groups, eps, silu = draw(problem)
    output = Setting().run(group_norm, x.fill_(3.0), None, beta, groups, 1e-5, silu)
    expected = beta.float()[:, None, None].expand(x.shape[1:])
    torch.testing.assert_close(output[1].float(), expected, rtol=8e-3, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("problem", [NHWC, NCHW], ids=str)
def test_nan_and_infinity_reach_their_group_and_no_other(
    problem: GroupNormProblem, value: float
) -> None:
    inputs = draw(problem)
    inputs[0][0, 5, 3, 7] = value
    lost = Setting().run(group_norm, *inputs).isnan()
    group = problem.channels // problem.groups
    first = 5 // group * group
    assert lost[0, first : first + group].all()
    lost[0, first : first + group] = False
    assert not lost.any()


@pytest.mark.parametrize("problem", [NHWC, NCHW], ids=str)
def test_the_statistics_of_each_part(problem: GroupNormProblem) -> None:
    x = draw(problem)[0]
    output = Setting().run(launches.launch_statistics, x)
    exact = formula.reference_statistics(x)
    assert output.shape == exact.shape and output.shape[1] > 1
    assert torch.equal(output[..., 2].double(), exact[..., 2])
    assert (output - exact)[..., 0].abs().max() < 2e-6
    assert ((output - exact)[..., 1] / exact[..., 1]).abs().max() < 2e-6


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx942"])
@pytest.mark.parametrize(
    ("parts", "channels", "groups"),
    [(1, 32, 32), (3, 40, 4), (2100, 128, 32), (257, 1280, 32), (100_001, 2, 1), (9, 4200, 2)],
)
def test_a_norm_from_parts(gfx: str, parts: int, channels: int, groups: int) -> None:
    """Few parts, so many that they are merged first, a part without pixels, wide groups."""
    problem = FinalizeProblem(1 if parts > 5000 else 2, parts, channels, groups)
    inputs = FINALIZE.make_inputs(problem, CPU, 3)
    exact = formula.reference_norm(*inputs)
    output = Setting(gfx).run(launches.launch_finalize, *inputs)
    assert (output - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("affine", ["none", "float16", "bfloat16", "float32"])
def test_kinds_of_gamma(affine: str) -> None:
    inputs = FINALIZE.make_inputs(FinalizeProblem(2, 3, 30, 3, affine=affine), CPU, 3)
    exact = formula.reference_norm(*inputs)
    output = Setting().run(launches.launch_finalize, *inputs)
    assert (output - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_channels_beyond_gammas_are_ignored() -> None:
    statistics, *rest = FINALIZE.make_inputs(FinalizeProblem(2, 2100, 24, 3), CPU, 3)
    padded = torch.nn.functional.pad(statistics, (0, 0, 0, 8), value=math.nan)
    plain = Setting().run(launches.launch_finalize, statistics, *rest)
    assert torch.equal(Setting().run(launches.launch_finalize, padded, *rest), plain)


def test_the_order_of_waves_changes_nothing() -> None:
    inputs = draw(NHWC)
    outputs = [Setting("gfx1100", seed).run(group_norm, *inputs) for seed in range(4)]
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("problem", [replace(NHWC, channels=36, groups=4), NHWC, NCHW], ids=str)
def test_memory_and_undefined_behaviour(problem: GroupNormProblem) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    setting = Setting("gfx942", 2, sanitized("address,undefined"))
    assert faults(setting, *draw(problem)) == []


@pytest.mark.parametrize("problem", [NHWC, NCHW], ids=str)
def test_no_races(problem: GroupNormProblem) -> None:
    assert faults(Setting("gfx1100", 1, sanitized("thread")), *draw(problem)) == []


def test_merging_is_clean_and_has_no_races() -> None:
    inputs = FINALIZE.make_inputs(FinalizeProblem(1, 70, 120, 1), CPU, 3)
    plain = Setting("gfx1100").run(launches.launch_finalize, *inputs)
    for sanitize in ("address,undefined", "thread"):
        setting = Setting("gfx1100", 1, sanitized(sanitize))
        assert torch.equal(setting.run(launches.launch_finalize, *inputs), plain)


BARRIERS = (KERNELS_DIR / "group_norm_silu.hip").read_text(encoding="utf-8").count("barrier();")


@pytest.mark.parametrize("barrier", range(BARRIERS))
def test_a_removed_barrier_is_a_race(barrier: int) -> None:
    kernels_dir = simt.planted("group_norm_silu.hip", "barrier();", "(void)0;", barrier)
    setting = Setting("gfx1100", 1, sanitized("thread"), kernels_dir)
    with pytest.raises(simt.SimtError, match="data race"):
        setting.run(group_norm, *draw(NHWC))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("wanted < last ? wanted : pixel", "wanted", NHWC),
        ("i < singles", "i <= singles", NCHW),
    ],
)
def test_one_value_out_of_bounds_is_seen(old: str, new: str, problem: GroupNormProblem) -> None:
    kernels_dir = simt.planted("group_norm_silu.hip", old, new)
    setting = Setting("gfx1100", 1, sanitized("address,undefined"), kernels_dir)
    with pytest.raises(simt.SimtError, match="AddressSanitizer"):
        setting.run(group_norm, *draw(replace(problem, batch=1)))
