"""The engine: refusals, ranking, self-tests, quarantine, fallbacks, threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine import engine as engine_module
from lib_rocm_sd.engine import memory, planner
from lib_rocm_sd.engine.gating import Asked
from lib_rocm_sd.errors import LaunchError, NotSupportedError
from lib_rocm_sd.functional import attention
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.base import Call
from tests.calls import calls_of
from tests.ops.toy_op import (
    CPU,
    GFX1100,
    NO_GPU,
    SELF_TESTS,
    Doubler,
    Doubling,
    Tile,
    X,
    engine_of,
    op_of,
)
from tests.waiting import wait_until

# Refusals and ranking


def test_the_highest_preference_that_does_not_refuse_runs() -> None:
    engine, report = engine_of()
    best = Doubler("best", 9, refuses=["not today"])
    op = op_of(Doubler("low", 1), best, Doubler("high", 5))
    assert torch.equal(engine.run(op, X), X * 2)
    assert best.seen == []
    (row,) = report.snapshot()["rows"]
    assert (row["variant"], row["calls"]) == ("high", 1)
    assert row["reasons"] == {"best": ["not today"], "low": ["comes after high"]}


def test_ours_is_refused_with_the_devices_reasons() -> None:
    engine, _ = engine_of(NO_GPU)
    op = op_of(Doubler("ours", 9, ours=True), Doubler("theirs"))
    plan = engine.plan(Doubling(10, 8), CPU, op)
    assert plan.variant.name == "theirs"
    assert plan.refusals == {"ours": ["no GPU: this is the CPU"]}


def test_ours_runs_with_the_devices_launcher_and_its_first_config() -> None:
    launch = object()
    engine, _ = engine_of(GFX1100, launcher=lambda device, arch: launch)  # type: ignore[arg-type,return-value]
    ours = Doubler("ours", 9, ours=True, tiles=(Tile(16), Tile(32)))
    theirs = Doubler("theirs")
    op = op_of(ours, theirs)
    engine.run(op, X)
    assert ours.seen[-1] == (launch, Tile(16), (10, 8))
    assert theirs.seen == []


def test_a_driver_that_cannot_be_used_is_a_refusal() -> None:
    def launcher(device: torch.device, arch: Any) -> Any:
        raise LaunchError("libamdhip64.so was not found")

    engine, _ = engine_of(GFX1100, launcher=launcher)
    plan = engine.plan(
        Doubling(10, 8), CPU, op_of(Doubler("ours", 9, ours=True), Doubler("theirs"))
    )
    assert plan.variant.name == "theirs"
    assert "libamdhip64.so was not found" in plan.refusals["ours"][0]


def test_why_no_kernel_of_ours_is_planned() -> None:
    engine, theirs = engine_of(GFX1100)[0].engine, Doubler("theirs", 5)
    wrong = Doubler("wrong", 9, ours=True, work=lambda x: x * 3)
    refuses = Doubler("refuses", 9, ours=True, refuses=["too wide"])
    modest = Doubler("modest", 1, ours=True)
    for ours, why in ((Doubler("ours", 9, ours=True), []), (refuses, ["too wide"])):
        op = op_of(ours, theirs, name=ours.name)
        assert engine.refused(op, Doubling(10, 8), CPU) == why
    (failed,) = engine.refused(op_of(wrong, theirs, name="wrong"), Doubling(10, 8), CPU)
    assert failed.startswith("self-test failed")
    (after,) = engine.refused(op_of(modest, theirs, name="modest"), Doubling(10, 8), CPU)
    assert after == "comes after theirs"


def test_nothing_left_names_every_reason() -> None:
    engine, _ = engine_of()
    op = op_of(Doubler("a", refuses=["too old"]), Doubler("b", work=lambda x: x * 3))
    with pytest.raises(NotSupportedError, match="too old") as caught:
        engine.run(op, X)
    assert "self-test failed" in caught.value.refusals["b"][0]


def test_auto_avoids_a_workspace_of_more_than_half_of_the_free_memory() -> None:
    engine, _ = engine_of(free=1000)
    op = op_of(Doubler("greedy", 9, workspace_bytes=501), Doubler("modest", 1))
    plan = engine.plan(Doubling(10, 8), CPU, op)
    assert plan.variant.name == "modest"
    assert "Auto allows" in plan.refusals["greedy"][0]


def test_memory_takes_the_least_workspace() -> None:
    engine, _ = engine_of()
    engine.set_level("Memory")
    op = op_of(Doubler("fast", 9, workspace_bytes=10), Doubler("frugal", 1))
    assert engine.plan(Doubling(10, 8), CPU, op).variant.name == "frugal"


def test_a_change_of_level_plans_anew_and_tests_nothing_twice() -> None:
    engine, _ = engine_of()
    fast, frugal = Doubler("fast", 9, workspace_bytes=10), Doubler("frugal", 1)
    op = op_of(fast, frugal)
    for level in ("Auto", "Memory", "Auto"):
        engine.set_level(level)
        engine.run(op, X)
    assert fast.calls(10) == 2
    assert frugal.calls(10) == 1
    assert len(fast.seen) == 2 + SELF_TESTS
    with pytest.raises(ValueError, match="Turbo"):
        engine.set_level("Turbo")
    assert engine.session.level == "Auto"


def test_tensors_that_a_variant_cannot_take_go_to_the_next_one() -> None:
    def strided(x: torch.Tensor) -> list[str]:
        return [] if x.stride(1) == 1 else ["the last stride is not 1"]

    engine, report = engine_of()
    op = op_of(Doubler("picky", 9, refuses_inputs=strided), Doubler("any"))
    engine.run(op, X)
    transposed = torch.arange(80.0).reshape(8, 10).t()
    assert torch.equal(engine.run(op, transposed), transposed * 2)
    used = {row["variant"]: row["reasons"] for row in report.snapshot()["rows"]}
    assert used["any"] == {"picky": ["the last stride is not 1"]}


def test_a_callers_mistake_is_raised_and_quarantines_nothing() -> None:
    engine, report = engine_of()
    op = op_of(Doubler("only"))
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        engine.run(op, torch.zeros(2, 2, 2))
    engine.run(op, X)
    assert report.snapshot()["events"] == []


def test_inputs_without_elements_give_zeros_and_run_nothing() -> None:
    engine, _ = engine_of()
    only = Doubler("only")
    output = engine.run(op_of(only), torch.zeros(0, 8, dtype=torch.float16))
    assert (output.shape, output.dtype) == ((0, 8), torch.float16)
    assert only.seen == []


# Threads, graph capture, torch.compile


def test_two_threads_share_one_first_use() -> None:
    engine, report = engine_of()

    def after_all_came(x: torch.Tensor) -> torch.Tensor:
        assert wait_until(lambda: len(came) == 4)
        return x * 2

    only = Doubler("only", work=after_all_came)
    op = op_of(only)
    came: list[int] = []
    outputs: list[torch.Tensor] = []

    def work() -> None:
        came.append(1)
        outputs.append(engine.run(op, X))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(output, X * 2) for output in outputs)
    assert len(only.seen) == 4 + SELF_TESTS
    assert report.snapshot()["rows"][0]["calls"] == 4


def test_a_graph_capture_tests_nothing_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recording = [True]
    for module in (planner, engine_module):
        monkeypatch.setattr(module, "is_recording", lambda device: recording[0])
    engine, report = engine_of(GFX1100)
    ours, theirs = Doubler("ours", 9, ours=True), Doubler("theirs")
    op = op_of(ours, theirs)
    engine.run(op, X)
    assert (len(ours.seen), len(theirs.seen)) == (0, 1)
    recording[0] = False
    engine.run(op, X)
    assert ours.calls(10) == 1
    recording[0] = True
    engine.run(op, X)
    assert ours.calls(10) == 2
    assert report.snapshot()["events"] == []


def test_torch_compile_traces_through_torchs_own_variant() -> None:
    q = torch.randn(2, 12, 2, 16)
    whole = hasattr(torch.compiler, "is_compiling")  # else the graph breaks at the engine
    compiled = torch.compile(lambda a: attention(a, a, a) + 1, backend="eager", fullgraph=whole)
    try:
        output = compiled(q)
    except ImportError as error:
        pytest.skip(f"torch.compile cannot be used here: {error}")
    assert torch.allclose(output.double(), reference(AttentionInputs(q, q, q)) + 1, atol=1e-5)


# What a user is told


def test_usable_and_the_status_line() -> None:
    good = op_of(Doubler("ours", ours=True), Doubler("theirs"))
    bad = op_of(Doubler("ours", ours=True, work=lambda x: x * 3), Doubler("theirs"))
    engine, _ = engine_of(GFX1100)
    assert engine.usable(CPU, good) == []
    assert engine.status_line(CPU, op=good) == "attention runs on our kernel (gfx1100)"
    engine.reset()
    assert "self-test failed" in engine.usable(CPU, bad)[0]
    line = engine.status_line(CPU, op=bad)
    assert line.startswith("not active: the kernel for gfx1100 cannot be used: self-test failed")
    assert line.endswith("; all else works as before")
    engine.reset()
    assert engine.usable(CPU, op_of(Doubler("theirs"))) == ["there is no kernel for doubling"]


def test_usable_for_one_problem() -> None:
    op = op_of(Doubler("ours", ours=True), Doubler("theirs"))
    engine, _ = engine_of(GFX1100)
    other = replace(op.usual[0][1], width=9)
    engine._planner.quarantine(Asked(op, op.variants[0], None, other, CPU), "planted")
    assert engine.usable(CPU, op) == [] and engine.engine.usable(CPU, op, problem=other) == [
        "planted"
    ]
    assert engine.known(CPU, op) == [], "of the op's usual problem"


def test_what_is_known_is_told_without_waiting() -> None:
    op = op_of(Doubler("ours", ours=True), Doubler("theirs"))
    engine, _ = engine_of(GFX1100)
    assert engine.known(CPU, op) is None
    assert engine.usable(CPU, op) == []
    told: list[object] = []
    with engine._lock:  # some thread measures
        thread = threading.Thread(target=lambda: told.append(engine.known(CPU, op)))
        thread.start()
        thread.join(600)
    assert told == [[]]
    engine._planner.quarantine(Asked(op, op.variants[0], 1, op.usual[0][1], CPU), "planted")
    assert engine.known(CPU, op) is None  # it may have been barred
    engine.usable(CPU, op)
    assert engine.known(CPU, op) is not None
    engine.reset()
    assert engine.known(CPU, op) is None


def test_what_is_pending_is_neither_compiled_nor_tested() -> None:
    ours = Doubler("ours", ours=True)
    op = op_of(ours, Doubler("theirs"))
    engine, _ = engine_of(GFX1100)
    engine.pending = lambda name: f"compiling {name}, 1 of 2"
    reason = f"compiling {op.name}, 1 of 2"
    assert engine.usable(CPU, op) == [reason]
    assert engine.known(CPU, op) == [reason]
    assert engine.status_line(CPU, "wait", op) == f"not active: {reason}; wait"
    assert not ours.seen
    engine.pending = lambda name: ""
    assert engine.usable(CPU, op) == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (NO_GPU, "no supported GPU (this is the CPU)"),
        (replace(GFX1100, reasons=("an NVIDIA card; kernels are for AMD",)), "an NVIDIA card"),
        (replace(GFX1100, backend="zluda", reasons=("torch runs through ZLUDA",)), "ZLUDA"),
    ],
)
def test_the_status_line_of_a_device_that_is_not_ours(info: Any, words: str) -> None:
    engine, _ = engine_of(info)
    ours = Doubler("ours", ours=True)
    line = engine.status_line(CPU, otherwise="nothing changes", op=op_of(ours))
    assert line.startswith("not active: ")
    assert words in line
    assert line.endswith("; nothing changes")
    assert ours.seen == []


def test_notes_are_part_of_the_status_line() -> None:
    engine, _ = engine_of(replace(GFX1100, notes=("HSA_OVERRIDE_GFX_VERSION=11.0.0 is set",)))
    line = engine.status_line(CPU, op=op_of(Doubler("ours", ours=True)))
    assert line.endswith("(gfx1100); HSA_OVERRIDE_GFX_VERSION=11.0.0 is set")


def test_checks_have_error_and_tolerance_of_every_variant_that_could_run() -> None:
    engine, _ = engine_of()
    op = op_of(
        Doubler("exact"), Doubler("off", work=lambda x: x * 2.2), Doubler("no", refuses=["no"])
    )
    found = engine.checks(Doubling(10, 8), CPU, op)
    assert set(found) == {"exact", "off"}
    assert (found["exact"].error, found["exact"].reason) == (0.0, "")
    assert found["off"].error == pytest.approx(0.1)
    assert found["off"].error > found["off"].tolerance


def test_a_call_costs_few_calls_beyond_the_launch() -> None:
    engine, _ = engine_of()
    op = replace(
        ATTENTION, name="nothing", variants=(_Nothing(),), tolerance=lambda p: float("inf")
    )
    q = torch.zeros(1, 4, 1, 8)
    engine.run(op, AttentionInputs(q, q, q))
    assert calls_of(lambda: engine.run(op, AttentionInputs(q, q, q))) <= 18


class _Nothing(MatrixAttention):
    name = "nothing"
    ours = False
    output = torch.zeros(2, 77, 16)

    def refusals(self, arch: Any, problem: Any) -> list[str]:
        return []

    def configs(self, arch: Any, problem: Any) -> tuple[Any]:
        return (None,)

    def run(self, call: Call[Any, Any]) -> torch.Tensor:
        return self.output[:, : call.problem.seq_q]


def test_many_plans_at_once_ask_for_the_free_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, cpu = [0.0], list[torch.device](), torch.device("cpu")

    def counted(device: torch.device) -> int:
        asked.append(device)
        return len(asked)

    monkeypatch.setattr(memory, "free_bytes", counted)
    free = memory.LatelyFree(lambda: now[0])
    assert [free(cpu), free(cpu)] == [1, 1]
    assert [free(torch.device("meta"), 1 << 30), free(torch.device("meta")), free(cpu)] == [0, 2, 1]
    now[0] = memory.FREE_KNOWN_S
    assert free(cpu) == 3


def test_a_tuned_config_that_is_wrong_gives_way_to_the_safe_one() -> None:
    engine, report = engine_of(GFX1100)
    tiles = {Tile(1): lambda x: x * 3, Tile(2): lambda x: x * 2}
    ours = Doubler("ours", 9, ours=True, tiles=tuple(tiles), by_tile=tiles, safe=Tile(2))
    op = op_of(ours, Doubler("theirs"))
    assert engine.usable(CPU, op) == []
    assert torch.equal(engine.run(op, X), X * 2)
    plan = engine.plan(Doubling(10, 8), CPU, op)
    assert (plan.variant.name, plan.config) == ("ours", Tile(2))
    assert "self-test failed" in report.snapshot()["events"][0]


def test_what_is_wrong_with_a_table_is_told_once() -> None:
    engine, report = engine_of(GFX1100)
    op = op_of(Doubler("ours", 9, ours=True, noted=("the table is ignored",)), Doubler("theirs"))
    for rows in (10, 20):
        engine.plan(Doubling(rows, 8), CPU, op)
    assert report.snapshot()["events"] == ["the table is ignored"]


def test_what_stands_for_a_config_is_tested_in_its_place() -> None:
    """Two sizes are posed to it once, and each is computed with its own config."""

    class Counting(Doubler):
        def configs(self, arch: Any, problem: Doubling) -> Sequence[Any]:
            return (Tile(problem.rows),)

        def defaults(self, arch: Any, problem: Doubling) -> Sequence[Any]:
            return self.configs(arch, problem)

        def tested_as(self, config: Any) -> Any:
            return Tile(0)

    variant = Counting("only")
    user, _ = engine_of()
    op = op_of(variant)
    for rows in (4, 8, 4):
        assert torch.equal(user.run(op, X[:rows]), 2 * X[:rows])
    tested = [seen for seen in variant.seen if seen[1] == Tile(0)]
    assert len(tested) == SELF_TESTS
    assert [config.size for _, config, _ in variant.seen if config.size] == [4, 8, 4]
