"""A cost model's estimates of a decode and of a UNet's step, on cards that nobody measured them on.

Each launch takes as long as its arithmetic, from the machine code of the config that would be
launched, or its memory traffic, whichever is longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lib_rocm_sd.arch import Arch, Card
from lib_rocm_sd.catalog.unet import Join, Layer, Problem
from lib_rocm_sd.catalog.vae import Layer as VaeLayer
from lib_rocm_sd.lab.cycles import Cycles, rates_of
from lib_rocm_sd.lab.listing import listing
from lib_rocm_sd.lab.loops import KernelWork, LoopWork, analysed
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec, Op
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem, NormProblem
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.layer_norm.heads import HeadsProblem
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.problem import LinearProblem, told
from lib_rocm_sd.ops.linear.torch import LibraryLinear
from lib_rocm_sd.runtime import build

LIBRARY_SHARE = 0.5
"""Share of the card's peak that a GEMM of torch's library is assumed to reach."""
SIMDS = 4
"""SIMDs of a WGP (RDNA) or CU (CDNA)."""
_TILE_FLOPS = 8192
ATTENTION_PASSES = 20
"""Readings and writings of the image around attention: norms, projections, addition."""

ASSUMPTIONS = (
    "The card runs at the highest clock that its maker names, its memory at full bandwidth.",
    "Each launch takes the longer of its arithmetic and its memory traffic; launches follow each"
    " other without gaps.",
    "Arithmetic: the loop of the kernel with most matrix cycles runs as often as the problem has"
    " products for it, the loops around it as often as there are chunks and taps, what stands"
    " outside of loops once. Of a branch in attention's loops both sides count, elsewhere those of"
    " the cheapest pass that reads or writes memory. Waves are enough to hide all latency, so a"
    " real card will be slower; work-groups go to WGPs (RDNA) or CUs (CDNA) in full rounds.",
    "Units overlap as in each family's `bound` (see the notes of inspect): serial on RDNA,"
    " overlapped on CDNA; both are given.",
    "Memory traffic: inputs, weights and outputs once each; nothing stays in a cache between"
    " launches, everything within one.",
    f"The 1x1 convolutions around attention are torch's GEMM at {LIBRARY_SHARE:.0%} of the peak,"
    f" their norms and additions {ATTENTION_PASSES} passes over the image.",
    "The config that Auto runs, our kernels only, in half precision, one image, whole frame; not"
    " counted: launches' own cost, merging of statistics, weight packing, Python.",
)

UPSCALER_ASSUMPTIONS = (
    *ASSUMPTIONS[:5],
    "SwinIR: a library's linear layers are taken to be as fast as ours, norms are memory traffic"
    " alone; not counted: GELU, 1x1 convolutions, and bringing pixels into the order of windows.",
    ASSUMPTIONS[-1],
)


@dataclass(frozen=True)
class Estimate:
    """One launch. `serial_ms`, `overlapped_ms`: arithmetic if units never or always overlap.

    `bound` is the hot loop's; `padding`: products computed for each one needed.
    """

    name: str
    config: str
    gflop: float
    compute_ms: float
    serial_ms: float
    overlapped_ms: float
    memory_ms: float
    bound: float
    padding: float

    @property
    def ms(self) -> float:
        """The longer of both."""
        return max(self.compute_ms, self.memory_ms)


@dataclass(frozen=True)
class Target:
    """What it is estimated for, and how a kernel's work there is found out."""

    arch: Arch
    card: Card
    work_of: Callable[[KernelSpec], KernelWork]

    @property
    def peak_tflops(self) -> float:
        """Half precision, at the highest clock."""
        operations = self.card.cu_count * rates_of(self.arch).half_operations
        return operations * self.card.clock_mhz * 1e-6

    @property
    def places(self) -> int:
        """Where work-groups live: work-group processors of two compute units on RDNA, else compute
        units; each has four SIMDs.
        """
        count = self.card.cu_count
        return count // 2 if self.arch.family.startswith("RDNA") else count

    def cycles_ms(self, cycles: float) -> float:
        """Milliseconds of so many cycles."""
        return cycles / self.card.clock_mhz * 1e-3

    def bytes_ms(self, moved: float) -> float:
        """Milliseconds in which memory moves so many bytes."""
        return moved / self.card.bandwidth_gb_s * 1e-6

    def launch(
        self,
        name: str,
        config: str,
        groups: int,
        waves: int,
        cycles: Cycles,
        bound: float,
        flops: int,
        computed: float,
        moved: float,
    ) -> Estimate:
        """`groups` of `waves`, each of them `cycles` long. `flops` are needed, `computed` are done;
        `moved` bytes.
        """
        per_simd = max(waves / SIMDS, 1) * -(-groups // self.places)
        return Estimate(
            name,
            config,
            flops * 1e-9,
            self.cycles_ms(per_simd * cycles.total),
            self.cycles_ms(per_simd * cycles.serial),
            self.cycles_ms(per_simd * cycles.overlapped),
            self.bytes_ms(moved),
            bound,
            computed / flops,
        )


def target_of(arch: Arch, card: Card) -> Target:
    """With this machine's compilers. Its `work_of` raises CompileError, NoListingError and the
    ValueErrors of `analysed`.
    """

    @cache
    def work_of(spec: KernelSpec) -> KernelWork:
        function, _ = listing(spec, arch, build.build(spec, arch))
        return analysed(function, arch)

    return Target(arch, card, work_of)


def estimates(layers: Sequence[VaeLayer | Layer], target: Target) -> list[Estimate]:
    """Each layer of a VAE or an upscaler; a VAE's attention is two rows, its products and what is
    around them.
    """
    rows: list[Estimate] = []
    for layer in layers:
        if isinstance(layer, Layer):
            rows += _launches(layer.problem, target)
            continue
        name, p = layer.name, layer.problem
        if isinstance(p, AttentionProblem):
            channels = layer.channels or p.head_dim
            rows += [_attention(name, p, target), _projections(name, p, channels, target)]
            continue
        if isinstance(p, LayerNormProblem):
            rows.append(moving(name, 2 * p.tensor_bytes, target))
            continue
        taps, stored = (4, 16) if p.kind == "upsample" else (9, 9)
        flops = 2 * p.out_values * (taps * p.in_channels + p.through)
        weights = p.out_channels * (stored * p.in_channels + p.through)
        rows.append(_conv(name, p, target, p, p.kind, flops, weights)[0])
    return rows


@dataclass(frozen=True)
class Tiles:
    """A launch of work-groups of `block` work-items; each wave makes so many products of 16 x 16 x
    16. `passes`: of the loops around the one that does, the outermost first.
    """

    groups: int
    block: int
    products: int
    passes: Sequence[int]


def _conv(
    name: str,
    p: ConvProblem,
    target: Target,
    as_run: ConvProblem,
    kind: str,
    flops: int,
    weights: int,
) -> tuple[Estimate, int]:
    """A convolution by the kernel that runs `as_run`, cut as `kind` is, and the bytes of the sums
    of parts that it writes and another launch reads. `weights`: values read.
    """
    arch, variant = target.arch, MatrixConv(p.kind)
    config = variant.configs(arch, as_run)[0]
    spec = variant.specs(arch, as_run, config)[0]
    rows, columns = p.out_size
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
    )
    title += f", {config.splits} parts" if config.splits > 1 else ""
    shortcut = p.batch * rows * columns * p.shortcut_channels
    sums = 4 * config.splits * p.out_values if config.splits > 1 else 0
    moved_bytes = 2 * (p.in_values + weights + shortcut)
    if sums and p.shortcut == "identity":
        moved_bytes -= 2 * shortcut  # the other launch adds it
    moved_bytes += sums or 2 * p.out_values
    return convolved(target, name, spec, title, tiles, flops, moved_bytes), sums


def convolved(
    target: Target,
    name: str,
    spec: KernelSpec,
    config: str,
    tiles: Tiles,
    flops: int,
    moved: float,
) -> Estimate:
    """A kernel of one loop that multiplies: a convolution, or a product of matrices."""
    arch, work = target.arch, target.work_of(spec)
    if work.hot is None or not work.loops[work.hot].usual.matrix:
        raise ValueError("no loop with matrix instructions in each pass")
    hot = work.loops[work.hot]
    around: list[LoopWork] = []
    loop = hot
    while loop.parent is not None:
        loop = work.loops[loop.parent]
        around.insert(0, loop)
    waves = tiles.block // arch.wave_size
    in_loop = tiles.products * rates_of(arch).tile_cycles - work.straight_cycles.matrix
    wave = work.straight_cycles.plus(hot.usual, max(in_loop, 0) / hot.usual.matrix)
    for passes, loop in zip(tiles.passes, around, strict=False):
        wave = wave.plus(loop.usual, passes)
    computed = tiles.groups * waves * tiles.products * _TILE_FLOPS
    bound = _bound(wave, work)
    return target.launch(name, config, tiles.groups, waves, wave, bound, flops, computed, moved)


def _bound(wave: Cycles, work: KernelWork) -> float:
    """In the loops, or, where nothing is multiplied there, altogether."""
    in_loops = wave.plus(work.straight_cycles, -1)
    return (in_loops if in_loops.matrix > 0 else wave).bounds()["bound"]


def _attention(name: str, p: AttentionProblem, target: Target) -> Estimate:
    """A head_dim is computed in whole tiles of 16."""
    arch, variant, heads = target.arch, MatrixAttention(), p.batch * p.heads
    config = variant.configs(arch, p)[0]
    spec = variant.spec(p, config)
    work = target.work_of(spec)
    groups = heads * config.tiles(p.seq_q)
    waves, blocks = config.block // arch.wave_size, -(-p.seq_k // config.block_k)
    head_dim = -(-dict(spec.defines)["HEAD_DIM"] // 16) * 16
    computed = 4 * groups * config.block_q * blocks * config.block_k * head_dim
    matrix = computed / _TILE_FLOPS / (groups * waves) * rates_of(arch).tile_cycles
    matrix = max(matrix - work.straight_cycles.matrix, 0)
    using = [loop for loop in work.loops if loop.cycles.matrix]
    around = {loop.parent for loop in using}
    wave = work.straight_cycles
    for index, loop in enumerate(work.loops):
        if loop.cycles.matrix:
            wave = wave.plus(loop.cycles, matrix / len(using) / loop.cycles.matrix)
        elif index in around:
            wave = wave.plus(loop.cycles, blocks)
    title = f"{config.block_q} queries, {config.block_k} keys, {waves} waves"
    moved_bytes = 2 * heads * p.head_dim * (2 * p.seq_q + 2 * p.seq_k)
    bound = _bound(wave, work)
    return target.launch(name, title, groups, waves, wave, bound, p.flops, computed, moved_bytes)


def _projections(name: str, p: AttentionProblem, channels: int, target: Target) -> Estimate:
    gflop = 8 * p.seq_q * channels * p.head_dim * 1e-9
    memory_ms = target.bytes_ms(ATTENTION_PASSES * 2 * p.seq_q * channels)
    ms = gflop / (target.peak_tflops * LIBRARY_SHARE) + memory_ms
    title = f"{name}, around it"
    return Estimate(title, "library", gflop, ms, ms, ms, memory_ms, LIBRARY_SHARE, 1.0)


KINDS = {
    "convolution": (ConvProblem,),
    "linear": (LinearProblem,),
    "attention": (AttentionProblem,),
    "norm": (GroupNormProblem, NormProblem, LayerNormProblem, HeadsProblem),
    "concatenation": (Join,),
}

UNET_ASSUMPTIONS = (
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
    " scheduler; of a transformer GELU, the last gated sums, and what is around its blocks.",
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
        return f"layer norm {p.rows} x {p.channels}{', gated' * p.added}"
    if isinstance(p, HeadsProblem):
        return f"norm of heads {p.rows} x {p.head_dim}"
    what = "concatenation" if isinstance(p, Join) else "group norm"
    statistics = " statistics" if isinstance(p, NormProblem) else ""
    return f"{what}{statistics} {p.channels}, {p.height}x{p.width}"


def counted(layers: Sequence[Layer], target: Target) -> list[Counted]:
    """Each layer that is different, in the order of the step. Raises what `target.work_of` does."""
    count = Counter(layers)
    return [Counted(each, n, tuple(_launches(each.problem, target))) for each, n in count.items()]


def layout_bytes(layers: Sequence[Layer]) -> int:
    """What changes of layout around the convolutions of a step move; see ASSUMPTIONS."""
    return sum(2 * 2 * _layout_values(layer) for layer in layers)


def _layout_values(layer: Layer) -> int:
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
        return _unet_conv(p, target)
    if isinstance(p, LinearProblem):
        return _linear(p, target)
    if isinstance(p, AttentionProblem):
        return [_attention(titled(p), p, target)]
    if isinstance(p, LayerNormProblem):
        values, passes = p.rows * p.channels, 4 if p.added else 2  # the sum is kept
    elif isinstance(p, HeadsProblem):
        values, passes = p.rows * p.head_dim, 2
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


def _unet_conv(p: ConvProblem, target: Target) -> list[Estimate]:
    """A library's convolution as ours with packed weights, with our passes around it."""
    ours = _is_first(MatrixConv, CONVS[p.kind], target, p)
    packed = replace(p, in_channels=-(-p.in_channels // 16) * 16, in_rows=False)
    weights = p.out_channels * (9 * p.in_channels + p.through)
    run = (p, "3x3") if ours else (packed, p.kind)
    launch, sums = _conv(titled(p), p, target, *run, p.flops, weights)
    launches = [launch]
    if sums:
        added = p.out_values // p.out_channels * p.shortcut_channels * (p.shortcut == "identity")
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
    out = p.rows * p.all_columns * (1 + p.residual)
    operands = p.rows * p.k + p.k * p.weight_rows
    sums = linear_kernel.partial_bytes(*shape, config)
    moved_bytes = 2 * operands + (sums or 2 * out)
    launches = [convolved(target, titled(p), spec, title, tiles, p.flops, moved_bytes)]
    if sums:
        launches.append(moving("sum of its parts", sums + 2 * out, target))
    if _is_first(LibraryLinear, LINEAR, target, p):
        launches.append(moving("its gate", 2 * 3 * out, target))
    return launches
