"""Names for profilers: every call of the engine as a range with its op, problem and variant.

    with ranges(), torch.profiler.profile() as found:
        ...

torch.profiler shows the ranges, and nvtx or roctx has them where torch has a GPU. Outside of the
`with` nothing of this stands in a call's way: not even a flag is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.engine import engine as process_engine
from lib_rocm_sd.engine.route import Route
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import paused
from lib_rocm_sd.ops.base import Op

PREFIX = "rocm_sd"
BETWEEN = " | "
"""Separator between the prefix, the family, the problem and the variant."""
_lock = threading.Lock()
_watched: dict[Engine, int] = {}
"""How many `with` blocks an engine is in."""


@contextmanager
def ranges(engine: Engine = process_engine) -> Iterator[None]:
    """Name the calls of `engine` inside the `with` block, in all threads. No graph is replayed
    meanwhile: its launches have no names.
    """
    with _lock:
        _watched[engine] = _watched.get(engine, 0) + 1
        if _watched[engine] == 1:
            vars(engine)["follow"] = _naming(engine.follow)
    try:
        with paused():
            yield
    finally:
        with _lock:
            _watched[engine] -= 1
            if not _watched[engine]:
                del _watched[engine], vars(engine)["follow"]


@contextmanager
def named(name: str) -> Iterator[None]:
    """What is done inside, as a range. As an operator of torch's, so that kernels which no other
    operator launches are counted to it.
    """
    on_gpu = torch.cuda.is_available()
    with _operator(name):
        if on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()


def _operator(name: str) -> AbstractContextManager[Any]:
    """torch.profiler counts kernels to operators, and to no range of a user's. Inductor's ranges
    around Triton's kernels are of this kind. Before torch 2.2 there is none.
    """
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return torch.autograd.profiler.record_function(name) if fast is None else fast(name)


def _naming(follow: Callable[..., Any]) -> Callable[..., Any]:
    """`follow`, each call in a range. A route's name is made once."""
    names: dict[Route, str] = {}

    def named_follow(route: Route, op: Op[Any, Any], inputs: Any, session: Session) -> Any:
        name = names.get(route)
        if name is None:
            name = names.setdefault(route, name_of(route, op))
        with named(name):
            return follow(route, op, inputs, session)

    return named_follow


def name_of(route: Route, op: Op[Any, Any]) -> str:
    """rocm_sd | family | op: problem | variant."""
    variant = "zeros" if route.plan is None else route.plan.variant.name
    return BETWEEN.join((PREFIX, op.family, f"{op.name}: {route.problem}", variant))


def read_name(name: str) -> tuple[str, str, str] | None:
    """Family, problem and variant of a range of ours; None for any other."""
    parts = name.split(BETWEEN)
    if len(parts) != 4 or parts[0] != PREFIX:
        return None
    return parts[1], parts[2], parts[3]
