"""What attention executes for one (query, key) pair, counted, not measured: by what stands in its
loop over the keys, or by the usual way through it, which loads a tile of keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.lab.cycles import Kind, Mix, cycles_of
from lib_rocm_sd.lab.listing import Function
from lib_rocm_sd.lab.loops import NoWayError, Ways, analysed


@dataclass(frozen=True)
class Chunks:
    """A loop inside the one over the keys: how often it is passed, and what a wave loads then."""

    passes: int
    bytes: int


class _KeyWays(Ways):
    """The ways through attention's loops. `least_bytes`: what a wave loads in an outer pass."""

    def __init__(self, function: Function, arch: Arch, least_bytes: int) -> None:
        super().__init__(function, arch)
        self.least_bytes = least_bytes
        self.chunks: dict[int, Chunks] = {}

    def all_passes(self, index: int) -> Counter[int]:
        """A loop without known chunks loads keys or values: half of `least_bytes`."""
        chunks = self.chunks.get(index)
        passed = self.through(index, chunks.bytes if chunks else 0)
        if chunks is None:
            each = self.loaded(passed)
            times = -(-self.least_bytes // (2 * each)) if each else 1
        else:
            times = chunks.passes
        return Counter({block: count * times for block, count in passed.items()})


def usual_pass(
    function: Function, arch: Arch, least_bytes: int, chunks: Sequence[Chunks] = ()
) -> Mix:
    """What one pass of attention's loop over the keys executes, the outer one with exponentials.

    `least_bytes`: what a wave loads in a pass. `chunks`: of the first loops inside it that use LDS;
    what comes after is not passed, as it does again what they did. Raises NoWayError,
    NotUnderstoodError.
    """
    ways = _KeyWays(function, arch, least_bytes)
    outer = [index for index, loop in enumerate(ways.loops) if loop.parent is None]
    keys = [
        index for index in outer if ways.standing(ways.all_blocks(index)).of(Kind.TRANSCENDENTAL)
    ]
    if len(keys) != 1:
        raise NoWayError(f"{function.name} has {len(keys)} outer loops with exponentials")
    if chunks:
        inner = [
            index
            for index in ways.inner(keys[0])
            if ways.standing(ways.all_blocks(index)).of(Kind.LDS)
        ]
        if len(inner) < len(chunks):
            raise NoWayError(f"{function.name} has {len(inner)} loops over chunks")
        ways.chunks = dict.fromkeys(inner, Chunks(0, 0)) | dict(zip(inner, chunks, strict=False))
    return ways.mix(ways.through(keys[0], least_bytes))


class NoPairsError(ValueError):
    """The loop over the keys, or what a pass through it computes, could not be made out."""


@dataclass(frozen=True)
class PerPair:
    """Instructions: those of a wave times its lanes, so that 1 is one instruction of one lane for
    each pair. `vector` is without matrix and transcendental ones, both halves of a dual-issue pair
    counted; `vector_slots` their issue slots. `scalar` with scalar loads and branches. Bytes of all
    lanes. `estimated_cycles`: of a SIMD for 1024 pairs, and `bound` on the use of the matrix units,
    by the cost model; 0 where none are used.
    """

    matrix: float
    transcendental: float
    vector: float
    vector_slots: float
    scalar: float
    lds: float
    lds_bytes: float
    global_bytes: float
    estimated_cycles: float
    bound: float

    def as_dict(self) -> dict[str, float]:
        """Rounded, for JSON."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def pairs_in_loop(function: Function, arch: Arch, pairs: int) -> PerPair:
    """Counts per pair in the loop with the most matrix work. Nothing in it may be conditional.
    `pairs`: those that one wave computes in a pass. Raises NoPairsError,
    NotUnderstoodError.
    """
    work = analysed(function, arch)
    if work.hot is None:
        raise NoPairsError(f"{function.name} has no loop")
    hot = work.loops[work.hot]
    if hot.conditional.counts or any(loop.parent == work.hot for loop in work.loops):
        raise NoPairsError(f"{function.name}: parts of the loop are conditional or loops")
    return per_pair(hot.mix, arch, pairs)


def per_pair(mix: Mix, arch: Arch, pairs: int) -> PerPair:
    """Counts per pair, from the wave instructions that did the work of `pairs` pairs."""
    mix = mix.beside(arch.matrix)
    each = arch.wave_size / pairs
    cycles = cycles_of(mix, arch)
    return PerPair(
        matrix=mix.of(Kind.MATRIX) * each,
        transcendental=mix.of(Kind.TRANSCENDENTAL) * each,
        vector=mix.of(Kind.VECTOR) * each,
        vector_slots=mix.vector_slots * each,
        scalar=sum(map(mix.of, (Kind.SCALAR, Kind.SCALAR_MEMORY, Kind.BRANCH))) * each,
        lds=mix.of(Kind.LDS) * each,
        lds_bytes=mix.lds_bytes / pairs,
        global_bytes=mix.global_bytes / pairs,
        estimated_cycles=1024 * cycles.total / pairs,
        bound=cycles.bounds().get("bound", 0.0),
    )
