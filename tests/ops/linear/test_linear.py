"""Linear layers on the CPU: through the engine, against float64; what callers do wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import arch, functional
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.inputs import LinearInputs, overlap
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import ODD, USUAL, LinearProblem
from lib_rocm_sd.ops.linear.torch import LibraryLinear, TorchLinear
from lib_rocm_sd.trials import recorder
from tests import executed
from tests.ops.toy_op import CPU, GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return ((output.double() - exact).abs().max() / exact.abs().max()).item()


def called(inputs: LinearInputs) -> torch.Tensor:
    """By the door."""
    weights, biases = zip(*inputs.layers, strict=True)
    one = len(weights) == 1
    return functional.linear(
        inputs.x,
        weights[0] if one else weights,
        biases[0] if one else biases,
        inputs.residual,
        inputs.gate,
        out=inputs.out,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("problem", ODD, ids=str)
def test_the_op_is_right_on_the_cpu(problem: LinearProblem, dtype: str) -> None:
    problem = replace(problem, dtype=dtype)
    inputs = LINEAR.make_inputs(problem, CPU, 1)
    assert LINEAR.problem_of(inputs) == problem
    exact = LINEAR.reference(inputs)
    output = called(inputs)
    assert output.dtype == inputs.x.dtype and output.shape == LINEAR.output_shape(problem)
    assert (inputs.out is None) == (output is not inputs.out)
    assert relative_error(output, exact) <= LINEAR.tolerance(problem)


def test_the_reference_is_torchs_formula() -> None:
    x, w, b, r = (torch.randn(*s).double() for s in ((5, 16), (32, 16), (32,), (5, 16)))
    first, second = F.linear(x, w, b).chunk(2, -1)
    exact = LINEAR.reference(LinearInputs(x, w, b, r, gate=True))
    assert relative_error(exact, first * F.gelu(second) + r) < 1e-14


def test_rows_are_all_but_the_last_dimension() -> None:
    x = torch.randn(2, 3, 5, 48)[..., 8:24]
    weight, bias, residual = torch.randn(24, 16), torch.randn(24), torch.randn(2, 3, 5, 24)
    expected = F.linear(x, weight, bias) + residual
    torch.testing.assert_close(functional.linear(x, weight, bias, residual), expected)
    made = functional.linear(x, weight, bias, residual, out=residual)
    assert made is residual
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(functional.linear(x[0, 0, 0], weight), F.linear(x[0, 0, 0], weight))
    assert functional.linear(x[:0], weight).shape == (0, 3, 5, 24)
    q, k = functional.linear(x, [weight, weight[:8]], [None, bias[:8]]).split([24, 8], -1)
    torch.testing.assert_close(q, F.linear(x, weight))
    torch.testing.assert_close(k, F.linear(x, weight[:8], bias[:8]))


X, W = torch.zeros(3, 16), torch.zeros(8, 16)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a weight for another k": ((X, torch.zeros(8, 24)), {}, r"not \(8, 24\).*x \(3, 16\)"),
    "a weight of three dimensions": ((X, W[None]), {}, r"not \(1, 8, 16\)"),
    "a bias for another weight": ((X, W, torch.zeros(7)), {}, r"must be \(8,\).*bias \(7,\)"),
    "a residual of another width": (
        (X, W),
        {"residual": torch.zeros(3, 7)},
        r"residual must be .*\(3, 7\)",
    ),
    "a residual of other rows": (
        (X[None], W),
        {"residual": torch.zeros(3, 8)},
        r"residual must be \(1, 3, ..\)",
    ),
    "another dtype": ((X, W.half()), {}, "weight must be torch.float32"),
    "out that is no residual": ((X, W), {"out": torch.zeros(3, 8)}, "out must be the residual"),
    "a gate of two weights": ((X, [W, W]), {"gate": True}, "a gate goes with one weight"),
    "a gate of an odd weight": ((X, torch.zeros(7, 16)), {"gate": True}, "unlike"),
    "too many weights": ((X, [W] * 145), {}, "145 weights"),
    "no weight": ((X, []), {}, "0 weights"),
    "one bias for two weights": ((X, [W, W], torch.zeros(8)), {}, "one bias for 2 weights"),
    "no tensor": (("x", W), {}, "x must be a tensor"),
    "no values": ((torch.zeros(3, 0), torch.zeros(8, 0)), {}, "no columns"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_callers_mistake_is_told_with_shapes(mistake: str) -> None:
    arguments, options, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        functional.linear(*arguments, **options)


def test_out_must_not_lie_over_x() -> None:
    both = torch.zeros(4, 32)
    x, left, right = both[:, :16], both[:, :16], both[:, 16:]
    assert overlap(x, left) and not overlap(x, right) and overlap(both[:, 8:24], right)
    assert not overlap(both[:2], both[2:]) and not overlap(x, torch.zeros(4, 32))
    functional.linear(x, torch.zeros(16, 16), residual=right, out=right)
    with pytest.raises(ValueError, match="out must not overlap x"):
        functional.linear(x, torch.zeros(16, 16), residual=left, out=left)


def test_what_is_not_for_the_kernel_is_said() -> None:
    ours, p = MatrixLinear(), LinearProblem(8, 64, (64,))
    gfx1100 = arch.by_gfx("gfx1100")
    assert ours.refusals(gfx1100, p) == []
    assert ours.refusals(None, p) == ["no supported GPU"]
    assert "multiple of 8" in ours.refusals(gfx1100, replace(p, k=60))[0]
    assert "multiple of 8" in ours.refusals(gfx1100, replace(p, columns=(64, 4)))[0]
    assert "fp16 and bf16" in ours.refusals(gfx1100, replace(p, dtype="float32"))[0]
    assert "4 GiB" in ours.refusals(gfx1100, replace(p, k=1 << 16, columns=(1 << 15,)))[0]
    assert "work-items" in ours.refusals(gfx1100, replace(p, rows=1 << 31, columns=(640,)))[0]
    for _, problem in USUAL:
        assert ours.refusals(gfx1100, problem) == []


def test_the_memory_beside_the_output_is_that_of_the_parts_of_k() -> None:
    ours = MatrixLinear()
    for _, problem in USUAL:
        assert ours.workspace(problem) <= kernel.MOST_PARTIAL_BYTES
    assert ours.workspace(LinearProblem(1 << 20, 320, (320,))) == 0
    assert ours.workspace(LinearProblem(2, 1280, (1280,))) > 0


@executed.known(by="shim")
@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize(
    "problem",
    [
        LinearProblem(33, 72, (40,), residual=True, in_place=True),
        LinearProblem(5, 136, (24,), gate=True),
        LinearProblem(2, 640, (24, 8, 8), bias=False),
    ],
    ids=str,
)
def test_our_kernel_through_the_engine_and_torchs_give_the_same(
    problem: LinearProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (LibraryLinear, TorchLinear):
        monkeypatch.setattr(other, "preference", 0)
    launch = ShimLaunch(arch.by_gfx("gfx1100"))  # type: ignore[arg-type]
    user, report = engine_of(GFX1100, lambda device, arch: launch)
    inputs = LINEAR.make_inputs(problem, CPU, 3)
    exact = LINEAR.reference(inputs)
    theirs = TorchLinear().run(Call(problem, inputs._replace(out=None)))
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        output = user.run(LINEAR, inputs)
    assert [row["variant"] for row in report.snapshot()["rows"]] == ["rocm_sd"]
    tolerance = LINEAR.tolerance(problem)
    assert relative_error(output, exact) <= tolerance
    assert relative_error(theirs, exact) <= tolerance


def test_auto_takes_torchs_first() -> None:
    user, report = engine_of(GFX1100, lambda device, arch: ShimLaunch(arch))
    user.run(LINEAR, LINEAR.make_inputs(LinearProblem(5, 136, (24,)), CPU, 3))
    assert [row["variant"] for row in report.snapshot()["rows"]] == ["torch"]


def test_auto_takes_ours_first_for_several_weights_on_few_rows() -> None:
    """With a fast library only for so many that it would be many launches."""
    ours, theirs = MatrixLinear(), TorchLinear()

    def first(problem: LinearProblem, gfx: str = "gfx1100") -> bool:
        row = arch.by_gfx(gfx)
        return ours.preference_for(row, problem) > theirs.preference_for(row, problem)

    text = LinearProblem(154, 768, (320, 320), bias=False)
    assert first(text) and first(LinearProblem(2, 1280, (320, 640, 1280)))
    assert not first(replace(text, rows=8192)) and not first(replace(text, columns=(320,)))
    assert not first(text, "gfx942") and first(replace(text, columns=(320,) * 4), "gfx942")


@executed.known(by="shim")
@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_auto_takes_torchs_product_and_our_gate_first() -> None:
    launch = ShimLaunch(arch.by_gfx("gfx1100"))  # type: ignore[arg-type]
    user, report = engine_of(GFX1100, lambda device, arch: launch)
    inputs = LINEAR.make_inputs(LinearProblem(5, 136, (24,), gate=True), CPU, 3)
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        user.run(LINEAR, inputs)
    assert [row["variant"] for row in report.snapshot()["rows"]] == ["torch + rocm_sd"]


def test_the_key_tells_apart_what_the_checks_do() -> None:
    both = torch.zeros(4, 32)
    weight, x, right = torch.zeros(16, 16), both[:, :16], both[:, 16:]
    other = torch.zeros(4, 32)[:, 16:]
    inputs = [
        LinearInputs(x, weight),
        LinearInputs(x.contiguous(), weight),
        LinearInputs(x, weight, gate=True),
        LinearInputs(x, weight.half()),
        LinearInputs(x, weight, torch.zeros(16)),
        LinearInputs(x, weight, None, right),
        LinearInputs(x, weight, None, right, right),
        LinearInputs(x, weight, None, right, other),
        LinearInputs(x, weight, None, x, x),
        LinearInputs(x, weight, None, None, None, weight),
        LinearInputs(x, weight.clone().requires_grad_()),
    ]
    assert len({LINEAR.key_of(each) for each in inputs}) == len(inputs)
    assert LINEAR.key_of(inputs[0]) == LINEAR.key_of(LinearInputs(other, weight.clone()))
    with pytest.raises(ValueError, match="not dense"):
        LINEAR.key_of(LinearInputs(torch.zeros(4, 16).to_sparse(), weight))
    with pytest.raises(ValueError, match="weight must be a tensor"):
        LINEAR.key_of(LinearInputs(x, [1]))  # type: ignore[arg-type]


def test_a_new_number_of_rows_is_measured_as_a_power_of_two() -> None:
    p = LinearProblem(1000, 64, (64,))
    assert LINEAR.measured_as(p).rows == 1024
    assert LINEAR.measured_as(replace(p, rows=2)).rows == 16
    assert LINEAR.test_problems(p)[0] == LINEAR.test_problems(replace(p, rows=7, k=8))[0]


@pytest.mark.parametrize("config", range(5))
def test_a_trial_is_recorded_without_torch_between_launches(config: int) -> None:
    problem = LinearProblem(154, 768, (320, 320), bias=False)
    gfx1100 = arch.by_gfx("gfx1100")
    chosen = MatrixLinear().configs(gfx1100, problem)[config]
    found = recorder.recordings(LINEAR, MatrixLinear(), chosen, problem)
    assert len(found) == 7 and not any(each.unmade for each in found)
    assert [each.far for each in found].count(True) == 1
    entries = {start.spec.entry for each in found for start in each.starts}
    assert entries == ({"linear", "linear_sum"} if chosen.parts > 1 else {"linear"})


def test_trial_inputs_are_right_and_reach_beyond_2_gib() -> None:
    problem = LinearProblem(64, 64, (64,), residual=True, in_place=True)
    far = 0
    for _, make in LINEAR.trial_inputs(problem):
        inputs = make()
        assert LINEAR.problem_of(inputs).in_place
        far += inputs.x.stride(0) * inputs.x.shape[0] * 2 > 1 << 31
    assert far == 1
