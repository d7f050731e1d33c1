"""What the demo found: differences, times, and what they mean."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AGREE_FLOAT32 = 2
"""Most that a pixel may differ in float32, of 255."""
INVISIBLE = 0.1
"""A mean difference, of 255, that is never held against anyone in half precision."""
BANDS_LARGEST, BANDS_SHARE = 1, 1e-4
"""Most that a value made in bands may differ from the whole frame's, of 255, and how many may."""
HALF_LUCK = 1.1
"""How much larger the mean rounding error of ours may be than torch's, by chance."""
ENCODER_ERROR = 1e-2
"""Largest difference of our encoder from torch's in float32, of the largest value."""
NO_GPU = (
    "The speed means nothing here: there is no GPU, and both sides run the same torch on the CPU."
)
TINY = (
    "This model is so small that starting kernels takes the time, not computing: "
    "`python -m lib_rocm_sd bench` measures the kernels."
)
NOT_OURS = "The speed says nothing of our kernels: they did not run here."


@dataclass(frozen=True)
class Sides:
    """One prompt's pictures, uint8 (height, width, 3), and how long each took in seconds."""

    prompt: str
    without: Any
    with_: Any
    without_s: float
    with_s: float
    reference: Any = None
    """The picture without the extension in float32, where the others are in half precision."""


def difference(a: Any, b: Any) -> tuple[int, float]:
    """The largest and the mean absolute difference of two uint8 pictures, of 255."""
    gap = abs(a.astype("int16") - b.astype("int16"))
    return int(gap.max()), float(gap.mean())


def comparison(
    sides: Sequence[Sides], backend: str, ran: dict[str, Any], exact: bool
) -> dict[str, Any]:
    """Times, differences, and what they mean."""
    rows = []
    for side in sides:
        largest, mean = difference(side.without, side.with_)
        row: dict[str, Any] = {
            "prompt": side.prompt,
            "without_s": round(side.without_s, 4),
            "with_s": round(side.with_s, 4),
            "largest_difference": largest,
            "mean_difference": round(mean, 4),
        }
        if side.reference is not None:
            row["half_vs_float32_mean"] = round(difference(side.without, side.reference)[1], 4)
        rows.append(row)
    without_s = statistics.median(row["without_s"] for row in rows)
    with_s = statistics.median(row["with_s"] for row in rows)
    ours = any(row["variant"] == "rocm_sd" for row in ran["rows"])
    speed = NO_GPU if backend == "cpu" else TINY if ours else NOT_OURS
    return {
        "pictures": rows,
        "median_without_s": without_s,
        "median_with_s": with_s,
        "ratio": round(without_s / with_s, 3),
        "speed": speed,
        "largest_difference": max(row["largest_difference"] for row in rows),
        "agree": _agree(rows, exact),
    }


def _agree(rows: Sequence[dict[str, Any]], exact: bool) -> bool:
    """Float32: no pixel differs much. Half: the mean differs no more than half from float32."""
    if exact:
        return all(row["largest_difference"] <= AGREE_FLOAT32 for row in rows)
    of_half = statistics.mean(row["half_vs_float32_mean"] for row in rows)
    return statistics.mean(row["mean_difference"] for row in rows) <= max(of_half, INVISIBLE)


def vae_agrees(vae: dict[str, Any]) -> bool:
    """Bands are the whole frame; ours in float32 is torch's, and in half no worse than torch's."""
    return vae["encoder_error"] <= ENCODER_ERROR and all(
        row["bands_largest"] <= BANDS_LARGEST
        and row["bands_share"] <= BANDS_SHARE
        and _no_worse(row)
        for row in vae["decodes"]
    )


def _no_worse(row: dict[str, Any]) -> bool:
    if row["dtype"] == "float32":
        return bool(row["ours_vs_float32_largest"] <= AGREE_FLOAT32)
    return bool(row["ours_vs_float32_mean"] <= HALF_LUCK * row["torch_vs_float32_mean"])


def versions() -> dict[str, str | None]:
    """What is installed."""
    import diffusers
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "hip": getattr(torch.version, "hip", None),
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def summary(findings: dict[str, Any]) -> str:
    """The report for people."""
    device, found = findings["device"], findings["versions"]
    hip = f", HIP {found['hip']}" if found["hip"] else ""
    count = len(findings["pictures"])
    lines = [
        f"Device     {device['name']} ({device['gfx'] or device['backend']}), {findings['dtype']}",
        f"Versions   Python {found['python']}, torch {found['torch']}{hip}, "
        f"diffusers {found['diffusers']}, transformers {found['transformers']}",
        f"Extension  {findings['status']}",
        *_ran(findings),
        f"Time       median of {count} pictures, {findings['settings']['steps']} steps each: "
        f"{findings['median_without_s']:.2f} s without, {findings['median_with_s']:.2f} s with",
    ]
    lines.append(f"           {findings['speed']}")
    largest = f"largest difference of any pixel {findings['largest_difference']}/255"
    verdict = "they agree" if findings["agree"] else "THEY DO NOT AGREE: please report this"
    lines.append(f"Pictures   {largest}: {verdict}")
    half = "half_vs_float32_mean"
    halves = [row[half] for row in findings["pictures"] if half in row]
    if halves:
        ours = statistics.mean(row["mean_difference"] for row in findings["pictures"])
        lines.append(
            f"           mean difference {ours:.3f}/255; "
            f"half precision itself, against float32: {statistics.mean(halves):.3f}/255"
        )
    return "\n".join([*lines, *_vae(findings["vae"])])


def _vae(vae: dict[str, Any]) -> list[str]:
    """What was found of the VAE alone."""
    left = [f"{role} left alone: {'; '.join(why)}" for role, why in vae["left_alone"].items()]
    lines = []
    if vae["programs"]:
        by = f", convolutions by {', '.join(vae['convolutions'])}" if "convolutions" in vae else ""
        lines.append(f"{' and '.join(vae['programs'])} run as our program{by}")
    for row in vae.get("decodes", ()):
        how = (
            f"largest difference {row['bands_largest']}/255, on {row['bands_share']:.4%} of values"
        )
        lines.append(f"{row['dtype']}, in bands against the whole frame: {how}")
        means = (row[f"{side}_vs_float32_mean"] for side in ("ours", "torch"))
        lines.append(
            "{}, mean difference from torch's float32: ours {:.3f}/255, torch's {:.3f}/255".format(
                row["dtype"], *means
            )
        )
    verdict = "" if vae["agree"] else "THIS IS NOT AS IT SHOULD BE: please report this"
    lines = [line for line in (*lines, *left, verdict) if line]
    return [f"{'' if index else 'VAE':10s} {line}" for index, line in enumerate(lines)]


def _ran(findings: dict[str, Any]) -> list[str]:
    """What ran, most often first, and what was left alone; of the VAE's operations only sums."""
    counts: dict[str, int] = {}
    for row in findings["ran"]["rows"]:
        one = f": {row['problem']}" if row["op"] == "attention" else ""
        what = f"{row['op']} by {row['variant']}{one}"
        counts[what] = counts.get(what, 0) + row["calls"]
    lines = [
        f"{counts[what]:6d} x {what}" for what in sorted(counts, key=lambda what: -counts[what])
    ]
    left = findings["patched"]["left_alone"]
    if left:
        lines.append(
            "left alone: " + ", ".join(f"{count} x {kind}" for kind, count in left.items())
        )
    modules = findings["patched"]["replaced"]
    lines.insert(0, f"{modules} attention modules go through the engine")
    return [f"{'Ran' if not index else '':10s} {line}" for index, line in enumerate(lines)]
