"""What was executed and found right: tests/executed.json, written by `install.py test --all`.

A case of machine code (`noted=True`) is known by what a GPU would execute: the code object, the
packed arguments, the seed of the inputs, and the executor's version (noted.py). Another test that
`@executed.known(...)` marks is a function of sources: of kernels, of the Python that it reaches, of
a compiler's version. The hash of these is its key. A key that the file has was executed and right.

What runs in the WebUI's double and what looks at its pages is known in the same way, by every byte
of the package and of what stands around it, and by the versions of Python, torch and gradio.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.compiled import CHECKOUT, hash_of, text_of

if TYPE_CHECKING:
    from tests import noted

FILE = CHECKOUT / "tests" / "executed.json"
KERNELS = CHECKOUT / "kernels"
FOLLOWED = (
    *("tests", "tools", "lib_rocm_sd.arch", "lib_rocm_sd.ops", "lib_rocm_sd.machine"),
    *(
        "lib_rocm_sd.runtime.clang",
        "lib_rocm_sd.runtime.codeobject",
        "lib_rocm_sd.runtime.compiler",
    ),
)
"""Packages and modules whose text is part of a key, where a test imports them, directly or not."""
ABOUT = "What was executed and right. Written by install.py test --all, see tests/executed.py."
ASIDE = ("tests.executed", "tests.ledger", "tests.noted")
EXECUTOR = "tests.amdgpu.executor"
CONV = ("conv3x3.hip", "upsample_conv.hip", "conv_sum.hip", "pack.hip", "group_norm_silu.hip")
"""The files that convolutions launch kernels of."""
WHOLE = (
    *("kernels", "lib_rocm_sd", "scripts", "tests/amdgpu", "tests/amdgpu_host"),
    *("tests/hip_library", "tests/vae", "tests/webui"),
)
PAGE = (
    *("javascript", "kernels", "lib_rocm_sd", "preload.py", "scripts", "style.css"),
    *("tests/browser", "tests/webui"),
)
SUFFIXES = (".py", ".hip", ".h", ".cpp", ".c", ".json", ".js", ".css")
NEWEST = "ziglang or clang"
Parts = Callable[..., Any]


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
    *sources: str,
    by: str,
    parts: Parts | None = None,
    together: Callable[..., Any] | None = None,
    noted: bool | Parts = False,
) -> pytest.MarkDecorator:
    """Marks tests that need not be executed again while nothing changes that decides about them.

    `sources`: files of kernels/ or of the checkout; `by`: what compiles them, "clang", "ziglang",
    NEWEST of these, "shim", or a WebUI's "gradio3" or "gradio4". A test that compiles another
    source fails.
    `parts` gives, of a test's parameters, a name for its group and what else its key is made of, in
    the place of its own name, its imports and `sources`. Tests of which `together` gives the same
    are executed again on one day, which compiles what they have in common once.
    `noted`: it launches machine code once, of the GPU, compiler and kernel that `together` gives;
    or a function that gives what its key is made of, of the code objects and its parameters.
    """
    return pytest.mark.executed(sources=sources, by=by, parts=parts, together=together, noted=noted)


always = pytest.mark.executed(sources=(), by="", parts=None, together=None, noted=False)
"""Takes a test, or one of a test's parameters, out of those that a mark of its file leaves out."""


def entry_of(item: pytest.Item) -> Entry | None:
    """None where it is always executed: it has no mark, or the compiler is not here; and where only
    running it tells.
    """
    mark = mark_of(item)
    if mark is None or mark.kwargs["noted"]:
        return None
    by, parts = mark.kwargs["by"], mark.kwargs["parts"]
    by = by if by != NEWEST else "ziglang" if version_of("ziglang") else "clang"
    if not version_of(by):
        return None
    file = item.path.relative_to(CHECKOUT).as_posix()
    test = f"{file}::{getattr(item, 'originalname', item.name)}"
    if parts is not None:
        group, made = parts(**getattr(getattr(item, "callspec", None), "params", {}))
        test = f"{test} {group}".strip()
    else:
        module = file.removesuffix(".py").replace("/", ".")
        made = (item.name, python(module), tables(), *map(kernel, mark.kwargs["sources"]))
    return Entry(f"{by} {version_of(by)}", test, hash_of(test, *made)[:12])


def noted_of(item: pytest.Function, mark: pytest.Mark, codes: noted.Codes) -> Entry | None:
    """The entry of a test that launches machine code: its key is what it would launch."""
    from tests import noted

    params = item.callspec.params
    gfx, compiled_by, spec = mark.kwargs["together"](**params)
    name = f"{item.path.relative_to(CHECKOUT).as_posix()}::{item.originalname}"
    if callable(mark.kwargs["noted"]):
        key = hash_of(name, mark.kwargs["noted"](codes, **params))[:12]
    else:
        arguments = {each: item.funcargs[each] for each in item._fixtureinfo.argnames}
        key = noted.key_of(codes, (name, params), lambda: item.obj(**arguments))
    by = f"{compiled_by} {version_of(compiled_by)}"
    return Entry(by, f"{name} {gfx} {spec.entry}", key) if key else None


def turn_of(item: pytest.Item, entry: Entry) -> int:
    """A number that decides on which day a known test is executed again."""
    mark = mark_of(item)
    together = mark.kwargs["together"] if mark else None
    if together is None:
        return int(entry.key, 16)
    return int(hash_of(together(**item.callspec.params)), 16)  # type: ignore[attr-defined]


def mark_of(item: pytest.Item) -> pytest.Mark | None:
    """The nearest mark; none where `always` is one of them."""
    marks = list(item.iter_markers("executed"))
    return marks[0] if marks and all(mark.kwargs["by"] for mark in marks) else None


@cache
def version_of(by: str) -> str:
    """Of the compiler that tests use under this name; empty where there is none."""
    from tests import compiled, simt
    from tests.amdgpu import launch
    from tests.webui.environments import A1111, FORGE

    for webui in (A1111, FORGE):
        if by == webui.name:
            return webui.packages[0].partition("==")[2]
    if by == "shim":
        found = simt.find_clang()
        return compiled.version_of(found) if found else ""
    compiler = launch.compiler(by)
    return compiled.version_of(*compiler.program) if compiler else ""


def sources() -> str:
    """Changes when a file is edited that a key may hang on."""
    folders = (KERNELS, *(CHECKOUT / name for name in ("tests", "tools", "lib_rocm_sd")))
    files = sorted(file for folder in folders for file in folder.rglob("*.*"))
    return hash_of(
        *(
            (str(file), file.stat().st_mtime_ns)
            for file in files
            if file.suffix in SUFFIXES and file != FILE
        )
    )


# -- what decides --------------------------------------------------------------------------------


def whole(**params: object) -> tuple[str, tuple[object, ...]]:
    """`parts` of tests that run a large part of the package on machine code: all of it, and all
    that stands in for a GPU, for HIP and for the WebUI.
    """
    named = " ".join(map(str, params.values()))
    return named, (named, folders(*WHOLE))


def page(**params: object) -> tuple[str, tuple[object, ...]]:
    """`parts` of tests that run in a WebUI's double, or look at its pages."""
    named = " ".join(str(getattr(value, "name", value)) for value in params.values())
    return named, (
        named,
        folders(*PAGE),
        platform.platform(terse=True),
        sys.version_info[:3],
        torch(),
    )


@cache
def torch() -> str:
    """Its version; empty where it is not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


@cache
def folders(*names: str) -> str:
    """The hash of these files, and all sources in these folders, of the checkout, to the byte."""
    places = (CHECKOUT / name for name in names)
    files = (f for at in places for f in ([at] if at.is_file() else sorted(at.rglob("*.*"))))
    return hash_of(
        *(
            (file.relative_to(CHECKOUT).as_posix(), file.read_bytes())
            for file in files
            if file.suffix in SUFFIXES
        )
    )


@cache
def kernel(name: str) -> str:
    """The hash of a file of kernels/ or of the checkout; of a kernel, with its headers."""
    path = KERNELS / name if (KERNELS / name).is_file() else CHECKOUT / name
    return hash_of(text_of(path) if path.suffix == ".hip" else path.read_bytes())


@cache
def tables() -> str:
    """The hash of the GPUs' rows and of what was tuned for them, however it is laid out."""
    files = sorted(KERNELS.rglob("*.json"))
    return hash_of(*((path.name, json.loads(path.read_text(encoding="utf-8"))) for path in files))


@cache
def kernels() -> str:
    """The hash of all of them, with what they include and what was tuned."""
    files = sorted(KERNELS.glob("*.hip"))
    return hash_of(tables(), *((path.name, kernel(path.name)) for path in files))


@cache
def python(*modules: str, without: tuple[str, ...] = ()) -> str:
    """The hash of these modules and of all that they import, as far as it is `FOLLOWED` and not in
    the packages `without`.

    Comments, docstrings, layout and names of local variables do not count. What is not Python in a
    package of tests does. The executor is known by its version, but for who asks for a part of it.
    """
    own = _reached((EXECUTOR,), ASIDE, "tests.amdgpu.")
    aside = () if own.intersection(modules) else own
    reached = _reached(modules, (*ASIDE, *without, *aside))
    version = [ast.dump(node) for node in _tree(EXECUTOR).body if _is_version(node)]
    return hash_of(version, *((module, *_text(module)) for module in sorted(reached)))


def _reached(modules: Iterable[str], without: Iterable[str], within: str = "") -> frozenset[str]:
    """These and what they import, of names that begin with `within`."""
    reached: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        left_out = module in reached or _within(module, tuple(without))
        if not left_out and module.startswith(within):
            reached.add(module)
            waiting += _imports(module)
    return frozenset(reached)


def _is_version(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSION"


def _file(module: str) -> Path | None:
    path = CHECKOUT / module.replace(".", "/")
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in found if file.is_file()), None)


@cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    return ast.parse(file.read_text(encoding="utf-8") if file else "")


@cache
def _imports(module: str) -> frozenset[str]:
    """Modules that are imported anywhere in this one, and the packages around them."""
    named: set[str] = set()
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            named |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    around = {name.rsplit(".", depth)[0] for name in named for depth in range(name.count(".") + 1)}
    return frozenset(name for name in named | around if _within(name, FOLLOWED) and _file(name))


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)


@cache
def _text(module: str) -> tuple[str, ...]:
    """The hash of a module's statements; for a package of tests, of its other sources, too."""
    file = _file(module)
    digest = hashlib.sha256("\n".join(_said(_tree(module))).encode())
    if file is not None and file.name == "__init__.py" and module.startswith("tests."):
        for path in sorted(file.parent.iterdir()):
            if path.suffix in (".c", ".cpp", ".h"):
                digest.update(path.name.encode() + path.read_bytes())
    return (digest.hexdigest(),)


def _said(node: object) -> list[str]:
    """A tree as words that are the same for each version of Python that reads it."""
    words: list[str] = []
    _say(node, False, {}, words.append)
    return words


def _say(node: object, text: bool, names: dict[str, str], add: Callable[[str], None]) -> None:
    """Adds the words of a tree. `text`: it stands in an f-string. `names`: what local variables are
    called.
    """
    if isinstance(node, list):
        for each in node:
            alone = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if not (alone and isinstance(each.value.value, str)):  # a docstring
                _say(each, text, names, add)
    elif isinstance(node, ast.Constant) and node.value == "" and text:
        return  # of Python 3.12 at the end of a format within a format
    elif isinstance(node, ast.AST):
        add(f"({type(node).__name__}")
        inner = isinstance(node, ast.JoinedStr)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = {**names, **_locals(node)}
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(node, ast.Name) and name == "id":
                value = names.get(node.id, node.id)
            if value is not None and value != []:
                add(name)
                _say(value, inner, names, add)
        add(")")
    else:
        add(repr(node))


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """Names by their place among those that are bound in it, but for parameters."""
    inside = list(ast.walk(function))
    shared = (
        n for node in inside if isinstance(node, (ast.Global, ast.Nonlocal)) for n in node.names
    )
    given = {*shared, *(node.arg for node in inside if isinstance(node, ast.arg))}
    bound = [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    found = dict.fromkeys(name for name in bound if name not in given)
    return {name: f"local {number}" for number, name in enumerate(found)}


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
