"""The convolutions' source executed on the CPU, as each matrix unit would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.weights import ConvWeights, phase_weights
from tests import executed
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

CASES = (
    ConvProblem("3x3", 2, 9, 19, 16, 24),
    ConvProblem("3x3", 1, 3, 1, 16, 40, "bfloat16"),
    ConvProblem("3x3", 1, 9, 17, 32, 64, "bfloat16", True, "identity", 64, True),
    ConvProblem("3x3", 1, 5, 18, 64, 32, "float16", True, "conv", 48, True),
    ConvProblem("3x3", 1, 9, 33, 32, 3, "float16", True),
    ConvProblem("3x3", 3, 5, 9, 32, 24, "float16", True, statistics=True, embedding=True),
    ConvProblem("3x3 stride 2", 2, 9, 20, 32, 32, "bfloat16"),
    ConvProblem("3x3 stride 2 padded", 2, 9, 20, 32, 32, "bfloat16"),
    ConvProblem("3x3 stride 2 padded", 1, 8, 33, 16, 48, statistics=True),
    ConvProblem("upsample", 2, 5, 17, 32, 32, "float16", statistics=True),
)


def run_shim(
    problem: ConvProblem, gfx: str, inputs: ConvInputs, config: int = 0, sanitize: str | None = None
) -> Any:
    """What the kernel gives, through MatrixConv.run."""
    arch = by_gfx(gfx)
    assert arch is not None
    variant = MatrixConv(problem.kind)
    launch = ShimLaunch(arch, 1, sanitize)
    weights = inputs.weights
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    with launch.knows(*tensors, weights.weight, weights.bias):
        return compute(
            CONVS[problem.kind], variant, launch, variant.configs(arch, problem)[config], inputs
        )


def largest_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return (output.double() - exact).abs().max().item()


def check(problem: ConvProblem, gfx: str, **how: Any) -> None:
    """Error at most twice that of torch's own convolution in the same half type."""
    op = CONVS[problem.kind]
    inputs = op.make_inputs(problem, torch.device("cpu"), 5)
    exact, exact_norm = op.reference(inputs)
    output, norm = run_shim(problem, gfx, inputs, **how)
    plain = inputs._replace(next_norm=None)
    torchs_own, _ = compute(CONVS[problem.kind], op.variants[-1], None, None, plain)
    assert largest_error(output, exact) <= 2 * largest_error(torchs_own, exact)
    assert not output[..., problem.out_channels :].any()
    if problem.statistics:
        assert largest_error(norm, exact_norm) <= 2e-3 * exact_norm.abs().max().item()


@pytest.mark.parametrize("problem", CASES, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_a_convolution_is_right_on_every_unit(gfx: str, problem: ConvProblem) -> None:
    check(problem, gfx)


@pytest.mark.parametrize("gfx", UNITS)
def test_other_configs_are_right(gfx: str) -> None:
    arch = by_gfx(gfx)
    assert arch is not None
    for config in range(1, len(MatrixConv("3x3").configs(arch, CASES[3]))):
        check(CASES[3], gfx, config=config)


@pytest.mark.parametrize("problem", [CASES[3], *CASES[6:]], ids=str)
def test_no_access_outside_of_any_buffer(problem: ConvProblem) -> None:
    check(problem, "gfx1100", sanitize="address,undefined")


def test_no_races() -> None:
    check(replace(CASES[3], in_channels=96), "gfx1200", sanitize="thread")


def test_an_embedding_in_float32_is_read_as_it_lies_where_there_is_no_bias() -> None:
    """To the bit as with a bias of zeros, each image's row and no other, from a wider tensor."""
    problem = ConvProblem("3x3", 3, 4, 5, 16, 32, embedding=True)
    inputs = CONVS["3x3"].make_inputs(problem, torch.device("cpu"), 1)
    wide = torch.randn(3, 72)
    results = []
    for bias in (None, torch.zeros(32)):
        weights = ConvWeights(inputs.weights.weight, bias)
        embedding = wide[:, 8:40]
        given = inputs._replace(weights=weights, embedding=embedding)
        rows, stride = weights.bias_rows(torch.zeros(32), embedding)
        as_it_lies = rows.data_ptr() == embedding.data_ptr()
        assert (as_it_lies, stride) == ((True, 72) if bias is None else (False, 32))
        output, _ = run_shim(problem, "gfx1100", given, sanitize="address,undefined")
        results.append(output)
        exact, _ = CONVS["3x3"].reference(given)
        assert largest_error(output, exact) <= 4e-3
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", list(CONVS))
def test_too_large_a_value_sets_the_overflow_flag(kind: str) -> None:
    problem = ConvProblem(kind, 1, 4, 4, 16, 16)
    for factor, flag in ((1.0, 0), (4e4, 1)):
        inputs = CONVS[kind].make_inputs(problem, torch.device("cpu"), 1)
        overflow = torch.zeros(1, dtype=torch.int32)
        inputs = inputs._replace(x=inputs.x * factor, overflow=overflow)
        run_shim(problem, "gfx1100", inputs)
        assert overflow.item() == flag


def test_without_an_overflow_flag_too_large_a_value_is_infinity() -> None:
    problem = ConvProblem("3x3", 1, 4, 4, 16, 16)
    inputs = CONVS["3x3"].make_inputs(problem, torch.device("cpu"), 1)
    inputs = inputs._replace(x=inputs.x * 4e4)
    output, _ = run_shim(problem, "gfx1100", inputs, sanitize="address,undefined")
    assert output.isinf().any()


def test_phase_weights_are_upsampling_and_convolution() -> None:
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    x = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    large = torch.nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
    exact = torch.nn.functional.conv2d(large, weight, padding=1)
    for phase, small in enumerate(phase_weights(weight)):
        py, px = divmod(phase, 2)
        padded = torch.nn.functional.pad(x, (1 - px, px, 1 - py, py))
        output = torch.nn.functional.conv2d(padded, small)
        assert (output - exact[:, :, py::2, px::2]).abs().max() < 1e-12
