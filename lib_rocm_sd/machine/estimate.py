"""A cost model's estimate of a whole decode on a card that nobody measured it on.

Each launch takes as long as its arithmetic, from the machine code of the config that would be
launched, or its memory traffic, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog.vae import Layer
from lib_rocm_sd.lab.cycles import Cycles, rates_of
from lib_rocm_sd.lab.listing import listing
from lib_rocm_sd.lab.loops import KernelWork, LoopWork, analysed
from lib_rocm_sd.machine.cards import HALF_OPERATIONS, Card
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
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
    "The config that Auto runs, our kernels only, fp16, one image, whole frame; not"
    " counted: launches' own cost, merging of statistics, weight packing, Python.",
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
        operations = self.card.cu_count * HALF_OPERATIONS[self.arch.family]
        return operations * self.card.clock_mhz * 1e-6

    def cycles_ms(self, cycles: float) -> float:
        """Milliseconds of so many cycles."""
        return cycles / self.card.clock_mhz * 1e-3

    def bytes_ms(self, moved: float) -> float:
        """Milliseconds in which memory moves so many bytes."""
        return moved / self.card.bandwidth_gb_s * 1e-6


def target_of(arch: Arch, card: Card) -> Target:
    """With this machine's compilers. Its `work_of` raises CompileError, NoListingError and the
    ValueErrors of `analysed`.
    """

    @cache
    def work_of(spec: KernelSpec) -> KernelWork:
        text = listing(spec, arch, build.build(spec, arch))
        return analysed(text.function(spec.entry), arch)

    return Target(arch, card, work_of)


def estimates(layers: Sequence[Layer], target: Target) -> list[Estimate]:
    """Each layer of a VAE; attention is two rows, its products and what is around them."""
    rows: list[Estimate] = []
    for layer in layers:
        if isinstance(layer.problem, ConvProblem):
            rows.append(_conv(layer.name, layer.problem, target))
        else:
            rows += [of(layer.name, layer.problem, target) for of in (_attention, _projections)]
    return rows


@dataclass(frozen=True)
class Launched:
    """One launch of a kernel: `groups` of `waves`, each of them `cycles` long. `flops` are needed,
    `computed` are done.
    """

    config: str
    groups: int
    waves: int
    cycles: Cycles
    bound: float
    flops: int
    computed: float
    moved_bytes: float

    def estimate(self, name: str, target: Target) -> Estimate:
        rounds = -(-self.groups // target.card.places(target.arch))
        per_simd = max(self.waves / SIMDS, 1) * rounds
        return Estimate(
            name,
            self.config,
            self.flops * 1e-9,
            target.cycles_ms(per_simd * self.cycles.total),
            target.cycles_ms(per_simd * self.cycles.serial),
            target.cycles_ms(per_simd * self.cycles.overlapped),
            target.bytes_ms(self.moved_bytes),
            self.bound,
            self.computed / self.flops,
        )


def _conv(name: str, p: ConvProblem, target: Target) -> Estimate:
    variant = MatrixConv(p.kind)
    config = variant.configs(target.arch, p)[0]
    spec = variant.specs(target.arch, p, config)[0]
    upsample = p.kind == "upsample"
    taps = 4 if upsample else 9  # per pixel of the output
    tiles = -(-p.width // 16) * -(-p.height // config.rows) * (4 if upsample else 1)
    blocks = -(-p.out_channels // config.block_co)
    through = {"none": 0, "identity": 1, "conv": p.shortcut_channels // 16}[p.shortcut]
    products = (taps * p.in_channels // 16 + through) * config.tiles_co * config.tiles_pix
    chunks = p.in_channels // dict(spec.defines)["CHUNK_C"]
    side = 2 if upsample else 3
    rows, columns = p.out_size
    extra = p.shortcut_channels if p.shortcut == "conv" else 0
    images = p.height * p.width * p.in_channels
    images += rows * columns * (p.out_channels + p.shortcut_channels)
    weights = p.out_channels * ((16 if upsample else 9) * p.in_channels + extra)
    return convolved(
        target,
        spec,
        f"{config.waves_co}x{config.waves_pix} waves, {config.tiles_co}x{config.tiles_pix} tiles",
        Tiles(tiles * blocks, config.block, products, (chunks, chunks * side, chunks * side**2)),
        2 * rows * columns * p.out_channels * (taps * p.in_channels + extra),
        2 * (images + weights),
    ).estimate(name, target)


@dataclass(frozen=True)
class Tiles:
    """A launch of work-groups of `block` work-items; each wave makes so many products of 16 x 16 x
    16. `passes`: of the loops around the one that does, the outermost first.
    """

    groups: int
    block: int
    products: int
    passes: Sequence[int]


def convolved(
    target: Target, spec: KernelSpec, config: str, tiles: Tiles, flops: int, moved: float
) -> Launched:
    """A kernel of one loop that multiplies: a convolution, or a product of matrices."""
    arch, work = target.arch, target.work_of(spec)
    hot = _hot(work)
    waves = tiles.block // arch.wave_size
    in_loop = tiles.products * rates_of(arch).tile_cycles - work.straight_cycles.matrix
    wave = work.straight_cycles.plus(hot.usual, max(in_loop, 0) / hot.usual.matrix)
    for passes, loop in zip(tiles.passes, _around(work, hot), strict=False):
        wave = wave.plus(loop.usual, passes)
    in_loops = wave.plus(work.straight_cycles, -1)
    bound = (in_loops if in_loops.matrix > 0 else wave).bounds()["bound"]
    computed = tiles.groups * waves * tiles.products * _TILE_FLOPS
    return Launched(config, tiles.groups, waves, wave, bound, flops, computed, moved)


def _attention(name: str, p: AttentionProblem, target: Target) -> Estimate:
    arch = target.arch
    config = attention_kernel.ordered(arch, p.dtype, p.head_dim)[0]
    spec = attention_kernel.spec(p.dtype, p.head_dim, "none", config)
    groups = -(-p.seq_q // config.block_q)
    moved = 4 * 2 * p.seq_q * p.head_dim
    launch = attended(target, spec, config, groups, p.seq_k, p.flops, moved)
    return launch.estimate(name, target)


def attended(
    target: Target,
    spec: KernelSpec,
    config: AttentionConfig,
    groups: int,
    keys: int,
    flops: int,
    moved: float,
) -> Launched:
    """Attention over so many keys; a head_dim is computed in whole tiles of 16."""
    arch, work = target.arch, target.work_of(spec)
    waves, blocks = config.block // arch.wave_size, -(-keys // config.block_k)
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
    in_loops = wave.plus(work.straight_cycles, -1)
    bound = (in_loops if in_loops.matrix > 0 else wave).bounds()["bound"]
    title = f"{config.block_q} queries, {config.block_k} keys, {waves} waves"
    return Launched(title, groups, waves, wave, bound, flops, computed, moved)


def _projections(name: str, p: AttentionProblem, target: Target) -> Estimate:
    gflop = 8 * p.seq_q * p.head_dim * p.head_dim * 1e-9
    memory_ms = target.bytes_ms(ATTENTION_PASSES * 2 * p.seq_q * p.head_dim)
    ms = gflop / (target.peak_tflops * LIBRARY_SHARE) + memory_ms
    title = f"{name}, around it"
    return Estimate(title, "library", gflop, ms, ms, ms, memory_ms, LIBRARY_SHARE, 1.0)


def _around(work: KernelWork, loop: LoopWork) -> list[LoopWork]:
    """The loops around one, the outermost first."""
    found: list[LoopWork] = []
    while loop.parent is not None:
        loop = work.loops[loop.parent]
        found.insert(0, loop)
    return found


def _hot(work: KernelWork) -> LoopWork:
    if work.hot is None or not work.loops[work.hot].usual.matrix:
        raise ValueError("no loop with matrix instructions in each pass")
    return work.loops[work.hot]
