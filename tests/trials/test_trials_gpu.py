"""On a card: all that Stable Diffusion needs passes its trial; planted faults stay in the child.

`pytest -s` prints a table of the verdicts, and how long the child took.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog import vae as usual
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.planner import default_launcher
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.report import Report
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials import conductor, place
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.gate import Gate
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject, subjects
from lib_rocm_sd.trials.verdicts import FAULTED, HUNG, PASSED, WRONG, Verdict
from tests.trials.plants import PLANTS, START
from tests.verify import simt

pytestmark = pytest.mark.gpu
LIMIT_S = 5.0
ENDS = {"outside": FAULTED, "endless": HUNG, "lane": WRONG}


@pytest.fixture
def card() -> Any:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def here(card: Any) -> Place:
    arch = identify(card).arch
    assert arch is not None
    found = place.of(card, default_launcher(card, arch))
    assert found is not None
    return found


@pytest.fixture
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Verdicts of this test alone; the machine code is kept."""
    from lib_rocm_sd import cache

    cache.clear(("verdicts",))
    yield
    cache.clear(("verdicts",))


def attention(here: Place, head_dim: int = 64) -> Subject:
    (found,) = subjects([(ATTENTION, AttentionProblem(2, 8, 1024, 1024, head_dim))], here.arch)
    return found


def planted(how: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Attention's kernel compiled from a changed source, until the returned function is called."""
    folder = simt.planted("attention.hip", START, PLANTS[how])
    real_build, real_cached = build.build, build.cached

    def changed(spec: KernelSpec) -> KernelSpec:
        return replace(spec, source=str(folder / spec.source))

    def is_ours(spec: KernelSpec) -> bool:
        return spec.source == "attention.hip"

    def made(spec: KernelSpec, row: Arch) -> Any:
        return real_build(changed(spec) if is_ours(spec) else spec, row)

    def known(spec: KernelSpec, row: Arch) -> Any:
        return real_cached(changed(spec) if is_ours(spec) else spec, row)

    monkeypatch.setattr(build, "build", made)
    monkeypatch.setattr(build, "cached", known)

    def undo() -> None:
        monkeypatch.setattr(build, "build", real_build)
        monkeypatch.setattr(build, "cached", real_cached)

    return undo


def show(verdict: Verdict, seconds: float) -> None:
    error = "" if verdict.error is None else f"{verdict.error:.1e} of {verdict.tolerance:.1e}"
    notes = f"  [{'; '.join(verdict.notes)}]" if verdict.notes else ""
    said = f"{verdict.outcome:8} {seconds:6.2f} s  {error:20} {verdict.time_ms:8.3f} ms"
    print(f"{said}  {verdict.subject}  {verdict.reason}{notes}")


@pytest.mark.usefixtures("no_verdicts")
def test_all_that_stable_diffusion_needs_passes(here: Place, card: Any) -> None:
    work = [(ATTENTION, problem) for problem in ATTENTION.cases[:18]] + usual.work()
    wanted = subjects(work, here.arch)
    specs = dict.fromkeys(spec for each in wanted for spec in each.specs)
    begin = time.monotonic()
    build.build_all(specs, here.arch)
    print(f"\n{here}: {len(wanted)} classes; compiled in {time.monotonic() - begin:.1f} s")
    begin = last = time.monotonic()

    def told(subject: Subject, verdict: Verdict) -> None:
        nonlocal last
        show(verdict, time.monotonic() - last)
        last = time.monotonic()

    found = Conductor(here).run(wanted, told=told)
    print(f"all trials: {time.monotonic() - begin:.1f} s")
    begin = time.monotonic()
    assert Conductor(here).run(wanted) == found
    print(f"asked again: {1e3 * (time.monotonic() - begin):.1f} ms")
    wrong = [verdict for _, verdict in found if verdict.outcome != PASSED]
    assert wrong == []
    assert len(found) == len(wanted)
    for gated in (False, True):
        show_first_use(card, work, gated)


def show_first_use(card: Any, work: Any, gated: bool) -> None:
    """How long a process's first look at each class takes, all verdicts being there."""
    begin = time.monotonic()
    engine = Engine()
    if gated:
        gate = Gate(renew=engine.renew)
        gate.start()
        engine.gate = gate
    assert engine.usable(card) == []
    usable = time.monotonic() - begin
    begin = time.monotonic()
    for op, problem in work:
        engine.plan(problem, card, op)
    torch.cuda.synchronize()
    planned = time.monotonic() - begin
    print(f"gate {gated}: usable after {usable:.3f} s, all {len(work)} planned in {planned:.3f} s")
    if gated:
        assert not gate.state().running
        assert gate.state().refused == ()


@pytest.mark.usefixtures("no_verdicts")
def test_what_needs_torch_is_tried_by_a_child_that_has_it(here: Place) -> None:
    problem = AttentionProblem(1, 1, 4096, 4096, 512)
    conv = ConvProblem("3x3", 1, 64, 64, 128, 128, norm=True, statistics=True)
    cases: list[tuple[Any, Any]] = [(ATTENTION, problem), (CONVS["3x3"], conv)]
    wanted = [
        Subject.of(op, op.variants[1], op.variants[1].configs(here.arch, each)[0], each, here.arch)
        for op, each in cases
        if not op.variants[1].refusals(here.arch, each)
    ]
    begin = time.monotonic()
    found = Conductor(here, class_limit_s=60).run(wanted)
    for _, verdict in found:
        show(verdict, time.monotonic() - begin)
    assert [verdict.outcome for _, verdict in found] == [PASSED] * len(wanted)


ALONE = """
import faulthandler
import sys
faulthandler.dump_traceback_later(30, exit=True)
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.runtime import build, launcher
from lib_rocm_sd.trials.gate import Gate
from dataclasses import replace
import torch

card, problem = torch.device("cuda", 0), AttentionProblem(2, 8, 1024, 1024, 64)
engine = Engine()
gate = Gate(renew=engine.renew)
print("started", [verdict.outcome for verdict in gate.start()])
engine.gate = gate
if len(sys.argv) > 1:  # what this process launches is not what the child has tried
    real = launcher.Launcher._code
    def changed(self, spec):
        return real(self, replace(spec, source=sys.argv[1] + "/" + spec.source))
    launcher.Launcher._code = changed
inputs = ATTENTION.make_inputs(problem, card, 3)
engine.run(ATTENTION, inputs)
gate.wait(600)
engine.run(ATTENTION, inputs)
print("refused", gate.state().refused)
"""


@pytest.mark.usefixtures("no_verdicts")
def test_a_fault_that_comes_only_in_the_program_comes_once(here: Place) -> None:
    folder = simt.planted("attention.hip", START, PLANTS["outside"])
    root = Path(__file__).parents[2]
    told = []
    for arguments in ([str(folder)], []):
        command = [sys.executable, "-c", ALONE, *arguments]
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=600, check=False
        )
        told.append((done.returncode, done.stdout, done.stderr[-3000:]))
        print(*told[-1], sep="\n")
    assert told[0][0] != 0
    assert told[1][0] == 0
    assert "in the program itself, though not in its trial" in told[1][1]


@pytest.mark.usefixtures("no_verdicts")
@pytest.mark.parametrize("how", PLANTS)
def test_a_planted_fault_ends_the_child_alone(
    here: Place, card: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = planted(how, monkeypatch)
    subject = attention(here)
    build.build_all(subject.specs, here.arch)
    begin = time.monotonic()
    ((_, verdict),) = Conductor(here, class_limit_s=LIMIT_S).run([subject])
    show(verdict, time.monotonic() - begin)
    assert verdict.outcome == ENDS[how]
    assert bool(conductor.halt(here)) == (how != "lane")
    assert torch.ones(4, device=card).sum().item() == 4  # the card works on, in this process
    undo()
    ((_, again),) = Conductor(here).run([subject], force=True)
    assert again.outcome == PASSED


@pytest.mark.usefixtures("no_verdicts")
def test_the_engine_stays_on_torch_and_takes_over_after_the_plant_is_gone(
    here: Place, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    undo = planted("outside", monkeypatch)
    engine, session = Engine(), Session(report=Report())
    gate = Gate(renew=engine.renew, say=lambda line: print(line))
    gate.start()
    engine.gate = gate
    inputs = ATTENTION.make_inputs(AttentionProblem(2, 8, 1024, 1024, 64), card, 3)
    first = engine.run(ATTENTION, inputs, session)
    assert gate.wait(600)
    second = engine.run(ATTENTION, inputs, session)
    assert torch.equal(first, second)
    assert gate.state().refused
    undo()
    assert gate.ask()
    assert gate.wait(600)
    begin = time.monotonic()
    third = engine.run(ATTENTION, inputs, session)
    print(f"the first call of ours, self-tests included: {time.monotonic() - begin:.3f} s")
    rows = session.report.snapshot()["rows"]
    assert "rocm_sd" in {row["variant"] for row in rows if row["calls"]}
    assert (first.double() - third.double()).abs().max() < 1e-2
    assert list(Path(str(gate._journal._place())).glob("*.trying")) == []
