"""Stands in for `forward` of one module, on the instance, and leaves to the module's own what ours
cannot or must not compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from lib_rocm_sd.engine.engine import is_compiling
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.modules.patches import ABSENT, Patch, is_the_classs, named, put, take

COMPILED = "it is compiled by torch.compile"
MOST_ALIKE = 2
"""Layers that are named one by one where the same is said of them."""


class UnknownModuleError(ValueError):
    """The module has a structure that is not known; `reasons` say what."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(f"this module cannot be run: {'; '.join(reasons)}")
        self.reasons = reasons


class TheirsError(Exception):
    """A module of the host raised `error` when it was called amid a block of ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StandIn(ABC):
    """The `forward` of `module` from `put_in` to `take_out`.

    It serves only while it is that attribute: who has kept it, to call it later, gets the module's
    own forward. A copy of the module, or what is pickled of it, has its own forward from the start.
    """

    passed_on: ClassVar[tuple[type[Exception], ...]] = (MemoryError,)
    """Errors of ours that are the caller's to see. "Out of memory" is, whatever its class."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._patch: Patch | None = None
        self._serving = False
        self._traced = type(module).forward

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")

    @property
    def is_put_in(self) -> bool:
        """True while the module's calls come here, and are to be served."""
        return self._serving and vars(self.module).get("forward") is self

    def put_in(self) -> str:
        """Serve the module's calls from now on; or the name of who has its forward already."""
        current = vars(self.module).get("forward", ABSENT)
        if current is not self or self._patch is None:
            if isinstance(current, StandIn) and not current.is_put_in:
                # Somebody kept it, and put it back after it was given back: it is the module's own.
                del self.module.forward
                current = ABSENT
            beneath = getattr(current, "lies_beneath", False) or is_the_classs(current, self.module)
            if current is not ABSENT and not beneath:
                self._serving = False
                return named(current)
            self._patch = put(self.module, "forward", self)
        self._traced = type(self.module).forward  # some classes cannot be asked while tracing
        self._serving = True
        return ""

    def take_out(self) -> None:
        """Leave the module as it was before `put_in`; who has taken our place meanwhile stays."""
        self._serving = False
        if self._patch is not None and take(self._patch):
            self._patch = None  # which has this object: memory would wait for Python's collector

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self._traced(self.module, *args, **kwargs)
        if not self.is_put_in:
            return self.theirs(*args, **kwargs)
        asked = self.asked(*args, **kwargs)
        if asked is None:
            return self.theirs(*args, **kwargs)
        try:
            why = self.refusal(*args, **kwargs)
            made = None if why else self.serve(asked)
        except UnknownModuleError as error:
            why = "; ".join(brief(error.reasons))
        except TheirsError as error:
            raise error.error from None
        except Exception as error:
            if isinstance(error, self.passed_on) or is_out_of_memory(error):
                raise
            why = self.failed(error)
        if not why:
            return self.used(made, asked, lambda: self.theirs(*args, **kwargs))
        self.tell(why)
        return self.theirs(*args, **kwargs)

    def theirs(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward gives."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        """What `serve` is given; None leaves the call to the module without a word."""
        return args

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        """Why this call is the module's own; empty if it is not."""
        if torch.is_grad_enabled():
            given = [*args, *kwargs.values(), *self.module.parameters()]
            if any(isinstance(item, torch.Tensor) and item.requires_grad for item in given):
                return "gradients are wanted"
        return ""

    @abstractmethod
    def serve(self, asked: Any) -> Any:
        """Compute a call that was not refused. What it raises but `passed_on` costs no result."""

    def used(self, made: Any, asked: Any, theirs: Callable[[], Any]) -> Any:
        """What the caller is given, where `serve` has made this of a call; `theirs` is what the
        module's own forward makes of it.
        """
        return made

    @abstractmethod
    def failed(self, error: Exception) -> str:
        """Why the module's own forward has to finish a call at which ours raised `error`."""

    @abstractmethod
    def tell(self, why: str) -> None:
        """A call is left to the module: say why, once."""


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile made of a module, or has compiled itself in place: a call of
    it does not come to a stand-in then.
    """
    return (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )


def brief(reasons: Iterable[str]) -> list[str]:
    """Reasons for people: what is said of many layers is said once, of the first."""
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, what = reason.partition(" ")
        alike.setdefault(what, []).append(name)
    found = []
    for what, names in alike.items():
        if len(names) <= MOST_ALIKE:
            found += [f"{name} {what}".strip() for name in names]
        else:
            found.append(f"{names[0]} and {len(names) - 1} others: {what}")
    return found
