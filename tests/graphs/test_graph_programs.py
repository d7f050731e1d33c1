"""Programs that are recorded: when they are, what they give, and when they are launched instead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd import calls as calls_module
from lib_rocm_sd.calls import MOST_FACTS, MOST_RECORDINGS, Calls, Places, begin
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs import device as device_module
from lib_rocm_sd.graphs import memory, programs
from lib_rocm_sd.graphs.device import obstacle
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.ranges import ranges
from lib_rocm_sd.report import Report
from lib_rocm_sd.runtime.zluda import CAPTURED
from tests.graph_tape import Desk, recording_cpu
from tests.ops.toy_op import NO_GPU, Doubler, Inputs, op_of

X = torch.arange(80.0).reshape(10, 8).half()
CPU = torch.device("cpu")
DOUBLE = op_of(Doubler("only"))
Program = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """That of the process is one of the test's own."""
    own = Engine(identify=lambda device: NO_GPU, free=lambda device, headroom: 1 << 40)
    monkeypatch.setattr(calls_module, "engine", own)
    return own


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return recording_cpu(monkeypatch)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def graphs(desk: Desk, told: list[str]) -> Graphs:
    return Graphs(told.append)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def doubled(calls: Calls, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    made: torch.Tensor = calls.run("here", DOUBLE, Inputs(x))
    return made if added is None else made + added


def program(graphs: Graphs, report: Report | None = None, compute: Any = doubled) -> Program:
    """2 x + added, by launches or by a graph."""
    places, session = Places(), Session.of("Auto", report=report or Report())

    def call(x: torch.Tensor, held: tuple[Any, ...] = (), **more: torch.Tensor) -> torch.Tensor:
        calls = begin(session, places.of((x.shape, x.stride())), graphs)
        return calls.recorded(compute, {"x": x, **more}, held)

    return call


def test_the_second_call_is_recorded_and_others_are_replayed(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    for factor in range(1, 6):
        assert torch.equal(call(factor * X), 2 * factor * X)
        assert desk.recorded == (factor > 1)
    assert desk.replayed == 4, "one to compare, and three calls"


def test_what_was_given_out_stays_as_it_is(desk: Desk, graphs: Graphs) -> None:
    one, other = program(graphs), program(graphs)
    made = [(n, run(n * X[:rows])) for n in range(1, 7) for run, rows in ((one, 10), (other, 4))]
    assert desk.replayed > 6
    for n, y in made:
        assert torch.equal(y, 2 * n * X[: len(y)])


def test_strides_and_nan_are_kept(graphs: Graphs) -> None:
    call = program(graphs)
    for factor in range(1, 5):
        x = (factor * X).t()
        x[1, 1] = float("nan")
        y = call(x)
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y.nan_to_num(), 2 * x.nan_to_num())


def test_a_program_may_hold_others_only_as_long_as_they_are_the_same(
    desk: Desk, graphs: Graphs
) -> None:
    first, second = object(), object()
    call = program(graphs)
    for held in (first, first, first, second, second, second):
        assert torch.equal(call(X, (held,)), 2 * X)
    assert desk.recorded == 2


def test_new_plans_are_recorded_anew(desk: Desk, graphs: Graphs, engine: Engine) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    engine.renew()
    for _ in range(3):
        assert torch.equal(call(X), 2 * X)
    assert desk.recorded == 2


def test_calls_in_a_graph_are_counted(graphs: Graphs) -> None:
    report = Report()
    call = program(graphs, report)
    for _ in range(7):
        call(X)
    assert [row["calls"] for row in report.snapshot()["rows"]] == [7]


def test_a_graph_that_gives_other_bytes_is_not_used(
    desk: Desk, graphs: Graphs, told: list[str]
) -> None:
    desk.spoil = lambda made: made + 1
    call = program(graphs)
    for factor in range(1, 5):
        assert torch.equal(call(factor * X), 2 * factor * X)
    assert desk.replayed == 1
    assert told == [
        "the UNet's blocks are launched one by one: a graph gave other values than its launches"
    ]


def test_a_recording_that_fails_costs_nothing_but_graphs(
    desk: Desk, graphs: Graphs, told: list[str]
) -> None:
    desk.fault = RuntimeError("operation not permitted when stream is capturing")
    call = program(graphs)
    for factor in range(1, 5):
        assert torch.equal(call(factor * X), 2 * factor * X)
    assert desk.replayed == 0
    assert len(told) == 1
    assert "operation not permitted" in told[0]


def test_named_calls_are_launched(desk: Desk, graphs: Graphs, engine: Engine) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    replayed = desk.replayed
    with ranges(engine):
        assert torch.equal(call(3 * X), 6 * X)
    assert desk.replayed == replayed
    call(X)
    assert desk.replayed == replayed + 1


@pytest.mark.parametrize("what", ["another stream", "a capture", "gradients"])
def test_elsewhere_it_is_launched(desk: Desk, graphs: Graphs, what: str) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    replayed = desk.replayed
    desk.stream += what == "another stream"
    desk.capturing = what == "a capture"
    with torch.set_grad_enabled(what == "gradients"):
        assert torch.equal(call(3 * X), 6 * X)
    assert desk.replayed == replayed


def test_what_is_given_again_is_copied_once(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, call = torch.ones_like(X), program(graphs)
    for factor in range(1, 4):
        call(factor * X, added=added)
    slot = graphs.known()[0]._buffers["added"].holds
    assert slot is not None
    slot.tensor.fill_(5)
    assert torch.equal(call(X, added=added), 2 * X + 5), "it is the memory of the last time"
    added += 1
    assert torch.equal(call(X, added=added), 2 * X + 2)
    assert torch.equal(call(X, added=torch.zeros_like(X)), 2 * X)


def test_inference_tensors_are_always_copied(graphs: Graphs) -> None:
    call = program(graphs)
    with torch.inference_mode():
        added = torch.ones_like(X)
        for number in range(1, 6):
            assert torch.equal(call(X, added=added), 2 * X + number)
            added += 1


def test_recordings_have_to_pay(
    desk: Desk, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "FREE_RECORDINGS", 2)
    call = program(graphs)
    for number in range(40):
        assert torch.equal(call(X, (number // 2,)), 2 * X)
    assert desk.recorded == 2
    for _ in range(2 * programs.REPLAYS_PER_RECORDING):
        call(X, ("stays",))
    assert desk.recorded == 2, "what was replayed has not paid for a third"


def test_programs_that_are_gone_leave_nothing(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    pools = desk.pools
    tape: Any = graphs.known()[0]._kept[0].graph
    tape._work = None  # a device keeps no Python
    del call
    gc.collect()
    other = program(graphs)
    for _ in range(3):
        assert torch.equal(other(X), 2 * X)
    assert len(graphs.known()[0]._kept) == 1
    assert desk.waits == 1
    assert desk.pools == pools + 1, "the memory of graphs ends with the last of them"


def test_a_call_without_a_route_is_recorded_later(desk: Desk, graphs: Graphs) -> None:
    places = iter(["first", "second", *["third"] * 6])

    def wandering(calls: Calls, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = calls.run(next(places), DOUBLE, Inputs(x))
        return made

    call = program(graphs, compute=wandering)
    for _ in range(4):
        assert torch.equal(call(X), 2 * X)
    assert graphs.known()[0].why == ""


def test_a_route_that_is_only_looked_at_may_be_missing_too(desk: Desk, graphs: Graphs) -> None:
    places = iter(["first", "second", *["third"] * 6])

    def looking(calls: Calls, x: torch.Tensor) -> torch.Tensor:
        place = next(places)
        calls.route(place, DOUBLE, Inputs(x))
        made: torch.Tensor = calls.run(place, DOUBLE, Inputs(x))
        return made

    call = program(graphs, compute=looking)
    for _ in range(4):
        assert torch.equal(call(X), 2 * X)
    assert graphs.known()[0].why == ""


def test_two_that_take_turns_are_both_recorded(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    for number in range(20):
        assert torch.equal(call(X, (number % 2,)), 2 * X)
    assert desk.recorded == MOST_RECORDINGS
    assert desk.replayed > 12


def test_a_failure_amid_a_call_is_not_recorded(desk: Desk, graphs: Graphs, engine: Engine) -> None:
    """The routes of that call are gone: what it would record is what has failed."""
    fails = iter([False, True])

    def failing(calls: Calls, x: torch.Tensor) -> torch.Tensor:
        if next(fails, False):
            engine.renew()
        return doubled(calls, x)

    call = program(graphs, compute=failing)
    call(X)
    call(X)
    assert desk.recorded == 0
    call(X)
    call(X)
    assert desk.recorded == 1 and graphs.known()[0].why == ""


def test_what_nobody_wants_is_let_go(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    for number in range(20):
        for _ in range(3):
            call(X, (number,))
    assert len(graphs.known()[0]._kept) <= MOST_RECORDINGS + 1


def test_what_is_read_is_forgotten_with_who_read_it(desk: Desk, graphs: Graphs) -> None:
    """As of sizes of pictures that nobody makes any more."""
    desk.baked = True
    call = program(graphs)
    sizes = [(rows, columns) for columns in (8, 4) for rows in range(10, 0, -1)]
    for rows, columns in sizes:
        for _ in range(3):
            call(X[:rows, :columns].contiguous())
    (known,) = graphs.known()
    assert known.recorded == len(sizes)
    (buffer,) = known._buffers.values()
    assert len(buffer._slots) <= MOST_FACTS + 2


def test_an_interrupted_copy_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.ones(8), torch.zeros(8)
    buffer = memory.Buffer(256, CPU)
    slot = buffer.slot(one)
    slot.fill(one, buffer)

    def interrupted(item: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory, "ref", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slot.fill(other, buffer)
    slot.fill(one, buffer)
    assert torch.equal(slot.tensor, one)


def test_values_that_are_put_into_a_tensor_are_copied(graphs: Graphs) -> None:
    added, call = torch.ones_like(X), program(graphs)
    for number in range(1, 6):
        assert torch.equal(call(X, added=added), 2 * X + number)
        added.data = added.data + 1  # counts no version


def test_an_expanded_tensor_is_taken(graphs: Graphs) -> None:
    call = program(graphs)
    for number in range(1, 6):
        added = torch.full((1, 8), number).half().expand(10, 8)
        assert torch.equal(call(X, added=added), 2 * X + number)
    assert graphs.known()[0].why == "" and graphs.known()[0].replays > 2


def test_a_wait_that_fails_costs_nothing_but_graphs(
    desk: Desk, graphs: Graphs, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    engine.renew()

    def failing(device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(programs, "synchronize", failing)
    for made in graphs.known()[0]._kept:
        tape: Any = made.graph
        tape._work = None
    del made, tape
    for _ in range(3):
        assert torch.equal(call(X), 2 * X)
    assert "not permitted" in graphs.known()[0].why


def test_forgetting_waits_for_what_runs(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    graphs.forget()
    assert desk.waits == 1
    assert graphs.known() == []


OFF, HIPS = "graphs are off", "HIP's graphs are used only where they are asked for"


@pytest.mark.parametrize(
    ("backend", "variable", "wish", "why"),
    [
        ("cuda", "", None, ""),
        ("cuda", "", False, OFF),
        ("cuda", "0", True, OFF),
        ("hip", "", None, HIPS),
        ("zluda", "", None, CAPTURED),
        ("zluda", "1", True, CAPTURED),
        ("hip", "", True, ""),
        ("hip", "1", False, ""),
    ],
)
def test_where_graphs_are_recorded(
    monkeypatch: pytest.MonkeyPatch, backend: str, variable: str, wish: bool | None, why: str
) -> None:
    info = DeviceInfo(0, "A card", backend, "", None)
    monkeypatch.setattr(device_module, "identify", lambda device: info)
    monkeypatch.setenv("ROCM_SD_GRAPHS", variable)
    assert obstacle(torch.device("cuda", 0), wish) == why
    assert obstacle(CPU, wish) == "graphs are for GPUs"


def test_an_old_torch_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    assert "other threads" in obstacle(torch.device("cuda", 0), True)


def test_what_keeps_it_from_recording_is_told(desk: Desk, graphs: Graphs) -> None:
    assert graphs.why_not(CPU) == ""
    desk.fault = RuntimeError("no")
    call = program(graphs)
    for _ in range(2):
        call(X)
    assert "no" in graphs.why_not(CPU)
