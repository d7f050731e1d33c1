"""What Python files define, by their source, and where a double differs from the real one."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

Signature = tuple[str, ...]
"""A function's parameters in order, each as "name", "name=default", "*name", "**name" or "*"."""


@dataclass
class Surface:
    """Names that a module or a class binds: to a function, to a class, or to anything else."""

    functions: dict[str, Signature] = field(default_factory=dict)
    classes: dict[str, Surface] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name here to the module and the name there ("": the module itself)."""

    def __contains__(self, name: str) -> bool:
        kinds = (self.functions, self.classes, self.values, self.imported)
        return any(name in kind for kind in kinds)


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    missing = [None] * (len(plain) - len(given.defaults))
    made = [_named(*pair) for pair in zip(plain, [*missing, *given.defaults], strict=True)]
    if given.vararg:
        made.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        made.append("*")
    made += [_named(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        made.append(f"**{given.kwarg.arg}")
    return tuple(made)


def _named(parameter: ast.arg, default: ast.expr | None) -> str:
    return parameter.arg if default is None else f"{parameter.arg}={ast.unparse(default)}"


@cache
def read(path: Path) -> Surface:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # foreign strings have escapes that Python does not know
        return _surface(ast.parse(path.read_text(encoding="utf-8")).body)


def _surface(body: list[ast.stmt]) -> Surface:
    found = Surface()
    for statement in _statements(body):
        _note(statement, found)
    return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """With those inside if, try and with, which bind in the same place."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _note(statement: ast.stmt, found: Surface) -> None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        if any(isinstance(d, ast.Name) and d.id == "property" for d in statement.decorator_list):
            found.values.add(statement.name)
        else:
            found.functions[statement.name] = signature(statement)
        found.values |= _attributes(statement)
    elif isinstance(statement, ast.ClassDef):
        found.classes[statement.name] = _surface(statement.body)
        found.classes[statement.name].bases = [ast.unparse(base) for base in statement.bases]
    elif isinstance(statement, ast.Import):
        for name in statement.names:
            found.imported[name.asname or name.name.split(".")[0]] = (name.name, "")
    elif isinstance(statement, ast.ImportFrom):
        for name in statement.names:
            found.imported[name.asname or name.name] = (statement.module or "", name.name)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            found.values |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        found.values.add(statement.target.id)


def _attributes(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """What a method sets on `self`; what a function declares global."""
    names: set[str] = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Global):
            names |= set(node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names


class Mirror:
    """What of the double's files is otherwise in a real WebUI's checkout."""

    REPOSITORIES = {"ldm": "stable-diffusion-stability-ai", "sgm": "generative-models"}  # noqa: RUF012
    ELSEWHERE = {  # noqa: RUF012
        "modules/shared.py": ("modules/options.py", "modules/shared_state.py"),
        "modules/ui_page.py": ("modules/ui.py",),
    }
    """Other files that a double's file stands for."""
    ALIKE = {  # noqa: RUF012
        "sgm/modules/diffusionmodules/model.py": "ldm/modules/diffusionmodules/model.py"
    }
    """Which file a double's file executes under its own name."""

    def __init__(self, double: Path, checkout: Path) -> None:
        self.double, self.checkout = double, checkout

    def place(self, file: str) -> Path:
        """Where the real one has this file."""
        repository = self.REPOSITORIES.get(file.split("/")[0])
        folder = self.checkout / "repositories" / repository if repository else self.checkout
        return folder / file

    def missing_repository(self, folder: str) -> str:
        """Which one the WebUI's first start has yet to clone; "" where none."""
        repository = self.REPOSITORIES.get(folder, "")
        return "" if (self.checkout / "repositories" / repository).is_dir() else repository

    def differences(self, folder: str) -> dict[str, str]:
        """Each name in a folder of the double that the real one lacks or has otherwise, and how.

        A name that begins with one underscore is the double's own.
        """
        paths = sorted((self.double / folder).rglob("*.py"))
        files = (path.relative_to(self.double).as_posix() for path in paths)
        return {name: how for file in files for name, how in self._of_file(file)}

    def _of_file(self, file: str) -> Iterator[tuple[str, str]]:
        mine = read(self.double / file)
        if file in self.ALIKE:
            other = read(self.double / self.ALIKE[file])
            mine = replace(
                other,
                functions=other.functions | mine.functions,
                classes=other.classes | mine.classes,
            )
        places = (self.place(name) for name in (file, *self.ELSEWHERE.get(file, ())))
        real = [read(path) for path in places if path.is_file()]
        for name, how in self._compared(mine, real):
            if not _own(name):
                yield f"{file}::{name}", how

    def _compared(self, mine: Surface, real: list[Surface]) -> Iterator[tuple[str, str]]:
        for name, given in mine.functions.items():
            yield from _function(name, given, self._where(real, name))
        yield from _values("", mine, real)
        for name, made in mine.classes.items():
            classes = list(self._classes(real, name))
            if not classes:
                yield name, "no such class"
                continue
            for method, given in made.functions.items():
                yield from _function(f"{name}.{method}", given, classes)
            yield from _values(f"{name}.", made, classes)

    def _where(self, surfaces: list[Surface], name: str) -> list[Surface]:
        """`surfaces`, and those of the modules from which they import `name`."""
        made = list(surfaces)
        for surface in surfaces:
            module, original = surface.imported.get(name, ("", ""))
            for path in (f"{module}.{original}", module):
                place = self.place(path.replace(".", "/") + ".py")
                made += [read(place)] if original and place.is_file() else []
        return made

    def _classes(self, surfaces: list[Surface], name: str) -> Iterator[Surface]:
        """The class of this name, and its bases as far as they lie in the checkout."""
        module, _, last = name.rpartition(".")
        where = self._where(surfaces, module or name)
        for surface in where[len(surfaces) :] if module else where:
            if last in surface.classes:
                yield surface.classes[last]
                for base in surface.classes[last].bases:
                    yield from self._classes([surface], base)


def _own(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_") and not name.endswith("__")


def _function(name: str, given: Signature, real: list[Surface]) -> Iterator[tuple[str, str]]:
    last = name.rpartition(".")[2]
    there = next((surface.functions[last] for surface in real if last in surface.functions), None)
    if there is None:
        yield name, "no such function"
    elif there != given:
        yield name, f"({', '.join(given)}) is there ({', '.join(there)})"


def _values(prefix: str, mine: Surface, real: list[Surface]) -> Iterator[tuple[str, str]]:
    for name in sorted(mine.values - {"__all__"}):
        if not any(name in surface for surface in real):
            yield prefix + name, "no such name"
