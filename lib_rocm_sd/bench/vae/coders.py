"""What is measured: Stable Diffusion's decoder and encoder with random weights, their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

FACTOR = 8
"""Pixels a side per value of a latent."""
WIDTHS = (128, 256, 512, 512)
SMALL_WIDTHS = (32, 32, 64, 64)
ROLES = ("decoder", "encoder")


@dataclass(frozen=True)
class Coder:
    """One of `ROLES`. `small`: of few channels, for a try in seconds."""

    role: str
    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    small: bool = False

    @property
    def scale(self) -> tuple[int, int]:
        """Output size over input size, as a fraction."""
        return (FACTOR, 1) if self.role == "decoder" else (1, FACTOR)

    def random_input(self, height: int, width: int) -> torch.Tensor:
        """The latent of, or the image with, `height` x `width` pixels, drawn from their number."""
        generator = torch.Generator("cpu").manual_seed(height * 65537 + width)
        channels, divisor = (4, FACTOR) if self.role == "decoder" else (3, 1)
        shape = (1, channels, height // divisor, width // divisor)
        values = torch.randn(shape, generator=generator)
        values = values if self.role == "decoder" else values.mul_(0.4).clamp_(-1, 1)
        return values.to(self.device, self.dtype)


def coder(role: str, device: torch.device, dtype: torch.dtype, small: bool = False) -> Coder:
    """The coder, seeded. Needs diffusers."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=SMALL_WIDTHS if small else WIDTHS,
        layers_per_block=1 if small else 2,
        norm_num_groups=8 if small else 32,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    module: nn.Module = vae.decoder if role == "decoder" else vae.encoder
    module = module.to(device, dtype).eval().requires_grad_(False)
    return Coder(role, module, device, dtype, small)


def structured_latent(height: int, width: int) -> torch.Tensor:
    """A latent (1, 4, height / 8, width / 8) with regions unlike each other, as pictures have.

    Smooth gradients, a quiet disc, a lively stripe: a tile's statistics are not the whole's.
    """
    rows, columns = height // FACTOR, width // FACTOR
    generator = torch.Generator("cpu").manual_seed(7)
    coarse = torch.randn((1, 4, 6, 6), generator=generator)
    size = (rows, columns)
    smooth = nn.functional.interpolate(coarse, size=size, mode="bicubic", align_corners=True)
    fine = torch.randn((1, 4, rows, columns), generator=generator)
    y = torch.linspace(-1, 1, rows)[:, None]
    x = torch.linspace(-1, 1, columns)[None, :]
    disc = ((x + 0.35) ** 2 + (y + 0.2) ** 2 < 0.2).float()
    stripe = ((x - y) > 0.9).float()
    return smooth * (1 - disc) + disc * smooth.mean() + fine * (0.15 + 0.6 * stripe - 0.12 * disc)
