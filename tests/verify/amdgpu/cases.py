"""What of our kernels is executed as machine code.

A file of its own: what the ledger knows of a case hangs on the case and on its judge, not on the
other cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel as backward_kernel
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.group_norm import kernel as norm_kernel
from lib_rocm_sd.ops.group_norm import whole as whole_norm
from lib_rocm_sd.ops.group_norm.problem import ADDED, FinalizeProblem, GroupNormProblem
from lib_rocm_sd.ops.layer_norm import kernel as layer_norm_kernel
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import ROTARIES, HeadsProblem
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.shipped import QWEN_PART, SD3_PART, SWINIR_PART, UPSCALER_PART, part_specs
from tests.verify.amdgpu import drawn
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.conv_cases import conv, conv_epilogue, conv_over_time, conv_rows, finish

SCALES = (None, -0.3, None, 0.0, None, 3.0, -0.05)
"""Of misaligned attention; None is the default, by head_dim."""


def attention(gfx: str) -> Iterator[Case]:
    """Every config of every usual head_dim, both half types; kinds of masks, lengths, windows."""
    arch = by_gfx(gfx)
    assert arch is not None
    turn = 0
    for head_dim in (*attention_kernel.SHIPPED_HEAD_DIMS, 72, 256):
        for index, config in enumerate(attention_kernel.ordered(arch, "float16", head_dim)):
            shipped = index == 0 or config.for_few_keys
            for dtype in attention_kernel.DTYPES[: 2 if shipped else 1]:
                yield from _each_way(gfx, head_dim, dtype, index, turn)
                turn += 1
    for turn, mask in enumerate(attention_kernel.MASK_KINDS[1:]):
        head_dim = (40, 64, 160, 512)[turn]
        for case in _each_way(gfx, head_dim, "float16", 0, turn, mask):
            yield case
        for of in ("keys", "queries", "heads")[turn % 3 : turn % 3 + 1]:
            yield replace(case, mask_of=of, scale=-0.2)
    windows = AttentionProblem(1, 2, 64, 64, 32, "float16", "float32")
    yield Case(gfx, "attention", windows, mask_of="whole", scale=30**-0.5)  # as SwinIR has them
    yield from _each_way(gfx, 32, "float16", 0, 0, "float32")
    for turn, head_dim in enumerate((40, 72, 128, 512)):
        yield from _each_way(gfx, head_dim, "float16", 0, turn, attention_kernel.LENGTHS)
    lengths = AttentionProblem(3, 1, 17, 77, 64, "bfloat16", attention_kernel.LENGTHS)
    yield Case(gfx, "attention", lengths)


def _each_way(
    gfx: str, head_dim: int, dtype: str, index: int, turn: int, mask: str = "none"
) -> Iterator[Case]:
    """Read by 16 bytes: a group with all its queries and one with a rest, three tiles of keys, of
    which the second must be scored again and the last is cut short; where tiles are fetched ahead
    also one alone. Read by halves: one group, two tiles.
    """
    arch = by_gfx(gfx)
    assert arch is not None
    config = attention_kernel.ordered(arch, dtype, head_dim, mask)[index]
    rows, keys = config.block_q, config.block_k
    sizes = (2 * rows - 1 - turn * 5 % 13, 3 * keys - 1 - turn * 7 % 15)
    problem = AttentionProblem(2, 2, *sizes, head_dim, dtype, mask)
    case = Case(gfx, "attention", problem, index, ("mixed", "plain")[turn % 2], turn)
    yield replace(case, values="growing", mask_of=("whole", "turned")[turn % 2])
    problem = replace(problem, batch=1, heads=3, seq_q=rows - 1 - turn % 4, seq_k=keys - 2)
    if config.ahead:
        yield replace(case, problem=problem, layout="repeated", scale=-0.2)
    odd = ("mixed and odd", "misaligned", "ragged rows")
    values = drawn.VALUES[turn % len(drawn.VALUES)]
    yield Case(
        *(gfx, "attention", replace(problem, seq_k=2 * keys - 3 - turn % 5), index),
        *(odd[turn % len(odd)], turn),
        values=values,  # infinite ones with a weight of no half are NaN, as torch's are
        scale=None if values == "infinite" else SCALES[turn % len(SCALES)],
        mask_of=("turned", "whole")[turn % 2],
    )


def attention_backward(gfx: str) -> Iterator[Case]:
    """Every config of every usual head_dim and of 256, both half types: work-groups with all their
    own rows, and with nearly all, read by 16 bytes and by halves; where tiles are fetched ahead
    also one alone; each kind of mask.
    """
    arch = by_gfx(gfx)
    assert arch is not None
    turn = 0
    for head_dim in (*backward_kernel.SHIPPED_HEAD_DIMS, 256):
        for index, config in enumerate(backward_kernel.configs(arch, head_dim)):
            queries, keys = config.queries.rows, config.keys.rows
            for dtype in backward_kernel.DTYPES:
                turn += 1
                plain = AttentionProblem(1, 1, queries - 1 - turn % 3, keys - 2, head_dim, dtype)
                if MatrixBackward().refusals(arch, plain):
                    continue
                case = Case(gfx, "attention backward", plain, index, "misaligned", turn)
                yield replace(case, scale=SCALES[turn % len(SCALES)])
                case = replace(case, layout="plain")
                yield replace(case, problem=replace(plain, seq_q=2 * queries - 1 - turn % 2))
                yield replace(case, problem=replace(plain, seq_k=2 * keys - 1))
                if config.keys.ahead:
                    few = (config.keys.block - 1, config.queries.block - 2)
                    yield replace(case, problem=replace(plain, seq_q=few[0], seq_k=few[1]))
    for turn, mask in enumerate(attention_kernel.MASK_KINDS[1:]):
        problem = AttentionProblem(2, 2, 19, 35, (40, 64, 128, 160)[turn], "float16", mask)
        yield Case(gfx, "attention backward", problem, seed=turn)


def attention_and_lse(gfx: str) -> Iterator[Case]:
    """Attention's problems, for what training is compiled ahead with, and for 256; a mask."""
    arch = by_gfx(gfx)
    assert arch is not None
    turn = 0
    for dtype in backward_kernel.DTYPES:
        for head_dim in (*backward_kernel.SHIPPED_HEAD_DIMS, 256):
            space = attention_kernel.ordered(arch, dtype, head_dim, "none")
            few = [index for index, config in enumerate(space) if config.for_few_keys]
            for index in (0, *few):
                turn += 1
                for case in _each_way(gfx, head_dim, dtype, index, turn):
                    layout = (
                        "plain" if case.layout in ("mixed", "plain", "repeated") else "misaligned"
                    )
                    made = Case(gfx, "attention and lse", case.problem, index, layout, turn + 7)
                    yield replace(made, scale=case.scale)
    masked = AttentionProblem(2, 2, 19, 35, 64, "float16", "bool")
    yield Case(gfx, "attention and lse", masked)


def softmax(gfx: str) -> Iterator[Case]:
    """Rows read twice, rows held in one to sixteen vectors of each work-item; the first and the
    last of so many.
    """
    problem = AttentionProblem(2, 2, 2, 131, 16, "float16", "none")
    lengths = (9001, 8, 4096, 8188, 16380, 32764, 65532, 36868, 90000)
    for turn, keys in enumerate(lengths):
        values = ("random", "large", "ties")[turn % 3]
        scale = (None, -0.3, 2.0**34, 0.0)[turn % 4]
        few = replace(problem, seq_k=keys, batch=1 + (keys < 9000))
        yield Case(gfx, "softmax", few, values=values, scale=scale)
    yield Case(gfx, "softmax", replace(problem, seq_k=1024, dtype="bfloat16"), scale=-0.3)


def group_norm(gfx: str) -> Iterator[Case]:
    """Both layouts and half types with and without SiLU, and every config: parts of several whole
    batches and of a rest, images that begin at a multiple of 16 bytes and not.
    """
    last = GroupNormProblem(2, 264, 3, 37, "float16", True, True, 8, "float16")
    first = GroupNormProblem(2, 6, 61, 127, "float16", False, True, 2, "float32")
    for problem in (last, first):
        for silu in (True, False):
            for index in range(3):
                for layout in ("plain", "misaligned"):
                    case = Case(gfx, "group norm", replace(problem, silu=silu), index, layout)
                    yield case
                    if index == 0:
                        yield replace(case, problem=replace(case.problem, dtype="bfloat16"))
    single = GroupNormProblem(2, 6, 13, 29, "float16", True, True, 2, "bfloat16")
    for layout in ("plain", "misaligned"):
        yield Case(gfx, "group norm", single, layout=layout)
        odd = replace(single, channels=37, groups=37, affine="none")
        yield Case(gfx, "group norm", odd, layout=layout)
    for index in range(3):  # so many parts that they are merged first
        many = FinalizeProblem(2, 2100, 64, 16)
        yield Case(gfx, "finalize", many, index)
        for affine in ("none", "float16", "bfloat16"):
            yield Case(gfx, "finalize", replace(many, parts=5, affine=affine), index)


def whole_group_norm(gfx: str) -> Iterator[Case]:
    """Every config full, but for the last pixel of some work-items, both half types, with SiLU and
    without; few pixels, groups that several waves merge, norms alone.
    """
    arch = by_gfx(gfx)
    assert arch is not None
    for index, config in enumerate(whole_norm.CONFIGS):
        if not whole_norm.fits(arch, config, 8):
            continue
        channels, groups = ((80, 8), (96, 12), (40, 1), (120, 24), (72, 2))[index]
        width = whole_norm.tiling(channels, groups, 8).width
        pixels = config.pixels(width) - 3
        full = GroupNormProblem(1, channels, 1, pixels, "float16", True, True, groups, "float16")
        for turn, dtype in enumerate(norm_kernel.DTYPES):
            affine = ("float32", "bfloat16", "none", "float16")[(index + turn) % 4]
            for silu in (True, False):
                case = replace(full, dtype=dtype, silu=silu, affine=affine)
                yield Case(gfx, "whole group norm", case, index)
                yield Case(gfx, "whole group norm", replace(case, added=True), index)
                if config == whole_norm.CONFIGS[-1]:
                    yield Case(gfx, "whole group norm", replace(case, width=pixels // 2), index)
        few = replace(full, batch=2, width=(5, 60, 9, 1, 131)[index], silu=False)
        yield Case(gfx, "whole group norm", few, index, "normed")
    for problem in ADDED:
        sizes = (problem.channels, problem.pixels, problem.groups, problem.form.vector)
        (held,) = whole_norm.configs(arch, *sizes)
        yield Case(gfx, "whole group norm", problem, whole_norm.CONFIGS.index(held))
    ragged = GroupNormProblem(2, 88, 3, 7, "bfloat16", True, False, 11, "float32")
    yield Case(gfx, "whole group norm", ragged)  # fewer channels for the last work-group
    single = GroupNormProblem(2, 35, 3, 13, "float16", True, True, 7, "bfloat16")
    for layout in ("plain", "normed"):
        yield Case(gfx, "whole group norm", single, 1, layout)
    yield Case(gfx, "whole group norm", replace(single, dtype="bfloat16", groups=1), 3)


def layer_norm(gfx: str) -> Iterator[Case]:
    """Every number of vectors held by every config in rows that a whole work-group makes, of which
    some work-items have one less; rows of which a wave makes several, with some behind the last;
    rows that are read twice.
    """
    for index, config in enumerate(layer_norm_kernel.CONFIGS):
        for held in layer_norm_kernel.HELD:
            problem = LayerNormProblem((2, 8 * (config.threads * held - 3)))
            biased = BiasedProblem(problem.shape)
            kinds = (replace(problem, added=True), problem, replace(biased, keeps=True), biased)
            for kind in kinds:
                for layout in ("apart", "misaligned"):
                    each = kind
                    yield Case(gfx, "layer norm", each, index, layout)
                    if index == 0:
                        each = replace(each, dtype="bfloat16", affine="bfloat16")
                        yield Case(gfx, "layer norm", each, index, layout)
    for turn, channels in enumerate((104, 296, 648, 1000)):
        problem = LayerNormProblem((19, channels), added=turn % 2 == 0)
        yield Case(gfx, "layer norm", problem, turn % 2, "apart")
        yield Case(gfx, "layer norm", replace(problem, dtype="bfloat16", affine="float32"))
        for index in range(len(layer_norm_kernel.CONFIGS)):
            yield Case(gfx, "layer norm", BiasedProblem((19, channels), keeps=True), index, "apart")
    for channels, affine in ((328, "none"), (5, "float16"), (2051, "none"), (6155, "float32")):
        problem = LayerNormProblem((3, channels), "float16", channels > 2000, affine)
        yield Case(gfx, "layer norm", problem, layout="apart")
        yield Case(gfx, "layer norm", replace(problem, shape=(1, channels)))
        biased = BiasedProblem((3, channels), "float16", affine=affine, keeps=channels != 328)
        yield Case(gfx, "layer norm", biased, layout="misaligned" if channels == 5 else "apart")
    yield from _modulated_norm(gfx)
    for turn, channels in enumerate((96, 192, 384)):  # Qwen-Image's VAE's, and of several waves
        norm = RmsProblem((19, channels), "bfloat16", affine="bfloat16", silu=True)
        wide = replace(norm, shape=(2, 8 * (128 * (4 + turn) - 3)))
        for problem in (norm, wide, replace(norm, silu=False), replace(wide, silu=False)):
            yield Case(gfx, "layer norm", problem, layout="apart")
            yield Case(gfx, "layer norm", problem, layout="misaligned")
        half = RmsProblem((5, 8 * (128 * (4 + turn) - 3)), silu=turn != 1)
        yield Case(gfx, "layer norm", half)
    # SwinIR's, and what else their kernels serve.
    for shape in ((5, 180), (1, 2051), (5, 6160), (5, 240), (5, 4072)):
        swin = LayerNormProblem(shape, affine="float32")
        yield Case(gfx, "layer norm", swin)
        yield Case(gfx, "layer norm", swin, layout="misaligned")


def _modulated_norm(gfx: str) -> Iterator[Case]:
    """The same, of images that end within a work-group."""
    for index, config in enumerate(layer_norm_kernel.CONFIGS):
        for held in layer_norm_kernel.HELD:
            problem = ModulatedProblem((2, 1, 8 * (config.threads * held - 3)), added=True)
            yield Case(gfx, "layer norm", problem, index, "apart")
    for channels in (328, 648, 1000):
        halves = ModulatedProblem((3, 5, channels), "bfloat16", channels != 648, "bfloat16")
        yield Case(gfx, "layer norm", halves, layout="misaligned")
    for channels in (5, 2051):
        yield Case(gfx, "layer norm", ModulatedProblem((3, 2, channels), added=channels > 5))
    for channels, added in ((1528, False), (1528, True), (6120, False)):  # held as SD 3's are
        problem = ModulatedProblem((2, 3 if channels < 2000 else 1, channels), added=added)
        yield Case(gfx, "layer norm", problem, layout="apart")
    for shape, added in (((2, 3, 1528), False), ((2, 3, 1528), True), ((2, 1, 6120), False)):
        yield Case(gfx, "layer norm", ModulatedProblem(shape, added=added), layout="misaligned")


def heads(gfx: str) -> Iterator[Case]:
    """Every number of work-items that a head has, with idle ones and without; one stream and two;
    groups that are not whole, images that end within one.
    """
    none, own = (False,) * 4, (True, True, False, False)
    for sizes, dtype, normed in (
        ((1, 1, 0, 5, 128), "float16", own),
        ((1, 2, 0, 5, 120), "bfloat16", own),
        ((1, 5, 6, 1, 128), "float16", (True,) * 4),
        ((2, 3, 1, 2, 128), "bfloat16", (True,) * 4),
        ((3, 2, 1, 2, 40), "float16", (False, True, True, False)),
        ((2, 2, 3, 3, 64), "bfloat16", (True,) * 4),
        ((1, 3, 2, 1, 256), "bfloat16", (True,) * 4),
        ((1, 3, 2, 1, 8), "float16", (True,) * 4),
        ((1, 2, 2, 4, 24), "float16", none),
    ):
        problem = HeadsProblem(*sizes, dtype, normed)
        for layout in ("plain", "misaligned")[: 2 if sizes[4] in (40, 64) else 1]:
            yield Case(gfx, "rms norm of heads", problem, layout=layout)
    for rotary in ROTARIES[1:]:
        turned = HeadsProblem(2, 3, 2, 3, 40, "bfloat16", (True, True, False, True), rotary, True)
        yield Case(gfx, "rms norm of heads", turned, layout="misaligned")
        yield Case(gfx, "rms norm of heads", replace(turned, dtype="float16"))
        single = replace(turned, words=0, head_dim=128, normed=own, own_rotary=False)
        yield Case(gfx, "rms norm of heads", single, layout="apart")
        yield Case(gfx, "rms norm of heads", replace(single, dtype="float16", normed=none))
    yield Case(gfx, "rms norm of heads", HeadsProblem(1, 3, 2, 1, 256), layout="misaligned")


def linear(gfx: str) -> Iterator[Case]:
    """Every size with and without a gate, k whole and in parts, both half types: a block of rows
    that is not whole, weights that end within one, chunks of k and a rest.
    """
    arch = by_gfx(gfx)
    assert arch is not None
    every = linear_kernel.sizes(arch, "float16")
    halves = linear_kernel.sizes(arch, "bfloat16")
    for index, size in enumerate(every):
        k, wide = 3 * size.chunk_k + 8, size.block_out
        three = LinearProblem(size.block_rows - 3, k, (24, wide - 8, 8), residual=True)
        gated = LinearProblem(size.block_rows - 3, k, (wide // 2 - 8,), gate=True, residual=True)
        for turn, config in enumerate((index, index + len(every))):  # the latter has parts
            for problem in (three, gated):
                layout = ("plain", "wide")[(turn + index) % 2]
                yield Case(gfx, "linear", problem, config, layout)
                if size in halves:
                    half = replace(problem, dtype="bfloat16", in_place=True)
                    where = halves.index(size) + turn * len(halves)
                    yield Case(gfx, "linear", half, where, layout)
                # A part, or all of k, begins with the rest of a chunk.
                short = replace(problem, k=8 + 2 * size.chunk_k * turn, bias=False, residual=False)
                yield Case(gfx, "linear", short, config)
    for index, size in enumerate(every):
        columns = (24, size.block_out + 8, 8, 16, 72)
        many = LinearProblem(size.block_rows - 3, 3 * size.chunk_k + 8, columns, residual=True)
        yield Case(gfx, "linear", many, index, "wide")
        yield Case(gfx, "linear", replace(many, k=8, bias=False, residual=False), index)
        if size in halves:
            yield Case(gfx, "linear", replace(many, dtype="bfloat16"), halves.index(size))
    few = len(every) - 1
    rows = LinearProblem(every[few].block_rows * 10 + 5, 40, (136,), bias=False)
    yield Case(gfx, "linear", rows, few)  # more blocks of rows than pass along together
    yield Case(gfx, "linear", replace(rows, rows=1, k=648, columns=(8,)), few + len(every))


def linear_gate(gfx: str) -> Iterator[Case]:
    """More than a work-group's, and a rest of one; rows of the residual that lie apart."""
    for problem in (
        LinearProblem(33, 24, (136,), gate=True),
        LinearProblem(7, 16, (8,), "bfloat16", residual=True, gate=True),
        LinearProblem(5, 8, (648,), residual=True, gate=True, in_place=True),
    ):
        yield Case(gfx, "linear gate", problem, layout="wide" if problem.residual else "plain")


ALL = {
    "attention": attention,
    "attention and lse": attention_and_lse,
    "attention backward": attention_backward,
    "softmax": softmax,
    "conv": conv,
    "finish": finish,
    "group norm": group_norm,
    "whole group norm": whole_group_norm,
    "layer norm": layer_norm,
    "linear": linear,
    "linear gate": linear_gate,
    "conv epilogue": conv_epilogue,
    "conv over time": conv_over_time,
    "conv rows": conv_rows,
    "rms norm of heads": heads,
}


@cache
def shipped_specs(gfx: str) -> frozenset[KernelSpec]:
    """All that is compiled ahead or searched for a GPU; of a UNet's convolutions those that Auto
    launches.
    """
    arch = by_gfx(gfx)
    assert arch is not None
    found: set[KernelSpec] = set()
    kernels = (
        attention_kernel,
        backward_kernel,
        conv_kernel,
        norm_kernel,
        layer_norm_kernel,
        linear_kernel,
    )
    for module in kernels:
        found |= {*module.shipped_specs(arch), *module.searched_specs(arch)}
    parts = ("unet", SD3_PART, UPSCALER_PART, SWINIR_PART, QWEN_PART)
    return frozenset(found.union(*(part_specs(part, arch) for part in parts)))
