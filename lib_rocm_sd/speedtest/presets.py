"""What a request comes to on a device: cases, sizes, and how long each part may take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.speedtest.request import WHAT, Request

GPU_SIZES = {"quick": (512,), "standard": (512, 1024)}
CPU_SIZES = {"quick": (64,), "standard": (64, 128)}


@dataclass(frozen=True)
class Effort:
    """`parts_s`: about how long each part takes on a GPU. `runs`: most timed calls of a row.

    `limit_s`: a row that takes longer is given up; a first run may search for convolutions for a
    minute. `pictures`: timed of each method. `steps` of a picture.
    """

    parts_s: dict[str, float]
    runs: int
    limit_s: float
    pictures: int
    steps: int


def _parts(*seconds: float) -> dict[str, float]:
    return dict(zip(WHAT, seconds, strict=True))


EFFORTS = {
    "quick": Effort(_parts(6.0, 6.0, 4.0, 18.0), 20, 90.0, 2, 8),
    "standard": Effort(_parts(45.0, 40.0, 15.0, 95.0), 50, 120.0, 5, 20),
    "custom": Effort(_parts(50.0, 60.0, 20.0, 150.0), 50, 180.0, 3, 20),
}
CPU_EFFORTS = {
    "quick": Effort(_parts(0.5, 0.5, 0.5, 2.0), 5, 10.0, 1, 2),
    "standard": Effort(_parts(3.0, 3.0, 3.0, 10.0), 20, 30.0, 3, 8),
    "custom": Effort(_parts(3.0, 3.0, 3.0, 10.0), 5, 30.0, 1, 4),
}


def effort(request: Request, device: torch.device) -> Effort:
    """How much is measured; on a CPU little, since nothing is learned there."""
    return (CPU_EFFORTS if device.type == "cpu" else EFFORTS)[request.preset]


def sizes(request: Request, device: torch.device) -> tuple[int, ...]:
    """Sides of pictures in pixels."""
    known = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    return request.sizes or known[request.preset]


def half(device: torch.device) -> torch.dtype:
    """What a host computes in: float16, on a CPU float32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def attention_cases(
    request: Request, device: torch.device
) -> list[tuple[str, int, AttentionProblem]]:
    """Name, side of the picture in pixels, problem: of SD 1.5's, SDXL's UNet and of the VAE."""
    dtype = str(half(device)).removeprefix("torch.")
    found = []
    for size in sizes(request, device):
        fine, middle, coarse = ((-(-size // step)) ** 2 for step in (8, 16, 32))
        picture = f"{size}x{size}"
        cases = {
            f"SD1.5 {picture} self": AttentionProblem(2, 8, fine, fine, 40, dtype),
            f"SD1.5 {picture} text": AttentionProblem(2, 8, fine, 77, 40, dtype),
            f"SDXL {picture} self": AttentionProblem(2, 10, middle, middle, 64, dtype),
            f"SD1.5 {picture} self, half": AttentionProblem(2, 8, middle, middle, 80, dtype),
            f"SDXL {picture} self, half": AttentionProblem(2, 20, coarse, coarse, 64, dtype),
            f"SDXL {picture} text": AttentionProblem(2, 10, middle, 77, 64, dtype),
            f"VAE {picture} middle": AttentionProblem(1, 1, fine, fine, 512, dtype),
        }
        chosen = list(cases.items())
        chosen = chosen if request.preset == "standard" else chosen[:3]
        found += [(name, size, problem) for name, problem in chosen]
    return found
