"""GPUs as rows of data, from kernels/arch.json. Support is never inferred from a gfx prefix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
INSTALLED = PACKAGE / "kernels"
"""Where `pip install` lays the kernels; in a checkout they stand beside the package."""
KERNELS_DIR = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "kernels"


@dataclass(frozen=True)
class Card:
    """One card or chip of a gfx id, with the figures that estimates need: those of AMD's product
    pages (amd.com, "Specifications").

    `clock_mhz`: the highest that the maker names ("boost"). `bandwidth_gb_s`: of an APU that of the
    fastest memory that it is specified for. `peak_tflops`: half precision, which only checks the
    other two: it is compute units times clock times the operations per clock (lab/cycles.py).
    """

    name: str
    cu_count: int
    clock_mhz: int
    bandwidth_gb_s: float
    peak_tflops: float


@dataclass(frozen=True)
class Arch:
    """One GPU target.

    `matrix` names the matrix unit: dot2, wmma_gfx11, wmma_gfx12, mfma or mma_sm80. `lds_bytes` is
    the most that one work-group may use, `lds_pool_bytes` what the work-groups on one WGP (RDNA) or
    CU (CDNA) share. `names` are the parts of marketing names that identify the chip where an
    operating system reports no gfx id. `integrated`: a part of a processor, no card of its own.
    `card`: one whose figures are known; nothing is compiled or chosen by them.
    """

    gfx: str
    family: str
    matrix: str
    wave_size: int
    lds_bytes: int
    lds_pool_bytes: int
    vgprs_per_simd: int
    vgpr_granule: int
    max_vgprs: int
    max_waves_per_simd: int
    names: tuple[str, ...]
    integrated: bool = False
    card: Card | None = None

    @property
    def is_amd(self) -> bool:
        """False for the development-only NVIDIA row."""
        return self.matrix != "mma_sm80"

    @property
    def has_fast_libraries(self) -> bool:
        """Whether a library's products, and its convolutions of channels-last halves, come before
        ours under Auto wherever they are one launch as ours are (docs/unet.md).
        """
        return self.matrix in ("mfma", "mma_sm80")

    def defines(self) -> dict[str, int]:
        """The preprocessor definitions through which a kernel learns what it is compiled for."""
        return {
            f"MATRIX_UNIT_{self.matrix.upper()}": 1,
            "WAVE_SIZE": self.wave_size,
            "LDS_BYTES": self.lds_bytes,
        }


@lru_cache(maxsize=1)
def table() -> dict[str, Arch]:
    """Every row of kernels/arch.json by gfx id, in the file's order."""
    rows = json.loads((KERNELS_DIR / "arch.json").read_text(encoding="utf-8"))["arches"]
    return {row["gfx"]: _arch(row) for row in rows}


def _arch(row: dict[str, Any]) -> Arch:
    card = Card(**row["card"]) if "card" in row else None
    return Arch(**{**row, "names": tuple(row["names"]), "card": card})


def amd_table() -> dict[str, Arch]:
    """The rows that a user can own: all but the development one."""
    return {gfx: arch for gfx, arch in table().items() if arch.is_amd}


def by_gfx(gfx: str) -> Arch | None:
    """The row of a gfx id such as 'gfx1100' or 'gfx90a:sramecc+:xnack-'.

    None when the manifest has no such row.
    """
    return table().get(gfx.split(":")[0].strip())


def by_marketing_name(name: str) -> Arch | None:
    """The row of a marketing name such as 'AMD Radeon RX 7900 XTX'.

    The longest matching part wins, None if none does.
    """
    words = f" {' '.join(name.replace('(TM)', ' ').replace('Graphics', ' ').split())} ".lower()
    hits = [
        (len(part), arch)
        for arch in amd_table().values()
        for part in arch.names
        if f" {part.lower()} " in words
    ]
    return max(hits, key=lambda hit: hit[0])[1] if hits else None
