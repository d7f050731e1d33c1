"""Tells whether the host's own call of a module would still run the code that was read.

What decides that, and who notices a change of it:

| What | Noticed by |
|---|---|
| a module's class, children, number of attributes | identity, before each call |
| `forward`, `_forward`, `_conv_forward` of an instance | identity, before each call |
| functions of each class that its call names; `Module.__call__` | identity, before each call |
| modules, classes and functions that these name as globals | identity, before each call |
| functions of `torch.nn.functional` that torch's layers call | identity, before each call |
| hooks of a module, and hooks of all modules | whether there are any, before each call |
| plain attributes of a host's modules, settings of torch's layers | value, before each call |
| a TorchFunctionMode or TorchDispatchMode of somebody's | whether there is one, before each call |
| a parameter: which tensor, its address and dtype | address, before each call (unet/weights.py) |
| values of weights | nothing is kept of them; biases are copied anew in each step |
| globals that are data, a `__call__` that a class gets, other dicts of a module | unet/spot.py |

A host's own layers may replace some of this for the same result: `Findings.hosts_own` names the
Python modules that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from lib_rocm_sd.modules.code import Code

_hooks, _pre_hooks = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")


class Watch:
    """What `modules` were when this was made; the first is the root.

    `watched`: attributes of an instance, a name and the value. `functions`: see Code. The root's
    own forward and hooks are the caller's business.
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
        parents = [module for module in self._modules if module._modules]
        self._children = [module._modules for module in parents]
        self._members = [dict(children) for children in self._children]
        self._hooked = self._is_hooked()
        own = [(own, "forward") for own in self._attributes]
        own += [(vars(module), "_forward") for module in parents if hasattr(module, "_forward")]
        own += [(vars(m), "_conv_forward") for m in self._modules if isinstance(m, nn.Conv2d)]
        facts = [(own, key, own.get(key)) for own, key in own] + list(watched)
        once = {(id(own), key): (own, key, value) for own, key, value in facts}.values()
        self._places = [attributes for attributes, _, _ in once]
        self._keys = [key for _, key, _ in once]
        self._values = [value for _, _, value in once]
        self._code = Code(dict.fromkeys(self._types), functions)

    def same(self) -> bool:
        """True if nothing of that has changed. Lists and dicts are compared by the identity of what
        is in them first, which is what makes this fast.
        """
        try:
            return (
                len(self._root) - ("forward" in self._root) == self._root_size
                and list(map(len, self._attributes)) == self._sizes
                and list(map(type, self._modules)) == self._types
                and self._is_hooked() is self._hooked
                and self._children == self._members
                and list(map(dict.get, self._places, self._keys)) == self._values
                and self._code.same()
            )
        except (AttributeError, KeyError, RuntimeError):
            return False  # something is gone, or tensors were compared

    def _is_hooked(self) -> bool:
        return any(map(_hooks, self._attributes)) or any(map(_pre_hooks, self._attributes))
