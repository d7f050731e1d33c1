"""The launches of a Stable Diffusion decoder on a whole frame, from its widths alone; no torch.

A test holds this against the recipe that vae/read.py makes of a real Decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib_rocm_sd.ops.conv.kernel import ConvForm, chunk_of

WIDTHS = (128, 256, 512, 512)
"""Channels of the levels of SD1.5's and SDXL's VAE, the largest image first."""


@dataclass(frozen=True)
class ConvLaunch:
    """A convolution of a `height` x `width` input; channels as stored."""

    name: str
    form: ConvForm
    height: int
    width: int
    in_channels: int
    out_channels: int
    shortcut_channels: int = 0

    @property
    def out_size(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        step = 2 if self.form.kind == "upsample" else 1
        return self.height * step, self.width * step

    @property
    def in_place(self) -> bool:
        """The result is written where the shortcut lay."""
        return self.form.shortcut != "none"

    @property
    def flops(self) -> int:
        """What it computes: four taps per output pixel where it doubles the image, else nine."""
        rows, columns = self.out_size
        taps = 4 if self.form.kind == "upsample" else 9
        extra = self.shortcut_channels if self.form.shortcut == "conv" else 0
        return 2 * rows * columns * self.out_channels * (taps * self.in_channels + extra)


@dataclass(frozen=True)
class AttentionLaunch:
    """Attention over all pixels with one head, with its norm and its four 1x1 convolutions."""

    name: str
    pixels: int
    channels: int

    @property
    def product_flops(self) -> int:
        """FLOPs of the two products, with the keys and with the values."""
        return 4 * self.pixels * self.pixels * self.channels

    @property
    def projection_flops(self) -> int:
        """FLOPs of the 1x1 convolutions."""
        return 8 * self.pixels * self.channels * self.channels


Launch = ConvLaunch | AttentionLaunch


def decoder(
    height: int, width: int, latent: int = 4, widths: tuple[int, ...] = WIDTHS, blocks: int = 3
) -> list[Launch]:
    """All launches for a latent of `height` x `width`."""
    made = _Maker(height, width)
    made.conv("conv_in", latent, widths[-1])
    channels = widths[-1]
    made.resnet("mid.0", channels, channels)
    made.launches.append(AttentionLaunch("mid.attention", height * width, channels))
    made.resnet("mid.1", channels, channels)
    for level, out in enumerate(reversed(widths)):
        doubled = level < len(widths) - 1
        for block in range(blocks):
            before_doubling = doubled and block == blocks - 1  # which reads without a norm
            made.resnet(f"up.{level}.{block}", channels, out, statistics=not before_doubling)
            channels = out
        if doubled:
            made.conv(f"up.{level}.upsample", channels, channels, kind="upsample")
    made.conv("conv_out", channels, 3, norm=True, statistics=False)
    return made.launches


class _Maker:
    def __init__(self, height: int, width: int) -> None:
        self.size = (height, width)
        self.launches: list[Launch] = []

    def conv(
        self,
        name: str,
        taken: int,
        out: int,
        kind: str = "3x3",
        norm: bool = False,
        statistics: bool = True,
        shortcut: str = "none",
        shortcut_channels: int = 0,
    ) -> None:
        taken = -(-taken // 16) * 16
        form = ConvForm(kind, "float16", norm, shortcut, statistics, chunk_of(taken, kind))
        launch = ConvLaunch(name, form, *self.size, taken, out, shortcut_channels)
        self.launches.append(launch)
        self.size = launch.out_size

    def resnet(self, name: str, taken: int, out: int, statistics: bool = True) -> None:
        shortcut = "identity" if taken == out else "conv"
        self.conv(f"{name}.conv1", taken, out, norm=True)
        self.conv(f"{name}.conv2", out, out, "3x3", True, statistics, shortcut, taken)
