"""The registers of waves that are at the same instruction, and what is known of each register.

A `Waves` owns its arrays: waves that part are copied out of it, waves that meet are put together.
`bad[r]` says cheaply whether register r needs a closer look: bit 0, some lane may never have been
written; bit 1, a memory access may still be on its way to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.poison import POISON
from tests.verify.amdgpu.errors import HazardError, UninitializedError

Array = np.ndarray[Any, Any]

LOAD, STORE, LDS, SMEM = range(4)
COUNTERS = ("loads", "stores", "LDS", "scalar loads")
EXEC, VCC = 126, 106
SGPRS = 128
UNWRITTEN, ON_ITS_WAY = 1, 2

_BY_WAVE = ("scc", "group", "wave", "slot", "epoch", "fresh", "lds_base", "signalled")
_SECOND = ("v", "v_init", "v_seq", "v_kind", "s", "s_init", "s_seq", "issued", "done", "settled")


class Waves:
    """`count` waves. Arrays: v (registers, waves, lanes) uint32; s (128, waves) uint32.

    `epoch`: barriers passed; `fresh`: those passed when a wave last emptied its cache; `settled`:
    what was `done` when it reached the last; `slot`: its group's place among those executed.
    """

    def __init__(self, registers: int, count: int, lanes: int) -> None:
        self.registers, self.count, self.lanes = registers, count, lanes
        self.pc = 0
        self.shift = 0
        self.v = np.full((registers, count, lanes), POISON, np.uint32)
        self.v_init = np.zeros((registers, count, lanes), bool)
        self.v_seq = np.zeros((registers, count), np.int32)
        self.v_kind = np.zeros((registers, count), np.int8)
        self.v_bad = [UNWRITTEN] * registers
        self.s = np.full((SGPRS, count), POISON, np.uint32)
        self.s_init = np.zeros((SGPRS, count), bool)
        self.s_seq = np.zeros((SGPRS, count), np.int32)
        self.s_bad = [UNWRITTEN] * SGPRS
        self.scc = np.zeros(count, bool)
        self.group = np.zeros(count, np.int64)
        self.wave = np.zeros(count, np.int64)
        self.slot = np.zeros(count, np.int64)
        self.epoch = np.zeros(count, np.int64)
        self.fresh = np.zeros(count, np.int64)
        self.lds_base = np.zeros(count, np.int64)
        self.signalled = np.zeros(count, bool)
        self.issued = np.zeros((4, count), np.int32)
        self.done = np.zeros((4, count), np.int32)
        self.settled = np.zeros((4, count), np.int32)
        self.branch: Array | None = None
        self._views()
        self.write_mask(EXEC, np.ones((count, lanes), bool))

    def _views(self) -> None:
        self.vf = self.v.view(np.float32)
        self.vi = self.v.view(np.int32)
        self.vh = self.v.view(np.uint16).reshape(*self.v.shape, 2)
        self.vl = list(self.v)
        self.vfl = list(self.vf)
        self.vil = list(self.vi)

    # -- exec ---------------------------------------------------------------------------------

    def refresh_exec(self) -> None:
        """After exec has been written."""
        self.exec = self.mask_of(EXEC)
        self.full = bool(self.exec.all())

    def mask_of(self, register: int) -> Array:
        """The lane mask in one SGPR (wave32) or two, as bool (waves, lanes)."""
        width = self.lanes // 32
        for each in range(register, register + width):
            if self.s_bad[each]:
                self.check_s(each)
        words = np.ascontiguousarray(self.s[register : register + width].T)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return bits.view(bool)

    def bits_of(self, mask: Array) -> Array:
        """A bool (waves, lanes) as uint32 (words, waves)."""
        packed = np.packbits(mask, axis=1, bitorder="little")
        return packed.view(np.uint32).T

    def write_mask(self, register: int, mask: Array) -> None:
        """A bool (waves, lanes) into SGPRs."""
        words = self.bits_of(mask)
        for place in range(self.lanes // 32):
            self.write_s(register + place, words[place], refresh=False)
        if register in (EXEC, EXEC + 1):
            self.refresh_exec()

    # -- scalar registers ---------------------------------------------------------------------

    def write_s(self, register: int, value: Any, refresh: bool = True) -> None:
        """One SGPR of every wave."""
        self.s[register] = value
        bad = self.s_bad[register]
        if bad:
            if bad & ON_ITS_WAY:
                self._pending_s(register)
            self.s_init[register] = True
            self.s_bad[register] = 0
        if refresh and register in (EXEC, EXEC + 1):
            self.refresh_exec()

    def _pending_s(self, register: int) -> None:
        late = self.s_seq[register] > self.done[SMEM]
        if late.any():
            raise HazardError(f"s{register} is touched before its scalar load was waited for")

    def check_s(self, register: int) -> None:
        """Before reading: raises where it was never written, or is on its way."""
        if self.s_bad[register] & ON_ITS_WAY:
            self._pending_s(register)
        if not self.s_init[register].all():
            raise UninitializedError(f"s{register} is read but was never written")
        self.s_bad[register] = 0

    # -- vector registers ---------------------------------------------------------------------

    def name_of(self, register: int) -> str:
        """As the assembler calls it."""
        return f"v{register}" if register < 256 else f"a{register - 256}"

    def _pending_v(self, register: int, allowed: int = -1) -> None:
        kind = self.v_kind[register]
        done = self.done[kind, np.arange(self.count)]
        late = (self.v_seq[register] > done) & (kind != allowed)
        if late.any():
            what = COUNTERS[int(kind[int(np.argmax(late))])]
            name = self.name_of(register)
            raise HazardError(f"{name} is touched before {what} to it were waited for")

    def check_v(self, register: int, mask: Array | None = None) -> None:
        """Before reading in the active lanes, or in those of `mask`: raises where nothing was
        written, or is on its way.
        """
        bad = self.v_bad[register]
        if bad & ON_ITS_WAY:
            self._pending_v(register)
            bad &= ~ON_ITS_WAY
        if bad & UNWRITTEN:
            missing = (self.exec if mask is None else mask) & ~self.v_init[register]
            if missing.any():
                wave, lane = np.argwhere(missing)[0]
                raise UninitializedError(
                    f"{self.name_of(register)} is read in lane {lane} of wave {self.wave[wave]}, "
                    f"group {self.group[wave]}, where nothing was written to it"
                )
        self.v_bad[register] = bad

    def missing_v(self, register: int) -> Array | None:
        """The active lanes where nothing was written, None for none. Raises where an access to it
        is on its way.
        """
        if not self.v_bad[register]:
            return None
        self.check_v(register, np.zeros_like(self.exec))
        missing = self.exec & ~self.v_init[register]
        return missing if missing.any() else None

    def wrote_v(self, register: int) -> None:
        """After writing the active lanes of a register whose `v_bad` is set."""
        if self.v_bad[register] & ON_ITS_WAY:
            self._pending_v(register)
        self._initialised(register)

    def _initialised(self, register: int) -> None:
        if self.full:
            self.v_init[register] = True
            self.v_bad[register] = 0
        else:
            self.v_init[register] |= self.exec
            self.v_bad[register] = 0 if self.v_init[register].all() else UNWRITTEN

    def put_v(self, register: int, value: Any) -> None:
        """uint32 into the active lanes."""
        if self.full:
            self.vl[register][...] = value
        else:
            np.copyto(self.vl[register], value, where=self.exec, casting="unsafe")
        if self.v_bad[register]:
            self.wrote_v(register)

    def forget_v(self, register: int, lanes: Array) -> None:
        """What was written in these lanes depends on nothing that was ever written."""
        self.v_init[register] &= ~lanes
        self.v_bad[register] |= UNWRITTEN

    def forget_mask(self, register: int) -> None:
        """Likewise, a mask of lanes in SGPRs; -1 for none."""
        for each in range(register, register + self.lanes // 32) if register >= 0 else ():
            self.s_init[each] = False
            self.s_bad[each] = UNWRITTEN

    # -- memory accesses on their way ---------------------------------------------------------

    def issue(self, counter: int) -> None:
        """One more access of this kind is on its way."""
        self.issued[counter] += 1

    def expect_v(self, register: int, counter: int) -> None:
        """The access issued last writes this register, whose new contents already stand there."""
        if self.v_bad[register] & ON_ITS_WAY:
            self._pending_v(register, allowed=counter)
        self._initialised(register)
        self.v_seq[register] = self.issued[counter]
        self.v_kind[register] = counter
        self.v_bad[register] |= ON_ITS_WAY

    def expect_s(self, register: int) -> None:
        """Likewise, an SGPR and a scalar load."""
        self.s_init[register] = True
        self.s_seq[register] = self.issued[SMEM]
        self.s_bad[register] = ON_ITS_WAY

    def wait(self, counter: int, left: int) -> None:
        """Until no more than `left` are on their way; scalar loads return in any order."""
        if counter == SMEM and left:
            return
        np.maximum(self.done[counter], self.issued[counter] - left, out=self.done[counter])

    # -- parting and meeting ------------------------------------------------------------------

    def part(self, which: Array) -> Waves:
        """A copy of the waves at these places."""
        made = Waves.__new__(Waves)
        made.registers, made.lanes, made.pc, made.shift = (
            *(self.registers, self.lanes, self.pc, self.shift),
        )
        made.count = len(which)
        for name in _SECOND:
            setattr(made, name, np.take(getattr(self, name), which, axis=1))
        for name in _BY_WAVE:
            setattr(made, name, getattr(self, name)[which])
        made.v_bad, made.s_bad, made.branch = list(self.v_bad), list(self.s_bad), None
        made._views()
        made.refresh_exec()
        return made

    @staticmethod
    def join(parts: Sequence[Waves]) -> Waves:
        """Waves that have met."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        made = Waves.__new__(Waves)
        made.registers, made.lanes, made.pc, made.shift = (
            *(first.registers, first.lanes, first.pc, first.shift),
        )
        made.count = sum(part.count for part in parts)
        for name in _SECOND:
            setattr(made, name, np.concatenate([getattr(part, name) for part in parts], axis=1))
        for name in _BY_WAVE:
            setattr(made, name, np.concatenate([getattr(part, name) for part in parts]))
        made.v_bad = [_either(bits) for bits in zip(*(p.v_bad for p in parts), strict=True)]
        made.s_bad = [_either(bits) for bits in zip(*(p.s_bad for p in parts), strict=True)]
        made.branch = None
        made._views()
        made.refresh_exec()
        return made


def _either(bits: Sequence[int]) -> int:
    found = 0
    for each in bits:
        found |= each
    return found
