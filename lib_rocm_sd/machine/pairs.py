"""What an attention kernel executes for one (query, key) pair: counted, not measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.machine.analysis import analysed
from lib_rocm_sd.machine.classify import Kind
from lib_rocm_sd.machine.listing import Function
from lib_rocm_sd.machine.mix import Mix
from lib_rocm_sd.machine.rates import cycles_of


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


def in_loop(function: Function, arch: Arch, pairs: int) -> PerPair:
    """Counts per pair in the loop with the most matrix work. Nothing in it may be conditional.
    `pairs`: those that one wave computes in a pass. Raises NoPairsError, ControlFlowError,
    UnknownInstructionError, UnknownRateError.
    """
    work = analysed(function, arch)
    if work.hot is None:
        raise NoPairsError(f"{function.name} has no loop")
    hot = work.loops[work.hot]
    if hot.conditional.counts or any(loop.parent == work.hot for loop in work.loops):
        raise NoPairsError(f"{function.name}: parts of the loop are conditional or loops")
    return of(hot.mix, arch, pairs)


def of(mix: Mix, arch: Arch, pairs: int) -> PerPair:
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
