"""The ways to run a UNet's step: with its blocks as our programs, and as torch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd import first_trials
from lib_rocm_sd.bench.modules import in_channels_last, last, refused
from lib_rocm_sd.bench.progress import say
from lib_rocm_sd.bench.unet.attended import attended
from lib_rocm_sd.bench.unet.models import Unet
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.report import Report
from lib_rocm_sd.report import report as process_report
from lib_rocm_sd.trials.gate import put_before
from lib_rocm_sd.unet.takeover import take_over


@dataclass(frozen=True)
class Runner:
    """A way made ready: `call` is a step, `told` what ran and why other blocks were not ours."""

    call: Callable[..., Any]
    told: Callable[[], list[str]] = list


OWN = "rocm_sd"
"""The name of variants that call no library."""
TRIALS_S = 300.0
"""For all trials of a card that has tried nothing yet."""
Maker = Callable[[Unet], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Way:
    """`key`: on the command line; `name`: in tables. `slow`: it compiles for a minute or more."""

    key: str
    name: str
    make: Maker
    slow: bool = False


@contextmanager
def ours(
    unet: Unet, level: str, own_only: bool = False, as_in_a_host: bool = False
) -> Iterator[Runner]:
    """The blocks by our programs, in a session of their own."""
    report = Report()
    session = Session.of(level, report=report)
    with ExitStack() as stack:
        if own_only:
            stack.enter_context(own_kernels_only())
        if as_in_a_host:
            stack.enter_context(tried_ahead(unet.device))
            session = session.patiently()
        taken = take_over(unet.module, session)

        def told() -> list[str]:
            rows = [*map(str, taken.report()), *map(str, taken.graphs.known()), report.summary()]
            return ["; ".join(line.strip() for line in row.splitlines()) for row in rows]

        try:
            yield Runner(unet.module, told)
        finally:
            taken.give_back()


@contextmanager
def tried_ahead(device: torch.device) -> Iterator[None]:
    """As a host's start leaves it: what a start tries was tried in processes of its own, and what
    was not tried is not launched.
    """
    if engine.launcher(device) is None:
        yield
        return
    for here in first_trials.places():
        first_trials.try_all(here, TRIALS_S, say)
    before, gate = engine.gate, put_before(engine, say)
    try:
        yield
    finally:
        engine.gate = before
        gate.stop()


def own_kernels_only() -> AbstractContextManager[None]:
    """Within this, each variant that is not ours alone refuses whatever is planned."""
    variants = (variant for op in ops() for variant in op.every)
    return refused((item for item in variants if item.name != OWN), "own kernels only")


@contextmanager
def eager(unet: Unet) -> Iterator[Runner]:
    """The module itself on NCHW, as the WebUI runs it, but with torch's own attention."""
    yield Runner(unet.module)


@contextmanager
def channels_last(unet: Unet) -> Iterator[Runner]:
    """The module in channels-last; put back afterwards."""
    with in_channels_last(unet.module):
        yield Runner(partial(_last, unet.module))


@contextmanager
def compiled(unet: Unet, mode: str) -> Iterator[Runner]:
    """torch.compile in channels-last, anew for each size."""
    torch._dynamo.reset()
    with in_channels_last(unet.module):
        function = torch.compile(unet.module, mode=mode, dynamic=False)
        try:
            yield Runner(partial(_last, function))
        finally:
            torch._dynamo.reset()


@contextmanager
def compiled_with_ours(unet: Unet, mode: str) -> Iterator[Runner]:
    """The same with attention as our operator, in the place of torch's own. Level Auto."""
    with attended(unet.module), compiled(unet, mode) as runner:
        yield Runner(runner.call, lambda: process_report.summary().splitlines())


def _last(function: Callable[..., Any], image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(last(image), *args, **kwargs)


WAYS = (
    Way("auto", "rocm_sd Auto", partial(ours, level="Auto", as_in_a_host=True)),
    Way("performance", "rocm_sd Performance", partial(ours, level="Performance")),
    Way("own", "rocm_sd own kernels", partial(ours, level="Performance", own_only=True)),
    Way("memory", "rocm_sd Memory", partial(ours, level="Memory")),
    Way("eager", "eager", eager),
    Way("channels-last", "eager channels-last", channels_last),
    Way("compiled", "compiled channels-last", partial(compiled, mode="default"), slow=True),
    Way("graphs", "compiled with graphs", partial(compiled, mode="reduce-overhead"), slow=True),
    Way(
        "compiled-ours",
        "compiled with ours",
        partial(compiled_with_ours, mode="default"),
        slow=True,
    ),
    Way(
        "graphs-ours",
        "compiled, graphs, ours",
        partial(compiled_with_ours, mode="reduce-overhead"),
        slow=True,
    ),
)
"""In the order in which they are measured."""
KEYS = tuple(way.key for way in WAYS)
