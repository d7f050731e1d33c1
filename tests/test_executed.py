"""The ledger: what is executed again, what is not, and what is written."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import install
from tests import compiled, executed
from tests.executed import Code, Entry, merged

A, B, C = (Entry("clang 19.1.7", "tests/x.py::test_y", f"{number:012x}") for number in range(3))
CODE, LATER = (Code("clang 19.1.7", "gfx1100 linear", each * 12, "c" * 12) for each in "ab")
OTHER = Entry("clang 22.1.0", "tests/x.py::test_y", "f" * 12)


def test_what_is_written_is_read_again_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "executed.json"
    executed.write([B, OTHER, A, B], [CODE, LATER], path)
    assert executed.read(path) == {A, B, OTHER}
    assert executed.read_codes(path) == {CODE, LATER}
    text = path.read_text(encoding="utf-8")
    assert f'"{A.test}": "{A.key} {B.key}"' in text  # one line for each test and compiler
    assert f'"{CODE.kernel}": "{CODE.source}:{CODE.code} {LATER.source}:{LATER.code}"' in text
    executed.write([OTHER, A, B], [LATER, CODE], path)
    assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", "{}", '{"right": 3}', '{"right": {"clang 19.1.7": 3}}']
    + ['{"right": {"clang": {"a": 1}}, "codes": {"clang": {"a": "b"}}}'],
)
def test_a_missing_or_damaged_file_knows_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "executed.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert not executed.read(path)
    assert not executed.read_codes(path)


def test_the_file_is_small_and_of_this_form() -> None:
    assert executed.FILE.stat().st_size < 280_000
    assert json.loads(executed.FILE.read_text(encoding="utf-8"))["about"] == executed.ABOUT


def test_a_whole_run_forgets_what_is_no_more_a_part_keeps_it() -> None:
    assert merged([A, B], [B, C], [C], [], whole=True) == {B, C}
    assert merged([A, B], [B, C], [C], [], whole=False) == {A, B, C}


def test_a_wrong_one_is_forgotten_and_another_compilers_stays() -> None:
    assert merged([A, B, OTHER], [A, B], [B], [A], whole=True) == {B, OTHER}


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
        getattr(function, "cache_clear", lambda: None)()


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


def test_the_executors_version_decides_in_the_place_of_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part of it that is asked for by name counts with its text."""
    asked = ("tests.amdgpu.judge", "tests.amdgpu.loader")
    keys = {each: executed.python(each) for each in asked}
    text, tree = executed._text, executed._tree

    def edited(module: str) -> tuple[str, ...]:
        return ("edited",) if module == "tests.amdgpu.vmem" else text(module)

    monkeypatch.setattr(executed, "_text", edited)
    forget()
    assert executed.python(asked[0]) == keys[asked[0]]
    monkeypatch.setattr(executed, "_text", text)
    later = ast.parse("VERSION = 1000")
    monkeypatch.setattr(executed, "_tree", lambda m: later if m == executed.EXECUTOR else tree(m))
    forget()
    assert executed.python(asked[0]) != keys[asked[0]]


def test_words_of_a_tree_do_not_hang_on_layout() -> None:
    one = ast.parse("def f(a):\n    'What.'\n    return a + 1  # more\n")
    other = ast.parse("def f(\n    a\n):\n    return (a + 1)\n")
    assert executed._said(one) == executed._said(other)
    assert executed._said(one) != executed._said(ast.parse("def f(a):\n return a - 1"))


def test_words_of_a_tree_do_not_hang_on_what_local_variables_are_called() -> None:
    text = "def f(a):\n    b = a\n    def g(): return b\n    return [b for c in a], g, OUTER"
    one = executed._said(ast.parse(text))
    assert one == executed._said(ast.parse(text.replace("b", "d").replace("c in", "e in")))
    for old, new in (("f(a)", "f(b)"), ("OUTER", "b"), ("[b for", "[c for"), ("def g", "def h")):
        assert one != executed._said(ast.parse(text.replace(old, new))), new
    shared = "def f():\n    global x\n    x = 1\n"
    assert executed._said(ast.parse(shared)) != executed._said(ast.parse(shared.replace("x", "y")))


def test_tables_do_not_hang_on_their_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executed, "KERNELS", tmp_path)
    found = []
    for text in ('{"a": [1, 2]}', '{\n "a": [1,\n 2]\n}\n', '{"a": [1, 3]}'):
        (tmp_path / "arch.json").write_text(text, encoding="utf-8")
        executed.tables.cache_clear()
        found.append(executed.tables())
    executed.tables.cache_clear()
    assert found[0] == found[1] != found[2]


def test_machine_code_does_not_hang_on_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.hip"
    path.write_text('int a; // x\n/* b\n c */ asm("//s");\n\n', encoding="utf-8")
    assert compiled.text_of(path) == 'int a;\nasm("//s");'


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


def test_pages_are_looked_at_by_the_file_and_gradio() -> None:
    from tests.browser import conftest
    from tests.webui.environments import A1111, FORGE

    class Page:
        def __init__(self, environment: Any, name: str) -> None:
            self.path = Path(conftest.__file__).with_name(f"test_browser_{name}.py")
            self.callspec = SimpleNamespace(params={"webui": environment})
            self.marks: list[pytest.MarkDecorator] = []

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.marks.append(mark)

    pages = [Page(A1111, "speed"), Page(FORGE, "speed"), Page(None, "speed")]
    conftest.pytest_collection_modifyitems(pages)  # type: ignore[arg-type]
    assert [len(page.marks) for page in pages] == [2, 2, 1]
    assert [page.marks[1].kwargs["by"] for page in pages[:2]] == ["gradio3", "gradio4"]
    together = pages[0].marks[1].kwargs["together"]
    assert together(webui=A1111) == "tests/browser/test_browser_speed.py"
    assert executed.page(webui=FORGE)[0] == "gradio4"
    assert executed.page(webui=FORGE)[1] != executed.page(webui=A1111)[1]
    assert [executed.version_of(by)[:2] for by in ("gradio3", "gradio4")] == ["3.", "4."]


def test_what_runs_in_a_webui_is_known_for_its_python_and_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [executed.page()]
    monkeypatch.setattr(executed.sys, "version_info", (3, 99, 0))
    keys.append(executed.page())
    monkeypatch.setattr(executed, "torch", lambda: "99.0")
    keys.append(executed.page())
    assert len(set(keys)) == 3
