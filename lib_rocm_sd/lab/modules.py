"""The ways to run a host's module beside ours, and what they do to it, and undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.ops.base import Variant


@dataclass(frozen=True)
class Runner:
    """A way made ready: `call` is a run, `told` what ran and why other parts were not ours.

    Of a VAE, `plan` describes the last run. `whole`: the whole frame at the same level, if the last
    run was in bands.
    """

    call: Callable[..., Any]
    told: Callable[[], list[str]] = list
    plan: Callable[[], str] = str
    whole: Callable[[], Callable[[torch.Tensor], torch.Tensor] | None] = lambda: None


@dataclass(frozen=True)
class Way:
    """`key`: its name on the command line; `name`: in tables and results. `make` takes what has the
    `module`. `slow`: it compiles for a minute or more.

    Of a VAE, `most`: pixels a side up to which a decoder is measured without being asked for more;
    `level`: of ours.
    """

    key: str
    name: str
    make: Callable[[Any], AbstractContextManager[Runner]]
    slow: bool = False
    most: int = 0
    level: str = ""


@contextmanager
def refused(variants: Iterable[Variant[Any, Any]], why: str) -> Iterator[None]:
    """Within this, each of these refuses whatever is planned."""
    excluded = list(variants)

    def refusals(arch: Any, problem: Any) -> list[str]:
        return [why]

    try:
        for variant in excluded:
            variant.refusals = refusals  # type: ignore[method-assign]
        yield
    finally:
        for variant in excluded:
            del variant.refusals


@contextmanager
def eager(model: Any) -> Iterator[Runner]:
    """The module itself on NCHW, as the WebUI runs it, but with torch's own attention."""
    yield Runner(model.module)


@contextmanager
def channels_last(model: Any) -> Iterator[Runner]:
    """The module in channels-last; put back afterwards."""
    with _in_channels_last(model.module):
        yield Runner(_given_last(model.module))


@contextmanager
def compiled(model: Any, **options: Any) -> Iterator[Runner]:
    """The module by torch.compile in channels-last, anew for each size."""
    torch._dynamo.reset()
    with _in_channels_last(model.module):
        function = torch.compile(model.module, **options, dynamic=False)
        try:
            yield Runner(_given_last(function))
        finally:
            torch._dynamo.reset()


@contextmanager
def _in_channels_last(module: Any) -> Iterator[None]:
    try:
        module.to(memory_format=torch.channels_last)
        yield
    finally:
        module.to(memory_format=torch.contiguous_format)


def _given_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same of an image that is brought into channels-last memory first."""

    def call(image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(image.contiguous(memory_format=torch.channels_last), *args, **kwargs)

    return call
