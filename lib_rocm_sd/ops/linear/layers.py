"""The linear layers of Stable Diffusion 1.5 and XL, a prompt and its negative. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """(rows, k) by weights that make `columns` each; `gate`: GEGLU, by a weight of twice as many
    rows. `residual`: what comes out is added to another tensor.
    """

    name: str
    rows: int
    k: int
    columns: tuple[int, ...]
    bias: bool = True
    residual: bool = False
    gate: bool = False


def _block(name: str, rows: int, channels: int, prompt: int, width: int) -> Iterator[Layer]:
    """A transformer block of `channels`; `prompt` rows of text have `width` values each."""
    same = (channels,)
    yield Layer(f"{name}, GEGLU", rows, channels, (4 * channels,), gate=True)
    yield Layer(f"{name}, q k v", rows, channels, same * 3, bias=False)
    yield Layer(f"{name}, feed-forward out", rows, 4 * channels, same, residual=True)
    yield Layer(f"{name}, attention out", rows, channels, same, residual=True)
    yield Layer(f"{name}, q of the text", rows, channels, same, bias=False)
    yield Layer(f"{name}, projection in", rows, channels, same)
    yield Layer(f"{name}, k v of the text", prompt, width, same * 2, bias=False)


def _embedding(name: str, *sizes: tuple[int, int]) -> Iterator[Layer]:
    for k, columns in sizes:
        yield Layer(f"{name}, time embedding {k} to {columns}", 2, k, (columns,))


LAYERS = (
    *_block("SD1.5 512x512, 64x64", 8192, 320, 154, 768),
    *_block("SD1.5 512x512, 32x32", 2048, 640, 154, 768),
    *_block("SD1.5 512x512, 16x16", 512, 1280, 154, 768),
    *_block("SD1.5 512x512, 8x8", 128, 1280, 154, 768),
    *_embedding("SD1.5", (320, 1280), (1280, 1280), (1280, 640), (1280, 320)),
    *_block("SDXL 1024x1024, 32x32", 2048, 1280, 154, 2048),
    *_block("SDXL 1024x1024, 64x64", 8192, 640, 154, 2048),
    *_embedding("SDXL", (2816, 1280)),
)
