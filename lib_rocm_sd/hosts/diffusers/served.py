"""An attention module that keeps its own processor, whose calls of torch's attention are served."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.hosts.attention import Serving
from lib_rocm_sd.modules.patches import ABSENT, Patch, put, take
from lib_rocm_sd.modules.stand_in import is_compiling


class ServedForward:
    """The `forward` of `module` from `put_in` to `take_out`; then, for who has kept it, the
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
        return _itself, (self._patch.before,)

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


def _itself(thing: Any) -> Any:
    return thing
