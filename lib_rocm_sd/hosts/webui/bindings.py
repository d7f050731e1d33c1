"""Every place where a Forge, or an extension in it, has one of its attention functions.

A function is bound where it is defined, and once more in each Python module that has imported it by
name. All of these are replaced, each is remembered, and all are given back.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from lib_rocm_sd.hosts import optional
from lib_rocm_sd.hosts.webui.functions import Function, given
from lib_rocm_sd.hosts.webui.kinds import Kind
from lib_rocm_sd.modules.patches import Patch, displaced_by, named, put, take

Make = Callable[[Any, str], Function]
PACKAGES = ("site-packages", "dist-packages")
_OURS = "lib_rocm_sd"
_STANDARD = sysconfig.get_path("stdlib")


class Bindings:
    """`make(theirs, name)`: what stands in for `theirs`, bound as `name` where it is defined.

    The caller locks.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._functions: dict[int, Function] = {}
        self._patches: list[Patch] = []
        self._seen: tuple[int, int] = (0, 0)
        self._others: list[tuple[str, str]] = []

    @property
    def places(self) -> list[str]:
        """Where ours were put."""
        return [_place(patch.owner.__name__, patch.name) for patch in self._patches]

    def put(self, kind: Kind) -> None:
        """Replace all bindings; where that was done, those that have come since."""
        seen = (len(sys.modules), len(_scripts()))
        if self._patches and seen == self._seen:
            return
        self._seen = seen
        home = sys.modules[kind.attention]
        self._others = []
        for name in kind.names:
            theirs = given(getattr(home, name))
            if getattr(theirs, "__module__", None) == kind.attention:
                self._replace(home, name, self._function(theirs, name))
            else:
                self._others.append((named(theirs), _place(kind.attention, name)))
        for module in _modules():
            if module is not home and not _is_below(module.__name__, kind.elsewhere):
                self._put_into(module, kind)

    def take(self) -> None:
        """Give all back, also what was bound while ours were in place. Who came after us stays."""
        if not self._patches:
            return
        for patch in self._patches:
            take(patch)
        self._patches = []
        for module in _modules():
            for name, value in list(vars(module).items()):
                if type(value) is Function:
                    setattr(module, name, value.theirs)

    def displaced_by(self) -> dict[str, list[str]]:
        """Who sits where ours were put, or should have been, by name, and in which places."""
        found: dict[str, list[str]] = {}
        sitting = list(self._others)
        for patch in self._patches:
            other = displaced_by(patch)
            if other is not None:
                sitting.append((named(other), _place(patch.owner.__name__, patch.name)))
        for name, place in dict.fromkeys(sitting):
            found.setdefault(name, []).append(place)
        return found

    def _put_into(self, module: ModuleType, kind: Kind) -> None:
        for name, value in list(vars(module).items()):
            if id(value) in self._functions:
                self._replace(module, name, self._functions[id(value)])
            elif name in kind.names and getattr(value, "__module__", None) == kind.attention:
                # who imported it before another extension took its place at home
                self._replace(module, name, self._function(given(value), name))

    def _replace(self, module: ModuleType, name: str, function: Function) -> None:
        if vars(module)[name] is not function:
            self._patches.append(put(module, name, function))

    def _function(self, theirs: Any, name: str) -> Function:
        if id(theirs) not in self._functions:
            self._functions[id(theirs)] = self._make(theirs, name)
        return self._functions[id(theirs)]


def _place(module: str, name: str) -> str:
    return f"{module}.{name}"


def _is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _modules() -> Iterator[ModuleType]:
    """The WebUI's own and its extensions', also scripts, which nobody can import."""
    for module in (*list(sys.modules.values()), *_scripts()):
        if isinstance(module, ModuleType) and _is_the_webuis(module):
            yield module


def _is_the_webuis(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or _STANDARD
    installed = file.startswith(_STANDARD) or any(name in file for name in PACKAGES)
    return not installed and not module.__name__.startswith(_OURS)


def _scripts() -> tuple[Any, ...]:
    found = optional.attribute("modules.script_loading", "loaded_scripts")
    return tuple(found.values()) if isinstance(found, dict) else ()
