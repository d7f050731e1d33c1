"""The code that a call of a module runs: functions of its class, what they name, torch's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from operator import itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _of_all

INNER = ("forward", "_forward", "_conv_forward")
"""What a call of a module may run of its own."""
FUNCTIONS = (
    *("conv2d", "dropout", "gelu", "group_norm", "interpolate", "layer_norm", "linear", "pad"),
    "silu",
)
"""Functions of torch.nn.functional that the forwards of known layers call. Attention's is not among
them: others replace it for speed, and what it computes is compared (unet/spot.py).
"""
_functions, _of_torch = itemgetter(*FUNCTIONS), vars(nn.functional)
_Global = tuple[dict[str, Any], str]


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
