"""Cases at the edges of tiles, of one to three images, heads and weights, where boundaries.py found
that none of cases.py, conv_cases.py and gradients.py has them.

They are not among those of coverage.py, nor executed by other compilers than the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lib_rocm_sd.arch import Arch, by_gfx
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel as backward_kernel
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.kernel import ConvConfig
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm import whole as whole_norm
from lib_rocm_sd.ops.group_norm.problem import FinalizeProblem, GroupNormProblem
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.gradients import GROUP, LAYER

MASKED = tuple(zip(attention_kernel.MASK_KINDS[1:], (40, 64, 160, 512), strict=True))


def _arch(gfx: str) -> Arch:
    arch = by_gfx(gfx)
    assert arch is not None
    return arch


def _edges(queries: int, keys: int) -> tuple[tuple[int, int], ...]:
    """Lengths, by what a work-group has of each: of both 0, 1 and -1 beyond whole ones; one, two
    and three of each.
    """
    return (queries, 2 * keys + 1), (queries + 1, 2 * keys), (3 * queries - 1, keys - 1)


def attention(gfx: str) -> Iterator[Case]:
    """Each size of a tile, fetched ahead or not, by the first config that has it."""
    arch, seen = _arch(gfx), set[tuple[object, ...]]()
    for head_dim in attention_kernel.SHIPPED_HEAD_DIMS:
        for index, config in enumerate(attention_kernel.ordered(arch, "float16", head_dim)):
            sizes = {("queries", config.block_q), ("keys", config.block_k, config.ahead)}
            if sizes <= seen:
                continue
            seen |= sizes
            for turn, lengths in enumerate(_edges(config.block_q, config.block_k)):
                problem = AttentionProblem((1, 3, 1)[turn], 1, *lengths, head_dim)
                yield Case(gfx, "attention", problem, index, seed=turn)
    for turn, (mask, head_dim) in enumerate(MASKED):
        config = attention_kernel.ordered(arch, "float16", head_dim, mask)[0]
        lengths = (*_edges(config.block_q, config.block_k), (1, config.block_k + 1))[turn]
        problem = AttentionProblem(3, 1, *lengths, head_dim, "float16", mask)
        yield Case(gfx, "attention", problem, seed=turn, mask_of="whole")


def attention_and_lse(gfx: str) -> Iterator[Case]:
    """The log-sum-exps of as many queries, with a mask and without."""
    for head_dim, mask in ((40, "none"), (64, "bool")):
        config = attention_kernel.ordered(_arch(gfx), "float16", head_dim, mask)[0]
        for turn, lengths in enumerate(_edges(config.block_q, config.block_k)):
            sizes = ((1, 3), (3, 1), (1, 1))[turn]
            problem = AttentionProblem(*sizes, *lengths, head_dim, "float16", mask)
            yield Case(gfx, "attention and lse", problem, seed=turn)


def attention_backward(gfx: str) -> Iterator[Case]:
    """Each size of a tile of both passes, by the first head_dim that has it; masks beside one head
    and several images, and the other way around.
    """
    arch, seen = _arch(gfx), set[tuple[object, ...]]()
    for head_dim in (*backward_kernel.SHIPPED_HEAD_DIMS, 256):
        config = backward_kernel.configs(arch, head_dim)[0]
        sizes: set[tuple[object, ...]] = set()
        for name in backward_kernel.PASSES:
            each = config.of(name)
            sizes |= {(name, each.rows), (name, each.block, each.ahead)}
        if sizes <= seen:
            continue
        seen |= sizes
        for turn, lengths in enumerate(_edges(config.queries.rows, config.keys.rows)):
            problem = AttentionProblem(1, 1, *lengths, head_dim)
            yield Case(gfx, "attention backward", problem, seed=turn)
    for turn, (mask, head_dim) in enumerate((("none", 40), *MASKED[:3], ("float32", 64))):
        lengths = ((65, 32), (64, 33), (63, 63))[turn % 3]
        problem = AttentionProblem(3, 1 + (mask == "none"), *lengths, head_dim, "float16", mask)
        yield Case(gfx, "attention backward", problem, seed=turn)
        problem = replace(problem, batch=problem.heads, heads=3, seq_q=13, seq_k=33)
        yield Case(gfx, "attention backward", problem, seed=turn)


def softmax(gfx: str) -> Iterator[Case]:
    """Rows of two heads beside one and three."""
    for batch, heads, keys in ((3, 1, 7), (1, 3, 5)):
        yield Case(gfx, "softmax", AttentionProblem(batch, heads, 2, keys, 16))


def conv(gfx: str) -> Iterator[Case]:
    """With packed weights and as they lie: rows and columns of each kind, channels of each block;
    channels, pixels and chunks of which a split has no rest, and chunks of which it has one.
    """
    arch = _arch(gfx)
    for in_rows in (False, True):
        for kind in conv_kernel.KINDS:
            yield from _images(arch, ConvProblem(kind, 1, 64, 64, 32, 72, in_rows=in_rows))
        yield from _channels(arch, ConvProblem("3x3", 1, 2, 6, 16, 16, in_rows=in_rows))
    plain = ConvProblem("3x3", 1, 4, 4, 176, 64, in_rows=True)
    yield _case(arch, plain, splits=2)
    wide = replace(plain, in_channels=192, out_channels=72)
    whole = [config for config in _configs(arch, wide) if config.splits == 1]
    largest = max(config.chunk_c for config in whole)
    yield _case(arch, wide, splits=1, chunk_c=largest)
    narrow = ConvProblem("3x3", 1, 2, 6, 16, 32, epilogue="leaky relu")
    for count in (31, 63, 64):
        yield _case(arch, replace(narrow, out_channels=count))
    rows = max(config.rows for config in _configs(arch, narrow))
    for height in (rows - 1, rows, rows + 1):
        yield _case(arch, replace(narrow, height=height), rows=rows)


def _configs(arch: Arch, problem: ConvProblem) -> Sequence[ConvConfig]:
    return MatrixConv(problem.kind).configs(arch, problem)


def _case(arch: Arch, problem: ConvProblem, **sizes: int) -> Case:
    """By the first config that has these."""
    index = next(
        index
        for index, config in enumerate(_configs(arch, problem))
        if all(getattr(config, name) == size for name, size in sizes.items())
    )
    values = "large" if problem.out_channels > 1 else "random"  # that are in the second channel
    return Case(arch.gfx, "conv", problem, index, values=values)


def _images(arch: Arch, plain: ConvProblem) -> Iterator[Case]:
    """By the narrowest config with each number of rows."""
    configs = {config.rows: config for config in _by_width(arch, plain)}
    first = replace(plain, statistics=True)
    three = replace(plain, batch=3, embedding=plain.kind != "upsample")
    if plain.kind == "3x3":
        shortcut = "conv" if plain.in_rows else "identity"
        three = replace(three, norm=True, shortcut=shortcut, out_channels=64, shortcut_channels=64)
        three = replace(three, statistics=not plain.in_rows, in_place=not plain.in_rows)
    step = 2 if plain.kind in conv_kernel.STRIDED else 1
    for rows, config in configs.items():
        sizes = [(first, rows, 33), (three, rows + 1, 16), (first, 3 * rows - 1, 31)]
        for problem, height, width in sizes[: 2 if plain.kind == conv_kernel.STRIDED[0] else 3]:
            if plain.kind == "upsample" and plain.in_rows:  # which is cut like what it makes
                height, width = (height + 1) // 2, (width + 1) // 2
            problem = replace(problem, height=height * step, width=width * step)
            yield _case(arch, problem, rows=rows, block_co=config.block_co)


def _by_width(arch: Arch, problem: ConvProblem) -> list[ConvConfig]:
    """Unsplit, the widest first."""
    whole = [config for config in _configs(arch, problem) if config.splits == 1]
    return sorted(whole, key=lambda config: -config.block_co)


def _channels(arch: Arch, plain: ConvProblem) -> Iterator[Case]:
    """A whole block of channels of each size, one less, and one more than one or two blocks."""
    blocks = sorted(
        {
            each.block_co
            for n in (1, 128)
            for each in _by_width(arch, replace(plain, out_channels=n))
        }
    )
    for turn, block in enumerate(blocks):
        more = 1 if block == 16 else block * (1 + (turn == 1)) + 1
        for count in (block, block - 1, more):
            problem = replace(plain, out_channels=count, embedding=True)
            yield _case(arch, problem, block_co=block)


def finish(gfx: str) -> Iterator[Case]:
    """One image and three; columns and channels of work-groups."""
    plain = ConvProblem("3x3", 3, 1, 28, 16, 264, embedding=True)
    added = replace(plain, shortcut="identity", shortcut_channels=264, statistics=True)
    for problem in (
        plain,
        replace(plain, batch=1, width=57),
        added,
        replace(added, batch=1, embedding=False),
        replace(plain, kind="upsample", width=14, statistics=True, embedding=False),
        replace(plain, kind="upsample", batch=1, width=14),
        replace(added, batch=1, width=3, out_channels=520, shortcut_channels=520),
        replace(plain, batch=2, width=2, out_channels=1032, embedding=False),
    ):
        yield Case(gfx, "finish pass", problem)
    whole = ConvProblem("3x3", 3, 2, 3, 16, 32, "float16", True, "conv", 32, embedding=True)
    yield Case(gfx, "finish", whole)
    yield Case(gfx, "finish", replace(whole, batch=1))


def group_norm(gfx: str) -> Iterator[Case]:
    """By the first config: parts, batches of pixels, vectors of channels; one image and three."""
    last = GroupNormProblem(1, 264, 1, 113, groups=33)
    first = GroupNormProblem(3, 2, 1, 16385, channels_last=False, groups=2)
    for problem in (
        last,
        replace(last, batch=3, width=28, silu=True),
        replace(last, width=385),
        replace(last, channels=520, width=7, groups=65),
        replace(last, channels=1032, width=9, groups=1),
        replace(last, channels=4033, width=2, groups=37),
        replace(last, channels=8, width=16513, groups=1),
        replace(first, batch=1, width=24576, silu=True),
        replace(first, channels=30, groups=2, width=23),
        replace(first, batch=1, width=16385),
    ):
        yield Case(gfx, "group norm", problem)
    for batch, parts, channels, groups in (
        *((3, 257, 4, 4), (1, 255, 4, 4), (1, 64, 8, 2)),
        *((1, 129, 64, 1), (1, 131, 64, 1)),
    ):
        yield Case(gfx, "finalize", FinalizeProblem(batch, parts, channels, groups))


def whole_group_norm(gfx: str) -> Iterator[Case]:
    """Channels a group as in Stable Diffusion's UNets; every config full, and but for one pixel."""
    arch = _arch(gfx)
    for index, config in enumerate(whole_norm.CONFIGS):
        if not whole_norm.fits(arch, config, 8):
            continue
        channels, groups = ((80, 4), (120, 4), (80, 1), (40, 4), (72, 2))[index]
        most = config.pixels(whole_norm.tiling(channels, groups, 8).width)
        for pixels in (most, most - 1):
            problem = GroupNormProblem(1, channels, 1, pixels, groups=groups, silu=pixels == most)
            yield Case(gfx, "whole group norm", problem, index)
    plain = GroupNormProblem(3, 120, 3, 7, groups=6)
    yield Case(gfx, "whole group norm", plain)
    yield Case(gfx, "whole group norm", replace(plain, silu=True, added=True))


def layer_norm(gfx: str) -> Iterator[Case]:
    """Rows and vectors of work-groups."""
    for turn, (rows, channels) in enumerate(_ROWS):
        yield Case(gfx, "layer norm", LayerNormProblem((rows, channels), added=turn % 2 == 0))
        if turn < 2:
            yield Case(gfx, "layer norm", BiasedProblem((rows, channels), keeps=turn == 0))


_ROWS = (
    *((32, 128), (31, 120), (33, 192), (1, 184), (65, 160), (2, 152), (2, 136), (3, 168)),
    *((2, 9), (3, 15), (1, 12304)),
)
"""All of 4, 5 and 6 vectors held, one less, one more; read twice."""


def layer_norm_backward(gfx: str) -> Iterator[Case]:
    """The same; rows of parts; channels of few parts and of many."""
    more = ((64, 256), (65, 256), (63, 256), (1057, 8), (2, 993), (1, 257), (3, 255), (1, 512))
    many = ((288, 16), (288, 17), (288, 15), (288, 40))
    for turn, shape in enumerate((*_ROWS, *more, *many)):
        added, wanted = turn % 2 == 0, turn % 5 != 4
        yield Case(gfx, LAYER, LayerNormBackwardProblem(shape, added=added, wanted=wanted))


def group_norm_backward(gfx: str) -> Iterator[Case]:
    """As of the forward pass; groups of as many channels as are added up at a time."""
    last = GroupNormBackwardProblem(3, 264, 1, 28, silu=True, groups=33)
    first = GroupNormBackwardProblem(3, 130, 1, 23, channels_last=False, groups=2)
    for problem in (
        last,
        replace(last, batch=1, width=385, silu=False),
        replace(last, batch=1, width=113, wanted=False),
        replace(last, batch=3, channels=127, width=2, groups=1, wanted=False),
        replace(last, batch=2, channels=520, width=7, groups=65, wanted=False),
        replace(last, batch=1, channels=1032, width=9, groups=1),
        replace(last, batch=1, channels=4033, width=2, groups=37),
        replace(last, batch=1, channels=8, width=16513, groups=1),
        replace(last, batch=1, width=111),
        first,
        replace(first, batch=1, channels=192, width=8, groups=1),
        replace(first, batch=1, channels=2, width=16384),
        replace(first, batch=1, channels=2, width=16399, silu=True),
        replace(first, batch=1, channels=1, width=24576, groups=1),
    ):
        yield Case(gfx, GROUP, problem)


def linear(gfx: str) -> Iterator[Case]:
    """Rows, k and columns of each size, with a gate and without; two weights; parts of k."""
    every = linear_kernel.sizes(_arch(gfx), "float16")
    for index, size in enumerate(every):
        rows, k, wide = size.block_rows, size.chunk_k, size.block_out
        two = LinearProblem(rows, 2 * k, (wide, 2 * wide + 8), residual=True, in_place=True)
        yield Case(gfx, "linear", two, index)
        gated = LinearProblem(rows + 1, k + 8, (wide // (1 + index % 2) + 8,), gate=True)
        yield Case(gfx, "linear", gated, index)
        gated = replace(gated, rows=2 * rows - 1, k=2 * k - 8, columns=(wide // 2,))
        yield Case(gfx, "linear", gated, index)
    few, size = len(every) - 1, every[-1]
    plain = LinearProblem(32, 5 * size.chunk_k, (64, 64), bias=False)
    fused = LinearProblem(15, 7 * size.chunk_k, (136,), residual=True, in_place=True)
    for problem in (plain, fused):
        yield Case(gfx, "linear", problem, few + len(every))
    yield Case(gfx, "linear", replace(plain, rows=57 * size.block_rows, k=8, columns=(8,)), few)
    for rows, columns in ((16, 128), (15, 136), (1, 2056)):
        yield Case(gfx, "linear gate", LinearProblem(rows, 8, (columns,), gate=True))


ALL: dict[str, Callable[[str], Iterator[Case]]] = {
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
    LAYER: layer_norm_backward,
    GROUP: group_norm_backward,
}
