"""The cost model's estimate of a UNet's step on a card that nobody measured it on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lib_rocm_sd.catalog.unet import Join, Layer, Problem
from lib_rocm_sd.machine.estimate import Estimate, Target, Tiles, attended, convolved
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem, NormProblem
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.ops.linear.library import LibraryLinear
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import LinearProblem, told

KINDS = {
    "convolution": (ConvProblem,),
    "linear": (LinearProblem,),
    "attention": (AttentionProblem,),
    "norm": (GroupNormProblem, NormProblem, LayerNormProblem),
    "concatenation": (Join,),
}

ASSUMPTIONS = (
    "The card runs at the highest clock that its maker names, its memory at full bandwidth.",
    "Each launch takes the longer of its arithmetic and its memory traffic; launches follow each"
    " other without gaps, and the CPU submits them in no time.",
    "Arithmetic is that of the machine code of our own kernels, with the config that runs first, in"
    " fp16, as for the VAE (inspect --estimate vae). Where a library's product comes first under"
    " Auto, it is taken to be as fast as ours, a convolution as ours with packed weights; what our"
    " passes around it move is added.",
    "Memory traffic: inputs, weights and outputs once each; nothing stays in a cache between"
    " launches, everything within one. Sums of parts are written and read once.",
    "Norms, what adds sums of parts, and the host's concatenations: memory traffic alone.",
    "Not counted: SiLU of the embedding, merging of statistics, what others have patched, the"
    " scheduler.",
    "Layout changes: around each convolution, 1x1 ones too, torch's library brings the image into"
    " the other layout and what it makes back: input and output each read and written once. A"
    " library that computes in the layout of the image moves none of it; weights are not counted.",
)


@dataclass(frozen=True)
class Counted:
    """A layer, how often a step has it, and its launches."""

    layer: Layer
    count: int
    launches: tuple[Estimate, ...]

    @property
    def title(self) -> str:
        """What tables call it."""
        return titled(self.layer.problem)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        problem = self.layer.problem
        return next(name for name, types in KINDS.items() if isinstance(problem, types))

    @property
    def ms(self) -> float:
        """Milliseconds of all its occurrences together."""
        return self.count * sum(each.ms for each in self.launches)

    @property
    def gflop(self) -> float:
        """GFLOP of all its occurrences together."""
        return self.count * sum(each.gflop for each in self.launches)


def titled(problem: Problem) -> str:
    """A layer by its sizes."""
    p = problem
    if isinstance(p, ConvProblem):
        size = f"{p.in_channels} -> {p.out_channels}, {p.height}x{p.width}"
        extra = {"none": "", "identity": " + shortcut", "conv": f" + 1x1 {p.shortcut_channels}"}
        return f"{p.kind} {size}{extra[p.shortcut]}"
    if isinstance(p, LinearProblem):
        return f"linear {p.rows} x {p.k} -> {told(p.columns)}{' GEGLU' * p.gate}"
    if isinstance(p, AttentionProblem):
        heads = f"{p.batch}x{p.heads} heads of {p.head_dim}"
        return f"attention {p.seq_q} x {p.seq_k}, {heads}"
    if isinstance(p, LayerNormProblem):
        return f"layer norm {p.rows} x {p.channels}"
    what = "concatenation" if isinstance(p, Join) else "group norm"
    statistics = " statistics" if isinstance(p, NormProblem) else ""
    return f"{what}{statistics} {p.channels}, {p.height}x{p.width}"


def counted(layers: Sequence[Layer], target: Target) -> list[Counted]:
    """Each layer that is different, in the order of the step. Raises what `target.work_of` does."""
    count = Counter(layers)
    return [Counted(each, n, tuple(_launches(each.problem, target))) for each, n in count.items()]


def layout_bytes(layers: Sequence[Layer]) -> int:
    """What changes of layout around the convolutions of a step move; see ASSUMPTIONS."""
    return sum(2 * 2 * _around(layer) for layer in layers)


def _around(layer: Layer) -> int:
    """Values of all inputs and outputs of the model's convolutions that a layer stands for."""
    p = layer.problem
    if isinstance(p, LinearProblem):
        return p.rows * (p.k + p.all_columns) * layer.pointwise
    if not isinstance(p, ConvProblem):
        return 0
    enlarged = 4 if p.kind == "upsample" else 1
    values = enlarged * p.in_values + p.out_values
    if p.shortcut == "conv":
        values += p.out_values // p.out_channels * p.shortcut_channels + p.out_values
    return values


def _launches(p: Problem, target: Target) -> list[Estimate]:
    if isinstance(p, ConvProblem):
        return _conv(p, target)
    if isinstance(p, LinearProblem):
        return _linear(p, target)
    if isinstance(p, AttentionProblem):
        return [_attention(p, target)]
    if isinstance(p, LayerNormProblem):
        values, passes = p.rows * p.channels, 2
    else:
        values, passes = p.batch * p.height * p.width * p.channels, 2
        if isinstance(p, NormProblem):
            passes = 1
        elif isinstance(p, GroupNormProblem):  # a small image is read but once
            passes = 2 if _is_small(p, target) else 3
    return [moving(titled(p), 2 * passes * values, target)]


def _is_small(image: GroupNormProblem, target: Target) -> bool:
    """Whether a norm of such an image, and SiLU, are one launch."""
    return isinstance(KernelGroupNorm().configs(target.arch, image)[0], WholeConfig)


def _is_first(kind: type, op: Op[Any, Any], target: Target, problem: Any) -> bool:
    """Whether a variant of this kind runs where nothing was measured."""
    return isinstance(op.able(target.arch, problem)[0], kind)


def moving(name: str, moved: float, target: Target) -> Estimate:
    """A launch of which only the memory traffic is counted."""
    ms = target.bytes_ms(moved)
    return Estimate(name, "memory", 0.0, 0.0, 0.0, 0.0, ms, 0.0, 1.0)


def _conv(p: ConvProblem, target: Target) -> list[Estimate]:
    arch, variant, as_run = target.arch, MatrixConv(p.kind), p
    ours = _is_first(MatrixConv, CONVS[p.kind], target, p)
    if not ours:
        as_run = replace(p, in_channels=-(-p.in_channels // 16) * 16, in_rows=False)
    config = variant.configs(arch, as_run)[0]
    spec = variant.specs(arch, as_run, config)[0]
    rows, columns = p.out_size
    kind = "3x3" if ours else p.kind
    cut = conv_kernel.tiling(kind, rows, columns, conv_kernel.padded(p.out_channels), config)
    taps = 2 if kind == "upsample" else 3
    taken = -(-p.in_channels // 16)
    through = {"none": 0, "identity": 1, "conv": -(-p.shortcut_channels // 16)}[p.shortcut]
    depth = -(-(taps * taps * taken + through) // config.splits)
    chunks = -(-16 * taken // dict(spec.defines)["CHUNK_C"] // config.splits)
    tiles = Tiles(
        cut.parts * cut.blocks_co * p.batch * config.splits,
        config.block,
        depth * config.tiles_co * config.tiles_pix,
        (chunks, chunks * taps, chunks * taps * taps),
    )
    title = (
        f"{config.waves_co}x{config.waves_pix} waves, {config.tiles_co}x{config.tiles_pix} tiles"
        + (f", {config.splits} parts" if config.splits > 1 else "")
    )
    shortcut = p.batch * rows * columns * p.shortcut_channels
    extra = p.shortcut_channels if p.shortcut == "conv" else 0
    weights = p.out_channels * (9 * p.in_channels + extra)
    added = shortcut if p.shortcut == "identity" else 0
    sums = 4 * config.splits * p.out_values if config.splits > 1 else 0
    read = p.in_values + weights + shortcut
    moved = 2 * read + (sums - 2 * added if sums else 2 * p.out_values)
    launches = [convolved(target, spec, title, tiles, p.flops, moved).estimate(titled(p), target)]
    if sums:
        launches.append(moving("sum of its parts", sums + 2 * (p.out_values + added), target))
    image = GroupNormProblem(p.batch, p.in_channels, *p.out_size)
    alone = not ours and p.embedding and _is_small(image, target)  # see compute.is_librarys
    if not ours and not alone and (p.embedding or p.statistics or p.shortcut != "none"):
        launches.append(moving("what is added", 2 * 2 * p.out_values, target))
    if not ours and p.norm:
        passes = 1 if alone else 2  # the norm has read it
        launches.append(moving("its norm, applied", 2 * passes * p.in_values, target))
    return launches


def _linear(p: LinearProblem, target: Target) -> list[Estimate]:
    arch, variant = target.arch, MatrixLinear()
    config = variant.configs(arch, p)[0]
    spec = variant.specs(arch, p, config)[0]
    shape = (p.rows, p.k, p.columns, p.gate)
    cut = linear_kernel.tiling(*shape, config)
    depth = cut.part_chunks * config.chunk_k // 16
    products = depth * config.tiles_out * config.tiles_rows
    tiles = Tiles(cut.grid, config.block, products, (cut.part_chunks,))
    title = f"{config.block_out} columns, {config.block_rows} rows" + (
        f", {cut.parts} parts" if cut.parts > 1 else ""
    )
    made = p.rows * p.all_columns * (1 + p.residual)
    read = p.rows * p.k + p.k * p.weight_rows
    sums = linear_kernel.partial_bytes(*shape, config)
    moved = 2 * read + (sums or 2 * made)
    launches = [convolved(target, spec, title, tiles, p.flops, moved).estimate(titled(p), target)]
    if sums:
        launches.append(moving("sum of its parts", sums + 2 * made, target))
    if _is_first(LibraryLinear, LINEAR, target, p):
        launches.append(moving("its gate", 2 * 3 * made, target))
    return launches


def _attention(p: AttentionProblem, target: Target) -> Estimate:
    heads, variant = p.batch * p.heads, MatrixAttention()
    config = variant.configs(target.arch, p)[0]
    spec = variant.spec(p, config)
    groups = heads * config.tiles(p.seq_q)
    moved = 2 * heads * p.head_dim * (2 * p.seq_q + 2 * p.seq_k)
    launch = attended(target, spec, config, groups, p.seq_k, p.flops, moved)
    return launch.estimate(titled(p), target)
