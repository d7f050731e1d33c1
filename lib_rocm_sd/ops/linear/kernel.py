"""What kernels/linear.hip is compiled with and called with. Needs no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.base import HALVES, KernelSpec
from lib_rocm_sd.ops.linear.problem import FEW_WEIGHTS, MOST_WEIGHTS, USUAL

SOURCE = "linear.hip"
FEW_ROWS = 512
"""A prompt and its negative have 154, three chunks of each 462."""
SUM_THREADS = 256
MOST_TOGETHER = 8
"""Blocks of rows that pass along the weights together."""
MOST_PARTIAL_BYTES = 32 << 20
"""Most bytes for the sums over parts of k."""


class LinearParams(ctypes.Structure):
    """The one argument of all kernels of linear.hip, where the same struct stands."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("x", "weights_0", "weights_1", "weights_2")),
        *((name, ctypes.c_uint64) for name in ("bias_0", "bias_1", "bias_2")),
        *((name, ctypes.c_uint64) for name in ("residual", "out", "partial")),
        *((name, ctypes.c_uint32) for name in ("x_stride", "residual_stride", "out_stride")),
        *((name, ctypes.c_uint32) for name in ("rows", "k")),
        *((name, ctypes.c_uint32) for name in ("columns_0", "columns_1", "columns_2", "columns")),
        *((name, ctypes.c_uint32) for name in ("row_blocks", "blocks", "together")),
        *((name, ctypes.c_uint32) for name in ("parts", "part_chunks")),
    ]


class LinearManyParams(ctypes.Structure):
    """The one argument where there are more than FEW_WEIGHTS; the same stands in linear.hip."""

    _anonymous_ = ("one",)
    _fields_ = [
        ("one", LinearParams),
        ("weights", ctypes.c_uint64 * MOST_WEIGHTS),
        ("bias", ctypes.c_uint64 * MOST_WEIGHTS),
        ("first_column", ctypes.c_uint32 * (MOST_WEIGHTS + 1)),
        ("first_block", ctypes.c_uint32 * MOST_WEIGHTS),
    ]

    def place(self, *addresses: int) -> None:
        """Store the addresses of weights, each followed by the address of its bias or 0."""
        count = len(addresses) // 2
        self.weights[:count], self.bias[:count] = addresses[::2], addresses[1::2]


NO_BLOCK = (1 << 32) - 1
"""Where there is no weight."""


@dataclass(frozen=True)
class LinearConfig:
    """Tile sizes; linear.hip says what each means. `parts`: of k, each summed by other work-groups;
    where k has fewer chunks there are fewer.
    """

    waves_out: int
    waves_rows: int
    tiles_out: int
    tiles_rows: int
    chunk_k: int
    wave_size: int
    parts: int = 1

    @property
    def block(self) -> int:
        """Work-items of one work-group."""
        return self.waves_out * self.waves_rows * self.wave_size

    @property
    def block_out(self) -> int:
        """Rows of the weights of one work-group."""
        return self.waves_out * self.tiles_out * 16

    @property
    def lds_bytes(self) -> int:
        """LDS bytes of one work-group: two buffers of rows, with a gap of eight halves after each
        row.
        """
        return (self.block_out + self.block_rows) * (self.chunk_k + 8) * 4

    @property
    def block_rows(self) -> int:
        """Rows of x of one work-group."""
        return self.waves_rows * self.tiles_rows * 16


@dataclass(frozen=True)
class LinearTiling:
    """How a launch is cut; the fields of LinearParams, and the number of work-groups, of which the
    last may have no rows.
    """

    row_blocks: int
    blocks: int
    together: int
    parts: int
    part_chunks: int

    @property
    def grid(self) -> int:
        """Work-groups of `linear`."""
        return self.row_blocks * self.blocks * self.parts


_SIZES = {
    "dot2": ((2, 2, 2, 4, 32), (2, 2, 2, 2, 32), (4, 1, 2, 1, 64)),
    "wmma_gfx11": ((2, 2, 4, 4, 32), (2, 2, 2, 4, 32), (2, 2, 2, 2, 64), (4, 1, 2, 1, 64)),
    "wmma_gfx12": ((2, 2, 4, 4, 32), (2, 2, 2, 4, 32), (2, 2, 2, 2, 64), (4, 1, 2, 1, 64)),
    "mfma": ((2, 4, 4, 4, 32), (2, 4, 4, 2, 32), (2, 2, 2, 2, 32), (4, 1, 2, 1, 32)),
    "mma_sm80": (
        *((2, 4, 4, 4, 64), (2, 4, 5, 2, 64), (2, 4, 4, 2, 64)),
        *((2, 2, 2, 4, 64), (2, 2, 2, 2, 64), (4, 1, 2, 1, 64)),
    ),
}
"""Waves along rows of the weights and of x, tiles of a wave likewise, k at a time, by matrix unit;
the largest first.
"""


@dataclass(frozen=True)
class _Machine:
    """What the first config is chosen for, a large card. `places`: where work-groups of four waves
    live, WGPs or CUs. `products`: multiply-adds per clock of each. `bytes`: of memory, per clock.
    """

    places: int
    products: int
    bytes: int


_MACHINES = {
    "dot2": _Machine(36, 256, 230),
    "wmma_gfx11": _Machine(48, 512, 380),
    "wmma_gfx12": _Machine(32, 1024, 220),
    "mfma": _Machine(304, 1024, 2500),
    "mma_sm80": _Machine(132, 1024, 2500),
}
"""By matrix unit: the RX 6800 XT, 7900 XTX, 9070 XT, MI300X and H200."""
_START_CLOCKS = 1500
"""Clocks of a work-group before and after its products."""
_CHUNK_CLOCKS = 800
"""Until a chunk of k has come from memory."""
_LAUNCH_CLOCKS = 8000
"""Clocks of a second launch."""
PARTS = (2, 3, 4, 6, 8, 12, 16)


def sizes(arch: Arch, dtype: str, gate: bool = False) -> tuple[LinearConfig, ...]:
    """All tile sizes for a GPU, the largest first. None of them spills registers. With a gate a
    wave has as many tiles of one half of the weights as of the other.
    """
    every = (LinearConfig(*size, arch.wave_size) for size in _SIZES[arch.matrix])
    found = tuple(
        size
        for size in every
        if size.lds_bytes <= arch.lds_bytes and not (gate and size.tiles_out % 2)
    )
    no_dot = arch.matrix == "dot2" and dtype == "bfloat16"  # more instructions and registers
    return found[1:] if no_dot else found


@lru_cache(maxsize=1024)
def configs(
    arch: Arch, dtype: str, rows: int, k: int, columns: tuple[int, ...], gate: bool
) -> tuple[LinearConfig, ...]:
    """The search space: each size as it is, and over as many parts of k as look best for it. First
    what is expected to be fastest.
    """
    found: dict[LinearConfig, float] = {}
    for size in sizes(arch, dtype, gate):
        counts = () if len(columns) > FEW_WEIGHTS else PARTS  # many have work-groups enough
        parted = [replace(size, parts=parts) for parts in counts if _may_have(size, parts, k)]
        fitting = [c for c in parted if partial_bytes(rows, k, columns, gate, c)]
        clocks = {c: _clocks(arch, rows, k, columns, gate, c) for c in (size, *fitting)}
        best = min(clocks, key=clocks.__getitem__)
        found |= {c: clocks[c] for c in (size, best)}
    return tuple(sorted(found, key=found.__getitem__))


def is_joint(arch: Arch, rows: int, columns: tuple[int, ...]) -> bool:
    """Whether several weights are one launch of ours under Auto, as of a prompt or a time
    embedding. Up to three of them a fast library multiplies sooner: on an H100 q, k and v of 512
    rows of 1280 take 25 us by ours and 17 by three products.
    """
    fewest = FEW_WEIGHTS if arch.has_fast_libraries else 1
    return len(columns) > fewest and rows <= FEW_ROWS


def _may_have(size: LinearConfig, parts: int, k: int) -> bool:
    """Each part has two chunks at least, but for the last."""
    return -(-k // size.chunk_k) >= 2 * parts


def partial_bytes(
    rows: int, k: int, columns: tuple[int, ...], gate: bool, config: LinearConfig
) -> int:
    """Bytes of the sums over parts of k; 0 where there is one part, or these would be too many."""
    parts = tiling(rows, k, columns, gate, config).parts
    size = 4 * parts * rows * sum(columns) * (1 + gate)
    return size if parts > 1 and size <= MOST_PARTIAL_BYTES else 0


@lru_cache(maxsize=1024)
def most_partial_bytes(rows: int, k: int, columns: tuple[int, ...], gate: bool) -> int:
    """The same by what runs unmeasured, of all GPUs."""
    each = {arch.matrix: arch for arch in table().values()}.values()
    shape = (rows, k, columns, gate)
    return max(partial_bytes(*shape, configs(arch, HALVES[0], *shape)[0]) for arch in each)


def _clocks(
    arch: Arch, rows: int, k: int, columns: tuple[int, ...], gate: bool, config: LinearConfig
) -> float:
    """What a launch takes, roughly: rounds of work-groups, or memory; then the sum of the parts."""
    machine, cut = _MACHINES[arch.matrix], tiling(rows, k, columns, gate, config)
    rounds = -(-cut.grid // machine.places)
    reads = 1 / config.block_out + 1 / config.block_rows  # of LDS, for each product
    products = config.block_out * config.block_rows * cut.part_chunks * config.chunk_k
    each = products / machine.products * (0.8 + 16 * reads) + _START_CLOCKS
    weights = 2 * k * sum(columns) * (1 + gate)
    moved = weights + 2 * rows * (k + sum(columns))
    beside = max(1, min(4, arch.lds_pool_bytes // config.lds_bytes))  # work-groups in one place
    waits = -(-rounds // beside) * (cut.part_chunks * _CHUNK_CLOCKS + _START_CLOCKS)
    clocks = max(rounds * each, waits, moved / machine.bytes) + each / 100
    if cut.parts > 1:
        clocks += 2 * partial_bytes(rows, k, columns, gate, config) / machine.bytes + _LAUNCH_CLOCKS
    return clocks


@lru_cache(maxsize=4096)
def tiling(
    rows: int, k: int, columns: tuple[int, ...], gate: bool, config: LinearConfig
) -> LinearTiling:
    """The work-groups that make (rows, sum(columns)); none of the parts of k is empty."""
    each = config.block_out // (1 + gate)
    chunks = -(-k // config.chunk_k)
    part_chunks = -(-chunks // min(config.parts, chunks))
    row_blocks = -(-rows // config.block_rows)
    strips = -(-row_blocks // MOST_TOGETHER)
    together = -(-row_blocks // strips)
    return LinearTiling(
        strips * together,
        sum(-(-count // each) for count in columns),
        together,
        -(-chunks // part_chunks),
        part_chunks,
    )


def many_params(
    one: LinearParams, columns: tuple[int, ...], config: LinearConfig, addresses: Iterable[int]
) -> LinearManyParams:
    """`one` with a table of weights, of which and of whose biases `addresses` are, in turn."""
    made = LinearManyParams(one)
    first_column = first_block = 0
    for place, count in enumerate(columns):
        made.first_column[place], made.first_block[place] = first_column, first_block
        first_column, first_block = first_column + count, first_block - -count // config.block_out
    beyond = MOST_WEIGHTS - len(columns)
    made.first_column[len(columns) :] = [first_column] * (beyond + 1)
    made.first_block[len(columns) :] = [NO_BLOCK] * beyond
    made.place(*addresses)
    return made


@cache
def spec(
    dtype: str, gate: bool, split: bool, config: LinearConfig, many: bool = False
) -> KernelSpec:
    """x, weights -> out, or -> partial sums where k is split."""
    defines = {
        "BF16_HALVES": int(dtype == "bfloat16"),
        "GATE": int(gate),
        "SPLIT": int(split),
        "MANY": int(many),
        "WAVES_OUT": config.waves_out,
        "WAVES_ROWS": config.waves_rows,
        "TILES_OUT": config.tiles_out,
        "TILES_ROWS": config.tiles_rows,
        "CHUNK_K": config.chunk_k,
    }
    return KernelSpec(SOURCE, "linear", tuple(defines.items()))


@cache
def sum_spec(dtype: str, gate: bool) -> KernelSpec:
    """Partial sums -> out."""
    defines = {
        "STEP_SUM": 1,
        "BF16_HALVES": int(dtype == "bfloat16"),
        "GATE": int(gate),
        "THREADS": SUM_THREADS,
    }
    return KernelSpec(SOURCE, "linear_sum", tuple(defines.items()))


@cache
def gate_spec(dtype: str) -> KernelSpec:
    """What a library made of both halves of a weight -> out."""
    defines = {
        "STEP_GATE": 1,
        "BF16_HALVES": int(dtype == "bfloat16"),
        "THREADS": SUM_THREADS,
    }
    return KernelSpec(SOURCE, "linear_gate", tuple(defines.items()))


def pass_grid(rows: int, columns: int) -> int:
    """Work-groups of linear_sum and of linear_gate: a work-item makes eight values."""
    return -(-rows * columns // (8 * SUM_THREADS))


def specs(
    dtype: str, gate: bool, split: bool, config: LinearConfig, many: bool = False
) -> tuple[KernelSpec, ...]:
    """All that a linear layer launches."""
    made = spec(dtype, gate, split, config, many)
    return (made, sum_spec(dtype, gate)) if split else (made,)


_ROWS = (0.25, 1.0, 1.5, 4.0)
"""Other sizes and batches of pictures, over the usual ones."""


def _launched(arch: Arch) -> Iterator[tuple[tuple[LinearConfig, ...], bool, bool]]:
    """Configs of each layer, its gate, and whether it has many weights."""
    for _, p in USUAL:
        for factor in (1.0,) if p.rows <= 154 else _ROWS:
            space = configs(arch, HALVES[0], int(p.rows * factor), p.k, p.columns, p.gate)
            yield space, p.gate, len(p.columns) > FEW_WEIGHTS


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """What is compiled ahead for a GPU: what Stable Diffusion launches in fp16."""
    return _specs_of(arch, slice(1))


def searched_specs(arch: Arch) -> list[KernelSpec]:
    """Every config of the search space for the same launches."""
    return _specs_of(arch, slice(None))


def _specs_of(arch: Arch, which: slice) -> list[KernelSpec]:
    found = [
        each
        for space, gate, many in _launched(arch)
        for config in space[which]
        for each in specs(HALVES[0], gate, config.parts > 1, config, many)
    ]
    return [*dict.fromkeys(found), gate_spec(HALVES[0])]
