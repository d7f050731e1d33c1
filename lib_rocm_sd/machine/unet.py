"""The cost model's estimate of a UNet's step on a card that nobody measured it on. Needs torch: the
ops say which config Auto runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lib_rocm_sd.machine.estimate import Estimate, Target, Tiles, attended, convolved
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.layers import problem_of_layer as conv_problem
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.ops.linear.library import LibraryLinear
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import problem_of_layer as linear_problem
from lib_rocm_sd.unet_step import Attention, Conv, GroupNorm, Join, Layer, LayerNorm, Linear

DTYPE = "float16"
KINDS = {
    "convolution": (Conv,),
    "linear": (Linear,),
    "attention": (Attention,),
    "norm": (GroupNorm, LayerNorm),
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
    def kind(self) -> str:
        """One of KINDS."""
        return next(name for name, types in KINDS.items() if isinstance(self.layer, types))

    @property
    def ms(self) -> float:
        """Milliseconds of all its occurrences together."""
        return self.count * sum(each.ms for each in self.launches)

    @property
    def gflop(self) -> float:
        """GFLOP of all its occurrences together."""
        return self.count * sum(each.gflop for each in self.launches)


def counted(layers: Sequence[Layer], target: Target) -> list[Counted]:
    """Each layer that is different, in the order of the step. Raises what `target.work_of` does."""
    found = Counter(layers)
    return [Counted(each, count, tuple(_launches(each, target))) for each, count in found.items()]


def layout_bytes(layers: Sequence[Layer]) -> int:
    """What changes of layout around the convolutions of a step move; see ASSUMPTIONS."""
    return sum(2 * 2 * _around(layer) for layer in layers)


def _around(layer: Layer) -> int:
    """Values of all inputs and outputs of the model's convolutions that a layer stands for."""
    if isinstance(layer, Linear):
        return layer.rows * (layer.k + sum(layer.columns)) * layer.pointwise
    if not isinstance(layer, Conv):
        return 0
    enlarged = 4 if layer.kind == "upsample" else 1
    found = enlarged * layer.in_values + layer.out_values
    if layer.shortcut == "conv":
        found += layer.out_values // layer.out_channels * layer.shortcut_channels + layer.out_values
    return found


def _launches(layer: Layer, target: Target) -> list[Estimate]:
    if isinstance(layer, Conv):
        return _conv(layer, target)
    if isinstance(layer, Linear):
        return _linear(layer, target)
    if isinstance(layer, Attention):
        return [_attention(layer, target)]
    passes = _read_and_written(layer, target) if isinstance(layer, GroupNorm) else 2
    return [moving(str(layer), 2 * passes * layer.values, target)]


def _read_and_written(layer: GroupNorm, target: Target) -> int:
    """How often the image is; where it is small, it is read but once."""
    if not layer.applied:
        return 1
    small = _is_small((layer.batch, layer.channels, layer.height, layer.width), target)
    return 2 if small else 3


def _is_small(sizes: tuple[int, int, int, int], target: Target) -> bool:
    """Whether a norm of such an image (N, C, H, W), and SiLU, are one launch."""
    config = KernelGroupNorm().configs(target.arch, GroupNormProblem(*sizes))[0]
    return isinstance(config, WholeConfig)


def _under_auto(op: Op[Any, Any], target: Target, problem: Any) -> Any:
    """The variant that comes first where nothing was measured."""
    arch = target.arch
    able = [variant for variant in op.variants if not variant.refusals(arch, problem)]
    return max(able, key=lambda variant: variant.preference_for(arch, problem))


def moving(name: str, moved: float, target: Target) -> Estimate:
    """A launch of which only the memory traffic is counted."""
    ms = target.bytes_ms(moved)
    return Estimate(name, "memory", 0.0, 0.0, 0.0, 0.0, ms, 0.0, 1.0)


def _conv(layer: Conv, target: Target) -> list[Estimate]:
    arch, problem = target.arch, conv_problem(layer)
    variant, ours = MatrixConv(layer.kind), True
    if not isinstance(_under_auto(CONVS[layer.kind], target, problem), MatrixConv):
        ours, wide = False, -(-layer.in_channels // 16) * 16
        problem = replace(problem, in_channels=wide, in_rows=False)
    config = variant.configs(arch, problem)[0]
    spec = variant.specs(arch, problem, config)[0]
    rows, columns = layer.out_size
    out = conv_kernel.padded(layer.out_channels)
    kind = "3x3" if ours else layer.kind
    cut = conv_kernel.tiling(kind, rows, columns, out, config)
    taps = 2 if kind == "upsample" else 3
    taken = -(-layer.in_channels // 16)
    through = {"none": 0, "identity": 1, "conv": -(-layer.shortcut_channels // 16)}[layer.shortcut]
    depth = -(-(taps * taps * taken + through) // config.splits)
    chunks = -(-16 * taken // dict(spec.defines)["CHUNK_C"] // config.splits)
    tiles = Tiles(
        cut.parts * cut.blocks_co * layer.batch * config.splits,
        config.block,
        depth * config.tiles_co * config.tiles_pix,
        (chunks, chunks * taps, chunks * taps * taps),
    )
    title = (
        f"{config.waves_co}x{config.waves_pix} waves, {config.tiles_co}x{config.tiles_pix} tiles"
        + (f", {config.splits} parts" if config.splits > 1 else "")
    )
    shortcut = layer.batch * rows * columns * layer.shortcut_channels
    extra = layer.shortcut_channels if layer.shortcut == "conv" else 0
    weights = layer.out_channels * (9 * layer.in_channels + extra)
    added = shortcut if layer.shortcut == "identity" else 0
    sums = 4 * config.splits * layer.out_values if config.splits > 1 else 0
    read = layer.in_values + weights + shortcut
    moved = 2 * read + (sums - 2 * added if sums else 2 * layer.out_values)
    found = [convolved(target, spec, title, tiles, layer.flops, moved).estimate(str(layer), target)]
    if sums:
        found.append(moving("sum of its parts", sums + 2 * (layer.out_values + added), target))
    image = (layer.batch, layer.in_channels, *layer.out_size)
    alone = not ours and layer.embedding and _is_small(image, target)  # see compute.is_librarys
    if not ours and not alone and (layer.embedding or layer.statistics or layer.shortcut != "none"):
        found.append(moving("what is added", 2 * 2 * layer.out_values, target))
    if not ours and layer.norm:
        passes = 1 if alone else 2  # the norm has read it
        found.append(moving("its norm, applied", 2 * passes * layer.in_values, target))
    return found


def _linear(layer: Linear, target: Target) -> list[Estimate]:
    arch, problem = target.arch, linear_problem(layer)
    variant = MatrixLinear()
    config = variant.configs(arch, problem)[0]
    spec = variant.specs(arch, problem, config)[0]
    shape = (layer.rows, layer.k, layer.columns, layer.gate)
    cut = linear_kernel.tiling(*shape, config)
    depth = cut.part_chunks * config.chunk_k // 16
    products = depth * config.tiles_out * config.tiles_rows
    tiles = Tiles(cut.grid, config.block, products, (cut.part_chunks,))
    title = f"{config.block_out} columns, {config.block_rows} rows" + (
        f", {cut.parts} parts" if cut.parts > 1 else ""
    )
    columns = sum(layer.columns)
    made = layer.rows * columns * (1 + layer.residual)
    read = layer.rows * layer.k + layer.k * columns * (1 + layer.gate)
    sums = linear_kernel.partial_bytes(*shape, config)
    moved = 2 * read + (sums or 2 * made)
    found = [convolved(target, spec, title, tiles, layer.flops, moved).estimate(str(layer), target)]
    if sums:
        found.append(moving("sum of its parts", sums + 2 * made, target))
    if isinstance(_under_auto(LINEAR, target, problem), LibraryLinear):
        found.append(moving("its gate", 2 * 3 * made, target))
    return found


def _attention(layer: Attention, target: Target) -> Estimate:
    arch, heads = target.arch, layer.batch * layer.heads
    problem = AttentionProblem(
        layer.batch, layer.heads, layer.seq_q, layer.seq_k, layer.head_dim, DTYPE, "none"
    )
    variant = MatrixAttention()
    config = variant.configs(arch, problem)[0]
    spec = variant.spec(problem, config)
    groups = heads * config.tiles(layer.seq_q)
    moved = 2 * heads * layer.head_dim * (2 * layer.seq_q + 2 * layer.seq_k)
    return attended(target, spec, config, groups, layer.seq_k, layer.flops, moved).estimate(
        str(layer), target
    )
