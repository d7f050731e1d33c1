"""Attributes of a host's classes and instances that we replace, and how they get back.

A patch puts back only what is still ours: whoever came after us stays. The callers lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from torch import nn

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""What an owner has in a place that it only inherits, or does not have at all."""
EXTENSIONS = ("extensions", "extensions-builtin")
"""Folders that have one folder for each extension."""


@dataclass(frozen=True, eq=False)
class Patch:
    """`owner.name` is `value` by us; before, the owner itself had `before`, which may be ABSENT."""

    owner: Any
    name: str
    value: Any
    before: Any


def put(owner: Any, name: str, value: Any) -> Patch:
    """Make `value` the attribute `name` of `owner`, a class, an instance or a module."""
    patch = Patch(owner, name, value, _own(owner, name))
    setattr(owner, name, value)
    return patch


def take(patch: Patch) -> bool:
    """Put back what was there; False, and nothing done, where another has taken the place."""
    if _own(patch.owner, patch.name) is not patch.value:
        return False
    if patch.before is ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.before)
    return True


def displaced_by(patch: Patch) -> Any:
    """What is there in our place; None where ours is, ABSENT where nothing is."""
    if _own(patch.owner, patch.name) is patch.value:
        return None
    return getattr(patch.owner, patch.name, ABSENT)


def named(function: Any) -> str:
    """Where a function comes from, for people: what functools.wraps copies does not deceive it."""
    while isinstance(function, partial):
        function = function.func
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if code is None:
        thing = inner if hasattr(inner, "__qualname__") else type(inner)
        return f"{thing.__qualname__} of {getattr(thing, '__module__', 'an unknown module')}"
    parts = PurePath(code.co_filename).parts
    for folder, name in zip(parts, parts[1:-1], strict=False):
        if folder in EXTENSIONS:
            return f"{code.co_name} of the extension {name}"
    return f"{code.co_name} of {parts[-1] if parts else 'an unknown file'}"


def is_the_classs(method: Any, module: nn.Module, key: str = "forward") -> bool:
    """True for a method as the class has it, bound to `module`: so an undone change is left."""
    own = getattr(method, "__func__", None)
    return own is getattr(type(module), key, None) and method.__self__ is module


def _own(owner: Any, name: str) -> Any:
    """What the owner itself has, as it lies there: no method is bound, nothing is inherited."""
    return vars(owner).get(name, ABSENT)
