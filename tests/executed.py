"""What was executed and found right: tests/executed.json, written by `install.py test --all`.

A test that `@executed.known(...)` marks is known by what it executes: the code objects, or the
kernels' text under the shim, the packed arguments, the seeds, the version of the executor and of
the shim (noted.py). The hash of these is its key. A key that the file has was executed and right.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.compiled import CHECKOUT, hash_of

if TYPE_CHECKING:
    from tests import noted

FILE = CHECKOUT / "tests" / "executed.json"
ABOUT = "What was executed and right. Written by install.py test --all, see tests/executed.py."
SUFFIXES = (".py", ".hip", ".h", ".cpp", ".c", ".json")
NEWEST = "ziglang or clang"


class Entry(NamedTuple):
    """One test: `compiler` such as "clang 19.1.7", `test` such as tests/x.py::test_y."""

    compiler: str
    test: str
    key: str


class Code(NamedTuple):
    """The `code` that `compiler` makes of `source` for a kernel, such as "gfx1100 linear"."""

    compiler: str
    kernel: str
    source: str
    code: str


def known(
    *,
    by: str,
    parts: Callable[..., object] | None = None,
    together: Callable[..., Any] | None = None,
    once: bool = False,
) -> pytest.MarkDecorator:
    """Marks tests that need not be executed again while they would execute the same.

    `by`: what compiles it, "clang", "ziglang", NEWEST of these, or "shim".
    `once`: a test ends, as far as it is noted, with its first launches.
    `parts` gives what the key is made of, of the code objects and the test's parameters, in the
    place of what the test is seen to launch.
    `together`: the GPU, compiler and kernel that tests have in common. They have one line in the
    file, and are executed again on one day, which compiles it once.
    """
    return pytest.mark.executed(by=by, parts=parts, together=together, once=once)


always = pytest.mark.executed(by="", parts=None, together=None, once=False)
"""Takes a test, or one of a test's parameters, out of those that a mark of its file leaves out."""


def entry_of(item: pytest.Function, codes: noted.Codes) -> Entry | None:
    """None where it is always executed: it has no mark, launches nothing, or the compiler is not
    here.
    """
    from tests import noted

    mark = mark_of(item)
    if mark is None:
        return None
    by, parts, together = (mark.kwargs[name] for name in ("by", "parts", "together"))
    by = by if by != NEWEST else "ziglang" if version_of("ziglang") else "clang"
    if not version_of(by):
        return None
    name = item.originalname
    params = getattr(getattr(item, "callspec", None), "params", {})
    if parts is not None:
        key = hash_of(item.path.stem, name, parts(codes, **params))[:12]
    else:
        test = item.obj if mark.kwargs["once"] else noted.unasserted_test(item)
        called = (item.path.stem, name, noted.plain(params))
        with pytest.MonkeyPatch.context() as patch:  # what it sets is undone before it is executed
            arguments = {each: item.funcargs[each] for each in item._fixtureinfo.argnames}
            arguments |= {"monkeypatch": patch} if "monkeypatch" in arguments else {}
            key = noted.key_of(codes, called, lambda: test(**arguments), mark.kwargs["once"])
    name = f"{item.path.relative_to(CHECKOUT).as_posix()}::{name}"
    if together is not None:
        gfx, by, spec = together(**params)
        name = f"{name} {gfx} {spec.entry}"
    return Entry(f"{by} {version_of(by)}", name, key) if key else None


def turn_of(item: pytest.Function, entry: Entry) -> int:
    """A number that decides on which day a known test is executed again."""
    mark = mark_of(item)
    together = mark.kwargs["together"] if mark else None
    if together is None:
        return int(entry.key, 16)
    return int(hash_of(together(**item.callspec.params)), 16)


def mark_of(item: pytest.Item) -> pytest.Mark | None:
    """The nearest mark; none where `always` is one of them."""
    marks = list(item.iter_markers("executed"))
    return marks[0] if marks and all(mark.kwargs["by"] for mark in marks) else None


@cache
def version_of(by: str) -> str:
    """Of the compiler that tests use under this name; empty where there is none."""
    from tests import compiled
    from tests.verify import simt
    from tests.verify.amdgpu import launch

    if by == "shim":
        found = simt.find_clang()
        return compiled.version_of(found) if found else ""
    compiler = launch.compiler(by)
    return compiled.version_of(*compiler.program) if compiler else ""


def sources() -> str:
    """Changes when a file is edited that a key may hang on."""
    folders = (CHECKOUT / name for name in ("kernels", "tests", "tools", "lib_rocm_sd"))
    files = sorted(file for folder in folders for file in folder.rglob("*.*"))
    return hash_of(
        *(
            (str(file), file.stat().st_mtime_ns)
            for file in files
            if file.suffix in SUFFIXES and file != FILE
        )
    )


def texts(*modules: Any) -> list[str]:
    """The statements of modules that decide beside what is executed, their imports aside."""
    kept = []
    for module in modules:
        text = Path(module.__file__).read_text(encoding="utf-8")
        imports = (ast.Import, ast.ImportFrom)
        body = [each for each in ast.parse(text).body if not isinstance(each, imports)]
        kept.append(hash_of(*(ast.get_source_segment(text, each) for each in body)))
    return kept


# -- the file ------------------------------------------------------------------------------------


def read(path: Path = FILE) -> frozenset[Entry]:
    """What the file knows; nothing where it is missing or damaged."""
    content = _content(path)
    try:
        return frozenset(
            Entry(compiler, test, key)
            for compiler, tests in content["right"].items()
            for test, keys in tests.items()
            for key in keys.split()
        )
    except (LookupError, AttributeError):
        return frozenset()


def read_codes(path: Path = FILE) -> frozenset[Code]:
    """Which code objects the file's sources give, likewise."""
    content = _content(path)
    try:
        return frozenset(
            Code(compiler, kernel, *pair.split(":"))
            for compiler, kernels in content["codes"].items()
            for kernel, pairs in kernels.items()
            for pair in pairs.split()
        )
    except (LookupError, AttributeError, TypeError):
        return frozenset()


def _content(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write(entries: Iterable[Entry], codes: Iterable[Code] = (), path: Path = FILE) -> None:
    """Sorted: a line for each test, or for each kernel, GPU and compiler."""
    right: dict[str, dict[str, str]] = {}
    for compiler, test, key in sorted(set(entries)):
        keys = right.setdefault(compiler, {})
        keys[test] = f"{keys[test]} {key}" if test in keys else key
    made: dict[str, dict[str, str]] = {}
    for compiler, kernel, source, code in sorted(set(codes)):
        pairs = made.setdefault(compiler, {})
        pair = f"{source}:{code}"
        pairs[kernel] = f"{pairs[kernel]} {pair}" if kernel in pairs else pair
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".executed-", encoding="utf-8", newline="\n", delete=False
    ) as file:
        content = {"about": ABOUT, "right": right, "codes": made}
        file.write(json.dumps(content, indent=1) + "\n")
    Path(file.name).replace(path)


def merged(
    before: Iterable[Entry],
    collected: Iterable[Entry],
    right: Iterable[Entry],
    wrong: Iterable[Entry],
    whole: bool,
) -> frozenset[Entry]:
    """What is known after a run. A `whole` one collected all tests: what else was known of its
    compilers belongs to sources that are no more.
    """
    here = {entry.compiler for entry in collected}
    stays = {
        entry
        for entry in before
        if entry in set(collected) or not whole or entry.compiler not in here
    }
    return frozenset((stays | set(right)) - set(wrong))
