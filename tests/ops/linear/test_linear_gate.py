"""The library's product with our gate: under the shim, and what a bound call launches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx, table
from lib_rocm_sd.ops.linear.formula import reference
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearParams
from lib_rocm_sd.ops.linear.op import LINEAR, apart
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.ops.linear.torch import LibraryLinear, finished
from tests import executed
from tests.ops.attention.judge import Errors
from tests.ops.launches import Launches, shifted
from tests.ops.running import bind, compute
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

OURS = LibraryLinear()
CPU = torch.device("cpu")
GATED = LinearProblem(33, 24, (136,), gate=True)
PROBLEMS = (
    GATED,
    LinearProblem(1, 8, (8,), "bfloat16", bias=False, gate=True),
    LinearProblem(77, 40, (320,), "bfloat16", residual=True, gate=True),
    LinearProblem(5, 16, (2056,), residual=True, gate=True, in_place=True),
)
on_shim = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]


def draw(problem: LinearProblem) -> LinearInputs:
    return LINEAR.make_inputs(problem, CPU, 1)


def run(
    inputs: LinearInputs,
    gfx: str = "gfx1100",
    kernels_dir: Path = KERNELS_DIR,
    sanitize: str | None = None,
) -> torch.Tensor:
    arch = by_gfx(gfx)
    assert arch is not None
    launch = ShimLaunch(arch, 1, sanitize, kernels_dir)
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        return compute(LINEAR, OURS, launch, None, inputs)


def theirs(inputs: LinearInputs) -> torch.Tensor:
    """torch's operators after the same product."""
    product = torch.nn.functional.linear(inputs.x, inputs.weight, inputs.bias)
    return finished(product, inputs._replace(out=None))


def wrong(inputs: LinearInputs, **options: Any) -> list[str]:
    """An error of more than that of torch's operators, which round once more."""
    exact, others = reference(inputs), theirs(inputs)
    made = run(inputs, **options)
    ours, torchs = Errors.of(made, exact), Errors.of(others, exact)
    good = ours.largest <= 2 * torchs.largest + 1e-7 and ours.rms <= 1.05 * torchs.rms + 1e-8
    placed = inputs.out is None or made.data_ptr() == inputs.out.data_ptr()
    return [] if good and placed else [f"{ours}, torch's {torchs}; in place: {placed}"]


class TestOnTheShim:
    pytestmark = on_shim

    @pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_shapes(self, problem: LinearProblem, gfx: str) -> None:
        assert wrong(draw(problem), gfx=gfx) == []

    def test_rows_of_a_residual_with_gaps(self) -> None:
        inputs = draw(PROBLEMS[-1])
        assert inputs.residual is not None
        residual = apart(inputs.residual, 2080)
        assert wrong(inputs._replace(residual=residual, out=residual)) == []
        assert wrong(inputs._replace(residual=shifted(inputs.residual), out=None)) == []

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_no_number_stays_in_its_row(self, value: float) -> None:
        inputs = draw(GATED)
        inputs.x[3, 5] = value
        made, others = run(inputs), theirs(inputs)
        assert torch.equal(made.isfinite(), others.isfinite())

    def test_no_access_outside(self) -> None:
        reason = simt.missing("address,undefined")
        if reason:
            pytest.skip(reason)
        for problem in PROBLEMS:
            assert wrong(draw(problem), sanitize="address,undefined") == []

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("(from + p.columns)", "(from)"),
            ("float_bits(gelu(half_of(gate, i)))", "float_bits(half_of(gate, i))"),
            ("p.x + (i64)row * p.x_stride", "p.x + (i64)row * p.columns"),
            ("write_row(p, (int)row, column, sums);", "write_row(p, 0, column, sums);"),
        ],
    )
    def test_a_planted_mistake_is_seen(self, old: str, new: str) -> None:
        kernels_dir = simt.planted("linear.hip", old, new)
        assert wrong(draw(PROBLEMS[-1]), kernels_dir=kernels_dir) != []


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_bound_call_launches_what_an_unbound_one_does(problem: LinearProblem) -> None:
    launch, inputs = Launches(), draw(problem)
    bound = bind(LINEAR, OURS, launch, None, inputs)
    for _ in range(2):
        launch.seen.clear()
        outs = [bound(inputs), compute(LINEAR, OURS, launch, None, inputs)]
        one, other = launch.seen
        assert one[:3] == other[:3] and one[4] == other[4]
        read = [LinearParams.from_buffer_copy(seen[3]) for seen in (one, other)]
        same = ("rows", "columns", "x_stride", "residual", "residual_stride")
        assert all(getattr(read[0], name) == getattr(read[1], name) for name in same)
        assert read[0].out == outs[0].data_ptr()
        assert outs[0].shape == outs[1].shape == (problem.rows, problem.all_columns)
    assert launch.prepared == 1


def test_a_misaligned_residual_is_copied() -> None:
    launch, inputs = Launches(), draw(PROBLEMS[2])
    bound = bind(LINEAR, OURS, launch, None, inputs)
    assert inputs.residual is not None
    bound(inputs._replace(residual=shifted(inputs.residual)))
    assert LinearParams.from_buffer_copy(launch.seen[-1][3]).residual % 16 == 0


def test_what_it_refuses() -> None:
    arch = table()["gfx1100"]
    assert OURS.refusals(arch, GATED) == []
    assert OURS.refusals(None, GATED) == ["no supported GPU"]
    assert OURS.refusals(arch, replace(GATED, gate=False)) == [
        "there is no gate (GEGLU), which it is for"
    ]
    assert "12 columns" in OURS.refusals(arch, replace(GATED, columns=(12,)))[0]
    assert "float32" in OURS.refusals(arch, replace(GATED, dtype="float32"))[0]
    assert "one launch" in OURS.refusals(arch, replace(GATED, rows=1 << 30, columns=(1 << 20,)))[0]
