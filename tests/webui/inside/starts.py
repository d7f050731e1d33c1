"""Makes the hundreds of starts of the double cheaper: each executes some 150 modules anew.

What Python does at each import and what comes out the same every time is done once: asking each
finder for a module, reading its code from its file, and compiling what `dataclasses` writes as
text; the CSS of gradio's theme; and what an op's reference gives for a self-test. The modules
themselves are executed at every start, but for `TABLES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gradio import blocks

TABLES = tuple(
    f"lib_rocm_sd.{name}"
    for name in (
        *("arch", "ops", "catalog", "shipped", "errors", "policy", "cards.blueprint"),
        *(
            "lab.models",
            "lab.methods",
            "runtime.codeobject",
            "runtime.compile_worker",
            "runtime.source",
        ),
        *("dit.parts", "unet.parts", "vae.steps", "vae.trace"),
    )
)
"""What of lib_rocm_sd is not executed at every start: it imports and holds nothing of a WebUI. It
took more than half of a start.
"""
_tables: dict[str, dict[str, Any]] = {}
_references: dict[tuple[str, str], Any] = {}
_checks: dict[tuple[str, ...], Any] = {}
_codes: dict[tuple[int, int, int], CodeType] = {}
_from_file = SourceFileLoader.get_code


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<string>", "exec", dont_inherit=True)


def _execute(text: str, *scopes: Any) -> None:
    exec(_compiled(text), *scopes)


def _code(self: SourceFileLoader, fullname: str) -> CodeType | None:
    """One code for all the links that lead to a file."""
    file = Path(self.path).stat()
    key = (file.st_dev, file.st_ino, file.st_mtime_ns)
    if key not in _codes:
        code = _from_file(self, fullname)
        if code is None:
            return None
        _codes[key] = code
    return _codes[key]


class _Finder:
    """Finds modules of the packages `roots` where they were found before, seen from the package
    around them: each start has that in another folder.
    """

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.roots = roots
        self.found: dict[str, tuple[str, str]] = {}
        """The folder of a package, else empty, and the file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if path is None or fullname.partition(".")[0] not in self.roots:
            return None
        around = next(iter(path))
        if fullname not in self.found:
            return self._search(fullname, path, around)
        folder, file = self.found[fullname]
        inside = [f"{around}/{folder}"] if folder else None
        return spec_from_file_location(
            fullname, f"{around}/{file}", submodule_search_locations=inside
        )

    def _search(self, fullname: str, path: Sequence[str], around: str) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin and Path(spec.origin).is_relative_to(around):
            file = Path(spec.origin).relative_to(around)
            folder = "" if spec.submodule_search_locations is None else str(file.parent)
            self.found[fullname] = folder, str(file)
        return spec


def make_cheaper(roots: tuple[str, ...]) -> None:
    """`roots`: the packages that are executed at every start."""
    blocks.DefaultTheme = cache(blocks.DefaultTheme)  # type: ignore[misc]
    blocks.Theme._get_theme_css = cache(blocks.Theme._get_theme_css)  # type: ignore[method-assign]
    sys.meta_path.insert(0, _Finder(roots))  # type: ignore[arg-type]
    vars(dataclasses)["exec"] = _execute
    SourceFileLoader.get_code = _code  # type: ignore[method-assign]


def kept() -> set[str]:
    """The modules of `TABLES` that the next start has too: all of them, unless a test has set
    something in one.
    """
    names = {name for name in sys.modules if name.startswith(TABLES)}
    for name in names:
        now = {
            key: value
            for key, value in vars(sys.modules[name]).items()
            if not isinstance(value, ModuleType)  # a package has what was imported of it
        }
        before = _tables.setdefault(name, now)
        if now.keys() != before.keys() or any(now[each] is not before[each] for each in now):
            _tables.clear()
            return set()
    return names


def list_once() -> None:
    """What is compiled ahead: a third of a start was to list it."""
    shipped: Any = importlib.import_module("lib_rocm_sd.shipped")
    if not hasattr(shipped.part_specs, "cache_info"):
        shipped.part_specs = cache(shipped.part_specs)


def remembered(reference_of: Any) -> Any:
    """The engine's function of this name, which knows what those of other starts gave, whose
    problems are of other classes.
    """

    def found(reference: Any, make_inputs: Any, problem: Any) -> Any:
        key = _place(reference), repr(problem)
        if key not in _references:
            _references[key] = reference_of(reference, make_inputs, problem)
        return _references[key]

    return found


def checked_once(check: Any) -> Any:
    """The engine's self-test, which knows what of torch's has passed on the CPU in other starts."""

    def found(op: Any, variant: Any, config: Any, launch: Any, problem: Any, device: Any) -> Any:
        words = (type(variant).__qualname__, _place(type(variant).run), f"{config} {problem}")
        key = (op.name, *words, str(device))
        if key in _checks:
            return _checks[key]
        made = check(op, variant, config, launch, problem, device)
        if not made.reason and type(variant).__module__.endswith(".torch"):
            _checks[key] = made
        return made

    return found


def _place(function: Any) -> str:
    """Where it is written, and what it is bound to."""
    if isinstance(function, partial):
        return f"{_place(function.func)} {function.args}"
    return f"{function.__module__} {function.__code__.co_firstlineno}"
