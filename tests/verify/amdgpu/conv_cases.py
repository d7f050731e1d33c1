"""What of the convolutions is executed as machine code: the VAE's, a UNet's, the passes around a
library's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.catalog.vae import qwen_work
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from tests.verify.amdgpu.case import Case


def conv(gfx: str) -> Iterator[Case]:
    """Every form and config that Stable Diffusion's VAE launches, and bfloat16."""
    arch = by_gfx(gfx)
    assert arch is not None
    for statistics in (True, False):
        for turn, problem in enumerate(_conv_problems(statistics)):
            ways = ("plain", "wide") if statistics or problem.in_place else ("band", "wide")
            for index in range(len(MatrixConv(problem.kind).configs(arch, problem))):
                way = ways[(turn + index) % 2]
                yield Case(gfx, "conv", problem, index, way, index, values="large")
    wide = ConvProblem("3x3", 2, 9, 33, 32, 3, "float16", True)
    yield Case(gfx, "conv", wide, values="large")
    for problem in (wide, replace(wide, out_channels=8, width=5)):
        yield Case(gfx, "conv", problem)
    half = ConvProblem("3x3", 2, 9, 19, 16, 72, "bfloat16")
    yield Case(gfx, "conv", half)
    normed = replace(half, in_channels=64, norm=True, statistics=True)
    yield Case(gfx, "conv", normed)
    yield Case(gfx, "conv", replace(normed, embedding=True))
    yield Case(gfx, "conv", replace(half, kind="upsample", in_channels=32, height=7), layout="band")
    strided = replace(half, kind="3x3 stride 2", out_channels=40, height=10)
    yield Case(gfx, "conv", strided)
    padded = replace(strided, kind="3x3 stride 2 padded", dtype="float16", statistics=True)
    yield Case(gfx, "conv", padded)
    yield Case(gfx, "conv", replace(padded, statistics=False, width=18), layout="band")
    for problem in _split_problems():
        blocks: set[tuple[int, int]] = set()
        for index, config in enumerate(MatrixConv(problem.kind).configs(arch, problem)):
            if config.splits > 1 and (config.block_co, config.block) not in blocks:
                blocks.add((config.block_co, config.block))
                yield Case(
                    gfx, "conv", problem, index, ("plain", "wide")[index % 2], values="large"
                )


def _split_problems() -> Iterator[ConvProblem]:
    """Of which the channels are shared by work-groups."""
    plain = ConvProblem("3x3", 2, 5, 9, 640, 72, "float16", True, statistics=True, embedding=True)
    yield plain
    yield replace(plain, out_channels=80, shortcut="identity", shortcut_channels=80, in_place=True)
    yield replace(plain, shortcut="conv", out_channels=80, shortcut_channels=176, statistics=False)
    yield replace(plain, kind="3x3 stride 2 padded", norm=False, height=5, width=18)
    yield replace(plain, kind="upsample", norm=False, batch=1)
    yield replace(plain, dtype="bfloat16", norm=False, batch=1)


def _conv_problems(statistics: bool) -> Iterator[ConvProblem]:
    plain = ConvProblem("3x3", 2, 9, 18, 16, 80, "float16", statistics=statistics)
    yield plain
    yield replace(plain, kind="3x3 stride 2", height=10, in_channels=32, width=20)
    yield replace(plain, kind="upsample", height=7, in_channels=32)
    normed = replace(plain, norm=True, in_channels=64)
    yield normed
    yield replace(normed, shortcut="identity", shortcut_channels=80, embedding=True)
    if not statistics:
        yield replace(normed, shortcut="identity", shortcut_channels=80, in_place=True)
    yield replace(normed, shortcut="conv", shortcut_channels=32)
    for channels in (128, 256):
        # A wide input of the shortcut, over which the output is written.
        yield ConvProblem(
            *("3x3", 1, 3, 18, 32, channels, "float16", True, "conv"),
            *(channels + 32, statistics, True),
        )


def conv_over_time(gfx: str) -> Iterator[Case]:
    """Every kernel that Qwen-Image's VAE launches, of images with ragged edges and few channels."""
    arch, seen = by_gfx(gfx), set[KernelSpec]()
    assert arch is not None
    for turn, (_, asked) in enumerate(qwen_work()):
        if not isinstance(asked, ConvProblem):
            continue
        few = min(asked.in_channels, 32)
        through = few if asked.shortcut == "conv" else asked.shortcut_channels
        p = replace(asked, height=10, width=18, in_channels=few, shortcut_channels=through)
        p = replace(p, in_place=asked.in_place and asked.shortcut == "identity")
        variant = MatrixConv(p.kind)
        specs = set(variant.specs(arch, p, variant.configs(arch, p)[0]))
        if not specs <= seen:
            seen |= specs
            way = ("wide", "band")[turn % 2]
            yield Case(gfx, "conv", p, layout=way, values="large")


def conv_epilogue(gfx: str) -> Iterator[Case]:
    """Every form and config that upscalers launch, and bfloat16."""
    arch = by_gfx(gfx)
    assert arch is not None
    ways = ("plain", "wide", "band")
    for turn, problem in enumerate(_epilogues()):
        for index in range(len(MatrixConv(problem.kind).configs(arch, problem))):
            way = ways[(turn + index) % 3]
            yield Case(gfx, "conv", problem, index, way, values="large")
    wide = ConvProblem("3x3", 1, 9, 18, 64, 240, epilogue="none")
    shortcut = replace(wide, shortcut="identity", shortcut_channels=240)
    few, most = replace(wide, in_channels=16), replace(wide, out_channels=256)
    for turn, problem in enumerate((most, few, shortcut)):  # SwinIR's
        yield Case(gfx, "conv", problem, 0, ways[turn], values="large")


def _epilogues() -> Iterator[ConvProblem]:
    plain = ConvProblem("3x3", 2, 9, 18, 32, 24, epilogue="leaky relu")
    yield plain
    yield replace(plain, out_channels=40, epilogue="prelu")
    yield replace(plain, out_channels=48, in_channels=16, epilogue="prelu", batch=1)
    yield replace(plain, out_channels=56, epilogue="leaky relu", height=17, width=3, batch=1)
    yield replace(plain, out_channels=64, in_channels=16, epilogue="none", batch=1)
    yield replace(plain, out_channels=48, epilogue="none", height=17, batch=1)
    yield replace(plain, out_channels=3, epilogue="none")
    yield replace(plain, kind="upsample", out_channels=40, height=7, batch=1)
    residual = replace(plain, out_channels=48, epilogue="none", shortcut="identity", batch=1)
    yield replace(residual, shortcut_channels=48)
    silu = replace(residual, epilogue="silu", in_channels=48, dtype="bfloat16")
    yield replace(silu, shortcut="none")
    yield replace(silu, shortcut_channels=48, epilogue="gate", dtype="float16")
    yield replace(plain, dtype="bfloat16", batch=1)
    few = replace(plain, in_channels=16, batch=1)
    yield replace(few, epilogue="none")
    yield replace(few, epilogue="none", out_channels=3)
    yield replace(few, epilogue="prelu")
    yield replace(few, out_channels=40)
    yield replace(few, epilogue="silu", out_channels=48)
    yield replace(plain, epilogue="prelu", batch=1)
    yield replace(plain, kind="upsample", height=7, batch=1)
    for activation in ("none", "leaky relu"):
        yield replace(residual, out_channels=32, shortcut_channels=32, epilogue=activation)


def conv_rows(gfx: str) -> Iterator[Case]:
    """With weights as they lie: every form and config that Stable Diffusion's UNets launch, whole
    and split; a block of channels that is not whole, smaller chunks, bfloat16.
    """
    arch = by_gfx(gfx)
    assert arch is not None
    blocks: set[Hashable] = set()
    for turn, problem in enumerate(_rows_problems()):
        for index, config in enumerate(MatrixConv(problem.kind).configs(arch, problem)):
            split = config.splits > 1
            block = (problem, config.block_co, config.rows, config.chunk_c)
            if split == (problem.in_channels > 64) and block not in blocks:
                blocks.add(block)
                layout = ("plain", "wide")[(turn + index) % 2]
                yield Case(gfx, "conv", problem, index, layout, values="large")


def _rows_problems() -> Iterator[ConvProblem]:
    """Of more than 64 channels, so that they are split."""
    plain = ConvProblem("3x3", 2, 5, 18, 64, 168, norm=True, in_rows=True)
    first = replace(plain, statistics=True, embedding=True)
    yield first
    yield replace(first, shortcut="identity", shortcut_channels=176, out_channels=176, batch=1)
    yield replace(plain, shortcut="identity", shortcut_channels=80, out_channels=80)
    yield replace(plain, shortcut="conv", shortcut_channels=128, out_channels=80)
    yield replace(plain, kind="upsample", norm=False, batch=1, out_channels=72)
    yield replace(plain, kind="3x3 stride 2 padded", norm=False, height=9)
    yield replace(plain, kind="3x3 stride 2", norm=False, statistics=True, in_channels=32)
    yield replace(plain, out_channels=4)
    yield replace(first, in_channels=48, out_channels=72, dtype="bfloat16")
    through = replace(plain, shortcut="conv", shortcut_channels=48, out_channels=80)
    yield replace(through, height=17, width=3, dtype="bfloat16")
    few = replace(plain, in_channels=128, batch=1, height=3, width=9, out_channels=72)
    yield replace(few, statistics=True, embedding=True)
    yield replace(few, shortcut="conv", shortcut_channels=192, out_channels=80)
    yield replace(few, kind="upsample", norm=False)
    yield replace(few, kind="3x3 stride 2 padded", norm=False, height=6)
    yield replace(few, out_channels=4)
    # Tiles of channels past the last, and every row of pixels of a wave.
    for count in (24, 80):
        yield replace(plain, kind="upsample", norm=False, batch=1, out_channels=count)
    for count in (24, 168):
        yield replace(few, height=17, width=17, out_channels=count)
    yield replace(few, kind="upsample", norm=False, height=9, width=17, out_channels=24)
    yield replace(few, shortcut="conv", shortcut_channels=192, out_channels=80, height=17)
    yield replace(few, dtype="bfloat16")
    for last in (plain, few):
        yield replace(last, norm=False, out_channels=4)


def finish(gfx: str) -> Iterator[Case]:
    """The passes around a library's convolution."""
    for problem in (
        ConvProblem("3x3", 2, 9, 19, 16, 24),
        ConvProblem("3x3", 1, 9, 17, 32, 64, "bfloat16", True, "identity", 64, True),
        ConvProblem("3x3", 2, 5, 18, 64, 32, "float16", True, "conv", 48, True, embedding=True),
        ConvProblem("upsample", 2, 5, 17, 32, 32, "float16", statistics=True),
    ):
        yield Case(gfx, "finish", problem)
    plain = ConvProblem("3x3", 2, 2, 55, 16, 264)
    for problem in (
        plain,
        replace(plain, shortcut="identity", shortcut_channels=264, statistics=True, embedding=True),
        replace(plain, kind="upsample", height=1, width=27, statistics=True),
        ConvProblem("3x3", 1, 2, 55, 16, 264, "bfloat16", False, "identity", 264, True),
        replace(plain, statistics=True),
        replace(plain, shortcut="identity", shortcut_channels=264),
    ):
        for layout in ("plain", "misaligned"):
            yield Case(gfx, "finish pass", problem, layout=layout)
