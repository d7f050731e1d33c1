"""The attention kernel on a real GPU: every head_dim and config, awkward layouts, large indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.lab.methods import AmdLoops
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import ODD, AttentionProblem
from lib_rocm_sd.runtime import launcher
from tests.ops.attention.judge import numbers
from tests.ops.attention.layouts import LAYOUTS, on_device
from tests.ops.running import compute
from tests.ops.toy_op import User
from tests.verify.simt.attention import DTYPES, draw

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
HEAD_DIMS = (*range(8, 257, 8), 512)

Run = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def run() -> Run:
    """Our kernel with the `index`-th config of its search space, no engine between."""
    arch = identify(DEVICE).arch
    assert arch is not None
    launch = launcher.launcher_for(DEVICE, arch)

    def attend(*inputs: Any, index: int = 0) -> torch.Tensor:
        q, k, v, *rest = inputs
        config = kernel.configs(arch, q.shape[3])[index]
        return compute(
            ATTENTION, MatrixAttention(), launch, config, AttentionInputs(q, k, v, *rest)
        )

    return attend


def faults(output: torch.Tensor, *inputs: Any) -> list[str]:
    """What the judge of tests/ops/attention/judge.py finds, all of it on the inputs' device."""
    return numbers(output, *inputs).faults(True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_and_config(run: Run, head_dim: int, dtype: str) -> None:
    arch = identify(DEVICE).arch
    assert arch is not None
    drawn = draw(AttentionProblem(2, 3, 113, 203, head_dim, dtype))
    inputs: list[Any] = [t.to(DEVICE) for t in drawn]
    for index in range(len(kernel.configs(arch, head_dim))):
        assert faults(run(*inputs, index=index), *inputs) == []


@pytest.mark.parametrize("mask", ["none", "float16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 128, 160, 256, 512])
def test_amds_loops_with_every_config(head_dim: int, mask: str) -> None:
    """What no config of this card runs up to 256: tiles that pass through registers."""
    arch = identify(DEVICE).arch
    assert arch is not None
    if AmdLoops().refusals(arch, AttentionProblem(1, 1, 1, 1, head_dim)):
        pytest.skip("on an AMD card all tests run them")
    launch = launcher.launcher_for(DEVICE, arch)
    for dtype in kernel.DTYPES:
        problem = AttentionProblem(2, 3, 113, 203, head_dim, dtype, mask)
        inputs = ATTENTION.make_inputs(problem, DEVICE, 3)
        for config in AmdLoops().configs(arch, problem):
            output = compute(ATTENTION, AmdLoops(), launch, config, inputs)
            assert faults(output, *inputs) == [], config


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_the_odd_cases(run: Run, problem: AttentionProblem) -> None:
    inputs = ATTENTION.make_inputs(problem, DEVICE, 3)
    assert faults(run(*inputs), *inputs) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_and_misaligned_views(run: Run, layout: str) -> None:
    problem = AttentionProblem(2, 3, 65, 77, 40)
    inputs: list[Any] = draw(problem, (layout,) * 3)
    on_gpu = [on_device(t, DEVICE) for t in inputs]
    assert faults(run(*on_gpu), *on_gpu) == []


@pytest.mark.parametrize("mask", ["bool", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [40, 512])
def test_masks_with_a_fully_masked_query(run: Run, head_dim: int, mask: str) -> None:
    inputs = ATTENTION.make_inputs(
        AttentionProblem(2, 2, 67, 131, head_dim, "float16", mask), DEVICE, 5
    )
    output = run(*inputs)
    assert faults(output, *inputs) == []
    assert not output[:, -1].any()


def test_more_than_65535_work_groups(run: Run) -> None:
    inputs = ATTENTION.make_inputs(AttentionProblem(70_001, 1, 3, 5, 8), DEVICE, 7)
    assert faults(run(*inputs), *inputs) == []


def test_indices_beyond_two_to_the_31(run: Run) -> None:
    far = (1 << 31) + 4096
    if torch.cuda.mem_get_info(DEVICE)[0] < 3 * far * 2:
        pytest.skip("needs 13 GB of free device memory")
    storage = torch.zeros(far * 2, dtype=torch.float16, device=DEVICE)
    shape, strides = (2, 33, 1, 40), (far, 192, 40, 1)
    views: list[Any] = [storage[i * 64 :].as_strided(shape, strides) for i in range(3)]
    for view, drawn in zip(views, draw(AttentionProblem(2, 1, 33, 33, 40)), strict=True):
        view.copy_(drawn)
    assert faults(run(*views), *views) == []


@pytest.mark.parametrize("head_dim", [40, 512])
def test_rows_a_gibibyte_apart(run: Run, head_dim: int) -> None:
    step, rows = 1 << 29, 5
    if torch.cuda.mem_get_info(DEVICE)[0] < 3 * rows * step:
        pytest.skip("needs 8 GB of free device memory")
    storage = torch.zeros(rows * step, dtype=torch.float16, device=DEVICE)
    q, *drawn = (x.to(DEVICE) for x in draw(AttentionProblem(1, 1, 33, rows, head_dim)))
    far: list[Any] = [
        storage[i * 4096 :].as_strided(x.shape, (rows * step, step, head_dim, 1)).copy_(x)
        for i, x in enumerate(drawn)
    ]
    assert faults(run(q, *far), q, *far) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_go_where_the_formula_lets_them(run: Run, value: float) -> None:
    for place in range(3):
        q, k, v = (t.to(DEVICE) for t in draw(AttentionProblem(1, 1, 37, 45, 64)))
        (q, k, v)[place][0, 20, 0, 7] = value
        output, exact = run(q, k, v), reference(AttentionInputs(q, k, v))
        assert not exact.isfinite().all()
        assert torch.equal(output.isnan(), exact.isnan())
        assert torch.equal(output.isinf(), exact.isinf())


def test_another_stream_and_a_captured_graph(run: Run) -> None:
    inputs = [t.to(DEVICE) for t in draw(AttentionProblem(1, 2, 64, 64, 64))]
    expected = run(*inputs)
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        on_stream = run(*inputs)
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*inputs)
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert torch.equal(on_stream, expected)
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_the_engine_runs_the_kernel_at_every_level(level: str) -> None:
    engine = User(Engine(), level)
    report = engine.session.report
    q, k, v = (t.to(DEVICE) for t in draw(AttentionProblem(2, 8, 256, 77, 40)))
    output = engine.run(ATTENTION, AttentionInputs(q, k, v))
    assert faults(output, q, k, v) == []
    if level != "Performance":
        assert report.snapshot()["rows"][0]["variant"] == "rocm_sd"


def test_the_result_is_the_same_every_time(run: Run) -> None:
    inputs = [t.to(DEVICE) for t in draw(AttentionProblem(2, 8, 1024, 1024, 80))]
    first = run(*inputs)
    assert all(torch.equal(run(*inputs), first) for _ in range(20))


def test_a_problem_is_what_the_tensors_say() -> None:
    q, k, v = draw(AttentionProblem(2, 3, 5, 7, 40, "bfloat16"))
    assert problem_of(AttentionInputs(q, k, v)) == AttentionProblem(2, 3, 5, 7, 40, "bfloat16")
    assert q.dtype == DTYPES["bfloat16"]
