"""How rows of a tile lie in LDS: kernels/common/tile.h, LdsRows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests import executed
from tests.verify import simt

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

ROWS = 64
COLUMNS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 256, 512)


class RowsParams(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("place", "across", "below", "kept")]


def places(columns: int, swizzled: bool) -> tuple[np.ndarray, ...]:
    """As each of the four ways gives them, in halves: (row, column)."""
    arch = by_gfx("sm_90")
    assert arch is not None
    defines = (("THREADS", ROWS), ("COLUMNS", columns), ("SWIZZLED", int(swizzled)))
    program = simt.compile_shim(
        KernelSpec("rows.hip", "rows", defines), arch, None, simt.SIMT_DIR / "kernels"
    )
    found = tuple(np.full((ROWS, columns), -1, np.int32) for _ in range(4))
    memory = [simt.Region(array.ctypes.data, array.nbytes) for array in found]
    simt.run(program, RowsParams(*(array.ctypes.data for array in found)), memory, 1, ROWS, 1)
    return found


@pytest.mark.parametrize("swizzled", [False, True], ids=["padded", "swizzled"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_in_lds(columns: int, swizzled: bool) -> None:
    """Each row keeps its columns, eight of them together, and consecutive rows have the same eight
    in different banks. What is added to an address leads to the same place.
    """
    place, across, below, kept = places(columns, swizzled)
    leading = columns + (0 if swizzled else 8)
    assert (np.sort(place, axis=1) == np.arange(ROWS)[:, None] * leading + np.arange(columns)).all()
    groups = place[:, ::8] // 8
    assert (place == groups.repeat(8, axis=1) * 8 + np.arange(columns) % 8).all()
    if columns % 16 == 0 or swizzled:
        eights = np.sort(groups.reshape(ROWS // 8, 8, -1) % 8, axis=1)
        assert (eights == np.arange(8)[None, :, None]).all()
    assert (across == place).all()
    assert (below == place).all()
    assert (kept == place).all()
