"""kernels/linear.hip, unchanged, executed on the CPU with waves of 32 and 64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.formula import reference
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearConfig
from lib_rocm_sd.ops.linear.op import LINEAR, apart
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import ODD, LinearProblem
from lib_rocm_sd.ops.linear.torch import TorchLinear
from tests import executed
from tests.ops.attention.judge import Errors
from tests.ops.running import compute, sanitized
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

CPU = torch.device("cpu")
UNITS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "sm_80")
TAILS = LinearProblem(147, 136, (136,), residual=True)
GATED = replace(TAILS, rows=83, columns=(72,), gate=True, dtype="bfloat16", in_place=True)
THREE = replace(TAILS, rows=19, columns=(136, 8, 72), in_place=True)
MANY = replace(TAILS, rows=35, columns=(136, 8, 72, 264, 8, 24))
"""Whole tiles and a rest, along every side."""


@dataclass(frozen=True)
class Setting:
    """How a kernel is run: as which GPU, by which config, in which order, with which sanitizer and
    sources.
    """

    gfx: str = "gfx1100"
    size: int = -2
    parts: int = 1
    seed: int = 1
    sanitize: str | None = None
    kernels_dir: Path = KERNELS_DIR

    def config(self, problem: LinearProblem) -> LinearConfig:
        arch = by_gfx(self.gfx)
        assert arch is not None
        return replace(kernel.sizes(arch, problem.dtype, problem.gate)[self.size], parts=self.parts)

    def run(self, inputs: LinearInputs) -> torch.Tensor:
        arch = by_gfx(self.gfx)
        assert arch is not None
        config = self.config(LINEAR.problem_of(inputs))
        launch = ShimLaunch(arch, self.seed, self.sanitize, self.kernels_dir)
        with launch.knows(*inputs.named.values()):
            return compute(LINEAR, MatrixLinear(), launch, config, inputs)


def draw(problem: LinearProblem, seed: int = 1) -> LinearInputs:
    return LINEAR.make_inputs(problem, CPU, seed)


def faults(setting: Setting, inputs: LinearInputs) -> list[str]:
    """What is wrong: a largest error of more than twice that of float32 rounded once, an rms of
    more than 1.2 times; NaN anywhere.
    """
    exact = reference(inputs)
    apart_from_it = inputs._replace(out=None)
    theirs = Errors.of(compute(LINEAR, TorchLinear(), None, None, apart_from_it), exact)
    output = setting.run(inputs)
    ours = Errors.of(output, exact)
    good = ours.largest <= 2 * theirs.largest + 1e-7 and ours.rms <= 1.2 * theirs.rms + 1e-8
    placed = inputs.out is None or output.data_ptr() == inputs.out.data_ptr()
    return [] if good and placed else [f"{ours}, float32 rounded once {theirs}; in place: {placed}"]


@pytest.mark.parametrize("problem", ODD, ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: LinearProblem) -> None:
    assert faults(Setting(gfx), draw(problem)) == []
    assert faults(Setting(gfx, size=-1, parts=3), draw(problem)) == []


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("problem", [TAILS, GATED, THREE, MANY], ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_every_unit_and_size(gfx: str, problem: LinearProblem, parts: int) -> None:
    arch = by_gfx(gfx)
    assert arch is not None
    for size in range(len(kernel.sizes(arch, problem.dtype, problem.gate))):
        assert faults(Setting(gfx, size, parts, 2), draw(problem)) == []


@pytest.mark.parametrize("k", [8, 24, 32, 40, 64, 72, 200, 256])
def test_lengths_of_k(k: int) -> None:
    problem = replace(TAILS, rows=17, k=k, columns=(24,))
    for parts in (1, 2, 16):
        assert faults(Setting("gfx1201", -1, parts), draw(problem)) == []


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64, 65])
@pytest.mark.parametrize("columns", [8, 16, 56, 64, 72])
def test_rows_and_columns(rows: int, columns: int) -> None:
    problem = LinearProblem(rows, 40, (columns,), bias=False)
    assert faults(Setting(), draw(problem)) == []
    assert faults(Setting("gfx942"), draw(replace(problem, bias=True, gate=True))) == []


def test_blocks_of_rows_pass_along_the_weights_together() -> None:
    """Three strips of them, of which the last has one less."""
    problem = LinearProblem(16 * 20 - 3, 40, (264,))
    assert faults(Setting("gfx1100", -1), draw(problem)) == []


def test_a_bias_for_some_weights_only() -> None:
    inputs = draw(THREE)
    for parts in (1, 2):
        for given in (
            inputs._replace(bias=None),
            inputs._replace(bias_1=None),
            inputs._replace(bias=None, bias_2=None),
        ):
            assert faults(Setting(parts=parts), given._replace(out=None)) == []


def test_a_bias_for_some_of_many_weights_only() -> None:
    inputs = draw(MANY)
    some = tuple(None if place in (1, 5) else item for place, item in enumerate(inputs.more))
    assert faults(Setting(), inputs._replace(more=some)) == []
    assert faults(Setting("gfx942"), inputs._replace(bias=None, bias_2=None)) == []


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_with_gaps(parts: int) -> None:
    made = draw(replace(TAILS, in_place=True))
    assert made.residual is not None
    residual = apart(made.residual, 160)
    inputs = made._replace(x=apart(made.x, 152), residual=residual, out=residual)
    assert faults(Setting(parts=parts), inputs) == []


def test_one_row_for_all_and_views_at_odd_addresses() -> None:
    """A stride of 0 is read as it is; what is not aligned is copied before."""
    made = draw(TAILS)
    assert faults(Setting(), made._replace(x=made.x[:1].expand(147, -1))) == []
    weight = torch.zeros(made.weight.numel() + 1, dtype=made.weight.dtype)[1:]
    weight = weight.view_as(made.weight).copy_(made.weight)
    residual = torch.zeros((147, 137), dtype=made.x.dtype)[:, 1:]
    assert made.residual is not None
    residual.copy_(made.residual)
    inputs = made._replace(x=made.x[:, 1:].repeat(1, 2)[:, :136], weight=weight)
    assert faults(Setting(), inputs._replace(residual=residual, out=residual)) == []


def test_the_order_of_waves_changes_nothing() -> None:
    for setting in (Setting(), Setting("gfx942", -1, 2)):
        outputs = [replace(setting, seed=seed).run(draw(TAILS)) for seed in range(3)]
        assert all(torch.equal(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("parts", [1, 2])
def test_nan_and_infinity_reach_what_torch_says(parts: int, value: float) -> None:
    """A row of x its row of y, a row of the weights its column; no other through tails."""
    for problem in (replace(TAILS, rows=33), replace(GATED, in_place=False, dtype="float16")):
        inputs = draw(problem)
        inputs.x[-1, -1] = value
        inputs.weight[-1, 3] = value
        exact = reference(inputs)
        output = Setting(parts=parts).run(inputs).double()
        assert torch.equal(output.isnan(), exact.isnan())
        assert torch.equal(output.isposinf(), exact.isposinf())
        assert torch.equal(output.isneginf(), exact.isneginf())
        assert not output[:-1, :-1].isfinite().logical_not().any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_gate_is_gelu_over_its_whole_range(dtype: str) -> None:
    """b goes from -30 to 30, and to infinity, in the first column."""
    problem = LinearProblem(124, 8, (8,), dtype, bias=False, gate=True)
    inputs = draw(problem)
    inputs.x.zero_()
    inputs.x[:, 0] = 1
    inputs.x[:, 1] = torch.linspace(-30, 30, 124).to(inputs.x.dtype)
    inputs.x[-1, 1] = math.inf
    inputs.weight.zero_()
    inputs.weight[:8, 0] = 1
    inputs.weight[8:, 1] = 1
    gate = inputs.x[:-1, 1].double()
    exact = torch.nn.functional.gelu(gate)
    output = Setting().run(inputs)[:, 0].double()
    assert output[:-1].sub(exact).abs().max() <= exact.to(inputs.x.dtype).sub(exact).abs().max()
    small = (gate > -3.8) & (gate < 0)
    assert (output[:-1] / exact - 1)[small].abs().max() <= torch.finfo(inputs.x.dtype).eps


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("problem", [TAILS, GATED, THREE, MANY], ids=str)
def test_memory_and_undefined_behaviour(problem: LinearProblem, parts: int) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    for gfx in ("gfx942", "gfx1100"):
        setting = Setting(gfx, -2, parts, 2, sanitized("address,undefined"))
        assert faults(setting, draw(problem)) == []


@pytest.mark.parametrize("size", [0, -1])
def test_no_races(size: int) -> None:
    assert faults(Setting("gfx1100", size, 1, 1, sanitized("thread")), draw(TAILS)) == []


def test_a_removed_barrier_is_a_race() -> None:
    source = (KERNELS_DIR / "linear.hip").read_text(encoding="utf-8")
    assert source.count("barrier();") == 1
    kernels_dir = simt.planted("linear.hip", "barrier();", "(void)0;")
    setting = Setting("gfx942", -2, 1, 1, sanitized("thread"), kernels_dir)
    with pytest.raises(simt.SimtError, match="data race"):
        setting.run(draw(TAILS))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(int)p.rows - first_row - 1)", "(int)p.rows - first_row)"),
        ("min2(column, columns - 1)", "min2(column, columns)"),
        ("if (rest >= CHUNK_K)", "if (rest >= 8)"),
        ("row < (int)p.rows && column", "row <= (int)p.rows && column"),
    ],
)
def test_one_row_out_of_bounds_is_seen(old: str, new: str) -> None:
    kernels_dir = simt.planted("linear.hip", old, new)
    setting = Setting("gfx1100", -2, 1, 1, sanitized("address,undefined"), kernels_dir)
    with pytest.raises(simt.SimtError, match="AddressSanitizer"):
        setting.run(draw(TAILS))


MISTAKES: dict[str, tuple[str, str, Any]] = {
    "the gate's other half": ("sums_of(i + kWaveTiles, j, e, gates)", "sums_of(i, j, e, gates)", 1),
    "the gate's rows": ("+ tile / kWaveTiles * columns)", ")", 1),
    "the gate's bias": (
        "add_bias(bias, columns + column, gates)",
        "add_bias(bias, column, gates)",
        1,
    ),
    "which part of k": ("first = SPLIT ? part *", "first = SPLIT ? 0 *", 2),
    "the sum's second part": ("part < p.parts", "part + 1 < p.parts", 2),
    "zeros past k": ("ahead[i].word[w] = real ? x.word[w] : 0", "ahead[i].word[w] = x.word[w]", 1),
    "where a tile of B begins": ("(wave_row * TILES_ROWS + j) * 16, k)", "j * 16, k)", 1),
    "gelu": ("x < 0.0f ? tail", "x < 0.0f ? 0.0f", 1),
}


MISTAKES_WITH_MANY = {
    "which weight": (
        "p.first_block[of + step] <= (u32)block",
        "p.first_block[of + step] < (u32)block",
    ),
    "which of its blocks": ("block - (int)p.first_block[of]", "0 * block"),
    "its bias": ("in_global(p.bias[of])", "in_global(p.bias[0])"),
    "its last column": ("columns = (int)p.first_column[of + 1] - column_before", "columns = 8"),
}


@pytest.mark.parametrize("mistake", MISTAKES_WITH_MANY)
def test_a_planted_mistake_with_many_weights_is_seen(mistake: str) -> None:
    old, new = MISTAKES_WITH_MANY[mistake]
    setting = Setting(size=-1)
    assert faults(setting, draw(MANY)) == []
    broken = replace(setting, kernels_dir=simt.planted("linear.hip", old, new))
    assert faults(broken, draw(MANY)) != []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    old, new, parts = MISTAKES[mistake]
    kernels_dir = simt.planted("linear.hip", old, new)
    problem = replace(GATED, dtype="float16")
    assert faults(Setting(parts=parts, kernels_dir=kernels_dir), draw(problem)) != []
    assert faults(Setting(parts=parts), draw(problem)) == []
