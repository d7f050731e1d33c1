"""Whether modules still are what was read: cheap enough to be asked before each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

_ClassForward = tuple[type, str, Any]


class Watch:
    """What `modules` were when this was made; the first is the root.

    Noticed are: another class, child or hook, an attribute more or less on an instance (as a
    forward of its own is), other values of those that are `watched`, and another forward in the
    class of a module that has children. The root's own forward and hooks are the caller's business.
    """

    def __init__(
        self, modules: Sequence[nn.Module], watched: Iterable[tuple[dict[str, Any], str, Any]] = ()
    ) -> None:
        self._modules = list(modules)
        self._types = list(map(type, self._modules))
        self._root = vars(self._modules[0])
        self._root_size = self._size_of_root()
        self._attributes = [vars(module) for module in self._modules[1:]]
        self._sizes = list(map(len, self._attributes))
        self._children = [module._modules for module in self._modules if module._modules]
        self._members = self._found_members()
        hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in self._modules[1:]]
        self._hooks = list(chain.from_iterable(hooks))
        self._hooked = any(self._hooks)
        facts = list(watched)
        self._keys = [(attributes, key) for attributes, key, _ in facts]
        self._values = [value for _, _, value in facts]
        self._classes = _classes(self._modules)

    def same(self) -> bool:
        """True if nothing of that has changed."""
        return (
            self._size_of_root() == self._root_size
            and list(map(len, self._attributes)) == self._sizes
            and list(map(type, self._modules)) == self._types
            and any(self._hooks) == self._hooked
            and _are(self._found_members(), self._members)
            and _are([attributes.get(key) for attributes, key in self._keys], self._values)
            and all(getattr(cls, key, None) is known for cls, key, known in self._classes)
        )

    def _size_of_root(self) -> int:
        return len(self._root) - ("forward" in self._root)

    def _found_members(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._children)))


def _are(found: list[Any], known: list[Any]) -> bool:
    """True if these are the very same objects. No value is compared: a tensor cannot be."""
    return list(map(id, found)) == list(map(id, known))


def _classes(modules: Iterable[nn.Module]) -> list[_ClassForward]:
    """The forwards of the classes that modules with children have, and nn.Sequential's like."""
    classes = {type(module): None for module in modules if module._modules}
    return [
        (cls, key, getattr(cls, key))
        for cls in classes
        for key in ("forward", "_forward")
        if hasattr(cls, key)
    ]
