"""The linear layers' kernel on a real GPU: every size and parts of k, real layers, far rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearConfig
from lib_rocm_sd.ops.linear.op import LINEAR, apart
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import ODD, USUAL, LinearProblem
from lib_rocm_sd.ops.linear.torch import LibraryLinear, TorchLinear
from tests.ops.running import compute, error
from tests.ops.toy_op import User

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
CPU = torch.device("cpu")


def configs(dtype: str, gate: bool = False) -> list[LinearConfig]:
    """Every size, with all of k and with three parts of it."""
    arch = identify(DEVICE).arch
    assert arch is not None
    return [replace(size, parts=n) for size in kernel.sizes(arch, dtype, gate) for n in (1, 3)]


def rounded_once(inputs: LinearInputs) -> LinearInputs:
    """On the CPU, where torch's variant computes in float32."""
    moved = {name: item.cpu() for name, item in inputs.named.items()}
    more = tuple(None if item is None else item.cpu() for item in inputs.more)
    given = {name: item for name, item in moved.items() if name in LinearInputs._fields}
    return LinearInputs(**{**given, "gate": inputs.gate, "more": more})._replace(out=None)


def check(launch: Launch, inputs: LinearInputs, config: LinearConfig) -> None:
    """At most twice the error of float32 rounded once, and the same bits again."""
    exact = LINEAR.reference(inputs)
    theirs = compute(LINEAR, TorchLinear(), None, None, rounded_once(inputs))
    kept = None if inputs.residual is None else inputs.residual.clone()
    output = compute(LINEAR, MatrixLinear(), launch, config, inputs).clone()
    assert error(output, exact) <= 2 * error(theirs, exact) + 1e-6, config
    if inputs.residual is not None and kept is not None:
        inputs.residual.copy_(kept)
    assert torch.equal(compute(LINEAR, MatrixLinear(), launch, config, inputs), output)


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_odd_shapes_by_every_size(launch: Launch, problem: LinearProblem) -> None:
    for config in configs(problem.dtype, problem.gate):
        check(launch, LINEAR.make_inputs(problem, DEVICE, 3), config)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "problem"), USUAL, ids=[name for name, _ in USUAL])
def test_the_layers_by_what_is_chosen(
    launch: Launch, name: str, problem: LinearProblem, dtype: str
) -> None:
    problem = replace(problem, dtype=dtype)
    arch = identify(DEVICE).arch
    for config in MatrixLinear().configs(arch, problem)[:3]:
        check(launch, LINEAR.make_inputs(problem, DEVICE, 3), config)


@pytest.mark.parametrize("gate", [False, True])
def test_sizes_of_every_kind(launch: Launch, gate: bool) -> None:
    for rows in (1, 2, 77, 131, 154, 1000):
        for columns in (8, 24, 320, 1288):
            for k in (8, 40, 320, 2056):
                problem = LinearProblem(rows, k, (columns,), gate=gate, residual=True)
                inputs = LINEAR.make_inputs(problem, DEVICE, rows + columns + k)
                for config in configs("float16")[-2:]:
                    check(launch, inputs, config)


def test_rows_beyond_4_gib(launch: Launch) -> None:
    """Of x, of the residual and of the output, which are 4 MiB apart."""
    need = 12 << 30
    if torch.cuda.mem_get_info(DEVICE)[0] < 2 * need:
        pytest.skip(f"needs {2 * need >> 30} GiB of free device memory")
    problem = LinearProblem(1100, 136, (72,), residual=True)
    made = LINEAR.make_inputs(problem, DEVICE, 3)
    assert made.residual is not None
    exact = LINEAR.reference(made)
    step = 1 << 22
    for config in configs("float16"):
        residual = apart(made.residual, step)
        inputs = made._replace(x=apart(made.x, step), residual=residual, out=residual)
        output = compute(LINEAR, MatrixLinear(), launch, config, inputs)
        assert error(output, exact) <= 2e-3 * exact.abs().max().item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_stay_in_their_row(launch: Launch, value: float) -> None:
    inputs = LINEAR.make_inputs(LinearProblem(147, 136, (136,)), DEVICE, 3)
    inputs.x[-1, -1] = value
    for config in configs("float16"):
        output = compute(LINEAR, MatrixLinear(), launch, config, inputs)
        assert not output[-1].isfinite().any() and output[:-1].isfinite().all()


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
def test_through_the_engine(level: str) -> None:
    user = User(Engine(), level)
    plain = next(problem for _, problem in USUAL if not problem.gate)
    gated = next(problem for _, problem in USUAL if problem.gate)
    for problem in (plain, gated):
        inputs = LINEAR.make_inputs(problem, DEVICE, 3)
        exact = LINEAR.reference(inputs)
        output = user.run(LINEAR, inputs)
        assert error(output, exact) <= LINEAR.tolerance(problem) * exact.abs().max().item()
    rows = user.session.report.snapshot()["rows"]
    assert len(rows) == 2
    if level == "Auto":
        assert {row["variant"] for row in rows} == {"torch", "torch + rocm_sd"}


@pytest.mark.parametrize("problem", [p for p in (*dict(USUAL).values(), *ODD) if p.gate], ids=str)
def test_torchs_product_with_our_gate(launch: Launch, problem: LinearProblem) -> None:
    """Not further off than torch's operators, which round once more."""
    inputs = LINEAR.make_inputs(problem, DEVICE, 3)
    exact = LINEAR.reference(inputs)
    theirs = error(compute(LINEAR, TorchLinear(), None, None, inputs._replace(out=None)), exact)
    ours = error(compute(LINEAR, LibraryLinear(), launch, None, inputs), exact)
    assert ours <= 1.1 * theirs


def test_the_door_writes_over_the_residual() -> None:
    x, weight = torch.randn(2, 77, 320, device=DEVICE), torch.randn(640, 320, device=DEVICE)
    x, weight = x.half(), (weight / 18).half()
    residual = torch.randn(2, 77, 640, device=DEVICE).half()
    exact = x.double() @ weight.double().T + residual.double()
    made = functional.linear(x, weight, residual=residual, out=residual)
    assert made is residual and error(residual, exact) <= 3e-3 * exact.abs().max().item()
