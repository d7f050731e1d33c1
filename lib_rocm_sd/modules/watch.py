"""Tells whether the host's own call of a module would still run the code that was read.

What decides that, and who notices a change of it:

| What | Noticed by |
|---|---|
| a module's class, children, number of attributes | identity, before each call |
| `forward`, `_forward`, `_conv_forward` of an instance | identity, before each call |
| the same of each class, and `__call__`, leaves included | identity, before each call |
| functions of `torch.nn.functional` that such forwards call | identity, before each call |
| hooks of a module, and hooks of all modules | whether there are any, before each call |
| settings that a reader names (`Findings.watch`), such as `eps` | value, before each call |
| a parameter: which tensor, its address and dtype | address, before each call (unet/weights.py) |
| values of weights | nothing is kept of them; biases are copied anew in each step |
| globals of a host's modules, attributes of its functions, `__dict__` itself | unet/spot.py |

A host's own layers may replace some of this for the same result: `Findings.hosts_own` names the
Python modules that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as _of_all

INNER = ("forward", "_forward", "_conv_forward")
"""What a call of a module may run of its own."""
FUNCTIONS = ("conv2d", "gelu", "group_norm", "interpolate", "layer_norm", "linear", "pad", "silu")
"""Functions of torch.nn.functional that the forwards of known layers call. Attention's is not among
them: others replace it for speed, and what it computes is compared (unet/spot.py).
"""
_TABLES = itemgetter("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
_functions, _of_torch = itemgetter(*FUNCTIONS), vars(nn.functional)


class Watch:
    """What `modules` were when this was made; the first is the root.

    `watched`: attributes of an instance, a name and the value. `functions`: an owner and a name, as
    a class and its `__call__`. The root's own forward and hooks are the caller's business.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        watched: Iterable[tuple[dict[str, Any], str, Any]] = (),
        functions: Iterable[tuple[Any, str]] = (),
    ) -> None:
        root, *others = self._modules = list(modules)
        self._types = list(map(type, self._modules))
        self._root = vars(root)
        self._root_size = len(self._root) - ("forward" in self._root)
        self._attributes = list(map(vars, others))
        self._sizes = list(map(len, self._attributes))
        self._tables = list(map(_TABLES, self._attributes))
        parents = [module for module in self._modules if module._modules]
        self._children = [module._modules for module in parents]
        self._members = [dict(children) for children in self._children]
        self._hooks = list(chain.from_iterable(tables[2:] for tables in self._tables))
        self._hooked = any(self._hooks)
        own = [(own, "forward") for own in self._attributes]
        own += [(vars(module), "_forward") for module in parents]
        own += [(vars(m), "_conv_forward") for m in self._modules if isinstance(m, nn.Conv2d)]
        facts = [(own, key, own.get(key)) for own, key in own] + list(watched)
        self._places = [attributes for attributes, _, _ in facts]
        self._keys = [key for _, key, _ in facts]
        self._values = [value for _, _, value in facts]
        code = [*_code_of(dict.fromkeys(self._types)), *functions]
        self._owners = [owner for owner, _ in code]
        self._names = [name for _, name in code]
        self._code = list(map(getattr, self._owners, self._names))
        self._around = surroundings()

    def same(self) -> bool:
        """True if nothing of that has changed. Lists and dicts are compared by the identity of what
        is in them first, which is what makes this fast.
        """
        try:
            return (
                len(self._root) - ("forward" in self._root) == self._root_size
                and list(map(len, self._attributes)) == self._sizes
                and list(map(type, self._modules)) == self._types
                and any(self._hooks) is self._hooked
                and self._children == self._members
                and list(map(dict.get, self._places, self._keys)) == self._values
                and list(map(getattr, self._owners, self._names)) == self._code
                and surroundings() == self._around
                and list(map(_TABLES, self._attributes)) == self._tables
            )
        except (AttributeError, KeyError, RuntimeError):
            return False  # something is gone, or tensors of a replaced dict were compared


def hooks_of_all() -> bool:
    """Whether a hook is set on every module there is (torch's register_module_forward_hook)."""
    return bool(_of_all._global_forward_hooks or _of_all._global_forward_pre_hooks)


def surroundings() -> tuple[bool, tuple[Any, ...]]:
    """What every module's call runs beside its own: hooks of all, torch's functions."""
    return hooks_of_all(), _functions(_of_torch)


def _code_of(classes: Iterable[type]) -> Iterable[tuple[Any, str]]:
    """What a call of an instance of these classes runs."""
    for cls in classes:
        yield cls, "__call__"
        yield from ((cls, name) for name in INNER if hasattr(cls, name))
    yield nn.Module, "_call_impl"
