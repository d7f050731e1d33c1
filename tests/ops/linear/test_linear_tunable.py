"""TunableOp: on for a call, bounded, put back whatever happens; never where a user has set it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import cache
from lib_rocm_sd.arch import table
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.linear import tunable
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.ops.linear.torch import TorchLinear
from lib_rocm_sd.ops.linear.tunable import TunedLinear

CPU = torch.device("cpu")
ARCH = table()["gfx1100"]
PROBLEM = LinearProblem(7, 16, (8, 24), "float32")
IN_PLACE = LinearProblem(7, 16, (8,), "float32", residual=True, in_place=True)
OTHERS_STATE = {
    "filename": "theirs.csv",
    "duration": 30,
    "iterations": 100,
    "tuning": True,
    "on": False,
}


class Tunable:
    """torch.cuda.tunable as torch 2.3 to 2.9 have it: what is set, and what was asked for."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = dict(OTHERS_STATE)
        self.results: list[tuple[str, ...]] = []
        self.read_from = ""
        self.written: list[str] = []
        self.fails = ""
        for name, read, write in (
            ("filename", "get_filename", "set_filename"),
            ("duration", "get_max_tuning_duration", "set_max_tuning_duration"),
            ("iterations", "get_max_tuning_iterations", "set_max_tuning_iterations"),
            ("tuning", "tuning_is_enabled", "tuning_enable"),
            ("on", "is_enabled", "enable"),
        ):
            setattr(self, read, lambda name=name: self.state[name])
            setattr(self, write, lambda value=True, name=name: self._set(name, value))

    def _set(self, name: str, value: Any) -> None:
        if self.fails == name:
            self.fails = ""
            raise RuntimeError("planted")
        self.state[name] = value

    def get_results(self) -> list[tuple[str, ...]]:
        self.read_from = self.read_from or self.state["filename"]
        return self.results

    def write_file(self, path: str) -> None:
        assert self.state["filename"] == path
        self.written.append(path)

    def meets(self, shape: Any) -> None:
        """A product: timed if it is not known."""
        if self.state["on"] and self.state["tuning"] and (str(shape),) not in self.results:
            assert self.state["duration"] <= 10 and self.state["iterations"] <= 10
            self.results.append((str(shape),))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> Iterator[Tunable]:
    made = Tunable()
    monkeypatch.setattr(tunable, "_module", lambda: made)
    for name in [name for name in os.environ if name.startswith(tunable.VARIABLES)]:
        monkeypatch.delenv(name)
    plain = TorchLinear.run

    def run(self: Any, call: Call[Any, Any]) -> torch.Tensor:
        made.meets(call.inputs.x.shape)
        return plain(self, call)

    monkeypatch.setattr(TorchLinear, "run", run)
    yield made
    assert made.state == OTHERS_STATE


def test_a_call_is_tuned_within_bounds_and_kept_in_our_folder(
    fake: Tunable, fresh_cache: Path
) -> None:
    inputs = LINEAR.make_inputs(PROBLEM, CPU, 1)
    for _ in range(2):
        made = TunedLinear().run(Call(PROBLEM, inputs))
        assert relative_error(made, LINEAR.reference(inputs)) <= LINEAR.tolerance(PROBLEM)
    assert len(fake.results) == 1 and len(fake.written) == 1
    written = Path(fake.written[0])
    assert fake.read_from == str(written) and cache.directory() in written.parents
    written.write_text("Validator\n", encoding="utf-8")
    assert cache.clear(("tune",)) == 10 and not written.exists()


def test_a_later_torch_writes_by_itself(fake: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Tunable, "write_file")
    TunedLinear().run(Call(PROBLEM, LINEAR.make_inputs(PROBLEM, CPU, 1)))
    assert len(fake.results) == 1


@pytest.mark.parametrize("place", ["call", *OTHERS_STATE])
def test_all_is_put_back_after_an_error(place: str, fake: Tunable) -> None:
    fake.fails = place
    with pytest.raises(RuntimeError, match="planted"), tunable.switched_on(tune=True):
        assert fake.state["on"] and fake.state["tuning"]
        raise RuntimeError("planted")


def test_a_bound_call_tunes_once_and_is_compared(fake: Tunable) -> None:
    inputs = LINEAR.make_inputs(PROBLEM, CPU, 1)
    with torch.no_grad():
        run: Any = TunedLinear().bound(Call(PROBLEM, inputs))
        for _ in range(3):
            made = run(Call(PROBLEM, inputs))
            assert relative_error(made, LINEAR.reference(inputs)) <= LINEAR.tolerance(PROBLEM)
            assert len(fake.results) == 1
    assert run._ready


@pytest.mark.parametrize("problem", [PROBLEM, IN_PLACE], ids=str)
def test_a_wrong_solution_is_an_error_and_changes_nothing(
    problem: LinearProblem, fake: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchLinear.run

    def wrong(self: Any, call: Call[Any, Any]) -> torch.Tensor:
        made = right(self, call)
        return made.mul_(1.5) if fake.state["on"] else made

    monkeypatch.setattr(TorchLinear, "run", wrong)
    inputs = LINEAR.make_inputs(problem, CPU, 1)
    before = None if inputs.out is None else inputs.out.clone()
    with torch.no_grad():
        run = TunedLinear().bound(Call(problem, inputs))
        with pytest.raises(RuntimeError, match="TunableOp chose what is wrong by 0.5"):
            run(Call(problem, inputs))
    if inputs.out is not None and before is not None:
        assert torch.equal(inputs.out, before)  # who goes on adds to it


def test_written_in_place_once(fake: Tunable) -> None:
    inputs = LINEAR.make_inputs(IN_PLACE, CPU, 1)
    expected = LINEAR.reference(inputs)
    with torch.no_grad():
        call = Call(IN_PLACE, inputs)
        made = TunedLinear().bound(call)(call)
    assert inputs.out is not None and made.data_ptr() == inputs.out.data_ptr()
    assert relative_error(inputs.out, expected) <= LINEAR.tolerance(IN_PLACE)


def test_two_threads_take_turns(fake: Tunable) -> None:
    entered, let_go, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with tunable.switched_on(tune=True):
            entered.set()
            let_go.wait(600)

    def second() -> None:
        with tunable.switched_on(tune=False):
            seen.append((fake.state["on"], fake.state["tuning"], fake.state["filename"]))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(600)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive() and not seen
    let_go.set()
    for thread in threads:
        thread.join(600)
    assert seen == [(True, False, "theirs.csv")]


def test_a_recorded_call_times_nothing(fake: Tunable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunable, "_recorded", lambda x: True)
    inputs = LINEAR.make_inputs(PROBLEM, CPU, 1)
    TunedLinear().run(Call(PROBLEM, inputs))
    run: Any = TunedLinear().bound(Call(PROBLEM, inputs))
    run(Call(PROBLEM, inputs))
    assert fake.results == [] and not run._ready


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one of AMD's."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.2")


@pytest.mark.usefixtures("card")
def test_it_is_left_alone_where_somebody_uses_it(
    fake: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TunedLinear().refusals(ARCH, PROBLEM) == []
    fake.state["on"] = True
    (why,) = TunedLinear().refusals(ARCH, PROBLEM)
    assert why == "TunableOp is on in this process, and left alone"
    fake.state["on"] = False
    for name in ("PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_FILENAME"):
        for value in ("0", "1"):
            monkeypatch.setenv(name, value)
            (why,) = TunedLinear().refusals(ARCH, PROBLEM)
            assert why == f"{name}: TunableOp is set by the user, and left alone"
        monkeypatch.delenv(name)
    monkeypatch.setattr(cache, "directory", lambda: None)
    (why,) = TunedLinear().refusals(ARCH, PROBLEM)
    assert why == "there is no cache folder for what it finds"


@pytest.mark.usefixtures("card")
def test_where_there_is_nothing_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TunedLinear().refusals(None, PROBLEM) == ["no supported GPU"]
    half = SimpleNamespace(enable=None, is_enabled=None)
    monkeypatch.setattr(tunable.importlib, "import_module", lambda name: half)
    (why,) = TunedLinear().refusals(ARCH, PROBLEM)
    assert why.endswith("has no torch.cuda.tunable: 2.3 has")
    monkeypatch.setattr(torch.version, "hip", None)
    (why,) = TunedLinear().refusals(ARCH, PROBLEM)
    assert why == "TunableOp has nothing to choose from on CUDA"


def test_this_torch_has_all_that_is_called() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3):
        pytest.skip("torch before 2.3 has no torch.cuda.tunable")
    assert tunable._module() is not None
    names = [variant.name for variant in LINEAR.every]
    assert names[-1] == "torch tunable" and TunedLinear() not in LINEAR.variants


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_the_card_torch_is_as_it_was_afterwards(dtype: str) -> None:
    """By run itself, since on CUDA the variant refuses: there it finds torch's default."""
    module: Any = tunable._module()
    if module is None or tunable.unavailable():
        pytest.skip("; ".join(tunable.unavailable()))
    before = [getattr(module, read)() for read, _ in tunable.SETTINGS]
    device, problem = torch.device("cuda:0"), replace(PROBLEM, rows=640, dtype=dtype)
    right = LINEAR.reference(LINEAR.make_inputs(problem, CPU, 1))
    inputs = LINEAR.make_inputs(problem, device, 1)
    with torch.no_grad():
        bound = TunedLinear().bound(Call(problem, inputs))
        for run in (TunedLinear().run, bound, bound):
            made = run(Call(problem, inputs)).cpu()
            assert relative_error(made, right) <= LINEAR.tolerance(problem)
    assert [getattr(module, read)() for read, _ in tunable.SETTINGS] == before
