"""A pipeline's models, the attention modules in them, and how each one's processor attends.

All is found by looking at what is there: diffusers 0.21 to 0.42 differ in names and classes, not in
what is looked for.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lib_rocm_sd.hosts import optional
from lib_rocm_sd.hosts.attention import Serving
from lib_rocm_sd.modules.patches import ABSENT, Patch, put, take
from lib_rocm_sd.modules.stand_in import is_compiled, is_compiling

CALLED = ("scaled_dot_product_attention", "dispatch_attention_fn")
"""What a processor calls that can be served as it is: torch's function, or diffusers' choice among
attention backends, of which "native" is torch's function.
"""
SERVED_BACKENDS = ("native", "rocm_sd")


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


class OurForward(ABC):
    """The `forward` of `module` from `put_in` to `take_out`; then, for who has kept it, the
    module's own.

    A copy of the module, or what is pickled of it, has what `module` had before.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._before: Any = vars(module).get("forward", ABSENT)
        self._traced = module.forward  # some classes cannot be asked while tracing
        self._patch: Patch | None = None
        self._serves = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is ABSENT:
            return getattr, (self.module, "forward")
        return itself, (self._before,)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._traced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self._traced(*args, **kwargs)
        return (self.serve if self._serves else self.theirs)(*args, **kwargs)

    @abstractmethod
    def serve(self, *args: Any, **kwargs: Any) -> Any:
        """A call while we are in."""

    def theirs(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward gives."""
        if self._before is ABSENT:
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._before(*args, **kwargs)

    def put_in(self) -> None:
        """Serve from now on, also whoever has taken our place and calls us."""
        self._serves = True
        if vars(self.module).get("forward", ABSENT) is self._before:
            self._patch = put(self.module, "forward", self)

    def take_out(self) -> None:
        """Leave the module as it was; whoever has taken our place meanwhile stays."""
        self._serves = False
        if self._patch is not None:
            take(self._patch)


class ServedForward(OurForward):
    """An attention module that keeps its own processor, whose calls of torch's attention are
    served.
    """

    def __init__(self, module: Any, mode: Serving) -> None:
        super().__init__(module)
        self._mode = mode

    def serve(self, *args: Any, **kwargs: Any) -> Any:
        with self._mode:
            return self.theirs(*args, **kwargs)


@dataclass
class Attentions:
    """Attention modules that are ours: `replaced`, with a processor of ours in the place of theirs,
    and `served`.
    """

    replaced: list[tuple[Any, Any]] = field(default_factory=list)
    served: list[ServedForward] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.replaced or self.served)

    def __str__(self) -> str:
        return f"attention: {len(self.replaced)} replaced, {len(self.served)} served"

    def within(self, model: torch.nn.Module) -> Attentions:
        """Those that are part of a model."""
        own = set(model.modules())
        return Attentions(
            [pair for pair in self.replaced if pair[0] in own],
            [forward for forward in self.served if forward.module in own],
        )

    def put_in(self) -> None:
        """Serve them, but those that have got another processor meanwhile."""
        for attn, ours in self.replaced:
            ours.off = False
            if attn.processor is ours.replaced:
                attn.processor = ours
        for forward in self.served:
            forward.put_in()

    def take_out(self) -> None:
        """Leave them as they were; who has taken our place meanwhile stays."""
        for forward in reversed(self.served):
            forward.take_out()
        for attn, ours in self.replaced:
            ours.off = True
            if attn.processor is ours:
                attn.processor = ours.replaced


def is_served(module: Any) -> bool:
    """Whether the module's forward is one of these."""
    return isinstance(vars(module).get("forward"), ServedForward)


def itself(thing: Any) -> Any:
    """What a pickled stand-in becomes."""
    return thing
