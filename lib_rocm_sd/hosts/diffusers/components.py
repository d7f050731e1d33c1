"""A pipeline's models, the attention modules in them, and how each one's processor attends.

All is found by looking at what is there: diffusers 0.21 to 0.42 differ in names and classes, not in
what is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lib_rocm_sd.hosts import optional
from lib_rocm_sd.hosts.attention import Serving
from lib_rocm_sd.modules.patches import ABSENT, Patch, put, take
from lib_rocm_sd.modules.stand_in import is_compiling

CALLED = ("scaled_dot_product_attention", "dispatch_attention_fn")
"""What a processor calls that can be served as it is: torch's function, or diffusers' choice among
attention backends, of which "native" is torch's function.
"""
SERVED_BACKENDS = ("native", "rocm_sd")
COMPILED = "it is compiled by torch.compile"


def attention_modules(pipeline: Any) -> Iterator[tuple[Any, bool]]:
    """Each attention module of the pipeline's models, once, and whether it is compiled."""
    seen: set[int] = set()
    for model in models(pipeline):
        for module, compiled in _within(model, False, seen):
            if callable(getattr(module, "processor", None)):
                yield module, compiled


def models(pipeline: Any) -> list[torch.nn.Module]:
    """What hangs on the pipeline and is a module; text encoders have no processors."""
    parts = getattr(pipeline, "__dict__", {}).values()
    return [part for part in parts if isinstance(part, torch.nn.Module)]


def _within(
    module: torch.nn.Module, compiled: bool, seen: set[int]
) -> Iterator[tuple[torch.nn.Module, bool]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    compiled = compiled or is_compiled(module)
    yield module, compiled
    for child in module.children():
        yield from _within(child, compiled, seen)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what torch.compile made of a module, or has compiled itself in place."""
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


def has_compiled(module: Any) -> bool:
    """Whether anything in it is compiled."""
    return isinstance(module, torch.nn.Module) and any(map(is_compiled, module.modules()))


def not_served(processor: Any) -> str:
    """Why this processor's attention cannot be served as it is; empty where it can."""
    kind = type(processor)
    if not kind.__module__.startswith("diffusers."):
        return kind.__name__
    if not any(name in CALLED for name in _names_in(kind)):
        return kind.__name__
    backend = _backend_of(processor)
    return "" if backend in SERVED_BACKENDS else f"{kind.__name__} with the backend {backend}"


def _names_in(kind: type) -> Iterator[str]:
    """What the functions of a class, and of those that it inherits from, refer to."""
    for owner in kind.__mro__:
        for function in vars(owner).values():
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            yield from getattr(getattr(function, "__code__", None), "co_names", ())


def _backend_of(processor: Any) -> str:
    """The name of the attention backend that the processor goes to, where it goes through one."""
    if not hasattr(processor, "_attention_backend"):
        return SERVED_BACKENDS[0]
    own = processor._attention_backend
    active: Callable[[], Any] | None = optional.attribute(
        "diffusers.models.attention_dispatch", "_AttentionBackendRegistry", "get_active_backend"
    )
    if own is None and active is not None:
        own = active()[0]
    return str(getattr(own, "value", own))


class ServedForward:
    """An attention module that keeps its own processor, whose calls of torch's attention are
    served: the `forward` of `module` from `put_in` to `take_out`; then, for who has kept it, the
    module's own.

    A copy of the module, or what is pickled of it, has what `module` had before.
    """

    def __init__(self, module: Any, mode: Serving) -> None:
        self.module = module
        self._mode: Serving | None = mode
        self._theirs = module.forward
        self._patch: Patch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._patch is None or self._patch.before is ABSENT:
            return getattr, (self.module, "forward")
        return itself, (self._patch.before,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._mode is None or is_compiling():
            return self._theirs(*args, **kwargs)
        with self._mode:
            return self._theirs(*args, **kwargs)

    def put_in(self) -> None:
        """Serve from now on."""
        self._patch = put(self.module, "forward", self)

    def take_out(self) -> None:
        """Leave the module as it was; whoever has taken our place meanwhile stays."""
        self._mode = None
        if self._patch is not None:
            take(self._patch)


def is_served(module: Any) -> bool:
    """Whether the module's forward is one of these."""
    return isinstance(vars(module).get("forward"), ServedForward)


def itself(thing: Any) -> Any:
    """What a pickled stand-in becomes."""
    return thing
