"""A bound call of the attention kernel gives it what an unbound one does, from many threads too."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.engine import engine as engines
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionParams, configs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import LARGEST_ROW_STRIDE, MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call
from tests.ops.launches import Launches, shifted
from tests.ops.running import bind, compute
from tests.ops.toy_op import GFX1100, engine_of
from tests.waiting import WAIT_S

CONFIGS = [each for arch in table().values() for dim in (40, 128) for each in configs(arch, dim)]
CONFIG = configs(table()["gfx1100"], 40)[0]
OURS = MatrixAttention()


def tensors(
    seq_q: int = 17, seq_k: int = 9, head_dim: int = 40, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(2, seq_q, 3, head_dim).to(dtype)
    k, v = (torch.randn(2, seq_k, 3, head_dim).to(dtype) for _ in range(2))
    return q, k, v


def without_output(params: bytes) -> list[Any]:
    read = AttentionParams.from_buffer_copy(params)
    values = {field[0]: getattr(read, field[0]) for field in AttentionParams._fields_}
    assert values.pop("out")
    return [(n, list(v) if isinstance(v, ctypes.Array) else v) for n, v in values.items()]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same shape with heads before the sequence in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows that are not a multiple of 16 bytes apart."""
    return torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype)[..., :-1].copy_(x)


@pytest.mark.parametrize("change", [lambda x: x, turned, shifted, odd_rows])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bound_call_launches_what_an_unbound_one_does(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    launch = Launches()
    q, k, v = tensors(dtype=dtype)
    for place in range(3):
        inputs: list[Any] = [q, k, v]
        inputs[place] = change(inputs[place])
        bound = bind(ATTENTION, OURS, launch, CONFIG, AttentionInputs(*inputs))
        for scale in (None, None, 0.25, -3.0, 0.0, None):
            launch.seen.clear()
            scaled = AttentionInputs(*inputs)._replace(scale=scale)
            outs = [bound(scaled), compute(ATTENTION, OURS, launch, CONFIG, scaled)]
            assert outs[0].shape == outs[1].shape == (2, 17, 120)
            assert outs[0].dtype == dtype and outs[0].is_contiguous()
            first, second = launch.seen
            assert without_output(first[3]) == without_output(second[3])
            assert first[:3] == second[:3] and first[4] == second[4]
            assert AttentionParams.from_buffer_copy(first[3]).out == outs[0].data_ptr()


def test_other_tensors_of_the_same_strides_are_told_apart() -> None:
    launch = Launches()
    one, other = tensors(), tensors()
    bound = bind(ATTENTION, OURS, launch, CONFIG, AttentionInputs(*one))
    misaligned = (other[0], shifted(other[1]), other[2])
    for inputs in (one, other, misaligned, one):
        bound(AttentionInputs(*inputs))
        read = AttentionParams.from_buffer_copy(launch.seen[-1][3])
        assert (read.q, read.k, read.v) == tuple(tensor.data_ptr() for tensor in inputs)
        assert bool(read.aligned) == (inputs is not misaligned)
    assert launch.prepared == 1


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(17, 9),
        torch.ones(2, 1, 1, 9, dtype=torch.bool),
        torch.ones(9, 17, 3, 1).half().permute(3, 2, 1, 0),
        torch.ones(3, 1, 9, dtype=torch.bfloat16),
        torch.ones(2, 1, 1, 1, dtype=torch.int32),
    ],
    ids=lambda mask: str(tuple(mask.shape)),
)
def test_a_bound_call_reads_the_mask_that_it_is_given(mask: torch.Tensor) -> None:
    launch = Launches()
    bound = bind(ATTENTION, OURS, launch, CONFIG, AttentionInputs(*tensors(), mask))
    again = mask.clone(memory_format=torch.preserve_format)
    other = AttentionInputs(*tensors(), again)
    launch.seen.clear()
    bound(other), compute(ATTENTION, OURS, launch, CONFIG, other)
    first, second = launch.seen
    assert AttentionParams.from_buffer_copy(first[3]).mask == again.data_ptr()
    assert without_output(first[3]) == without_output(second[3])
    assert first[:3] == second[:3] and first[4] == second[4]


def test_without_a_launcher_that_prepares_it_is_run() -> None:
    plain: Any = lambda *words: None  # noqa: E731
    inputs = AttentionInputs(*tensors())
    assert OURS.bound(Call(ATTENTION.problem_of(inputs), inputs, plain, CONFIG)) == OURS.run


def test_threads_do_not_share_arguments() -> None:
    launch = Launches(pause=threading.Barrier(6, timeout=WAIT_S).wait)
    bound = bind(ATTENTION, OURS, launch, CONFIG, AttentionInputs(*tensors()))
    expected: dict[int, tuple[int, ...]] = {}
    kept: list[Any] = []

    def work(number: int) -> None:
        for _ in range(20):
            inputs = tensors()
            out = bound(AttentionInputs(*inputs, None, float(number + 1)))
            kept.append((inputs, out))
            expected[out.data_ptr()] = (*(x.data_ptr() for x in inputs), number + 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launch.seen) == 120 and launch.prepared == 6
    for _, _, _, params, _ in launch.seen:
        read = AttentionParams.from_buffer_copy(params)
        factor = read.scale * 0.6931472
        assert (read.q, read.k, read.v, round(factor)) == expected[read.out]


def test_a_failed_launch_leaves_nothing_behind() -> None:
    launch = Launches(fails=True)
    q, k, v = tensors()
    bound = bind(ATTENTION, OURS, launch, CONFIG, AttentionInputs(q, k, v))
    with pytest.raises(LaunchError):
        bound(AttentionInputs(q, k, v))
    launch.fails = False
    bound(AttentionInputs(q, k, v))
    assert AttentionParams.from_buffer_copy(launch.seen[0][3]).q == q.data_ptr()


def test_it_keeps_no_tensor() -> None:
    launch = Launches()
    q, k, v = tensors()
    bound = bind(ATTENTION, OURS, launch, CONFIG, AttentionInputs(q, k, v))
    out = bound(AttentionInputs(q, k, v))
    gone = [weakref.ref(tensor) for tensor in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert [each() for each in gone] == [None] * 4 and callable(bound)


# -- through the engine


def engine_with(launch: Launches, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """An engine whose self-tests, which need a GPU, are passed."""
    monkeypatch.setattr(selftest, "check", lambda *words: selftest.Check(0.0, 1.0))
    return engine_of(GFX1100, launcher=lambda device, arch: launch)


def test_the_engine_binds_once_per_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launches()
    engine, report = engine_with(launch, monkeypatch)
    q, k, v = tensors()
    with torch.no_grad():
        for _ in range(3):
            engine.run(ATTENTION, AttentionInputs(q, k, v))
            engine.run(ATTENTION, AttentionInputs(q, k, v, None, 0.5))
        assert launch.prepared == 2  # a scale is given, or not
        engine.run(ATTENTION, AttentionInputs(turned(q), k, v))
        engine.run(ATTENTION, AttentionInputs(q, turned(k), v))
        engine.run(ATTENTION, AttentionInputs(q, k, odd_rows(v)))
        engine.run(ATTENTION, AttentionInputs(shifted(q), k, v))
        assert launch.prepared == 5
    for _, _, _, params, _ in launch.seen[6:9]:
        read = AttentionParams.from_buffer_copy(params)
        strides = (read.q_stride[:], read.k_stride[:], read.v_stride[:])
        assert strides != tuple(list(x.stride()[:3]) for x in (q, k, v))
    assert AttentionParams.from_buffer_copy(launch.seen[9][3]).aligned == 0
    (row,) = (row for row in report.snapshot()["rows"] if row["calls"])
    assert row["variant"] == "rocm_sd" and row["calls"] == 10


def test_ever_other_strides_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launches()
    engine, _ = engine_with(launch, monkeypatch)
    monkeypatch.setattr(engines, "MOST_ROUTES", 3)
    _, k, v = tensors()
    for rows in range(8):
        wide = torch.zeros(2, 17 + rows, 3, 40, dtype=torch.float16)
        engine.run(ATTENTION, AttentionInputs(wide[:, :17], k, v))
        assert len(engine._routes) <= 3
    assert launch.prepared == 8


def test_what_changes_a_plan_changes_it_for_bound_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launches()
    engine, report = engine_with(launch, monkeypatch)
    q, k, v = tensors(dtype=torch.bfloat16)
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    engine.run(ATTENTION, AttentionInputs(q.clone().requires_grad_(), k, v))
    with torch.no_grad():
        engine.run(ATTENTION, AttentionInputs(q.clone().requires_grad_(), k, v))
    assert len(launch.seen) == 2
    engine.set_level("Memory")
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    engine.reset()
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    assert launch.prepared == 4
    launch.fails = True
    expected = ATTENTION.reference(AttentionInputs(q, k, v))
    assert (engine.run(ATTENTION, AttentionInputs(q, k, v)).double() - expected).abs().max() < 0.05
    launch.fails = False
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    assert len(launch.seen) == 4 and "is not used" in report.snapshot()["events"][0]


def test_masks_and_other_shapes_go_their_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launches()
    engine, _ = engine_with(launch, monkeypatch)
    q, k, v = tensors()
    with torch.no_grad():
        engine.run(ATTENTION, AttentionInputs(q, k, v, torch.ones(17, 9, dtype=torch.bool)))
        assert launch.prepared == 1 and AttentionParams.from_buffer_copy(launch.seen[0][3]).mask
        engine.run(ATTENTION, AttentionInputs(*tensors(seq_k=11)))
        assert launch.prepared == 2
        assert not AttentionParams.from_buffer_copy(launch.seen[1][3]).mask
        with pytest.raises(ValueError, match="q and k must agree"):
            engine.run(ATTENTION, AttentionInputs(q, *tensors(head_dim=48)[1:]))
        with pytest.raises(ValueError, match="k and v must have one shape"):
            engine.run(ATTENTION, AttentionInputs(q, k, tensors(seq_k=11)[2]))
        with pytest.raises(ValueError, match="one dtype"):
            engine.run(ATTENTION, AttentionInputs(q, k, v.float()))


@pytest.mark.parametrize("beyond", [0, 8])
def test_rows_very_far_apart_are_not_said_to_be_aligned(beyond: int) -> None:
    """The kernel reads aligned ones at 32-bit offsets from the first row of a tile."""
    stride = LARGEST_ROW_STRIDE + beyond
    storage = torch.empty(stride + 40, dtype=torch.float16)
    far = storage.as_strided((1, 2, 1, 40), (2 * stride, stride, 40, 1))
    near = torch.empty(1, 2, 1, 40, dtype=torch.float16)
    launches = Launches()
    compute(ATTENTION, OURS, launches, CONFIG, AttentionInputs(near, near, far))
    params = AttentionParams.from_buffer_copy(launches.seen[0][3])
    assert params.aligned == (beyond == 0)
    assert 2 * LARGEST_ROW_STRIDE * max(config.block_q for config in CONFIGS) < 1 << 32


def test_more_than_one_launch_may_have_is_refused() -> None:
    arch = table()["gfx1100"]
    most = AttentionProblem(1, 8, 1 << 27, 77, 40)
    assert OURS.refusals(arch, most) == []
    (why,) = OURS.refusals(arch, replace(most, batch=2))
    assert why.endswith("work-items are more than one launch may have")
    assert OURS.refusals(arch, replace(most, head_dim=36)) == ["head_dim 36 is not a multiple of 8"]
