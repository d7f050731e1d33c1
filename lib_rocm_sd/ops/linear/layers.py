"""The linear layers of Stable Diffusion 1.5 and XL, a prompt and its negative. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from lib_rocm_sd.unet_step import STEPS, Linear


def _largest_first() -> Iterator[Linear]:
    for layers in STEPS:
        linear = [layer for layer in layers if isinstance(layer, Linear)]
        yield from sorted(linear, key=lambda layer: -layer.flops)


LAYERS = tuple(dict.fromkeys(_largest_first()))
"""Each once."""
