"""What instructions add up to: a count for each kind of work, and the bytes moved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lib_rocm_sd.machine.classify import Kind, Work, work_of
from lib_rocm_sd.machine.listing import Instruction

_ENCODING = re.compile(r"(_(e32|e64|dpp|dpp8|sdwa))+$")


@dataclass(frozen=True)
class Mix:
    """Instructions of one wave by kind; bytes as if all its lanes took part.

    Both halves of a dual-issue pair count as instructions. `vector_slots`: issue slots of the
    vector instructions, where a pair takes one and a slow instruction several. `matrix_names`: how
    often each matrix instruction stands there, whatever its encoding.
    """

    counts: dict[Kind, int]
    vector_slots: int
    dual_pairs: int
    lds_bytes: int
    global_bytes: int
    scratch_bytes: int
    matrix_names: dict[str, int] = field(default_factory=dict)

    def of(self, kind: Kind) -> int:
        """Instructions of one kind."""
        return self.counts.get(kind, 0)

    def times(self, count: int) -> Mix:
        """The same so many times."""
        return Mix(
            {kind: count * each for kind, each in self.counts.items()},
            count * self.vector_slots,
            count * self.dual_pairs,
            count * self.lds_bytes,
            count * self.global_bytes,
            count * self.scratch_bytes,
            {name: count * each for name, each in self.matrix_names.items()},
        )

    def beside(self, matrix: str) -> Mix:
        """Where `matrix`, the arch's unit, is not dot products, these are vector instructions."""
        dots = {name: n for name, n in self.matrix_names.items() if "dot" in name}
        if matrix == "dot2" or not dots:
            return self
        alone = sum(count for name, count in dots.items() if "dual" not in name)
        counts = Counter(self.counts)
        counts[Kind.MATRIX] -= sum(dots.values())
        counts[Kind.VECTOR] += sum(dots.values())
        names = {name: n for name, n in self.matrix_names.items() if name not in dots}
        slots = self.vector_slots + alone
        return replace(self, counts=dict(counts), vector_slots=slots, matrix_names=names)

    def as_dict(self) -> dict[str, int]:
        """What is not zero, by name; bytes are those of a whole wave."""
        named = {kind.value: self.of(kind) for kind in Kind}
        for name in ("vector_slots", "dual_pairs", "lds_bytes", "global_bytes", "scratch_bytes"):
            named[name] = getattr(self, name)
        return {name: value for name, value in named.items() if value}


def mix_of(instructions: Iterable[Instruction], wave_size: int) -> Mix:
    """Add up. Raises UnknownInstructionError."""
    counts: Counter[Kind] = Counter()
    moved: Counter[Kind] = Counter()
    matrix: Counter[str] = Counter()
    slots = pairs = 0
    for instruction in instructions:
        works = [work_of(mnemonic) for mnemonic in instruction.mnemonics]
        for mnemonic, work in zip(instruction.mnemonics, works, strict=True):
            counts[work.kind] += 1
            moved[work.kind] += work.bytes_per_lane * wave_size
            if work.kind is Kind.MATRIX:
                matrix[_ENCODING.sub("", mnemonic)] += 1
        slots += _vector_slots(works)
        pairs += len(works) > 1
    return Mix(
        dict(counts),
        slots,
        pairs,
        moved[Kind.LDS],
        moved[Kind.GLOBAL],
        moved[Kind.SCRATCH],
        dict(matrix),
    )


def _vector_slots(works: list[Work]) -> int:
    return max((work.slots for work in works if work.kind is Kind.VECTOR), default=0)
