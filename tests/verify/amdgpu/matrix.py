"""Matrix instructions, by the register layouts of AMD's ISA documents.

RDNA3 ISA 7.9: lane l holds row (A) or column (B) l % 16, all sixteen k in eight registers, lanes
16..31 the same again; register e of C and D holds row 2 e + l / 16, column l % 16.
RDNA4 ISA 7.12.2: element e of eight is k = 8 (l / 16) + e; C and D: row 8 (l / 16) + e.
CDNA3 ISA 7.1.4: 16x16x16: k = 4 (l / 16) + e, row 4 (l / 16) + e. 32x32x8: l % 32,
k = 4 (l / 32) + e; register e of D holds row 8 (e / 4) + 4 (l / 32) + e % 4, column l % 32.
Products and sums are taken in float64 and rounded once: the order of the hardware's sums is not
documented. Denormal inputs of bf16 and f16 are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.verify.amdgpu import floats
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UndefinedError, UnsupportedError
from tests.verify.amdgpu.operands import constant, vector
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import Waves

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layout:
    """`rows[lane]`, `k[lane, element]` of A and B; `out_rows[lane, register]` of C and D."""

    size: int
    depth: int
    lanes: int
    rows: Array
    k: Array
    out_rows: Array

    @property
    def in_registers(self) -> int:
        """Registers of A, and of B."""
        return self.k.shape[1] // 2

    @property
    def out_registers(self) -> int:
        """Registers of C, and of D."""
        return self.out_rows.shape[1]


def _rdna3() -> Layout:
    lane, element = np.arange(32)[:, None], np.arange(16)[None]
    out = 2 * np.arange(8)[None] + lane // 16
    return Layout(16, 16, 32, lane[:, 0] % 16, element + 0 * lane, out)


def _rdna4() -> Layout:
    lane, element = np.arange(32)[:, None], np.arange(8)[None]
    here = 8 * (lane // 16) + element
    return Layout(16, 16, 32, lane[:, 0] % 16, here, here)


def _cdna(size: int, depth: int) -> Layout:
    lane, element = np.arange(64)[:, None], np.arange(4)[None]
    k = 4 * (lane // size) + element
    register = np.arange(size * size // 64)[None]
    step = 64 // size * 4
    out = step * (register // 4) + 4 * (lane // size) + register % 4
    return Layout(size, depth, 64, lane[:, 0] % size, k, out)


def _layout(ins: Instruction) -> Layout | None:
    name = ins.name
    if name in ("V_WMMA_F32_16X16X16_F16", "V_WMMA_F32_16X16X16_BF16"):
        return _rdna3() if ins.family == "rdna3" else _rdna4()
    if name in ("V_MFMA_F32_16X16X16_F16", "V_MFMA_F32_16X16X16_BF16"):
        return _cdna(16, 16)
    if name in ("V_MFMA_F32_32X32X8_F16", "V_MFMA_F32_32X32X8_BF16"):
        return _cdna(32, 8)
    if "WMMA" in name or "MFMA" in name:
        raise UnsupportedError(name)
    return None


def compile_matrix(ins: Instruction) -> Step | None:
    """The step of a matrix instruction or of a move of accumulation registers; None where it is
    another's.
    """
    if ins.name.startswith("V_ACCVGPR_"):
        return _moves(ins)
    layout = _layout(ins)
    if layout is None:
        return None
    a_at, b_at, c_at, d_at = _registers(ins)
    bf16 = ins.name.endswith("BF16")
    fixed = constant(ins, ins.get("src2"), "f32") if c_at < 0 else None
    if c_at < 0 and fixed is None:
        raise UnsupportedError("a scalar accumulator")
    columns, out_rows = layout.rows, layout.out_rows.T

    def step(b: Waves) -> None:
        if b.lanes != layout.lanes:
            raise UnsupportedError(f"{ins.name} with {b.lanes} lanes")
        if not b.full:
            raise UndefinedError(f"{ins.name} with inactive lanes")
        left = _operand(b, a_at, layout, bf16)
        right = _operand(b, b_at, layout, bf16)
        product = left @ right.swapaxes(1, 2)
        total = product.transpose(1, 2, 0)[out_rows, columns].transpose(0, 2, 1)
        if fixed is not None:
            total = total + fixed
        else:
            total = total + _block(b, c_at, layout.out_registers).view(np.float32)
        for register, value in enumerate(total.astype(np.float32).view(np.uint32)):
            b.put_v(d_at + register, value)

    return step


def _registers(ins: Instruction) -> tuple[int, int, int, int]:
    """Of A, B, C (-1 for a constant) and D. Raises UnsupportedError for modifiers."""
    if ins.family == "cdna":
        if ins.get("cbsz") or ins.get("abid") or ins.get("blgp"):
            raise UnsupportedError("broadcast modifiers of MFMA")
        accumulating = ins.get("acc_cd")
        sides = [ins.get("acc") & 1, ins.get("acc") >> 1 & 1, accumulating, accumulating]
    else:
        plain = ins.get("opsel") == 0 and not ins.get("clmp")
        if ins.get("neg") or ins.get("neg_hi") or not plain:
            raise UnsupportedError("modifiers of WMMA")
        sides = [0, 0, 0, 0]
    found = []
    for name, agpr in zip(("src0", "src1", "src2", "vdst"), sides, strict=True):
        code = ins.get(name)
        if code < 256 and name != "src2":
            raise UnsupportedError("a scalar factor of a matrix product")
        found.append(-1 if code < 256 else code - 256 + 256 * agpr)
    return found[0], found[1], found[2], found[3]


def _read(b: Waves, register: int) -> Array:
    if b.v_bad[register]:
        b.check_v(register)
    return b.vl[register]


def _block(b: Waves, register: int, count: int) -> Array:
    """So many registers from this one on, (registers, waves, lanes)."""
    for each in range(register, register + count):
        _read(b, each)
    return b.v[register : register + count]


def _operand(b: Waves, register: int, layout: Layout, bf16: bool) -> Array:
    """A, or B transposed: (waves, size, depth) float64. Where lanes hold the same place twice,
    as on RDNA3, they must agree.
    """
    words = _block(b, register, layout.in_registers)
    words = np.ascontiguousarray(words.transpose(1, 2, 0))
    halves = words.view(np.uint16).reshape(b.count, b.lanes, -1)
    values = floats.bfloat16_to_float(halves) if bf16 else halves.view(np.float16)
    if layout.lanes > layout.size * (layout.depth // layout.k.shape[1]):
        if (halves[:, : layout.size] != halves[:, layout.size :]).any():
            raise UndefinedError("the two halves of a wave hold different matrices")
        return values[:, : layout.size].astype(np.float64)
    out = np.empty((b.count, layout.size, layout.depth), np.float64)
    out[:, layout.rows[:, None], layout.k] = values
    return out


def _moves(ins: Instruction) -> Step:
    """V_ACCVGPR_READ, _WRITE and _MOV."""
    source, target = ins.get("src0"), ins.get("vdst") - 256
    if ins.name != "V_ACCVGPR_READ_B32":
        target += 256
    if source < 256:
        if ins.name != "V_ACCVGPR_WRITE_B32":
            raise UnsupportedError(f"{ins.name} of a scalar")
        read = vector(ins, source, "u32")
        return lambda b: b.put_v(target, read(b))
    register = source - 256 + (0 if ins.name == "V_ACCVGPR_WRITE_B32" else 256)
    return lambda b: b.put_v(target, _read(b, register))
