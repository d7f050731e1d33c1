"""Whether modules still are what was read: cheap enough to be asked before each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential)


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
        self._root_size = len(self._root) - ("forward" in self._root)
        self._attributes = [vars(module) for module in self._modules[1:]]
        self._sizes = list(map(len, self._attributes))
        self._children = [module._modules for module in self._modules if module._modules]
        self._members = [dict(children) for children in self._children]
        hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in self._modules[1:]]
        self._hooks = list(chain.from_iterable(hooks))
        self._hooked = any(self._hooks)
        facts = list(watched)
        self._places = [attributes for attributes, _, _ in facts]
        self._keys = [key for _, key, _ in facts]
        self._values = [value for _, _, value in facts]
        own = dict.fromkeys(type(module) for module in self._modules if module._modules)
        self._classes: list[Any] = [cls for cls in own if cls not in _CONTAINERS]
        self._forwards = [cls.forward for cls in self._classes]
        self._inner: list[Any] = [cls for cls in self._classes if hasattr(cls, "_forward")]
        self._inner_forwards = [cls._forward for cls in self._inner]

    def same(self) -> bool:
        """True if nothing of that has changed. Lists and dicts are compared by the identity of what
        is in them first, which is what makes this fast.
        """
        return (
            len(self._root) - ("forward" in self._root) == self._root_size
            and list(map(len, self._attributes)) == self._sizes
            and list(map(type, self._modules)) == self._types
            and any(self._hooks) is self._hooked
            and self._children == self._members
            and list(map(dict.get, self._places, self._keys)) == self._values
            and [cls.forward for cls in self._classes] == self._forwards
            and [cls._forward for cls in self._inner] == self._inner_forwards
        )
