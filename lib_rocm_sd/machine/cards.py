"""One card or chip per gfx id, with the figures that estimates need.

Compute units, highest clock, memory bandwidth and peak of half-precision (matrix) arithmetic are
those of AMD's product pages (amd.com, "Specifications"); bandwidth of the APUs is that of the
fastest memory that they are specified for. The peak only checks the other two: it is compute units
times clock times the operations per clock of rates.py's sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib_rocm_sd.arch import Arch

HALF_OPERATIONS = {
    "RDNA2": 256,
    "RDNA3": 512,
    "RDNA3.5": 512,
    "RDNA4": 1024,
    "CDNA2": 1024,
    "CDNA3": 2048,
    "CDNA4": 4096,
}
"""Half-precision operations per clock of one compute unit; rates.py says where from."""


@dataclass(frozen=True)
class Card:
    """`clock_mhz`: the highest that the maker names ("boost"). `peak_tflops`: half precision."""

    gfx: str
    name: str
    cu_count: int
    clock_mhz: int
    bandwidth_gb_s: float
    peak_tflops: float

    def places(self, arch: Arch) -> int:
        """Where work-groups live: work-group processors of two compute units on RDNA, else compute
        units; each has four SIMDs.
        """
        return self.cu_count // 2 if arch.family.startswith("RDNA") else self.cu_count


CARDS = {
    card.gfx: card
    for card in (
        Card("gfx1030", "RX 6800 XT", 72, 2250, 512.0, 41.47),
        Card("gfx1031", "RX 6700 XT", 40, 2581, 384.0, 26.43),
        Card("gfx1032", "RX 6600 XT", 32, 2589, 256.0, 21.21),
        Card("gfx1034", "RX 6500 XT", 16, 2815, 144.0, 11.53),
        Card("gfx1100", "RX 7900 XTX", 96, 2500, 960.0, 122.8),
        Card("gfx1101", "RX 7800 XT", 60, 2430, 624.1, 74.65),
        Card("gfx1102", "RX 7600", 32, 2655, 288.0, 43.5),
        Card("gfx1103", "Radeon 780M", 12, 2700, 120.0, 16.59),
        Card("gfx1150", "Radeon 890M", 16, 2900, 120.0, 23.76),
        Card("gfx1151", "Radeon 8060S", 40, 2900, 256.0, 59.39),
        Card("gfx1200", "RX 9060 XT", 32, 3130, 320.0, 103.0),
        Card("gfx1201", "RX 9070 XT", 64, 2970, 640.0, 195.0),
        Card("gfx90a", "Instinct MI210", 104, 1700, 1638.4, 181.0),
        Card("gfx942", "Instinct MI300X", 304, 2100, 5300.0, 1307.4),
        Card("gfx950", "Instinct MI355X", 256, 2400, 8000.0, 2516.6),
    )
}
