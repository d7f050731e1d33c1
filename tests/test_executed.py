"""The ledger: what is executed again, what is not, and what is written."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import install
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests import compiled, executed, ledger
from tests.amdgpu import launch
from tests.amdgpu.coverage import kernel_of
from tests.amdgpu.judge import Case
from tests.amdgpu.test_amdgpu_kernels import spec_turn
from tests.executed import Entry, merged

A, B, C = (Entry("clang 19.1.7", "tests/x.py::test_y", f"{number:012x}") for number in range(3))
OTHER = Entry("clang 22.1.0", "tests/x.py::test_y", "f" * 12)


def test_what_is_written_is_read_again_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "executed.json"
    executed.write([B, OTHER, A, B], path)
    assert executed.read(path) == {A, B, OTHER}
    text = path.read_text(encoding="utf-8")
    assert text.index(A.key) < text.index(B.key) < text.index(OTHER.key)
    executed.write([OTHER, A, B], path)
    assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", [None, "", "[]", '{"clang 19.1.7": 3}', '{"clang": {"a": 1}}'])
def test_a_missing_or_damaged_file_knows_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "executed.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert executed.read(path) == frozenset()


def test_the_file_is_small_and_of_this_form() -> None:
    assert executed.FILE.stat().st_size < 200_000
    assert json.loads(executed.FILE.read_text(encoding="utf-8"))["about"] == executed.ABOUT


def test_a_whole_run_forgets_what_is_no_more_a_part_keeps_it() -> None:
    assert merged([A, B], [B, C], [C], [], whole=True) == {B, C}
    assert merged([A, B], [B, C], [C], [], whole=False) == {A, B, C}


def test_a_wrong_one_is_forgotten_and_another_compilers_stays() -> None:
    assert merged([A, B, OTHER], [A, B], [B], [A], whole=True) == {B, OTHER}


def test_each_has_its_turn_within_thirty_days() -> None:
    assert ledger.ROTATION == 30  # docs/verification.md says it
    for entry in (A, B, C, OTHER):
        assert sum(ledger.due(int(entry.key, 16), day) for day in range(740_000, 740_030)) == 1


def test_a_days_share_stays_bounded() -> None:
    assert len(executed.read()) <= ledger.ROTATION * ledger.MOST_A_DAY


def test_what_is_compiled_for_several_is_executed_on_one_day() -> None:
    """Else each of them would compile it on another."""
    case = Case("gfx1100", "attention", AttentionProblem(1, 1, 128, 64, 64, "float16", "none"))
    other = replace(case, problem=replace(case.problem, seq_k=80), layout="packed", values="ties")
    spec = kernel_of(case)[2]
    assert kernel_of(other) == kernel_of(case) == spec_turn("gfx1100", spec)
    assert kernel_of(replace(case, config=1)) != kernel_of(case)
    assert kernel_of(replace(case, gfx="gfx1201")) != kernel_of(case)


# -- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a few modules: tests.a imports tests.b.c, that a module of ops."""
    for name, text in {
        "tests/a.py": "from tests.b import c\n",
        "tests/b/__init__.py": "",
        "tests/b/shim.h": "int x;",
        "tests/b/c.py": "def f():\n    from lib_rocm_sd.ops.toy import formula\n",
        "lib_rocm_sd/__init__.py": "",
        "lib_rocm_sd/ops/__init__.py": "",
        "lib_rocm_sd/ops/toy/__init__.py": "",
        "lib_rocm_sd/ops/toy/formula.py": "SCALE = 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(executed, "CHECKOUT", tmp_path)
    forget()
    return tmp_path


def forget() -> None:
    for function in (executed.python, executed._tree, executed._imports, executed._text):
        function.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    forget()


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("lib_rocm_sd/ops/toy/formula.py", "SCALE = 3\n", True),
        ("lib_rocm_sd/ops/toy/formula.py", '"""Doc."""\n\nSCALE = (  # of two\n    2\n)\n', False),
        ("tests/b/shim.h", "int y;", True),
        ("tests/b/other.py", "x = 1\n", False),
        ("tests/a.py", "from tests.b import c\nx = 1\n", True),
        ("tests/b/c.py", "def g():\n    from lib_rocm_sd.ops.toy import formula\n", True),
    ],
)
def test_a_key_hangs_on_what_is_imported(tree: Path, name: str, text: str, counts: bool) -> None:
    before = executed.python("tests.a")
    (tree / name).write_text(text, encoding="utf-8")
    forget()
    assert (executed.python("tests.a") != before) is counts


def test_what_an_op_does_not_use_is_left_out(tree: Path) -> None:
    before = executed.python("tests.a", without=("lib_rocm_sd.ops.toy",))
    (tree / "lib_rocm_sd/ops/toy/formula.py").write_text("SCALE = 3\n", encoding="utf-8")
    forget()
    assert executed.python("tests.a", without=("lib_rocm_sd.ops.toy",)) == before


def test_the_executor_decides_about_each_case() -> None:
    for module in ("tests.amdgpu.judge", "tests.ops.attention.test_simt_attention"):
        waiting, reached = [module], set(executed.ASIDE)
        while waiting:
            each = waiting.pop()
            if each not in reached:
                reached.add(each)
                waiting += executed._imports(each)
        assert {"tests.simt", "tests.simt.launch", "lib_rocm_sd.ops.attention.ours"} <= reached
        assert ("tests.amdgpu.vmem" in reached) is (module == "tests.amdgpu.judge")


def test_words_of_a_tree_do_not_hang_on_layout() -> None:
    one = ast.parse("def f(a):\n    'What.'\n    return a + 1  # more\n")
    other = ast.parse("def f(\n    a\n):\n    return (a + 1)\n")
    assert executed._said(one) == executed._said(other)
    assert executed._said(one) != executed._said(ast.parse("def f(a):\n return a - 1"))


def test_machine_code_does_not_hang_on_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.hip"
    path.write_text('int a; // x\n/* b\n c */ asm("//s");\n\n', encoding="utf-8")
    assert compiled.text_of(path) == 'int a;\nasm("//s");'


# -- choosing and saying -------------------------------------------------------------------------


def config(*words: str, keyword: str = "", **options: bool) -> Any:
    source = pytest.Config.ArgsSource
    chosen = {"all": False, "record": False, **options}
    return SimpleNamespace(
        args=words,
        args_source=source.ARGS if words else source.TESTPATHS,
        option=SimpleNamespace(keyword=keyword, markexpr="", collectonly=False),
        getoption=chosen.__getitem__,
    )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger has A and B."""
    path = tmp_path / "executed.json"
    monkeypatch.setattr(ledger, "UNFINISHED", tmp_path / "unfinished.jsonl")
    monkeypatch.setattr(executed, "FILE", path)
    monkeypatch.setattr(executed.read, "__defaults__", (path,))
    monkeypatch.setattr(executed.write, "__defaults__", (path,))
    executed.write([A, B])
    return path


def day_of(entry: Entry) -> int:
    return next(day for day in range(ledger.ROTATION) if ledger.due(int(entry.key, 16), day))


def chosen(found: ledger.Ledger, entry: Entry) -> bool:
    return found.is_executed(entry, int(entry.key, 16))


def test_what_is_new_is_executed_and_what_has_its_turn(kept: Path) -> None:
    found = ledger.Ledger(config())
    found.day = day_of(A)
    assert [chosen(found, each) for each in (A, B, C)] == [True, False, True]


@pytest.mark.parametrize("how", [config("tests/x.py"), config("x::y"), config(keyword="x")])
def test_what_is_named_is_executed(kept: Path, how: Any) -> None:
    found = ledger.Ledger(how)
    assert all(chosen(found, each) for each in (A, B, C)) and not found.whole
    folder = ledger.Ledger(config("tests/ops"))
    folder.day = day_of(A)
    assert not chosen(folder, B)


def report(entry: Entry, outcome: Any = "passed", nodeid: str = "tests/x.py::test_y") -> Any:
    return pytest.TestReport(
        nodeid, ("x", 1, "y"), {}, outcome, None, "call", user_properties=[("executed", entry)]
    )  # type: ignore[arg-type]


def test_an_interrupted_one_goes_on_where_it_was(kept: Path) -> None:
    first = ledger.Ledger(config(all=True))
    first.collected = {A, B, C}
    first.pytest_runtest_logreport(report(A))
    first.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.INTERRUPTED)  # type: ignore[arg-type]
    assert executed.read() == {A, B}
    again = ledger.Ledger(config(all=True))
    assert [chosen(again, each) for each in (A, B, C)] == [False, True, True]
    again.collected = {A, B, C}
    again.pytest_runtest_logreport(report(B, "failed"))
    again.pytest_runtest_logreport(report(C))
    again.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.TESTS_FAILED)  # type: ignore[arg-type]
    assert executed.read() == {A, C} and not ledger.UNFINISHED.exists()


def test_a_usual_run_writes_nothing_and_record_adds(kept: Path) -> None:
    for record in (False, True):
        found = ledger.Ledger(config(record=record))
        found.collected = {A, B, C}
        found.pytest_runtest_logreport(report(C))
        found.machine["executed"] = 1
        found.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.OK)  # type: ignore[arg-type]
        assert executed.read() == ({A, B, C} if record else {A, B})


def test_nothing_is_kept_of_sources_that_changed_meanwhile(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ledger.Ledger(config(all=True))
    found.collected = {A, C}
    found.pytest_runtest_logreport(report(C))
    monkeypatch.setattr(executed, "sources", lambda: "edited")
    found.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.OK)  # type: ignore[arg-type]
    assert executed.read() == {A, B} and not ledger.UNFINISHED.exists()
    assert "sources were edited during the run" in "\n".join(found.lines())


def test_a_wrong_claim_is_said_loudly(kept: Path) -> None:
    found = ledger.Ledger(config())
    found.collected = {A, B, C}
    found.pytest_runtest_logreport(report(A, "failed"))
    found.pytest_runtest_logreport(report(C))
    said = "\n".join(found.lines())
    assert "ledger: 2 of 3 known, 0 re-executed today, 1 new" in said
    assert f"LEDGER IS WRONG: {A.test} is known to be right as {A.key}" in said


def test_another_compiler_is_said(kept: Path) -> None:
    found = ledger.Ledger(config())
    found.collected = {OTHER}
    assert "nothing is known of clang 22.1.0, so all is executed" in "\n".join(found.lines())


def test_machine_code_that_was_not_executed_is_said(kept: Path) -> None:
    found = ledger.Ledger(config())
    skipped = report(A, "skipped", "tests/amdgpu/test_x.py::test_y")
    skipped.longrepr = ("x", 1, "no clang with ld.lld")
    found.pytest_runtest_logreport(skipped)
    assert "MACHINE CODE WAS NOT EXECUTED: no clang with ld.lld" in "\n".join(found.lines())
    found.pytest_runtest_logreport(report(A, nodeid="tests/amdgpu/test_x.py::test_y"))
    assert "machine code: 1 tests executed it now" in "\n".join(found.lines())


def enough() -> set[Entry]:
    """So many that no floor is missed."""
    gpus, kernels = ledger.FLOORS["GPUs"], ledger.FLOORS["kernels"]
    tests = [
        *(f"{ledger.CONFIGS}gfx{n % gpus} k{n % kernels}" for n in range(ledger.FLOORS["configs"])),
        *(f"{ledger.CASES}gfx0 op" for _ in range(ledger.FLOORS["cases"])),
    ]
    return {Entry("clang 19.1.7", test, f"{n:012x}") for n, test in enumerate(tests)}


def status_of(found: ledger.Ledger) -> int:
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    found.pytest_sessionfinish(session, pytest.ExitCode.OK)  # type: ignore[arg-type]
    return int(session.exitstatus)


@pytest.mark.parametrize("what", [None, *ledger.FLOORS])
def test_a_whole_run_that_executed_too_little_fails(
    kept: Path, monkeypatch: pytest.MonkeyPatch, what: str | None
) -> None:
    """Known or executed now is the same. `what`: of which there is one too few."""
    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setenv(ledger.MUST_EXECUTE, "1")
    found = ledger.Ledger(config())
    found.collected = found.right = enough()
    if what is not None:
        monkeypatch.setitem(ledger.FLOORS, what, ledger.FLOORS[what] + 1)
    assert bool(status_of(found)) is (what is not None)
    assert ("TOO LITTLE MACHINE CODE" in "\n".join(found.lines())) is (what is not None)
    part = ledger.Ledger(config("tests/ops"))
    assert not status_of(part) and not part.too_little()
    monkeypatch.delenv(ledger.MUST_EXECUTE)
    assert not status_of(found)


@pytest.mark.parametrize("absent", ["clang", "tinygrad"])
def test_a_run_without_the_compiler_or_the_decoder_fails(tmp_path: Path, absent: str) -> None:
    """As .ci/run asks for, by pytest itself, of one file as the whole suite."""
    words = {"tinygrad": "import sys\nsys.modules['tinygrad'] = None\n", "clang": ""}
    (tmp_path / "sitecustomize.py").write_text(words[absent], encoding="utf-8")
    environment = {**os.environ, ledger.MUST_EXECUTE: "1", "PYTHONPATH": str(tmp_path)}
    if absent == "clang":
        environment["PATH"] = str(tmp_path)
    command = ["-m", "pytest", "-q", "-o", "testpaths=tests/amdgpu/test_amdgpu_compilers.py"]
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")],
        cwd=compiled.CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TOO LITTLE MACHINE CODE WAS EXECUTED: " in done.stdout, done.stdout + done.stderr
    assert "ld.lld" in done.stdout if absent == "clang" else "tinygrad" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


# -- what is compiled ----------------------------------------------------------------------------


def test_an_entry_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "compiled")
    compiled._prune.cache_clear()
    times = []

    def make(made: Path) -> None:
        times.append(1)
        (made / "code.co").write_bytes(b"1")
        if len(times) == 1:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        compiled.entry("k", make)
    for _ in range(2):
        assert (compiled.entry("k", make) / "code.co").read_bytes() == b"1"
    assert len(times) == 2 and [each.name for each in (tmp_path / "compiled").iterdir()] == ["k"]
    compiled._prune.cache_clear()


def test_what_is_old_or_too_much_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_BYTES", 100)
    now = 10.0 * compiled.KEPT_S
    names = ("new", "large", "next", "old")
    folders = [tmp_path / name for name in names]
    used = (now, now - 1, now - 2, now - 2 * compiled.KEPT_S)
    sizes = (40, 50, 20, 1)
    gone = compiled._superfluous(list(zip(used, sizes, folders, strict=True)), now)
    assert [each.name for each in gone] == ["next", "old"]


# -- install.py test -----------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Python is a shell script")
@pytest.mark.parametrize(("failing", "status"), [("none", 0), ("mypy", 3), ("ruff", 3)])
def test_types_are_checked_beside_pytest_and_shown_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failing: str, status: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $2 $3"\n[ "$2" != {failing} ] || exit 3\n')
    python.chmod(0o755)
    assert install.test(python, ["--all"]) == status
    said = capfd.readouterr().out
    ran = [line.split()[1] for line in said.splitlines() if line.startswith("ran ")]
    assert ran == ["ruff", "ruff", "pytest", "mypy"]
    assert "== mypy\nran mypy" in said and "--dist loadfile --no-loadscope-reorder --all\n" in said


def test_a_key_of_the_whole_package_changes_with_any_byte_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executed, "CHECKOUT", tmp_path)
    file = tmp_path / "lib" / "deep" / "a.py"
    file.parent.mkdir(parents=True)
    keys = []
    for text in ("x = 1\n", "x = 1  # a comment\n"):
        file.write_text(text, encoding="utf-8")
        executed.folders.cache_clear()
        keys.append(executed.folders("lib"))
    (file.parent / "notes.md").write_text("no source", encoding="utf-8")
    executed.folders.cache_clear()
    assert executed.folders("lib") == keys[1] != keys[0]
    executed.folders.cache_clear()


def test_tests_of_the_whole_package_differ_by_their_parameters() -> None:
    (first, made), (second, other) = (executed.whole(gpu=name) for name in ("gfx942", "gfx1201"))
    assert (first, second) == ("gfx942", "gfx1201") and made != other
    assert executed.whole()[0] == "" and executed.whole() == executed.whole()


def test_the_pages_with_gradio_4_alone_are_known() -> None:
    from tests.browser import conftest
    from tests.webui.environments import A1111, FORGE

    class Page:
        path = Path(conftest.__file__)

        def __init__(self, environment: Any) -> None:
            self.callspec = SimpleNamespace(params={"webui": environment})
            self.marks: list[pytest.MarkDecorator] = []

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark)

    three, four = Page(A1111), Page(FORGE)
    conftest.pytest_collection_modifyitems([three, four])  # type: ignore[list-item]
    assert [mark.name for mark in three.marks] == ["slow"]
    assert [mark.name for mark in four.marks] == ["slow", "executed"]
    assert four.marks[1].kwargs["together"](webui=FORGE) == "tests/browser/conftest.py"
    assert executed.page(webui=FORGE)[0] == "gradio4"
    assert executed.page(webui=FORGE)[1] != executed.page(webui=A1111)[1]
    assert executed.version_of("gradio").startswith("4.")
