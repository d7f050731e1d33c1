"""Self-tests: a variant that is wrong on this machine is found out before its first use."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lib_rocm_sd.engine import selftest
from lib_rocm_sd.errors import CompileError, DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from tests.ops.toy_op import CPU, SELF_TESTS, Doubler, Doubling, X, engine_of, op_of, raising


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda x: x * 2.001, "wrong by"),
        (lambda x: x * float("nan"), "NaN or infinity"),
        (lambda x: (x * 2).flatten(), "output is (24,)"),
        (lambda x: (x * 2).double(), "torch.float64"),
        (raising(CompileError("clang", "died of signal 11")), "died of signal 11"),
        (raising(LaunchError("hipModuleLaunchKernel: status 1")), "status 1"),
        (raising(RuntimeError("no kernel image is available")), "no kernel image"),
        (raising(TypeError("unexpected keyword 'scale'")), "unexpected keyword"),
    ],
)
def test_a_variant_that_fails_its_self_test_is_never_used(
    work: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    engine, report = engine_of()
    bad = Doubler("bad", 9, work=work)
    op = op_of(bad, Doubler("good"))
    for _ in range(3):
        assert torch.equal(engine.run(op, X), X * 2)
    assert bad.calls(10) == 0
    assert len(bad.seen) == 1
    (event,) = report.snapshot()["events"]
    assert "bad is not used on cpu" in event
    assert words in event


def test_wrong_for_one_class_only_stays_in_use_for_the_others() -> None:
    engine, report = engine_of()
    partly = Doubler("partly", 9, work=lambda x: x * (3 if x.shape[1] == 512 else 2))
    op = op_of(partly, Doubler("good"))
    wide = torch.ones(10, 512)
    assert torch.equal(engine.run(op, wide), wide * 2)
    assert torch.equal(engine.run(op, X), X * 2)
    assert partly.calls(10) == 1
    assert len(report.snapshot()["events"]) == 1


def test_wrong_for_the_tail_only_is_caught_and_bars_the_class() -> None:
    engine, _ = engine_of()
    tail = Doubler("tail", 9, work=lambda x: x * (3 if x.shape[0] == 4 + 11 % 4 else 2))
    op = op_of(tail, Doubler("good"))
    eleven = torch.ones(11, 8)
    assert torch.equal(engine.run(op, eleven), eleven * 2)
    assert torch.equal(engine.run(op, X), X * 2)
    assert (tail.calls(11), tail.calls(10)) == (0, 0)


def test_a_self_test_runs_once_per_class() -> None:
    engine, _ = engine_of()
    only = Doubler("only")
    op = op_of(only)
    for rows in (10, 14, 18):  # the same tail
        engine.run(op, torch.ones(rows, 8))
    assert len(only.seen) == 3 + SELF_TESTS


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
        DeviceOutOfMemoryError("hipModuleLoadData: out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"),
    ],
)
@pytest.mark.parametrize("after", [0, SELF_TESTS])
def test_out_of_memory_is_passed_on_and_bars_nothing(error: Exception, after: int) -> None:
    engine, report = engine_of()
    work = [raising(error, after)]
    full = Doubler("full", 9, work=lambda x: work[0](x))
    other = Doubler("other")
    op = op_of(full, other)
    with pytest.raises(type(error)) as caught:
        engine.run(op, X)
    assert caught.value is error
    assert other.seen == []
    work[0] = lambda x: x * 2
    engine.run(op, X)
    assert full.calls(10) == (1 if after == 0 else 2)
    assert report.snapshot()["events"] == []


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_random_generators_autograd_and_autocast_are_left_alone() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False))
    engine, _ = engine_of()
    engine.set_level("Performance")
    modes = []

    def work(x: torch.Tensor) -> torch.Tensor:
        modes.append((torch.is_grad_enabled(), x.requires_grad))
        return x * 2

    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = torch.ones(1, 4, 2, 8, requires_grad=True)
        engine.run(ATTENTION, AttentionInputs(q, q, q))
        engine.run(op_of(Doubler("spy", work=work)), X)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == repr(np.random.get_state(legacy=False))
    assert modes[:SELF_TESTS] == [(False, False)] * SELF_TESTS
    assert modes[-1] == (True, False)


def test_an_error_that_comes_with_the_output_is_the_variants() -> None:
    class Late:
        """What a launch gives on a card where it has died since."""

        def detach(self) -> Late:
            return self

        def to(self, device: str) -> torch.Tensor:
            raise RuntimeError("an illegal memory access was encountered")

    variant = Doubler("late", work=lambda x: Late())  # type: ignore[arg-type,return-value]
    found = selftest.check(op_of(variant), variant, None, None, Doubling(3, 8), CPU)
    assert "illegal memory access" in found.reason


def test_configs_and_variants_share_a_problems_reference() -> None:
    computed: list[torch.Size] = []

    def reference(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        computed.append(inputs[0].shape)
        return inputs[0].double() * 2

    right, wrong = Doubler("right"), Doubler("wrong", work=lambda x: x * 3)
    op = replace(op_of(right, wrong), reference=reference)
    for rows in (3, 5):
        problem = Doubling(rows, 8)
        for config in (1, 2):
            assert not selftest.check(op, right, config, None, problem, CPU).reason
        assert "wrong by" in selftest.check(op, wrong, None, None, problem, CPU).reason
    assert computed == [(3, 8), (5, 8)]
