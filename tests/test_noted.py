"""Cases of machine code are known by what a GPU would execute."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.op import LINEAR as LINEAR_OP
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.runtime import build, codeobject
from tests import compiled, executed, ledger, noted
from tests.executed import Entry
from tests.ops.running import compute
from tests.test_ledger import config
from tests.verify import simt
from tests.verify.amdgpu import executor, launch
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.coverage import kernel_of
from tests.verify.amdgpu.judge import execute
from tests.verify.simt.launch import ShimLaunch

pytestmark = pytest.mark.skipif(bool(launch.missing()), reason=str(launch.missing()))

ATTENTION = Case("gfx1100", "attention", AttentionProblem(1, 2, 35, 67, 40, "float16", "none"))
LINEAR = Case("gfx1030", "linear", LinearProblem(33, 64, (40,), "float16"))
MANY = replace(LINEAR, problem=LinearProblem(33, 64, (40, 24, 8, 16, 8), "float16"))


@pytest.fixture(autouse=True)
def _nothing_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*given: Any) -> None:
        raise AssertionError("executed")

    monkeypatch.setattr(executor, "run", run)


def key_of(case: Case, kernels_dir: Path = KERNELS_DIR) -> str:
    """Of the case's launch alone, whatever it is called."""
    return noted.key_of(noted.Codes([]), "", lambda: execute(case, kernels_dir))


@pytest.mark.parametrize("case", [ATTENTION, LINEAR, MANY], ids=str)
def test_a_key_is_the_same_wherever_tensors_lie(case: Case) -> None:
    keep = [key_of(case)]
    others = [bytearray(1 << 16) for _ in range(50)]
    assert keep[0] and key_of(case) == keep[0], len(others)
    assert compiled.noting is None


def changed(case: Case, **what: Any) -> Case:
    return replace(case, problem=replace(case.problem, **what))


@pytest.mark.parametrize(
    "other",
    [
        changed(ATTENTION, seq_k=68),
        changed(ATTENTION, heads=3),
        replace(ATTENTION, scale=-0.3),
        replace(ATTENTION, layout="misaligned"),
        replace(ATTENTION, config=1),
        replace(ATTENTION, schedule=1),
        replace(ATTENTION, gfx="gfx1201"),
    ],
    ids=str,
)
def test_arguments_code_and_order_make_another_key(other: Case) -> None:
    assert key_of(other) not in ("", key_of(ATTENTION))


def test_the_executors_version_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(LINEAR)
    monkeypatch.setattr(executor, "VERSION", executor.VERSION + 1)
    assert key_of(LINEAR) != before


OTHERWISE: Callable[[str], str] = lambda text: text.replace("p.k", "(p.k ^ 8)", 1)  # noqa: E731
OTHERWISE_AND_SAID: Callable[[str], str] = lambda text: OTHERWISE(text) + "// said\n"  # noqa: E731
ANOTHER: Callable[[str], str] = lambda text: text.replace("p.k", "(p.k ^ 16)", 1)  # noqa: E731


def edited(tmp_path: Path, edit: Callable[[str], str]) -> Path:
    """The kernels, of which linear.hip is edited."""
    kernels_dir = tmp_path / "kernels"
    shutil.copytree(KERNELS_DIR, kernels_dir)
    path = kernels_dir / "linear.hip"
    text = path.read_text(encoding="utf-8")
    assert edit(text) != text
    path.write_text(edit(text), encoding="utf-8")
    return kernels_dir


@pytest.mark.parametrize("where", ["a comment", "a line"])
def test_what_gives_the_same_machine_code_has_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A comment needs no compiler, another line does."""
    line = {"a comment": "// nothing", "a line": "struct NeverUsed { int x; };"}[where]
    kernels_dir = edited(tmp_path, lambda text: f"{text}\n{line}\n")
    codes = noted.Codes([])
    before = noted.key_of(codes, "", lambda: execute(LINEAR))
    known = codes.taken()
    codes = noted.Codes(known)
    monkeypatch.setattr(noted, "KERNELS_DIR", kernels_dir)
    assert noted.key_of(codes, "", lambda: execute(LINEAR, kernels_dir)) == before
    assert (codes.taken() == known) is (where == "a comment")


def test_other_machine_code_has_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_dir, before = edited(tmp_path, OTHERWISE), key_of(LINEAR)
    monkeypatch.setattr(noted, "KERNELS_DIR", kernels_dir)
    assert key_of(LINEAR, kernels_dir) not in ("", before)


def test_a_planted_mistake_is_known_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not compiled to be known."""
    monkeypatch.setattr(launch, "built", None)
    one, other = (
        key_of(LINEAR, edited(tmp_path / name, edit))
        for name, edit in (("one", OTHERWISE), ("other", OTHERWISE_AND_SAID))
    )
    assert one == other != key_of(LINEAR, edited(tmp_path / "another", ANOTHER))


# -- under the shim, and where a test goes on ------------------------------------------------------


PROBLEM = LinearProblem(33, 64, (40,), "float16")


def solved(seed: int = 1, sanitize: str | None = None, kernels_dir: Path = KERNELS_DIR) -> Any:
    arch = by_gfx("gfx1100")
    assert arch is not None
    inputs = LINEAR_OP.make_inputs(PROBLEM, torch.device("cpu"), 1)
    run = ShimLaunch(arch, seed, sanitize, kernels_dir)
    config = MatrixLinear().configs(arch, PROBLEM)[0]
    with run.knows(*inputs.named.values()):
        return compute(LINEAR_OP, MatrixLinear(), run, config, inputs)


def shim_key(**how: Any) -> str:
    return noted.key_of(noted.Codes([]), "", lambda: solved(**how), once=False)


def test_what_the_shim_runs_is_known_by_text_arguments_and_order(tmp_path: Path) -> None:
    before = shim_key()
    said = edited(tmp_path / "said", lambda text: text + "// said")
    assert before == shim_key() == shim_key(kernels_dir=said) != ""
    others = {
        shim_key(seed=2),
        shim_key(kernels_dir=edited(tmp_path / "otherwise", OTHERWISE)),
        *([] if simt.missing("thread") else [shim_key(sanitize="thread")]),
    }
    assert len(others) >= 2 and before not in others


@pytest.mark.parametrize("change", ["an argument", "the grid", "the shim"])
def test_what_decides_under_the_shim(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    before, launch_shim = shim_key(), noted.Notes.launch_shim

    def other(notes: Any, program: str, params: Any, regions: Any, grid: int, *how: Any) -> None:
        if change == "an argument":
            params.rows += 1
        launch_shim(notes, program, params, regions, grid + (change == "the grid"), *how)

    if change == "the shim":
        monkeypatch.setattr(simt, "version", lambda: "another")
    monkeypatch.setattr(noted.Notes, "launch_shim", other)
    assert shim_key() not in ("", before)


def verdict(seed: int) -> str:
    return "right" if solved(seed).isfinite().all() else "wrong"


def _each_is_right() -> None:
    """What nobody wrote is not finite."""
    assert solved(1).isfinite().all()
    with pytest.raises(ValueError, match="nothing"):
        assert solved(2).isfinite().all(), "not even this"
    for seed in (3, 4):
        if verdict(seed) != "right":
            return
    pytest.fail("nothing shows it")


def test_all_that_a_test_launches_is_noted_whatever_it_asserts() -> None:
    seeds: list[Any] = []
    test = noted.unasserted(__name__)["_each_is_right"]
    for step in noted.steps_of(noted.Codes([]), test, once=False):
        seeds.append(step[-1])  # type: ignore[index]
    assert seeds == [1, 2, 3, 4]


def test_what_is_only_compiled_is_known_and_not_kept() -> None:
    """What is kept of compilers while a test is noted would be found when it is executed."""
    arch = by_gfx("gfx1100")
    assert arch is not None
    (spec,) = kernel.specs("float16", False, False, kernel.sizes(arch, "float16")[0], False)
    found: list[Any] = []

    def test() -> None:
        found.extend(codeobject.resources(launch.built(spec, arch)))
        found.extend(codeobject.resources(build.build(spec, arch).code))

    assert len(noted.steps_of(noted.Codes([]), test)) == 2
    assert [each.name for each in found] == [spec.entry] * 2
    assert launch.built(spec, arch)[:4] == b"\x7fELF" and compiled.noting is None


def test_parameters_are_known_by_their_values() -> None:
    assert noted.plain((PROBLEM, MatrixLinear, [1])) == noted.plain((PROBLEM, MatrixLinear, [1]))
    assert noted.plain(PROBLEM) != noted.plain(replace(PROBLEM, rows=34))
    plain = ConvProblem("3x3", 1, 2, 3, 16, 16)
    assert noted.plain(plain)[-1] == repr(plain.in_rows)
    assert noted.plain(replace(plain, epilogue="none")) == [*noted.plain(plain), "'none'"]
    with pytest.raises(AssertionError, match="not the same in each run"):
        noted.plain(object())


def test_what_fails_before_it_launches_has_no_key() -> None:
    assert noted.key_of(noted.Codes([]), "", lambda: execute(replace(LINEAR, op="none"))) == ""
    assert noted.key_of(noted.Codes([]), "", lambda: None) == ""
    assert noted.key_of(noted.Codes([]), "", lambda: pytest.skip("no compiler")) == ""


# -- in a run ------------------------------------------------------------------------------------


def item(case: Case) -> Any:
    """A test of one case, as pytest has it."""
    mark = executed.known(by="clang", together=kernel_of, once=True).mark
    return SimpleNamespace(
        path=Path(__file__),
        originalname="test_x",
        callspec=SimpleNamespace(params={"case": case}),
        funcargs={"case": case},
        _fixtureinfo=SimpleNamespace(argnames=("case",)),
        obj=lambda case: execute(case),
        user_properties=[],
        iter_markers=lambda name: iter([mark]),
    )


def test_what_a_test_sets_is_undone_when_it_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    before, new = noted.PROGRAM, item(LINEAR)

    def test(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(noted, "PROGRAM", before + 1)
        execute(case)

    new.obj, new.funcargs["monkeypatch"] = test, monkeypatch
    new._fixtureinfo.argnames = ("case", "monkeypatch")
    assert executed.entry_of(new, noted.Codes([])) is not None
    assert before == noted.PROGRAM


def test_a_test_ends_where_it_is_known_and_is_told_of_once_it_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executed, "read", frozenset)
    monkeypatch.setattr(executed, "read_codes", frozenset)
    run = ledger.Ledger(config())
    new = item(LINEAR)
    assert run.pytest_pyfunc_call(new) is None
    told = dict(new.user_properties)
    entry = Entry._make(told["executed"])
    assert told["is new"] and entry.test == "tests/test_noted.py::test_x gfx1030 linear"
    assert [code[1] for code in told["codes"]] == ["gfx1030 linear"]
    run.known = frozenset([entry])
    run.day = executed.turn_of(new, entry) + 1
    known = item(LINEAR)
    assert run.pytest_pyfunc_call(known) is True
    assert dict(known.user_properties)["is new"] is False
