"""A model's calls, as hooks of torch's tell of them, for who times them (modules/faster.py).

Forwards may be replaced amid a picture, as accelerate's offloading does: hooks stay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.modules.faster import Contest


class Hook:
    """A hook of a module. A copy of the module, or what is pickled of it, has an idle one."""

    def __init__(self, do: Callable[..., None] | None = None) -> None:
        self._do = do

    def __call__(self, *given: Any) -> None:
        if self._do is not None:
            self._do(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class TimedCalls:
    """Those of one model, until `end`. `picture()`: as Contest.before is given it."""

    def __init__(
        self,
        model: nn.Module,
        contest: Contest,
        picture: Callable[[], Any],
        say: Callable[[str], None],
    ) -> None:
        self._contest, self._picture, self._say = contest, picture, say
        self._threads = threading.local()
        self._handles = [
            model.register_forward_pre_hook(Hook(self._begins), with_kwargs=True),
            model.register_forward_hook(Hook(self._ends), with_kwargs=True, always_call=True),
        ]

    def end(self) -> None:
        """Calls are nobody's business any more."""
        while self._handles:
            self._handles.pop().remove()
        self._ended(False)

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._ended(False)  # torch's hooks are not told of a call that Ctrl-C ends
        try:
            self._threads.after = self._contest.before(self._picture(), args, kwargs)
        except Exception as error:
            self._say(f"a model is not timed: {trouble.once(error)}")

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        self._ended(made is not None)

    def _ended(self, done: bool) -> None:
        """This thread's call has ended, if it has one."""
        after, self._threads.after = getattr(self._threads, "after", None), None
        try:
            if after is not None:
                after(done)
        except Exception as error:
            self._say(f"a model is not timed: {trouble.once(error)}")
