"""Where recorded programs read and write: in each other's results where these stay, else copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd import calls as calls_module
from lib_rocm_sd.calls import Calls, Places, begin
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs import memory, programs
from lib_rocm_sd.graphs.memory import COPIED, LENT, OWN, Into, Layout, Result, span_bytes
from lib_rocm_sd.graphs.programs import STEADY, Graphs, Recording
from lib_rocm_sd.report import Report
from tests.graph_tape import Desk, recording_cpu
from tests.ops.toy_op import NO_GPU, Doubler, Inputs, op_of

X = torch.arange(80.0).reshape(10, 8).half()
CPU = torch.device("cpu")
DOUBLE = op_of(Doubler("only"))
Program = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    own = Engine(identify=lambda device: NO_GPU, free=lambda device, headroom: 1 << 40)
    monkeypatch.setattr(calls_module, "engine", own)
    return own


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return recording_cpu(monkeypatch, baked=True)


@pytest.fixture
def graphs(desk: Desk) -> Graphs:
    return Graphs(lambda text: None)


def program(graphs: Graphs) -> Program:
    """2 x, by launches or by a graph."""
    places, session = Places(), Session.of("Auto", report=Report())

    def doubled(calls: Calls, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = calls.run("here", DOUBLE, Inputs(x))
        return made

    def call(x: torch.Tensor) -> torch.Tensor:
        calls = begin(session, places.of((x.shape, x.stride())), graphs)
        return calls.recorded(doubled, {"x": x})

    return call


def chain(graphs: Graphs, count: int = 3) -> Program:
    """As many programs, each given what the one before has made."""
    programs = [program(graphs) for _ in range(count)]

    def call(x: torch.Tensor) -> torch.Tensor:
        for each in programs:
            x = each(x)
        return x

    return call


def recordings(graphs: Graphs) -> list[Recording]:
    return [each for each in graphs.known()[0]._kept if each.is_wanted]


def reads(graphs: Graphs) -> list[str]:
    return [type(each.reads["x"]).__name__ for each in recordings(graphs)]


def uses(graphs: Graphs) -> list[str]:
    return [each.result.use for each in recordings(graphs)]


def test_a_program_reads_what_another_made_where_it_lies(desk: Desk, graphs: Graphs) -> None:
    call, places = chain(graphs), set()
    for factor in range(1, 8):
        y = call(factor * X)
        assert torch.equal(y, 8 * factor * X)
        places.add(y.data_ptr()) if factor > 1 else None
        del y
    assert reads(graphs) == ["Copied", "Direct", "Direct"]
    assert uses(graphs) == [LENT] * 3
    assert len(places) == 1 and desk.recorded == 3
    assert len(graphs.known()[0]._results) == 2, "the third writes where the first did"


def test_what_somebody_holds_is_not_written_to(desk: Desk, graphs: Graphs) -> None:
    call = chain(graphs)
    held = [(factor, call(factor * X)) for factor in range(1, 9)]
    for factor, y in held:
        assert torch.equal(y, 8 * factor * X)
    assert COPIED in uses(graphs)
    assert desk.recorded < 8, "what is held again and again is copied at once"
    recorded = desk.recorded
    held += [(factor, call(factor * X)) for factor in range(9, 15)]
    assert desk.recorded == recorded
    for factor, y in held:
        assert torch.equal(y, 8 * factor * X)


def test_what_another_holds_in_the_same_place_moves_only_once(desk: Desk, graphs: Graphs) -> None:
    first, second = program(graphs), program(graphs)
    for _ in range(3):
        first(X)
        second(X)
    assert {id(each.result) for each in recordings(graphs)} == {id(recordings(graphs)[0].result)}
    for factor in range(1, 6):
        held = first(factor * X)
        assert torch.equal(second(3 * X), 6 * X)
        assert torch.equal(held, 2 * factor * X)
        del held
    assert sorted(uses(graphs)) == [LENT, OWN]
    assert desk.recorded == 3


def test_what_is_elsewhere_for_once_is_copied_to_its_place(desk: Desk, graphs: Graphs) -> None:
    first, second = program(graphs), program(graphs)
    for factor in range(1, 12):
        between = first(factor * X)
        if factor > 4:
            between = between + 1  # as a ControlNet adds to it
        assert torch.equal(second(between), 4 * factor * X + 2 * (factor > 4))
        del between
    assert reads(graphs) == ["Copied", "Direct"]
    assert desk.recorded == 2


def test_where_its_place_is_not_free_it_is_copied_elsewhere(desk: Desk, graphs: Graphs) -> None:
    first, second = program(graphs), program(graphs)
    for factor in range(1, 12):
        kept = first(factor * X)
        between = kept + 1 if factor > 4 else kept
        assert torch.equal(second(between), 4 * factor * X + 2 * (factor > 4))
        assert torch.equal(kept, 2 * factor * X)
        del between, kept
    assert reads(graphs) == ["Copied", "Copied"]
    assert desk.recorded == 3


def from_one_place(graphs: Graphs, call: Program, count: int = STEADY + 4) -> torch.Tensor:
    """Calls with a tensor that somebody else makes, always in the same memory."""
    given = torch.empty_like(X)
    for factor in range(1, count):
        given.copy_(factor * X)
        assert torch.equal(call(given), 2 * factor * X)
    return given


def test_what_is_always_in_one_place_is_read_there(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    given = from_one_place(graphs, call, STEADY + 3)
    assert reads(graphs) == [] and desk.recorded == 1, "it is no longer wanted"
    for factor in range(1, 4):
        given.copy_(factor * X)
        assert torch.equal(call(given), 2 * factor * X)
    assert reads(graphs) == ["Settled"] and desk.recorded == 2


def test_what_comes_from_many_places_is_copied(desk: Desk, graphs: Graphs) -> None:
    call, held = program(graphs), []
    for factor in range(1, 2 * STEADY):
        held.append(factor * X)
        assert torch.equal(call(held[-1]), 2 * factor * X)
    assert reads(graphs) == ["Copied"] and desk.recorded == 1


def test_what_leaves_its_place_is_copied_from_then_on(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    given = from_one_place(graphs, call)
    assert reads(graphs) == ["Settled"]
    for factor in range(1, 5):
        elsewhere = factor * X
        assert elsewhere.data_ptr() != given.data_ptr()
        assert torch.equal(call(elsewhere), 2 * factor * X)
        assert torch.equal(call(given), 2 * given)
    from_one_place(graphs, call, 2 * STEADY)
    assert reads(graphs) == ["Copied"] and desk.recorded == 3, "it is not tried twice"


def test_what_lay_elsewhere_for_long_may_lie_in_anothers_result_again(
    desk: Desk, graphs: Graphs
) -> None:
    first, second = program(graphs), program(graphs)
    place = torch.empty_like(X)
    for factor in range(1, STEADY + 20):
        between = first(factor * X)
        changed = 4 < factor < STEADY + 10
        if changed:
            between = torch.add(between, 1, out=place)
        assert torch.equal(second(between), 4 * factor * X + 2 * changed)
        del between
    assert reads(graphs) == ["Copied", "Direct"]


def test_an_expanded_tensor_in_one_place_is_recorded_once(desk: Desk, graphs: Graphs) -> None:
    call, given = program(graphs), torch.empty(8).half()
    for factor in range(1, 3 * STEADY):
        given.fill_(factor)
        assert torch.equal(call(given.expand(10, 8)), torch.full((10, 8), 2.0 * factor).half())
    assert desk.recorded == 1


def test_each_of_two_that_take_turns_settles(desk: Desk, graphs: Graphs) -> None:
    """What they read beside what they are given tells them apart."""
    places, session = Places(), Session.of("Auto", report=Report())
    given, held = torch.empty_like(X), (object(), object())

    def doubled(calls: Calls, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = calls.run("here", DOUBLE, Inputs(x))
        return made

    for factor in range(1, 2 * STEADY + 20):
        given.copy_(factor * X)
        calls = begin(session, places.of(0), graphs)
        made = calls.recorded(doubled, {"x": given}, (held[factor % 2],))
        assert torch.equal(made, 2 * factor * X)
        del made
    assert reads(graphs) == ["Settled", "Settled"]


def test_what_is_steadily_copied_into_anothers_result_is_read_elsewhere(
    desk: Desk, graphs: Graphs
) -> None:
    first, second = program(graphs), program(graphs)
    place = torch.empty_like(X)
    for factor in range(1, STEADY + 8):
        between = first(factor * X)
        if factor > 4:
            between = torch.add(between, 1, out=place)
        assert torch.equal(second(between), 4 * factor * X + 2 * (factor > 4))
        del between
    assert reads(graphs) == ["Copied", "Settled"]
    assert desk.recorded == 3


def test_a_place_taken_once_costs_one_recording_nothing(desk: Desk, graphs: Graphs) -> None:
    call, kept = chain(graphs), X
    for factor in range(1, 12):
        y = call(factor * X)
        assert torch.equal(y, 8 * factor * X)
        if factor == 5:
            kept = y
        if factor == 6:
            kept = X
        del y
    assert desk.recorded == 3 and uses(graphs) == [LENT] * 3
    assert kept is X


def test_what_was_resized_is_not_lent_again(desk: Desk, graphs: Graphs) -> None:
    call = program(graphs)
    for factor in range(1, 9):
        y = call(factor * X)
        assert torch.equal(y, 2 * factor * X)
        if factor == 4:
            y.resize_(4096)
        del y
    assert all(each.result.is_whole for each in recordings(graphs))


def test_without_a_budget_one_miss_is_one_launch(
    desk: Desk, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = program(graphs)
    for _ in range(3):
        call(X)
    monkeypatch.setattr(programs, "FREE_RECORDINGS", 0)
    held = [call(X) for _ in range(5)]
    replayed = desk.replayed
    del held
    for factor in range(1, 5):
        assert torch.equal(call(factor * X), 2 * factor * X)
    assert desk.replayed == replayed + 4


def test_recorded_anew_it_lies_where_it_lay(desk: Desk, graphs: Graphs, engine: Engine) -> None:
    """As when networks give convolutions other biases: who reads it finds it."""
    places, session, held = Places(), Session.of("Auto", report=Report()), [object()]

    def doubled(calls: Calls, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = calls.run("here", DOUBLE, Inputs(x))
        return made

    def first(x: torch.Tensor) -> torch.Tensor:
        calls = begin(session, places.of((x.shape, x.stride())), graphs)
        return calls.recorded(doubled, {"x": x}, (held[0],))

    second, third = program(graphs), program(graphs)
    for number in range(12):
        if number % 4 == 3:
            held[0] = object()
        assert torch.equal(third(second(first(X))), 8 * X)
    assert sorted(reads(graphs)) == ["Copied", "Direct", "Direct"]


def test_what_is_changed_in_place_is_read(graphs: Graphs) -> None:
    first, second = program(graphs), program(graphs)
    for factor in range(1, 6):
        between = first(factor * X)
        between += 1
        assert torch.equal(second(between), 4 * factor * X + 2)
        del between
    assert reads(graphs)[1] == "Direct"


def test_a_torch_that_does_not_tell_gets_copies(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "storage_uses", None)
    call = chain(graphs)
    for factor in range(1, 9):
        assert torch.equal(call(factor * X), 8 * factor * X)
    assert set(uses(graphs)) == {COPIED}


def test_memory_of_programs_that_are_gone_is_let_go(graphs: Graphs) -> None:
    call = chain(graphs)
    for _ in range(3):
        call(X)
    del call
    wide = chain(graphs, 1)
    for _ in range(3):
        wide(torch.cat([X, X]))
    assert [each.n_bytes for each in graphs.known()[0]._results] == [512]


def test_a_result_is_held_by_whatever_shares_its_memory() -> None:
    result, layout = Result(256, CPU, LENT), Layout.of(X[:4])
    held = [result.is_held]
    y = result.tensor(layout)
    held.append(result.is_held)
    assert result.holds(y) and not result.holds(X)
    part = y[1:, 2:]
    del y
    held.append(result.is_held)
    assert result.holds(part)
    del part
    held.append(result.is_held)
    assert held == [False, True, True, False]
    assert result.tensor(layout)._base is None


@pytest.mark.parametrize("inference", [False, True])
def test_a_result_can_be_written_to(inference: bool) -> None:
    result = Result(256, CPU, LENT)
    with torch.inference_mode(inference):
        y = result.tensor(Layout.of(X[:4]))
        y.fill_(3)
    assert result.tensor(Layout.of(X[:4])).eq(3).all()


def into(work: Callable[[], torch.Tensor], target: torch.Tensor) -> bool:
    """Whether the result of `work` is in `target`, as it has to be anyway."""
    expected = work()
    with Into(target):
        made = work()
    assert torch.equal(made, expected)
    return made.data_ptr() == target.data_ptr()


def filled(*shape: int, **more: Any) -> torch.Tensor:
    return X.new_empty(shape, **more).fill_(2)


@pytest.mark.parametrize(
    ("work", "there"),
    [
        (lambda: filled(10, 8), True),
        (lambda: filled(2, 5, 8), True),
        (lambda: X + X, True),
        (lambda: filled(10, 4), False),
        (lambda: filled(10, 8, dtype=torch.float32), False),
        (lambda: X + 1, False),
        (lambda: X.t() + X.t(), False),
        (lambda: X + X.float(), False),
        (lambda: X * X, False),
    ],
)
def test_a_result_is_made_where_it_is_wanted(work: Callable[[], torch.Tensor], there: bool) -> None:
    assert into(work, torch.empty_like(X)) == there


def test_two_of_the_size_do_not_share_the_place() -> None:
    with Into(torch.empty_like(X)):
        first, second = filled(10, 8), filled(10, 8)
    second.zero_()
    assert first.eq(2).all()


def test_a_place_with_gaps_is_left_alone() -> None:
    wide = torch.zeros(10, 16).half()
    assert not into(lambda: filled(10, 8), wide[:, :8])
    assert not wide.any()


@pytest.mark.parametrize(
    ("like", "n_bytes"),
    [(X, 256), (X[:, ::2], 256), (X[:1].expand(40, 8), 768), (X[:0], 0), (X.float(), 512)],
)
def test_bytes_of_a_layout(like: torch.Tensor, n_bytes: int) -> None:
    assert span_bytes(like) == n_bytes


def test_a_recording_does_not_load_torchs_compiler() -> None:
    """Newer torch wraps a mode's calls so that the first one does: seconds, amid a picture."""
    assert not hasattr(Into.__torch_dispatch__, "__wrapped__")
