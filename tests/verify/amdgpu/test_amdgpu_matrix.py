"""Matrix products under the executor of AMD machine code, an instruction at a time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.verify.amdgpu import assembled
from tests.verify.amdgpu.assembled import Machine
from tests.verify.amdgpu.errors import UndefinedError, UnsupportedError

pytestmark = pytest.mark.skipif(assembled.missing() is not None, reason=str(assembled.missing()))
LANE = np.arange(32)
WIDE = np.arange(64)
CDNA = ("gfx942", "gfx90a")


def packed(halves: np.ndarray) -> np.ndarray:
    """(registers, lanes, 2) float16 -> (registers, lanes) uint32."""
    return np.ascontiguousarray(halves.astype(np.float16)).view(np.uint32)[..., 0]


def numbered(rows: int, columns: int, step: int = 1) -> np.ndarray:
    return (np.arange(rows)[:, None] * step + np.arange(columns)[None] * 0.125) % 61.0


def test_wmma_of_rdna3_with_an_inline_constant_accumulator() -> None:
    """Written out from the table in the ISA document: lane 17 holds row 1 of A too, and register 3
    of lane 17 holds row 7, column 1 of D.
    """
    a, b = numbered(16, 16, 3), numbered(16, 16, 5)
    m = Machine("gfx1100")
    for register in range(8):
        two = 2 * register + np.arange(2)
        m.set_v(**{f"v{8 + register}": packed(a[LANE % 16][:, two])})
        m.set_v(**{f"v{16 + register}": packed(b.T[LANE % 16][:, two])})
    m.lines("v_wmma_f32_16x16x16_f16 v[24:31], v[8:15], v[16:23], 1.0")
    exact = a @ b + 1.0
    assert m.v(24 + 3)[17] == np.float32(exact[7, 1])
    assert m.v(24 + 0)[15] == np.float32(exact[0, 15])
    assert m.v(24 + 7)[31] == np.float32(exact[15, 15])
    m.lines("v_wmma_f32_16x16x16_f16 v[24:31], v[8:15], v[16:23], v[24:31]")
    assert m.v(24 + 3)[17] == np.float32(exact[7, 1] + exact[7, 1] - 1.0)


def test_wmma_of_rdna3_wants_both_halves_of_the_wave_alike() -> None:
    m = Machine("gfx1100").set_v(**{f"v{r}": 0 for r in range(8, 24)})
    m.set_v(v9=LANE)
    with pytest.raises(UndefinedError, match="different matrices"):
        m.lines("v_wmma_f32_16x16x16_f16 v[24:31], v[8:15], v[16:23], 0")


def test_wmma_of_rdna4() -> None:
    """Lane 20 holds k = 8..15 of row 4; register 2 of lane 20 is row 10, column 4 of D."""
    a, b = numbered(16, 16, 3), numbered(16, 16, 5)
    m = Machine("gfx1201")
    for register in range(4):
        k = (8 * (LANE // 16))[:, None] + 2 * register + np.arange(2)[None]
        m.set_v(**{f"v{8 + register}": packed(a[(LANE % 16)[:, None], k])})
        m.set_v(**{f"v{12 + register}": packed(b[k, (LANE % 16)[:, None]])})
    m.lines("v_wmma_f32_16x16x16_f16 v[24:31], v[8:11], v[12:15], 0")
    exact = a @ b
    assert m.v(24 + 2)[20] == np.float32(exact[10, 4])
    assert m.v(24 + 7)[9] == np.float32(exact[7, 9])


@pytest.mark.parametrize("gfx", CDNA)
@pytest.mark.parametrize("size", [16, 32])
def test_mfma(gfx: str, size: int) -> None:
    """32x32: registers 4..7 are rows 8..11 of lanes 0..31 and rows 12..15 of lanes 32..63."""
    depth = 256 // size
    a, b = numbered(size, depth, 3), numbered(depth, size, 5)
    m = Machine(gfx)
    for register in range(2):
        k = (4 * (WIDE // size))[:, None] + 2 * register + np.arange(2)[None]
        m.set_v(**{f"v{2 + register}": packed(a[(WIDE % size)[:, None], k])})
        m.set_v(**{f"v{4 + register}": packed(b[k, (WIDE % size)[:, None]])})
    shape = f"{size}x{size}x{depth}"
    name = f"{shape}f16" if gfx == "gfx90a" else f"{shape}_f16"
    last = 8 + size * size // 64 - 1
    m.lines(f"v_mfma_f32_{name} a[8:{last}], v[2:3], v[4:5], 0")
    exact = a @ b
    if size == 16:
        assert m.v(256 + 8 + 2)[37] == np.float32(exact[10, 5])
    else:
        assert m.v(256 + 8 + 5)[3] == np.float32(exact[9, 3])
        assert m.v(256 + 8 + 5)[35] == np.float32(exact[13, 3])
        assert m.v(256 + 8 + 15)[63] == np.float32(exact[31, 31])
    m.lines(f"v_mfma_f32_{name} a[8:{last}], v[2:3], v[4:5], a[8:{last}]")
    assert m.v(256 + 8)[1] == np.float32(2 * exact[0, 1])


@pytest.mark.parametrize("text", ["neg_lo:[1,0,0]", "neg_hi:[0,0,1]"])
def test_modifiers_of_matrix_products_are_refused(text: str) -> None:
    m = Machine("gfx1100").set_v(**{f"v{r}": 0 for r in range(8, 32)})
    with pytest.raises((UnsupportedError, ValueError)):
        m.lines(f"v_wmma_f32_16x16x16_f16 v[24:31], v[8:15], v[16:23], v[24:31] {text}")
