"""The ways to run a coder: as our program at each level, as torch does, and as tilings do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.bench.modules import in_channels_last, last, refused
from lib_rocm_sd.bench.vae import tilings
from lib_rocm_sd.bench.vae.coders import FACTOR, Coder
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.vae.program import Program

Call = Callable[[torch.Tensor], torch.Tensor]
SMALL_TILE = 32


@dataclass(frozen=True)
class Runner:
    """A way made ready for one coder.

    `plan` describes the last run. `whole`: the whole frame at the same level, if the last run was
    in bands.
    """

    call: Call
    plan: Callable[[], str] = str
    whole: Callable[[], Call | None] = lambda: None


Maker = Callable[[Coder], AbstractContextManager[Runner]]


@dataclass(frozen=True)
class Way:
    """`key` is its name on the command line, `name` in tables and results.

    `most`: pixels a side up to which a decoder is measured without being asked for more.
    """

    key: str
    name: str
    make: Maker
    most: int
    level: str = ""

    @property
    def compiled(self) -> bool:
        return self.key == "compiled"


@contextmanager
def ours(coder: Coder, level: str, own_only: bool = False) -> Iterator[Runner]:
    """Our program at a level, in a session of its own; `own_only`: without torch's convolutions."""
    session, program = Session.of(level), Program(coder.module)

    def plan() -> str:
        return "" if program.last_plan is None else str(program.last_plan)

    def whole() -> Call | None:
        if program.last_plan is None or program.last_plan.whole:
            return None
        return whole_frame

    def whole_frame(image: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = program(image, session=session, mode="whole")
        if program.last_plan is None or not program.last_plan.whole:
            raise RuntimeError("out of memory")
        return output

    with ExitStack() as stack:
        if own_only:
            stack.enter_context(own_convolutions_only())
        try:
            yield Runner(partial(program, session=session), plan, whole)
        finally:
            program.release()


def own_convolutions_only() -> AbstractContextManager[None]:
    """Within this, each variant that calls torch's convolution refuses whatever is planned."""
    variants = (variant for op in CONVS.values() for variant in op.variants)
    return refused((v for v in variants if v.name.startswith("torch")), "own convolutions only")


@contextmanager
def eager(coder: Coder) -> Iterator[Runner]:
    """The module itself on NCHW, as the WebUI runs it."""
    yield Runner(coder.module)


@contextmanager
def channels_last(coder: Coder) -> Iterator[Runner]:
    """The module in channels-last; put back afterwards."""
    with in_channels_last(coder.module):
        yield Runner(lambda image: coder.module(last(image)))


@contextmanager
def compiled(coder: Coder) -> Iterator[Runner]:
    """The module by torch.compile's default mode in channels-last, anew for each size."""
    torch._dynamo.reset()
    with in_channels_last(coder.module):
        function = torch.compile(coder.module, dynamic=False)
        try:
            yield Runner(lambda image: function(last(image)))
        finally:
            torch._dynamo.reset()


@contextmanager
def overlap_blend(coder: Coder) -> Iterator[Runner]:
    """Tiles of 512 pixels, a quarter overlapping, blended linearly."""
    tile = _of_input(coder, SMALL_TILE if coder.small else tilings.TILE)
    yield Runner(
        lambda image: tilings.overlap_blend(coder.module, image, coder.scale, tile),
        lambda: f"tiles of {tile * coder.scale[0]}, a quarter overlaps",
    )


@contextmanager
def per_tile_norm(coder: Coder) -> Iterator[Runner]:
    """Tiles of 512 pixels with a margin that is cropped, each with its own statistics."""
    decodes = coder.role == "decoder"
    margin = tilings.DECODER_MARGIN if decodes else tilings.ENCODER_MARGIN
    sizes = (SMALL_TILE, FACTOR) if coder.small else (tilings.TILE, margin)
    tile, around = (_of_input(coder, pixels) for pixels in sizes)
    yield Runner(
        lambda image: tilings.per_tile_norm(coder.module, image, coder.scale, tile, around),
        lambda: f"tiles of {sizes[0]}, {sizes[1]} more around",
    )


def _of_input(coder: Coder, pixels: int) -> int:
    return pixels // FACTOR if coder.role == "decoder" else pixels


WAYS = (
    Way("auto", "rocm_sd Auto", partial(ours, level="Auto"), 4096, "Auto"),
    Way(
        "performance",
        "rocm_sd Performance",
        partial(ours, level="Performance"),
        2048,
        "Performance",
    ),
    Way(
        "own",
        "rocm_sd own convolutions",
        partial(ours, level="Performance", own_only=True),
        2048,
        "Performance",
    ),
    Way("memory", "rocm_sd Memory", partial(ours, level="Memory"), 8192, "Memory"),
    Way("eager", "eager", eager, 4096),
    Way("channels-last", "eager channels-last", channels_last, 4096),
    Way("overlap-blend", "overlap-blend tiling", overlap_blend, 4096),
    Way("per-tile-norm", "per-tile GroupNorm tiling", per_tile_norm, 4096),
    Way("compiled", "compiled channels-last", compiled, 2048),
)
"""In the order in which they are measured. Compiling goes last: it may take long."""
KEYS = tuple(way.key for way in WAYS)


def chosen(keys: list[str] | None, levels: list[str] | None) -> list[Way]:
    """The ways of `keys` (None: all), of ours only those of `levels` (None: all)."""
    found = [way for way in WAYS if keys is None or way.key in keys]
    return [way for way in found if not way.level or levels is None or way.level in levels]
