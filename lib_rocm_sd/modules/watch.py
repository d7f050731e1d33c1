"""Tells whether the host's own call of a module would still run the code that was read.

What decides that, and who notices a change of it:

| What | Noticed by |
|---|---|
| a module's class, children, number of attributes | identity, before each call |
| `forward`, `_forward`, `_conv_forward` of an instance | identity, before each call |
| functions of each class that its call names; `Module.__call__` | identity, before each call |
| modules, classes and functions that these name as globals | identity, before each call |
| functions of `torch.nn.functional` that torch's layers call | identity, before each call |
| hooks of a module, and hooks of all modules | which have any, before each call |
| a list or dict of modules, which is never called: its children | identity, before each call |
| plain attributes of a host's modules, settings of torch's layers | value, before each call |
| a TorchFunctionMode or TorchDispatchMode of somebody's | whether there is one, before each call |
| a parameter: which tensor, its address and dtype | address, before each call (unet/weights.py) |
| values of weights | nothing is kept of them; biases are copied anew in each step |
| values of an adapter's factors and scale | value, once in a step (unet/merged.py) |
| globals that are data, a `__call__` that a class gets, other dicts of a module | unet/spot.py |

A host's own layers may replace some of this for the same result: `Findings.hosts_own` names the
Python modules that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _of_all

from lib_rocm_sd.modules.stand_in import StandIn

INNER = ("forward", "_forward", "_conv_forward")
"""What a call of a module may run of its own."""
FUNCTIONS = (
    *(
        "avg_pool2d",
        "conv2d",
        "conv3d",
        "dropout",
        "gelu",
        "group_norm",
        "interpolate",
        "layer_norm",
    ),
    *("linear", "normalize", "pad", "silu"),
)
"""Functions of torch.nn.functional that the forwards of known layers call. Attention's is not among
them: others replace it for speed, and what it computes is compared (unet/spot.py).
"""
_functions, _of_torch = itemgetter(*FUNCTIONS), vars(nn.functional)
_Global = tuple[dict[str, Any], str]
CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")
"""What a convolution computes follows from, beside its weights."""
LISTS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""What has children, or parameters, and is never called. PEFT's layers have six of these."""
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
        root, *others = self._modules = [each for each in modules if type(each) not in LISTS]
        self._types = list(map(type, self._modules))
        self._root = vars(root)
        self._root_size = len(self._root) - ("forward" in self._root)
        self._attributes = list(map(vars, others))
        self._sizes = list(map(len, self._attributes))
        self._children = [module._modules for module in modules if module._modules]
        self._members = [dict(children) for children in self._children]
        self._hooked = self._with_hooks()
        own = [(own, "forward") for own in self._attributes]
        own += [
            (vars(module), "_forward") for module in self._modules if hasattr(module, "_forward")
        ]
        convs = (m for m in self._modules if isinstance(m, nn.Conv2d | nn.Conv3d))
        own += [(vars(conv), "_conv_forward") for conv in convs]
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
                and self._with_hooks() == self._hooked
                and self._children == self._members
                and list(map(dict.get, self._places, self._keys)) == self._values
                and self._code.same()
            )
        except (AttributeError, KeyError, RuntimeError):
            return False  # something is gone, or tensors were compared

    def _with_hooks(self) -> list[bool]:
        """Which of the modules have hooks; empty where none has, as is the rule."""
        own = self._attributes
        if not (any(map(_hooks, own)) or any(map(_pre_hooks, own))):
            return []
        return [bool(_hooks(each) or _pre_hooks(each)) for each in own]


class Structure:
    """All of a module tree that reading it could depend on, but the values of its parameters.

    `same()` is True only if reading it again would give what it gave when this was made.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        modules = list(root.modules())
        classes = {base for each in modules for base in type(each).__mro__ if base is not object}
        self._classes = [(cls, dict(vars(cls))) for cls in classes]
        self._around = surroundings()
        values = (value for module in modules for value in vars(module).values())
        if any(isinstance(value, torch.Tensor) for value in values):
            modules = []  # neither to be compared nor to be kept alive
        self._seen = [(module, _seen(module)) for module in modules]

    def same(self) -> bool:
        """True if nothing has changed: no attribute, child or hook, no class that is in use, and
        nothing of torch's that all of them run.
        """
        try:
            return (
                bool(self._seen)
                and surroundings() == self._around
                and all(_seen(module) == seen for module, seen in self._seen)
                and not any(
                    module._forward_hooks or module._forward_pre_hooks
                    for module, _ in self._seen
                    if module is not self._root
                )
                and all(vars(cls) == attributes for cls, attributes in self._classes)
            )
        except (RuntimeError, TypeError, ValueError):
            return False  # attributes that cannot be compared


def _seen(module: nn.Module) -> tuple[Any, ...]:
    """What it is and has: attributes, children, and which parameters and buffers. A stand-in, which
    comes and goes, is not kept alive.
    """
    attributes = {key: it for key, it in vars(module).items() if not isinstance(it, StandIn)}
    own = type(module), attributes, dict(module._modules)
    return *own, _given(module._parameters), _given(module._buffers)


def _given(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    """The names of those that are there."""
    return [name for name, tensor in tensors.items() if tensor is not None] if tensors else []


class Code:
    """What a call of instances of `classes` runs, and `functions`, each an owner and a name, as it
    was when this was made.
    """

    def __init__(
        self, classes: Iterable[type[nn.Module]], functions: Iterable[tuple[Any, str]] = ()
    ) -> None:
        own = [(cls, name) for cls in classes for name in functions_of(cls)]
        own += [*functions, (nn.Module, "__call__"), (nn.Module, "_call_impl")]
        self._owners = [owner for owner, _ in own]
        self._names = [name for _, name in own]
        self._found = list(map(getattr, self._owners, self._names))
        named = dict.fromkeys(
            (id(table), name) for each in self._found for table, name in globals_of(each)
        )
        tables = {
            id(each.__globals__): each.__globals__ for each in map(_plain, self._found) if each
        }
        self._tables = [tables[at] for at, _ in named]
        self._keys = [name for _, name in named]
        self._globals = list(map(dict.get, self._tables, self._keys))
        self._hooked, self._functions = surroundings()

    def same(self) -> bool:
        """True if nothing of it has been replaced."""
        try:
            return (
                list(map(getattr, self._owners, self._names)) == self._found
                and list(map(dict.get, self._tables, self._keys)) == self._globals
                and _functions(_of_torch) == self._functions
                and hooks_of_all() is self._hooked
            )
        except AttributeError:
            return False  # a class has lost one


def hooks_of_all() -> bool:
    """Whether a hook is set on every module there is (torch's register_module_forward_hook)."""
    return bool(_of_all._global_forward_hooks or _of_all._global_forward_pre_hooks)


def surroundings() -> tuple[bool, tuple[Any, ...]]:
    """What every module's call runs beside its own: hooks of all, torch's functions."""
    return hooks_of_all(), _functions(_of_torch)


def is_intercepted() -> bool:
    """Whether somebody's mode sees, and may change, what torch's functions compute in this thread.
    A default device is one, which changes nothing that is given its device.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    count = torch._C._len_torch_function_stack()
    if not count:
        return False
    modes = (torch._C._get_function_stack_at(number) for number in range(count))
    return any(not type(mode).__module__.startswith(("torch.", "lib_rocm_sd.")) for mode in modes)


def functions_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the functions of a class that a call of an instance runs, as far as their code names
    them.
    """
    return _functions_of(cls, tuple(getattr(cls, name, None) for name in INNER))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _functions_of(cls: type[nn.Module], _: tuple[Any, ...]) -> tuple[str, ...]:
    found = [name for name in INNER if hasattr(cls, name)]
    if cls.__call__ is not nn.Module.__call__:
        found.append("__call__")
    for name in found:
        function = _plain(getattr(cls, name))
        named = names_in(function.__code__) if function else ()
        found += [each for each in named if each not in found and _plain(getattr(cls, each, None))]
    return tuple(found)


def names_of(cls: type[nn.Module]) -> frozenset[str]:
    """All that the functions of a class name which a call of an instance runs."""
    own = (_plain(getattr(cls, name)) for name in functions_of(cls))
    return frozenset().union(*(names_in(each.__code__) for each in own if each))


def globals_of(function: Any) -> Iterator[_Global]:
    """The modules, classes and functions that the code of a host's function names."""
    plain = _plain(function)
    if plain:
        table = plain.__globals__
        for name in names_in(plain.__code__):
            if isinstance(table.get(name), (ModuleType, type, FunctionType)):
                yield table, name


def _plain(function: Any) -> FunctionType | None:
    """A function in Python that is a host's, not torch's."""
    own = isinstance(function, FunctionType) and not str(function.__module__).startswith("torch.")
    return function if own else None


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Attributes and globals that code names, and strings that could be names."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)
