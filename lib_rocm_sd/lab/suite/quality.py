"""How far a picture is from another: figures that people quote, and a histogram of the differences.

SSIM is scikit-image's with the window of Wang and others, "Image Quality Assessment" (2004). FLIP
(Andersson and others, 2020) is the package flip-evaluator's: a perceptual difference, 0 to 1, that
needs no weights. Distances by a network (LPIPS and the like) are left out, since no package of a
registry ships the network's weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.lab.svg import BAR, GAP, WIDE, colour_of, drawing, text_at, title_of

EDGES = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129)
"""The histogram's classes begin at these differences, of 255."""
ABSENT = {"ssim": "scikit-image", "flip": "flip-evaluator"}


@dataclass(frozen=True)
class Distance:
    """`largest` and `mean` of 255; `psnr` in dB, infinite where the pictures are equal. `ssim` and
    `flip` are NaN where their packages are not installed. `histogram`: values, by EDGES.
    """

    largest: int
    mean: float
    psnr: float
    ssim: float
    flip: float
    histogram: tuple[int, ...]


def distance(one: Any, other: Any) -> Distance:
    """Between two RGB images of PIL. Raises ValueError where their sizes differ."""
    import numpy as np

    if one.size != other.size:
        raise ValueError(f"the pictures have different sizes: {one.size} and {other.size}")
    a, b = (np.asarray(image.convert("RGB")) for image in (one, other))
    gap = np.abs(a.astype(np.int16) - b)
    square = float((gap.astype(np.float64) ** 2).mean())
    counts, _ = np.histogram(gap, bins=[*EDGES, 256])
    return Distance(
        int(gap.max()),
        float(gap.mean()),
        10 * math.log10(255**2 / square) if square else math.inf,
        _ssim(a, b),
        _flip(a, b),
        tuple(map(int, counts)),
    )


def _ssim(a: Any, b: Any) -> float:
    try:
        from skimage.metrics import structural_similarity
    except ImportError:
        return math.nan
    if min(a.shape[:2]) < 11:  # its window
        return math.nan
    options: dict[str, Any] = {"gaussian_weights": True, "use_sample_covariance": False}
    return float(structural_similarity(a, b, channel_axis=2, data_range=255, **options))


def _flip(a: Any, b: Any) -> float:
    try:
        from flip_evaluator import evaluate
    except ImportError:
        return math.nan
    scaled = ((image / 255.0).astype("float32") for image in (a, b))
    return float(evaluate(*scaled, "LDR", applyMagma=False)[1])


def drawn(histograms: Mapping[str, Sequence[int]]) -> str:
    """An SVG: for each way, the share of values by how far they are from float32's, on a scale of
    powers of ten.
    """
    parts, y = [title_of("Share of values by difference, of 255", WIDE)], 34.0
    ends = [f"{low} to {high - 1}" for low, high in zip(EDGES, (*EDGES[1:], 256), strict=True)]
    names = [name.split(" to ")[0] if len(set(name.split(" to "))) == 1 else name for name in ends]
    spoken = []
    for place, (way, counts) in enumerate(histograms.items()):
        total = max(sum(counts), 1)
        parts.append(text_at(0, y + 14, way, weight="bold"))
        y += BAR + GAP
        for name, count in zip(names, counts, strict=True):
            if not count:
                continue
            share = count / total
            length = max(1 + math.log10(max(share, 1e-7)) / 7, 0.01) * 300
            parts.append(text_at(90, y + 13, name, "end"))
            parts.append(
                f'<rect x="100" y="{y:.0f}" width="{length:.1f}" height="{BAR}" '
                f'style="fill:{colour_of(place)}"/>'
            )
            parts.append(text_at(108 + length, y + 13, f"{share:.2%}"))
            y += BAR + 2
        y += GAP
        spoken.append(f"{way}: {counts[0] / total:.1%} equal")
    return drawing(WIDE.width, y + GAP, parts, "Differences. " + "; ".join(spoken))
