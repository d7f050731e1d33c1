"""A bound linear layer gives the kernels what an unbound one does; torch's writes side by side."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.ops.base import Call, Launch
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearConfig, LinearParams, configs
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.ops.linear.torch import TorchLinear, _side_by_side, as_one
from tests.ops.launches import Launches, shifted
from tests.ops.running import bind, compute

OURS = MatrixLinear()
CPU = torch.device("cpu")
PROBLEMS = (
    LinearProblem(17, 64, (24,)),
    LinearProblem(17, 64, (24,), "bfloat16", residual=True),
    LinearProblem(17, 64, (24, 8), bias=False),
    LinearProblem(17, 64, (24, 8, 16), residual=True, in_place=True),
    LinearProblem(2, 1024, (48,), gate=True),
    LinearProblem(1, 1024, (48, 16), residual=True, in_place=True),
    LinearProblem(5, 64, (24, 8, 16, 264, 8), residual=True),
)
NEW = {"out", "partial"}
"""Where tensors lie that a call makes, if nothing is made in place."""


def config(problem: LinearProblem, parts: int = 1) -> LinearConfig:
    p = problem
    found = configs(table()["gfx1100"], p.dtype, p.rows, p.k, p.columns, p.gate)[0]
    return replace(found, parts=parts)


def drawn(problem: LinearProblem, seed: int = 0) -> LinearInputs:
    return LINEAR.make_inputs(problem, CPU, seed)


def read(params: bytes, made: set[str]) -> dict[str, Any]:
    got = LinearParams.from_buffer_copy(params)
    values = {name: getattr(got, name) for name, *_ in LinearParams._fields_}
    assert bool(values["partial"]) == (values["parts"] > 1)
    values["table"] = params[ctypes.sizeof(LinearParams) :]
    return {name: value for name, value in values.items() if name not in made}


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_bound_call_launches_what_an_unbound_one_does(problem: LinearProblem, parts: int) -> None:
    launch, chosen = Launches(), config(problem, parts)
    bound = bind(LINEAR, OURS, launch, chosen, drawn(problem))
    for seed in (0, 1):
        inputs = drawn(problem, seed)
        launch.seen.clear()
        outs = [bound(inputs), compute(LINEAR, OURS, launch, chosen, inputs)]
        assert outs[0].shape == outs[1].shape and outs[0].dtype == inputs.x.dtype
        half = len(launch.seen) // 2
        assert half == (2 if OURS._cut(problem, chosen).parts > 1 else 1)
        for one, other in zip(launch.seen[:half], launch.seen[half:], strict=True):
            assert one[:3] == other[:3] and one[4] == other[4]
            made = {"partial"} if problem.in_place else NEW
            assert read(one[3], made) == read(other[3], made)
            assert LinearParams.from_buffer_copy(one[3]).out == outs[0].data_ptr()
    assert launch.prepared == half


def test_rows_that_are_apart_are_read_as_they_lie() -> None:
    problem, launch = PROBLEMS[1], Launches()
    inputs = drawn(problem)
    wide = torch.zeros(17, 128, dtype=inputs.x.dtype)
    inputs = inputs._replace(x=wide[:, 64:].copy_(inputs.x))
    bind(LINEAR, OURS, launch, config(problem), inputs)(inputs)
    got = LinearParams.from_buffer_copy(launch.seen[0][3])
    assert (got.x, got.x_stride) == (inputs.x.data_ptr(), 128)


@pytest.mark.parametrize("which", ["x", "weight", "bias", "residual"])
def test_what_is_not_aligned_is_copied(which: str) -> None:
    problem, launch = PROBLEMS[1], Launches()
    inputs = drawn(problem)
    bound = bind(LINEAR, OURS, launch, config(problem), inputs)
    changed: Any = {which: shifted(getattr(inputs, which))}
    moved = inputs._replace(**changed)
    bound(moved)
    assert launch.prepared == 1
    got = LinearParams.from_buffer_copy(launch.seen[-1][3])
    name = {"weight": "weights_0", "bias": "bias_0"}.get(which, which)
    assert getattr(got, name) % 16 == 0
    bound(inputs)
    got = LinearParams.from_buffer_copy(launch.seen[-1][3])
    assert got.x == inputs.x.data_ptr() and got.residual == inputs.residual.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("which", ["x", "weight"])
def test_what_has_no_dense_rows_is_run(which: str) -> None:
    problem, launch = PROBLEMS[0], Launches()
    inputs = drawn(problem)
    turned = getattr(inputs, which).t().contiguous().t()
    changed: Any = {which: turned}
    inputs = inputs._replace(**changed)
    posed = LINEAR.problem_of(inputs)
    assert OURS.bound(Call(posed, inputs, launch, config(problem))) == OURS.run


def test_without_a_launcher_that_prepares_it_is_run() -> None:
    inputs = drawn(PROBLEMS[0])
    plain: Launch = lambda *words: None  # noqa: E731
    assert OURS.bound(Call(PROBLEMS[0], inputs, plain, config(PROBLEMS[0]))) == OURS.run


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if len(p.columns) > 1], ids=str)
def test_torchs_writes_side_by_side(problem: LinearProblem) -> None:
    problem = replace(problem, dtype="float32")
    inputs = drawn(problem)
    expected = LINEAR.reference(inputs)  # before the residual is written over
    made = _side_by_side(Call(problem, inputs))
    assert torch.allclose(made.double(), expected, atol=1e-5)
    if problem.in_place:
        assert inputs.residual is not None and made.data_ptr() == inputs.residual.data_ptr()


def beside(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """Weights that lie one after another."""
    every = torch.randn(sum(rows for rows, _ in shapes), shapes[0][1])
    return list(every.split([rows for rows, _ in shapes]))


def test_weights_that_lie_one_after_another_make_one_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = LinearProblem(17, 64, (24, 8, 16), "float32", bias=False)
    apart, products = drawn(problem), []
    weights = beside((24, 64), (8, 64), (16, 64))
    for weight, (values, _) in zip(weights, apart.layers, strict=True):
        weight.copy_(values)
    joint = apart._replace(weight=weights[0], weight_1=weights[1], weight_2=weights[2])
    product: Any = torch.mm

    def counted(*args: Any, **kwargs: Any) -> Any:
        products.append(args)
        return product(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    made = _side_by_side(Call(problem, joint))
    assert len(products) == 1
    assert torch.allclose(made, _side_by_side(Call(problem, apart)), atol=1e-6)
    assert len(products) == 4
    biased = replace(problem, bias=True)
    with_bias = joint._replace(bias_1=torch.ones(8))
    made[:, 24:32] += 1
    assert torch.allclose(_side_by_side(Call(biased, with_bias)), made, atol=1e-6)


def test_what_is_one_weight_and_what_is_not() -> None:
    first, second, third = beside((24, 64), (8, 64), (16, 64))
    one = as_one([first, second, third])
    assert one is not None and torch.equal(one, torch.cat([first, second, third]))
    assert one.data_ptr() == first.data_ptr() and as_one([second, third]) is not None
    assert as_one([first]) is not None
    assert as_one([first, third]) is None and as_one([second, first, third]) is None
    assert as_one([first, first]) is None and as_one([first, second.clone()]) is None
    wide = torch.randn(24, 128)
    assert as_one([wide[:12, :64], wide[12:, :64]]) is None
    memory = torch.randn(48, 64).numpy()
    neighbours = [torch.from_numpy(memory[:24]), torch.from_numpy(memory[24:])]
    assert neighbours[1].data_ptr() == neighbours[0].data_ptr() + neighbours[0].nbytes
    assert as_one(neighbours) is None


def test_what_is_measured_lies_as_in_a_unet() -> None:
    """Every copy of the inputs too."""
    problem = LinearProblem(17, 64, (24, 24, 24), bias=False)
    sets = input_sets(LINEAR, problem, CPU, lambda size: 3)
    weights = [[weight for weight, _ in inputs.layers] for inputs in sets]
    assert all(as_one(each) is not None for each in weights)
    assert len({each[0].data_ptr() for each in weights}) == 3
    assert all(map(torch.equal, weights[0], weights[2]))
    apart = input_sets(LINEAR, replace(problem, bias=True), CPU, lambda size: 2)
    assert all(as_one([weight for weight, _ in each.layers]) is None for each in apart)


def test_what_vmap_transforms_writes_nowhere() -> None:
    """Without a gradient too, on any device but the CPU."""
    problem = LinearProblem(17, 64, (24, 8, 16), "float32")
    inputs = LINEAR.make_inputs(problem, torch.device("meta"), 0)
    many = torch.empty(3, *inputs.x.shape, device="meta")

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        given = inputs._replace(x=x)
        return TorchLinear().run(Call(problem, given))

    with torch.no_grad():
        assert torch.vmap(by_torch)(many).shape == (3, 17, 48)
