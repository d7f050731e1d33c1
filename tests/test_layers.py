"""The house's layers: no circles among its modules, and nothing imported from above.

Imports within functions count too: they hide a circle, and do not remove it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAME = "lib_rocm_sd"
HOSTS = tuple(
    f"hosts.{path.parent.name}"
    for path in sorted((ROOT / NAME / "hosts").glob("*/__init__.py"))
    if path.parent.name not in ("read", "ui")
)
LAYERS = (
    ("errors", "checks", "arch", "cache", "console", "device", "report", "policy"),
    ("triton_kernels",),
    ("ops",),
    ("catalog",),
    ("runtime",),
    ("engine",),
    ("trials",),
    ("functional", "followed", "graphs", "calls", "ranges"),
    ("torch_ops",),
    ("modules",),
    ("vae", "unet", "dit"),
    ("upscaler",),
    ("hosts.read",),
    ("shipped", "first_trials", "present"),
    ("cards",),
    ("lab",),
    (
        *("hosts.attention", "hosts.gate", "hosts.oldest", "hosts.optional", "hosts.ours"),
        *("hosts.strides", "hosts.timed", "hosts.trouble", "hosts.upscaler", "hosts.vae"),
    ),
    ("hosts.ui",),
    HOSTS,
    ("hosts.a1111",),
    ("distributed",),
    ("commands",),
    ("__main__",),
)
"""From the ground up: a module may import from its own layer and from those before it. Each name is
a room, which has all modules below it but those of another room.
"""
ROOMS = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
NOT_YET_UP: dict[tuple[str, str], str] = {}
"""Imports from above that still have to go, and where to."""
NOT_YET_ROUND: dict[frozenset[str], str] = {}
"""Circles that still have to go."""

Graph = Mapping[str, set[str]]


@cache
def graph(root: Path = ROOT) -> Graph:
    """By module, the modules of the house that it imports, at its top or anywhere within."""
    files = {_module(root, path): path for path in sorted((root / NAME).rglob("*.py"))}
    return {name: set(_imported(path, files)) - {name} for name, path in files.items()}


def _module(root: Path, path: Path) -> str:
    """Its dotted name within the house; the house itself is ""."""
    parts = path.relative_to(root / NAME).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in _names(node):
            if name == NAME or name.startswith(f"{NAME}."):
                found = name[len(NAME) + 1 :]
                yield found if found in known else found.rpartition(".")[0]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def room(module: str) -> str:
    """The room that a module is in; empty for the package itself, and where it is in none."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), "")


def layer(module: str) -> int:
    """The number of a module's layer; the package itself, which has its version, is below all."""
    return ROOMS.get(room(module), -1)


def upward(imports: Graph) -> set[tuple[str, str]]:
    """Who imports whom from a layer above."""
    return {(a, b) for a, others in imports.items() for b in others if layer(b) > layer(a)}


def circles(imports: Graph) -> set[frozenset[str]]:
    """The largest sets of modules that import each other, directly or not."""
    reached = {name: _reached(name, imports) for name in imports}
    found = {
        frozenset(other for other in imports if other in reached[name] and name in reached[other])
        for name in imports
    }
    return found - {frozenset()}


def _reached(start: str, imports: Graph) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = imports.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def of_rooms(imports: Graph) -> dict[str, set[str]]:
    """The same, of the rooms."""
    found: dict[str, set[str]] = {}
    for name, others in imports.items():
        found.setdefault(room(name), set()).update(map(room, others))
    return {own: others - {own} for own, others in found.items()}


def test_every_module_has_a_layer() -> None:
    assert [name for name in graph() if not room(name) and name not in ("", "hosts")] == []


def test_nothing_is_imported_from_above() -> None:
    assert upward(graph()) == set(NOT_YET_UP)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(graph()) == set(NOT_YET_ROUND)


def test_hosts_know_nothing_of_each_other() -> None:
    rooms = of_rooms(graph())
    assert {host: rooms[host] & set(HOSTS) for host in HOSTS} == dict.fromkeys(HOSTS, set())


def test_no_rooms_import_each_other_in_a_circle() -> None:
    imports = {
        name: {other for other in others if (name, other) not in NOT_YET_UP}
        for name, others in graph().items()
    }
    assert circles(of_rooms(imports)) == set()


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small one whose errors import the engine, in a function, and the engine them."""
    files = {
        "__init__": "",
        "errors": "def f():\n    from lib_rocm_sd.engine import engine\n",
        "engine/__init__": "",
        "engine/engine": "import lib_rocm_sd.errors\nfrom lib_rocm_sd import arch\n",
        "arch": "from lib_rocm_sd import __version__\n",
    }
    for name, text in files.items():
        path = tmp_path / NAME / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_an_import_in_a_function_is_seen(house: Path) -> None:
    imports = graph(house)
    assert upward(imports) == {("errors", "engine.engine")}
    assert circles(imports) == {frozenset({"errors", "engine.engine"})}
    assert circles(of_rooms(imports)) == {frozenset({"errors", "engine"})}
