"""`tune`: what an owner measures, exports and imports; without a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd import __main__ as command
from lib_rocm_sd import device
from lib_rocm_sd.commands import tune as tuned_file
from lib_rocm_sd.commands import tune_measured
from lib_rocm_sd.commands.support import Gpu
from lib_rocm_sd.engine import planner
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.lab import sensors
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.runtime import build
from tests.clock import Clock
from tests.ops.toy_op import CPU, GFX1100, NO_GPU
from tests.vae.vae_models import needs_half

pytestmark = [pytest.mark.usefixtures("fresh_cache"), needs_half]

SLOTS = (tune_measured.Slot("float16", 40), tune_measured.Slot("bfloat16", 64))
DELAYS = {40: (4e-3, 1e-3, 8e-3, 8e-3), 64: (1e-3, 4e-3, 4e-3, 4e-3)}
"""Seconds by the config's place in the search space."""
USUAL_S = 1e-3
Work = Callable[[kernel.AttentionConfig, int], None]


@pytest.fixture
def card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> Callable[[Work | None], Path]:
    """A machine with one gfx1100, an empty kernels/tuned, and two small problems per slot."""
    assert GFX1100.arch is not None
    spaces = {each: list(kernel.configs(GFX1100.arch, each)) for each in DELAYS}

    def take(config: kernel.AttentionConfig, head_dim: int) -> None:
        clock.turn(DELAYS[head_dim][min(spaces[head_dim].index(config), 3)])

    def problems(slot: tune_measured.Slot) -> list[AttentionProblem]:
        return [AttentionProblem(1, 1, seq, 8, slot.head_dim, slot.dtype) for seq in (8, 16)]

    def have(work: Work | None = None) -> Path:
        def run(self: Any, call: Call[Any, Any]) -> Any:
            inputs = call.inputs
            (work or take)(call.config, call.problem.head_dim)
            return reference(inputs).to(inputs.q.dtype)

        monkeypatch.setattr(MatrixAttention, "run", run)
        return tmp_path / "table.json"

    monkeypatch.setattr(tune_measured, "SLOTS", SLOTS)
    monkeypatch.setattr(tune_measured.Slot, "problems", problems)
    monkeypatch.setattr(tune_measured, "BUDGET_S", 0.1)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(tuned_file, "gpu", lambda index: Gpu(CPU, GFX1100, GFX1100.arch))
    monkeypatch.setattr(sensors, "identify", lambda place: GFX1100)
    monkeypatch.setattr(planner, "default_launcher", lambda place, row: object())
    monkeypatch.setattr(build, "build_all", lambda specs, row: None)
    monkeypatch.setattr(build, "is_cached", lambda spec, row: False)
    return have


def tune(*words: object) -> int:
    return command.main(["tune", *map(str, words)])


def test_what_is_missing_is_measured_and_exported(
    card: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = card()
    assert tune("--measure", "--export", path) == 0
    said = capsys.readouterr().out
    assert "4 problems" in said and "compiling: 0 of" in said and "  4 of 4  B1 H1 Sq16" in said
    assert f"{path.name}: 2 choices for {GFX1100.name} (gfx1100)." in said
    content = json.loads(path.read_text(encoding="utf-8"))
    assert tuned_file.problems(path.read_bytes()) == []
    (section,) = content["sections"]
    assert section["source"] == "measured" and section["card"] == GFX1100.name
    assert section["torch"] == torch.__version__ and len(section["date"]) == 10
    assert {"driver", "rocm", "os"} <= section.keys()
    first, second = section["entries"]
    space = kernel.configs(GFX1100.arch, 40)  # type: ignore[arg-type]
    assert first["form"] == kernel.form("float16", 40)
    assert first["config"] == kernel.fields_of(space[1])
    assert [row["problem"] for row in first["times"]] == [
        "B1 H1 Sq8 Sk8 D40 float16",
        "B1 H1 Sq16 Sk8 D40 float16",
    ]
    assert [(row["time_us"], row["default_us"]) for row in first["times"]] == [(1000, 4000)] * 2
    assert second["config"] == kernel.fields_of(kernel.configs(GFX1100.arch, 64)[0])  # type: ignore[arg-type]
    assert not list(path.parent.glob("*.part"))


def test_nothing_is_measured_twice(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    card()
    assert tune("--measure") == 0
    capsys.readouterr()

    def never(config: Any, head_dim: int) -> None:
        raise AssertionError("measured again")

    path = card(never)
    assert tune("--measure", "--export", path) == 0
    assert "All is measured already." in capsys.readouterr().out and path.is_file()


def test_an_export_of_nothing_says_how(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = card()
    assert tune("--export", path) == 1
    said = capsys.readouterr().out
    assert "not measured: float16, head_dim 40" in said and "--measure" in said
    assert not path.exists()


def test_what_performance_measured_counts(card: Any) -> None:
    from lib_rocm_sd.engine.engine import Engine
    from lib_rocm_sd.engine.session import Session
    from lib_rocm_sd.report import Report

    path = card()
    engine = Engine(
        identify=lambda place: GFX1100,
        launcher=lambda place, row: lambda *a, **k: None,
        free=lambda place, headroom_bytes: 1 << 40,
    )
    session = Session.of("Performance", report=Report())
    engine.plan(AttentionProblem(2, 4, 24, 8, 40), CPU, session=session)
    assert tune("--export", path) == 1  # the other form is lacking
    (entry,) = json.loads(path.read_text(encoding="utf-8"))["sections"][0]["entries"]
    assert [row["problem"] for row in entry["times"]] == ["B2 H4 Sq24 Sk8 D40 float16"]


def test_a_wrong_config_is_not_timed(
    card: Any, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert GFX1100.arch is not None
    wrong = kernel.configs(GFX1100.arch, 40)[1]

    def work(config: Any, head_dim: int) -> None:
        if config == wrong:
            raise LaunchError("status 700 in /home/somebody/x")
        clock.turn(USUAL_S)

    path = card(work)
    assert tune("--measure", "--export", path) == 0
    assert "left out: " in capsys.readouterr().out
    entries = json.loads(path.read_text(encoding="utf-8"))["sections"][0]["entries"]
    assert all(entry["config"] != kernel.fields_of(wrong) for entry in entries[:1])
    assert "somebody" not in path.read_text(encoding="utf-8")


def test_a_card_on_which_nothing_works(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def work(config: Any, head_dim: int) -> None:
        raise LaunchError("status 700")

    path = card(work)
    assert tune("--measure", "--export", path) == 1
    assert "no config of ours works" in capsys.readouterr().out and not path.exists()


def test_too_little_memory_for_one_problem(
    card: Any, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: Any, head_dim: int) -> None:
        if head_dim == 64:
            raise torch.cuda.OutOfMemoryError("HIP out of memory")
        clock.turn(USUAL_S)

    path = card(work)
    assert tune("--measure", "--export", path) == 1
    said = capsys.readouterr().out
    assert "Sq8 Sk8 D64 bfloat16: too little memory" in said
    assert "not measured: bfloat16, head_dim 64" in said and path.is_file()


def test_interrupted_and_gone_on_with(
    card: Any, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [0]

    def work(config: Any, head_dim: int) -> None:
        calls[0] += 1
        if head_dim == 64:
            raise KeyboardInterrupt
        clock.turn(USUAL_S)

    path = card(work)
    assert tune("--measure", "--export", path) == 2
    assert "interrupted" in capsys.readouterr().err and not path.exists()
    card()
    assert tune("--measure") == 0
    assert "2 problems" in capsys.readouterr().out  # those of the other form are known


def test_without_a_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "identify", lambda place: NO_GPU)
    assert tune("--measure", "--export", tmp_path / "x.json") == 2
    assert "nothing can be measured here: no GPU" in capsys.readouterr().err


def test_a_driver_that_cannot_be_used(
    card: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(place: Any, row: Any) -> Any:
        raise OSError("no libamdhip64")

    card()
    monkeypatch.setattr(planner, "default_launcher", fail)
    assert tune("--measure") == 2
    assert "the driver cannot be used" in capsys.readouterr().err


def test_an_import_is_merged_and_decides(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = card()
    assert tune("--measure", "--export", path) == 0
    assert GFX1100.arch is not None
    space = kernel.configs(GFX1100.arch, 40)
    assert kernel.ordered(GFX1100.arch, "float16", 40)[0] == space[0]
    assert tune("--import", path) == 0
    assert "kernels/tuned/gfx1100/attention.json: 2 choices" in capsys.readouterr().out
    assert kernel.ordered(GFX1100.arch, "float16", 40)[0] == space[1]
    assert tune("--import", path) == 0  # the same card again
    kept = tuned.path_of("gfx1100", "attention").read_bytes()
    assert len(json.loads(kept)["sections"]) == 1 and tuned_file.problems(kept) == []


def test_a_bad_file_is_refused(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = card()
    assert tune("--measure", "--export", path) == 0
    good = path.read_text(encoding="utf-8")
    for bad in (good[:200], good.replace("measured", "guessed"), good.replace("gfx1100", "gfx7")):
        path.write_text(bad, encoding="utf-8")
        assert tune("--import", path) == 1
        assert f"{path.name} is refused: " in capsys.readouterr().err
    link = path.with_name("link.json")
    path.write_text(good, encoding="utf-8")
    link.symlink_to(path)
    assert tune("--import", link) == 1
    assert tune("--import", path.with_name("none.json")) == 2
    assert not tuned.path_of("gfx1100", "attention").exists()


def test_what_runs_first_is_shown(card: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = card()
    assert tune("--arch", "gfx1100,gfx942") == 0
    said = capsys.readouterr().out
    forms = len(kernel.DTYPES) * len(kernel.SHIPPED_HEAD_DIMS)
    assert said.count("default") == 2 * forms
    assert tune("--measure", "--export", path) == tune("--import", path) == 0
    capsys.readouterr()
    assert tune("--arch", "gfx1100") == 0
    assert capsys.readouterr().out.rstrip().count("measured") == 2
    tuned.path_of("gfx1100", "attention").write_bytes(b"{")
    assert tune("--arch", "gfx1100") == 1
    assert "is ignored" in capsys.readouterr().err
    assert tune("--arch", "gfx7") == 2


def test_the_least_time_for_all_problems_together() -> None:
    space = kernel.configs(GFX1100.arch, 64)  # type: ignore[arg-type]
    one, two, three = space[:3]
    short, long = (AttentionProblem(1, 1, seq, 8, 64) for seq in (8, 4096))
    rows = {short: {one: 10.0, two: 20.0, three: 1.0}, long: {one: 1100.0, two: 1000.0}}
    assert tune_measured.best(rows) == two
    assert tune_measured.best({}) is None
    assert tune_measured.best({short: {one: 1.0}, long: {two: 1.0}}) is None


def test_every_shipped_head_dim_has_problems() -> None:
    for dtype in kernel.DTYPES:
        for head_dim in kernel.SHIPPED_HEAD_DIMS:
            problems = tune_measured.Slot(dtype, head_dim).problems()
            assert problems and all(
                (each.head_dim, each.dtype, each.mask) == (head_dim, dtype, "none")
                for each in problems
            )
            assert all(tune_measured.PROBLEM.fullmatch(str(each)) for each in problems)
            assert math.prod(problem.seq_q for problem in problems) > 0
