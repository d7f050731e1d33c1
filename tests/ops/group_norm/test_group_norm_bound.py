"""Bound calls of GroupNorm and its steps give what unbound ones do, from many threads too."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from lib_rocm_sd import arch
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.bound import Bound
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm.inputs import NormInputs
from lib_rocm_sd.ops.group_norm.kernel import MergeParams
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.group_norm.whole import CONFIGS, WholeConfig
from tests.ops.running import bind, compute
from tests.ops.toy_op import CPU
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch
from tests.waiting import WAIT_S

ROW = arch.table()["gfx1100"]
STEPS, WHOLE = kernel.configs(ROW)[0], CONFIGS[0]
NHWC, NCHW = (2, 24, 7, 9, "float16", True), (2, 6, 11, 13, "bfloat16", False)
EACH: tuple[tuple[Any, Any, Any, int], ...] = (
    (STATISTICS, ImageProblem(*NHWC), STEPS, 1),
    (STATISTICS, ImageProblem(*NCHW), STEPS, 1),
    (FINALIZE, FinalizeProblem(2, 3, 24, 4), STEPS, 1),
    (FINALIZE, FinalizeProblem(1, 2100, 24, 3, affine="bfloat16"), STEPS, 2),
    (FINALIZE, FinalizeProblem(2, 3, 24, 4, affine="none"), STEPS, 1),
    (APPLY, ApplyProblem(*NHWC, silu=True), STEPS, 1),
    (APPLY, ApplyProblem(*NCHW), STEPS, 1),
    (NORM, NormProblem(*NHWC, 4), STEPS, 2),
    (NORM, NormProblem(*NCHW, 3, "float32"), STEPS, 2),
    (NORM, NormProblem(*NHWC, 4, "none"), WHOLE, 1),
    (GROUP_NORM_SILU, GroupNormProblem(*NHWC, True, 4), STEPS, 3),
    (GROUP_NORM_SILU, GroupNormProblem(*NCHW, False, 3, "none"), STEPS, 3),
    (GROUP_NORM_SILU, GroupNormProblem(*NHWC, True, 4, "float32"), WHOLE, 1),
    (GROUP_NORM_SILU, GroupNormProblem(*NHWC, True, 4, "float16", added=True), WHOLE, 1),
)
"""Ops, problems, configs, and launches."""


def named(item: Any) -> str:
    """In a test's name; an op's own text has addresses."""
    return str(getattr(item, "name", item))


@dataclass
class Launches:
    """Runs kernels under the shim, or does nothing. `made`: spec and arguments of each launch.
    `pause`: between being called and reading.
    """

    launch: Callable[..., object] = lambda *arguments: None
    pause: Callable[[], object] = bool
    made: list[tuple[Any, ...]] = field(default_factory=list)
    prepared: int = 0

    def __call__(self, spec: Any, grid: int, block: int, params: Any, device: Any) -> None:
        self.pause()
        self.made.append((spec, grid, block, bytes(params)))
        self.launch(spec, grid, block, params, device)

    def prepare(self, *arguments: Any) -> Callable[[], None]:
        self.prepared += 1
        return lambda: self(*arguments)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same strides, no longer at a multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    return room[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize(("op", "problem", "config", "count"), EACH, ids=named)
def test_a_bound_call_gives_what_an_unbound_one_does(
    op: Any, problem: Any, config: Any, count: int
) -> None:
    """Other addresses, alignments and eps; one packet serves calls that follow each other."""
    shim = ShimLaunch(ROW)
    launch: Any = Launches(shim)
    ours = op.variants[0]
    with shim.knows():
        bound = bind(op, ours, launch, config, op.make_inputs(problem, CPU, 1))
        changes: tuple[Any, ...] = (torch.clone, shifted, torch.clone)
        for seed, change in enumerate(changes):
            inputs = op.make_inputs(problem, CPU, seed)
            inputs = inputs._replace(**{inputs._fields[0]: change(inputs[0])})
            if "eps" in inputs._fields:
                inputs = inputs._replace(eps=0.25 * seed)
            made = bound(inputs)
            assert len(launch.made) == count
            expected = compute(op, ours, launch, config, inputs)
            assert torch.equal(made, expected) and made.stride() == expected.stride()
            assert made.dtype == expected.dtype
            launch.made.clear()
    assert launch.prepared == count


def test_what_is_not_aligned_and_would_be_misread_is_run_as_before() -> None:
    """A norm that is applied, statistics; an image in one launch."""
    cases: tuple[tuple[Any, Any, Any, int], ...] = (
        (APPLY, ApplyProblem(*NHWC), STEPS, 1),
        (FINALIZE, FinalizeProblem(2, 3, 24, 4), STEPS, 0),
        (GROUP_NORM_SILU, GroupNormProblem(*NHWC, groups=4), WHOLE, 0),
        (NORM, NormProblem(*NHWC, groups=4), WHOLE, 0),
    )
    for op, problem, config, place in cases:
        launch: Any = Launches()
        inputs: Any = op.make_inputs(problem, CPU, 1)
        bound = bind(op, op.variants[0], launch, config, inputs)
        inputs = inputs._replace(**{inputs._fields[place]: shifted(inputs[place])})
        bound(inputs)
        addresses = memoryview(launch.made[0][3][:32]).cast("Q").tolist()
        assert inputs[place].data_ptr() not in addresses


@pytest.mark.parametrize(("op", "problem", "config", "count"), EACH, ids=named)
def test_threads_do_not_share_arguments_and_nothing_is_kept(
    op: Any, problem: Any, config: Any, count: int
) -> None:
    threads = 4
    launch: Any = Launches(pause=threading.Barrier(threads, timeout=WAIT_S).wait)
    bound = bind(op, op.variants[0], launch, config, op.make_inputs(problem, CPU, 1))
    drawn = [op.make_inputs(problem, CPU, seed) for seed in range(threads)]

    def work(inputs: Any) -> None:
        for _ in range(5):
            bound(inputs)

    started = [threading.Thread(target=work, args=(inputs,)) for inputs in drawn]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert len(launch.made) == threads * 5 * count
    first = [made for made in launch.made if made[0] == launch.made[0][0]]
    read = [memoryview(params[:8]).cast("Q")[0] for *_, params in first]
    assert sorted(read) == sorted(inputs[0].data_ptr() for inputs in drawn for _ in range(5))
    kept = [weakref.ref(t) for inputs in drawn for t in inputs if isinstance(t, torch.Tensor)]
    del drawn, started
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_what_has_to_be_copied_first_is_not_bound() -> None:
    launch: Any = Launches()

    def plain(*arguments: Any) -> None:
        raise AssertionError("nothing is launched here")

    group_norm = GROUP_NORM_SILU.make_inputs(GroupNormProblem(2, 24, 6, 9, groups=4), CPU, 1)
    x, gamma, _, *_ = group_norm
    assert gamma is not None
    apart = group_norm._replace(gamma=gamma.repeat(2)[::2])
    applied = APPLY.make_inputs(ApplyProblem(*NHWC), CPU, 1)
    found = FINALIZE.make_inputs(FinalizeProblem(2, 4, 24, 4), CPU, 1)
    cases: tuple[tuple[Any, Any, Any], ...] = (
        (GROUP_NORM_SILU, group_norm._replace(x=x[:, :, ::2]), launch),
        (GROUP_NORM_SILU, apart, launch),
        (GROUP_NORM_SILU, group_norm, plain),
        (STATISTICS, STATISTICS.make_inputs(ImageProblem(*NHWC), CPU, 1), None),
        (APPLY, applied._replace(norm=applied.norm.double()), launch),
        (FINALIZE, found._replace(statistics=found.statistics[:, ::2]), launch),
    )
    for op, inputs, given in cases:
        ours = op.variants[0]
        assert ours.bound(Call(op.problem_of(inputs), inputs, given, STEPS)) == ours.run
    assert launch.prepared == 0


def test_calls_that_must_not_share_a_plan_have_other_keys() -> None:
    problem = GroupNormProblem(2, 24, 6, 9, silu=True, groups=4)
    inputs = GROUP_NORM_SILU.make_inputs(problem, CPU, 1)
    x, gamma, beta, groups, eps, silu, _ = inputs
    assert gamma is not None and beta is not None
    others = [
        inputs,
        inputs._replace(x=x.contiguous()),
        inputs._replace(x=x[:, :, ::2]),
        inputs._replace(x=x[:1]),
        inputs._replace(x=x.bfloat16()),
        inputs._replace(gamma=None),
        inputs._replace(beta=None),
        inputs._replace(gamma=gamma.float()),
        inputs._replace(beta=beta.float()),
        inputs._replace(gamma=gamma.repeat(2)[::2]),
        inputs._replace(groups=8),
        inputs._replace(silu=False),
        inputs._replace(gamma=gamma.clone().requires_grad_()),
    ]
    assert len({GROUP_NORM_SILU.key_of(each) for each in others}) == len(others)
    again = inputs._replace(x=x.clone(), eps=eps * 2, beta=shifted(beta))
    assert GROUP_NORM_SILU.key_of(again) == GROUP_NORM_SILU.key_of(inputs)
    norms = [NORM.key_of(NormInputs(*each[:5])) for each in others if each.silu]
    assert len(set(norms)) == len(norms)
    with torch.no_grad():
        assert GROUP_NORM_SILU.key_of(others[-1]) == GROUP_NORM_SILU.key_of(
            inputs._replace(x=x.clone())
        )
    norm = APPLY.make_inputs(ApplyProblem(*NHWC), CPU, 1)
    applied = [norm, norm._replace(silu=True), norm._replace(norm=norm.norm.double())]
    assert len({APPLY.key_of(each) for each in applied}) == len(applied)


def test_packets_are_taken_by_one_call_at_a_time() -> None:
    launched: list[int] = []

    def prepare(params: Any) -> Callable[[], None]:
        return lambda: launched.append(params.parts)

    bound = Bound(counting(7), prepare)
    one, other = bound.taken(), bound.taken()
    assert one is not other and one.params is not other.params
    other.params.parts = 8
    one.launch()
    other.launch()
    assert launched == [7, 8]
    bound.free.append(other)
    assert bound.taken() is other
    assert bound.taken().params.parts == 7


def counting(parts: int) -> MergeParams:
    params = MergeParams()
    params.parts = parts
    return params


def test_a_small_image_is_bound_to_one_launch_and_a_large_one_to_three() -> None:
    ours = GROUP_NORM_SILU.variants[0]
    for problem, count in (
        (GroupNormProblem(2, 320, 32, 32, silu=True), 1),
        (GroupNormProblem(2, 320, 64, 64, silu=True), 3),
        (replace(GroupNormProblem(2, 320, 32, 32), channels_last=False), 3),
    ):
        config = ours.configs(ROW, problem)[0]
        assert isinstance(config, WholeConfig) == (count == 1)
        launch: Any = Launches()
        inputs = GROUP_NORM_SILU.make_inputs(problem, CPU, 1)
        bind(GROUP_NORM_SILU, ours, launch, config, inputs)(inputs)
        assert len(launch.made) == count


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_what_is_added_may_lie_otherwise_in_each_call() -> None:
    """As an embedding's columns do, alone or beside other layers': no key asks for it there."""
    problem = GroupNormProblem(*NHWC, True, 4, "float16", added=True)
    launch = ShimLaunch(ROW)
    made = Launches(launch)
    inputs = GROUP_NORM_SILU.make_inputs(problem, CPU, 1)
    assert inputs.added is not None
    apart = torch.full((2, 100), float("nan"))
    apart[:, 40:64] = inputs.added
    turned = inputs.added.t().contiguous().t()
    ways = [inputs, *(inputs._replace(added=each) for each in (apart[:, 40:64], turned))]
    with launch.knows(*(t for t in (*inputs, apart, turned) if isinstance(t, torch.Tensor))):
        expected = compute(GROUP_NORM_SILU, GROUP_NORM_SILU.variants[0], launch, WHOLE, inputs)
        for first in ways:
            call = bind(GROUP_NORM_SILU, GROUP_NORM_SILU.variants[0], made, WHOLE, first)
            assert all(torch.equal(call(each), expected) for each in ways)
