"""kernels/layer_norm.hip, unchanged, executed on the CPU with waves of 32 and 64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.layer_norm import biased, kernel, modulated, rms
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import ODD, LayerNormProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem
from tests import executed
from tests.ops.layer_norm.judge import (
    apart,
    draw,
    faults,
    misaligned,
    op_of,
    pair_of,
    placed,
)
from tests.ops.running import compute, sanitized
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

SMALL = LayerNormProblem((21, 320), added=True)
"""Several teams a wave, the last work-group not full."""
WIDE = LayerNormProblem((3, 3136), "bfloat16", True, "bfloat16")
"""Several waves a team, of waves of 32 and of 64."""
LONG = LayerNormProblem((3, 2051), added=True)
"""A row that is read twice, with a rest."""
BIASED = [BiasedProblem(p.shape, p.dtype, False, p.affine, True) for p in (SMALL, WIDE, LONG)]


MODULATED = [
    ModulatedProblem((3, 7, 320), added=True),
    ModulatedProblem((3, 1, 3136), "bfloat16", True, "bfloat16"),
    ModulatedProblem((2, 2, 2051), added=True),
]
"""The same, whose images end within a work-group."""
RMS = [
    RmsProblem((21, 96), "bfloat16", affine="bfloat16", silu=True),
    RmsProblem((21, 328), silu=True),
    RmsProblem((3, 3136), affine="float32"),
]
"""Rows that are held, by several work-items and by several waves."""


@dataclass(frozen=True)
class Setting:
    """How the kernel is run: as which GPU, in which order, with which sanitizer and sources."""

    gfx: str = "gfx1100"
    seed: int = 1
    sanitize: str | None = None
    kernels_dir: Path = KERNELS_DIR
    config: kernel.LayerNormConfig | None = None

    def run(self, inputs: Any) -> Any:
        arch = by_gfx(self.gfx)
        assert arch is not None
        launch = ShimLaunch(arch, self.seed, self.sanitize, self.kernels_dir)
        config = self.config or kernel.configs(arch, inputs.x.shape[-1])[0]
        with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
            op = op_of(inputs)
            return compute(op, op.variants[0], launch, config, inputs)

    def faults(self, inputs: Any) -> list[str]:
        return faults(self.run(inputs), inputs)


def same(a: Any, b: Any) -> bool:
    """To the bit."""
    return all(
        x is y or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(pair_of(a), pair_of(b), strict=True)
    )


ALL = [
    *ODD,
    SMALL,
    WIDE,
    LONG,
    *biased.ODD,
    *BIASED,
    *modulated.ODD,
    *MODULATED,
    *rms.ODD[1:],
    *RMS,
]


@pytest.mark.parametrize("problem", ALL, ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: LayerNormProblem) -> None:
    assert Setting(gfx).faults(draw(problem)) == []


@pytest.mark.parametrize("gfx", sorted({*UNITS} - {"gfx1100", "gfx942"}))
def test_the_other_units(gfx: str) -> None:
    for problem in (SMALL, WIDE, LONG, *BIASED, *MODULATED, *RMS):
        assert Setting(gfx, 2).faults(draw(problem)) == []


@pytest.mark.parametrize("threads", [config.threads for config in kernel.CONFIGS])
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_every_config(gfx: str, threads: int) -> None:
    config = kernel.LayerNormConfig(threads)
    for problem in (SMALL, replace(WIDE, added=False), LONG, LayerNormProblem((2, 1280))):
        assert Setting(gfx, config=config).faults(draw(problem)) == []


LENGTHS = (1, 7, 8, 9, 24, 32, 40, 192, 200, 320, 384, 640, 768, 1000, 1280, 2048, 3072, 4096)


@pytest.mark.parametrize("channels", [*LENGTHS, 4104, 6144, 6152, 6153, 12288, 12296])
def test_lengths_of_a_row(channels: int) -> None:
    problem = LayerNormProblem((5 if channels < 2000 else 2, channels), added=channels % 16 == 0)
    assert Setting().faults(draw(problem)) == []


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33])
def test_numbers_of_rows(rows: int) -> None:
    for added in (True, False):
        problem = LayerNormProblem((rows, 320), "bfloat16", added, "float32")
        assert Setting().faults(draw(problem)) == []


@pytest.mark.parametrize("problem", [SMALL, WIDE, LONG], ids=str)
def test_misaligned_tensors(problem: LayerNormProblem) -> None:
    """Each in turn, and all, one element after a multiple of 16 bytes: the result is the same."""
    inputs = draw(problem)
    plain = Setting().run(inputs)
    for place in (0, 1, 2, 4):
        moved: list[Any] = list(inputs)
        moved[place] = misaligned(moved[place])
        assert same(Setting().run(LayerNormInputs(*moved)), plain)
    assert same(Setting().run(placed(inputs, "misaligned")), plain)


@pytest.mark.parametrize("problem", [SMALL, WIDE, LONG], ids=str)
@pytest.mark.parametrize("more", [8, 3, 1])
def test_rows_apart(problem: LayerNormProblem, more: int) -> None:
    """Distances that keep rows at multiples of 16 bytes, and do not; another for each tensor."""
    inputs = draw(problem)
    plain = Setting().run(inputs)
    assert inputs.added is not None
    assert same(Setting().run(inputs._replace(x=apart(inputs.x, more))), plain)
    assert same(Setting().run(inputs._replace(added=apart(inputs.added, more))), plain)


def test_rows_at_uneven_distances_and_columns_apart() -> None:
    x, whole_gamma, whole_beta, *_ = draw(LayerNormProblem((4, 6, 64)))
    assert whole_gamma is not None and whole_beta is not None
    pictures = [
        x[:, ::2],
        x[:, 1:4],
        x.transpose(0, 1),
        x[1:2, 3:4],
        x[:1].expand(3, -1, -1),
        x[:1, :1].expand(3, 6, -1),
        x[:, :1].expand(-1, 5, -1),
        x[..., ::2][..., :24],
    ]
    for view in pictures:
        gamma, beta = (t[: view.shape[-1]] for t in (whole_gamma, whole_beta))
        inputs = LayerNormInputs(view, gamma, beta, 1e-5)
        assert Setting().faults(inputs) == []


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [
        ("float16", 2000.0, 3.0),
        ("float16", -60000.0, 40.0),
        ("float16", 60.0, 0.1),
        ("bfloat16", 1000.0, 20.0),
        ("bfloat16", 1e18, 1e17),
    ],
)
@pytest.mark.parametrize("channels", [320, 3136, 2051])
def test_a_mean_far_from_zero(channels: int, dtype: str, mean: float, std: float) -> None:
    inputs = draw(LayerNormProblem((4, channels), dtype, affine="float32"))
    values = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(5))
    assert Setting().faults(inputs._replace(x=(values * std + mean).to(inputs.x.dtype))) == []


@pytest.mark.parametrize("channels", [320, 2051])
def test_a_sum_far_from_zero(channels: int) -> None:
    inputs = draw(replace(SMALL, shape=(4, channels)))
    assert inputs.added is not None
    assert Setting().faults(inputs._replace(x=inputs.x + 1500, added=inputs.added + 700)) == []


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("channels", [320, 2051])
def test_an_outlier_spoils_nothing(channels: int, place: int) -> None:
    """Also where it is what all others are counted from."""
    inputs = draw(LayerNormProblem((4, channels), affine="none"))
    x = inputs.x * 0.01 + 5
    x[:, place] = -60000
    assert Setting().faults(inputs._replace(x=x)) == []


@pytest.mark.parametrize("value", [3.140625, -2000.0, 65504.0])
@pytest.mark.parametrize("channels", [320, 3136, 2051])
def test_a_constant_row_gives_beta(channels: int, value: float) -> None:
    inputs = draw(LayerNormProblem((2, channels)))
    assert inputs.beta is not None
    output = Setting().run(inputs._replace(x=inputs.x.fill_(value)))
    assert torch.equal(output, inputs.beta.expand(output.shape))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("problem", [SMALL, WIDE, LONG], ids=str)
@pytest.mark.parametrize("place", [0, 5])
def test_nan_and_infinity_spoil_their_row_and_no_other(
    problem: LayerNormProblem, value: float, place: int
) -> None:
    """As torch's own."""
    inputs = draw(problem)
    inputs.x[1, place] = value
    norm, total = pair_of(Setting().run(inputs))
    theirs, theirs_total = pair_of(compute(LAYER_NORM, LAYER_NORM.variants[1], None, None, inputs))
    assert total is not None and theirs_total is not None
    assert theirs[1].isnan().all()
    assert norm.isnan().equal(theirs.isnan())
    assert torch.equal(total.nan_to_num(), theirs_total.nan_to_num())


def test_a_sum_that_does_not_fit_spoils_its_row_and_no_other() -> None:
    inputs = draw(SMALL)
    assert inputs.added is not None
    inputs.x[2, 7] = inputs.added[2, 7] = 60000
    norm, total = pair_of(Setting().run(inputs))
    assert total is not None
    assert total.isinf().sum() == 1 and total[2, 7] == math.inf
    assert norm[2].isnan().all() and norm.isnan().sum() == norm.shape[1]


@pytest.mark.parametrize("affine", kernel.AFFINE_KINDS)
@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_kinds_of_gamma(dtype: str, affine: str) -> None:
    for channels in (40, 43):
        inputs = draw(LayerNormProblem((5, channels), dtype, False, affine))
        assert Setting().faults(inputs) == []
        if affine != "none":
            assert Setting().faults(placed(inputs, "misaligned")) == []


def test_gamma_or_beta_alone_or_of_another_dtype() -> None:
    inputs = draw(LayerNormProblem((5, 40)))
    assert inputs.gamma is not None and inputs.beta is not None
    for changed in (
        inputs._replace(gamma=None),
        inputs._replace(beta=None),
        inputs._replace(beta=inputs.beta.float()),
        inputs._replace(gamma=inputs.gamma.bfloat16()),
        inputs._replace(gamma=inputs.gamma.repeat_interleave(2)[::2]),
    ):
        assert Setting().faults(changed) == []


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 0.5])
def test_eps(eps: float) -> None:
    inputs = draw(SMALL)._replace(eps=eps)
    assert Setting().faults(inputs._replace(x=inputs.x * 0.01)) == []


@pytest.mark.parametrize("problem", BIASED, ids=str)
def test_rows_that_are_missing(problem: BiasedProblem) -> None:
    """None, one or two of them, with a sum that is kept and without; from an odd address on."""
    inputs = draw(problem)
    for missing, more in ((None, None), (inputs.missing, None), (None, inputs.more)):
        for ahead, keeps in ((None, False), (None, True), (inputs.ahead, True)):
            rows = {"missing": missing, "more": more, "ahead": ahead}
            each = inputs._replace(**rows, keeps=keeps)
            assert Setting().faults(each) == []
    plain = Setting().run(inputs)
    for name in ("x", *biased.ROWS):
        moved = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        assert same(Setting().run(moved), plain)


@pytest.mark.parametrize("problem", MODULATED, ids=str)
def test_rows_of_images(problem: ModulatedProblem) -> None:
    """With a gate and without; apart, from an odd address on, expanded, and each by itself."""
    inputs = draw(problem)
    plain = Setting().run(inputs)
    assert Setting().faults(inputs._replace(added=None, gate=None)) == []
    for name in ("x", "scale", "shift", "added", "gate"):
        moved = inputs._replace(**{name: misaligned(getattr(inputs, name))})
        assert same(Setting().run(moved), plain)
    for layout in ("misaligned", "apart"):
        assert same(Setting().run(placed(inputs, layout)), plain)
    every = inputs._replace(scale=inputs.scale[:1].expand_as(inputs.scale))
    assert Setting().faults(every) == []


def test_rows_of_zeros_change_nothing() -> None:
    inputs = draw(BIASED[0])
    zeros = dict.fromkeys(biased.ROWS, torch.zeros_like(inputs.missing))
    norm, total = pair_of(Setting().run(inputs._replace(**zeros)))
    assert total is not None and torch.equal(total, inputs.x)
    assert torch.equal(norm, Setting().run(inputs.plain))


@pytest.mark.parametrize("problem", [SMALL, WIDE, LONG], ids=str)
def test_the_norm_is_that_of_the_rounded_sum(problem: LayerNormProblem) -> None:
    inputs = draw(problem)
    norm, total = pair_of(Setting().run(inputs))
    assert total is not None
    assert torch.equal(Setting().run(inputs._replace(x=total, added=None)), norm)


def test_the_order_of_waves_changes_nothing() -> None:
    for problem in (SMALL, WIDE, LONG):
        outputs = [Setting("gfx1100", seed).run(draw(problem)) for seed in range(4)]
        assert all(same(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("layout", ["plain", "misaligned", "apart"])
@pytest.mark.parametrize("problem", [SMALL, WIDE, LONG, *BIASED], ids=str)
def test_memory_and_undefined_behaviour(problem: LayerNormProblem, layout: str) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    setting = Setting("gfx942", 2, sanitized("address,undefined"))
    assert setting.faults(placed(draw(problem), layout)) == []


@pytest.mark.parametrize("problem", [SMALL, WIDE, LONG], ids=str)
def test_no_races(problem: LayerNormProblem) -> None:
    assert Setting("gfx1100", 1, sanitized("thread")).faults(draw(problem)) == []


@pytest.mark.parametrize("problem", [WIDE, LONG], ids=str)
def test_a_removed_barrier_is_a_race(problem: LayerNormProblem) -> None:
    ((name, number),) = simt.places("barrier();", "layer_norm.hip")
    kernels_dir = simt.planted(name, "barrier();", "(void)0;", number)
    setting = Setting("gfx1100", 1, sanitized("thread"), kernels_dir)
    with pytest.raises(simt.SimtError, match="data race"):
        setting.run(draw(problem))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("min2(wanted, p.rows - 1)", "min2(wanted, p.rows)", SMALL),
        ("min2(vector(i), vectors - 1)", "min2(vector(i), vectors)", replace(SMALL, shape=(1, 40))),
        ("c < p.channels", "c <= p.channels", LONG),
        ("v < vectors; v +=", "v <= vectors; v +=", LONG),
    ],
)
def test_one_value_out_of_bounds_is_seen(old: str, new: str, problem: LayerNormProblem) -> None:
    kernels_dir = simt.planted("layer_norm.hip", old, new)
    setting = Setting("gfx1100", 1, sanitized("address,undefined"), kernels_dir)
    with pytest.raises(simt.SimtError, match="AddressSanitizer"):
        setting.run(draw(problem))


PLANTED = (
    ("row * p.x_stride", "row * p.channels"),
    ("row * p.added_stride", "row * p.channels"),
    ("sum += vector(i) < vectors ? eight : 0.0f", "sum += eight"),
    ("squares += vector(i) < vectors ? eight : 0.0f", "squares += eight"),
    ("p.share, p.eps)", "p.share, 0.1f)"),
    ("x += other_half<2>(x)", "x += x"),
    ("kLanes == 8 ? 0x141 : 0x140", "kLanes == 8 ? 0x140 : 0x141"),
    ("OF_ROW(beta), channel(i)", "OF_ROW(gamma), channel(i)"),
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p.more + channel)", "p.added + channel)"),
        ("sum(x, i) + half_of<Half>(ahead, i)", "sum(x, i)"),
        ("half_of<Half>(added, i) + half_of<Half>(more, i)", "half_of<Half>(added, i)"),
        ("sum + value_of(p.ahead, c)", "sum"),
        ("value_of(p.added, channel) + ", ""),
    ],
)
def test_a_mistake_with_rows_is_seen(old: str, new: str) -> None:
    """In whole vectors, or in the rest of a row and its first value, from which all are counted."""
    kernels_dir = simt.planted("layer_norm.hip", old, new)
    inputs = draw(BIASED[2])
    assert Setting().faults(inputs) == []
    assert Setting(kernels_dir=kernels_dir).faults(inputs) != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p.tokens * p.image_stride", "p.tokens * p.channels"),
        ("(u32)row / p.tokens", "min2((u32)row / p.tokens, 1u)"),
        ("1.0f + gamma", "gamma"),
        (
            "fma_f32(half_of<Half>(gate, i), half_of<Half>(b, i),",
            "fma_f32(1.0f, half_of<Half>(b, i),",
        ),
        ("Half::to(OF_ROW(more)[c]), added", "1.0f, added"),
    ],
)
def test_a_mistake_with_images_is_seen(old: str, new: str) -> None:
    """In whole vectors, or in the rest of a row."""
    kernels_dir = simt.planted("layer_norm.hip", old, new)
    inputs = draw(replace(MODULATED[2], shape=(3, 2, 2051)))
    assert Setting().faults(inputs) == []
    assert Setting(kernels_dir=kernels_dir).faults(inputs) != []


def barely(problem: RmsProblem, least: float = 0.5) -> Any:
    """Rows of which each other one has squares whose mean is less than `least`."""
    inputs = draw(problem)
    inputs.x[::2] *= 1e-3
    return inputs._replace(eps=least)


@pytest.mark.parametrize("problem", RMS, ids=str)
def test_a_row_of_next_to_nothing_is_divided_by_the_least_length(problem: RmsProblem) -> None:
    inputs = barely(problem)
    assert Setting().faults(inputs) == []
    inputs.x[0] = 0
    assert not Setting().run(inputs._replace(eps=1e-36))[0].any()
    inputs.x[0, 5] = math.nan
    made = Setting().run(inputs)
    assert made[0].isnan().all() and made[1:].isfinite().all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("squares * p.share < p.eps ? p.eps", "squares * p.share < p.eps ? squares * p.share"),
        ("RMS ? 0.0f : over_team(p, sum, lds)", "over_team(p, sum, lds)"),
        ("-1.44269504088896341f * normed", "-1.0f * normed"),
        ("difference * scale * gamma", "difference * scale"),
        ("RMS ? least", "RMS ? squares"),
    ],
)
def test_a_mistake_without_a_mean_is_seen(old: str, new: str) -> None:
    inputs = placed(barely(RMS[1]), "apart")
    kernels_dir = simt.planted("layer_norm.hip", old, new)
    assert Setting().faults(inputs) == []
    assert Setting(kernels_dir=kernels_dir).faults(inputs) != []


@pytest.mark.parametrize(("old", "new"), PLANTED)
def test_a_planted_mistake_is_seen(old: str, new: str) -> None:
    """With rows that lie apart, and leave some of eight work-items without a sixth vector."""
    kernels_dir = simt.planted("layer_norm.hip", old, new)
    inputs = placed(draw(replace(SMALL, shape=(5, 328))), "apart")
    assert Setting().faults(inputs) == []
    assert Setting(kernels_dir=kernels_dir).faults(inputs) != []
