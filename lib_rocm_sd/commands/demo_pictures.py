"""What the demo shows: differences, times, and what they mean; a picture with a row per prompt:
without, with, and their difference made visible; and a look at the VAE alone: torch's and ours,
whole and in bands, single and half. Imports torch and Pillow where they are needed.
"""

from __future__ import annotations

import copy
import platform
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import report

if TYPE_CHECKING:
    import torch
    from PIL import Image, ImageDraw

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
HALF = "half_vs_float32_mean"
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
            row[HALF] = round(difference(side.without, side.reference)[1], 4)
        rows.append(row)
    without_s = statistics.median(row["without_s"] for row in rows)
    with_s = statistics.median(row["with_s"] for row in rows)
    ours = any(row["variant"] == "rocm_sd" for row in ran["rows"])
    largest = max(row["largest_difference"] for row in rows)
    if exact:
        agree = largest <= AGREE_FLOAT32
    else:  # the mean differs no more than half precision does from float32
        of_half = statistics.mean(row[HALF] for row in rows)
        mean = statistics.mean(row["mean_difference"] for row in rows)
        agree = mean <= max(of_half, INVISIBLE)
    return {
        "pictures": rows,
        "median_without_s": without_s,
        "median_with_s": with_s,
        "ratio": round(without_s / with_s, 3),
        "speed": NO_GPU if backend == "cpu" else TINY if ours else NOT_OURS,
        "largest_difference": largest,
        "agree": agree,
    }


def vae_agrees(vae: dict[str, Any]) -> bool:
    """Bands are the whole frame; ours in float32 is torch's, and in half no worse than torch's."""
    agree = [vae["encoder_error"] <= ENCODER_ERROR]
    for row in vae["decodes"]:
        agree += [row["bands_largest"] <= BANDS_LARGEST, row["bands_share"] <= BANDS_SHARE]
        if row["dtype"] == "float32":
            agree.append(row["ours_vs_float32_largest"] <= AGREE_FLOAT32)
        else:
            limit = HALF_LUCK * row["torch_vs_float32_mean"]
            agree.append(row["ours_vs_float32_mean"] <= limit)
    return all(agree)


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


# -- the report -----------------------------------------------------------------------------------


def summary(findings: dict[str, Any]) -> str:
    """The report for people."""
    device, found, pictures = findings["device"], findings["versions"], findings["pictures"]
    hip = f", HIP {found['hip']}" if found["hip"] else ""
    steps = findings["settings"]["steps"]
    agree = "they agree" if findings["agree"] else "THEY DO NOT AGREE: please report this"
    sections = {
        "Device": [f"{device['name']} ({device['gfx'] or device['backend']}), {findings['dtype']}"],
        "Versions": [
            f"Python {found['python']}, torch {found['torch']}{hip}, "
            f"diffusers {found['diffusers']}, transformers {found['transformers']}"
        ],
        "Extension": [findings["status"]],
        "Ran": _ran(findings),
        "Time": [
            f"median of {len(pictures)} pictures, {steps} steps each: "
            f"{findings['median_without_s']:.2f} s without, {findings['median_with_s']:.2f} s with",
            findings["speed"],
        ],
        "Pictures": [
            f"largest difference of any pixel {findings['largest_difference']}/255: {agree}"
        ],
        "VAE": _vae(findings["vae"]),
    }
    halves = [row[HALF] for row in pictures if HALF in row]
    if halves:
        ours = statistics.mean(row["mean_difference"] for row in pictures)
        sections["Pictures"].append(
            f"mean difference {ours:.3f}/255; "
            f"half precision itself, against float32: {statistics.mean(halves):.3f}/255"
        )
    return "\n".join(
        f"{'' if index else title:10s} {line}"
        for title, lines in sections.items()
        for index, line in enumerate(lines)
    )


def _ran(findings: dict[str, Any]) -> list[str]:
    """What ran, most often first, and what was left alone; of the VAE's operations only sums."""
    counts: Counter[str] = Counter()
    for row in findings["ran"]["rows"]:
        problem = f": {row['problem']}" if row["op"] == "attention" else ""
        counts[f"{row['op']} by {row['variant']}{problem}"] += row["calls"]
    left = findings["patched"]["left_alone"].items()
    return [
        f"{findings['patched']['replaced']} attention modules go through the engine",
        *(f"{count:6d} x {call}" for call, count in counts.most_common()),
        *(
            ["left alone: " + ", ".join(f"{count} x {kind}" for kind, count in left)]
            if left
            else []
        ),
    ]


def _vae(vae: dict[str, Any]) -> list[str]:
    """What the look at the VAE alone showed."""
    lines = []
    if vae["programs"]:
        by = f", convolutions by {', '.join(vae['convolutions'])}" if "convolutions" in vae else ""
        lines.append(f"{' and '.join(vae['programs'])} run as our program{by}")
    for row in vae.get("decodes", ()):
        lines += [
            f"{row['dtype']}, in bands against the whole frame: largest difference"
            f" {row['bands_largest']}/255, on {row['bands_share']:.4%} of values",
            f"{row['dtype']}, mean difference from torch's float32: ours"
            f" {row['ours_vs_float32_mean']:.3f}/255,"
            f" torch's {row['torch_vs_float32_mean']:.3f}/255",
        ]
    lines += [f"{role} left alone: {'; '.join(why)}" for role, why in vae["left_alone"].items()]
    return lines if vae["agree"] else [*lines, "THIS IS NOT AS IT SHOULD BE: please report this"]


# -- the picture ----------------------------------------------------------------------------------


AMPLIFIED = 32
CELL, GAP, HEAD, CAPTION = 256, 16, 118, 30
INK, PAPER, FAINT = (24, 26, 30), (255, 255, 255), (112, 116, 124)


def draw(sides: Sequence[Sides], findings: dict[str, Any]) -> Image.Image:
    """The sheet. `findings` is the demo's report."""
    from PIL import Image, ImageDraw

    width = 3 * CELL + 4 * GAP
    sheet = Image.new("RGB", (width, HEAD + len(sides) * (CELL + CAPTION + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    _head(pen, findings, width)
    for row, side in enumerate(sides):
        top = HEAD + row * (CELL + CAPTION + GAP)
        pen.text((GAP, top), side.prompt, fill=INK, font=_font(15))
        gap = abs(side.without.astype("int16") - side.with_.astype("int16"))
        visible = (gap * AMPLIFIED).clip(0, 255).astype("uint8")
        for column, pixels in enumerate((side.without, side.with_, visible)):
            picture = Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.LANCZOS)
            sheet.paste(picture, (GAP + column * (CELL + GAP), top + CAPTION - 6))
    return sheet


def _head(pen: ImageDraw.ImageDraw, findings: dict[str, Any], width: int) -> None:
    device = findings["device"]
    name = f"{device['name']} ({device['gfx'] or device['backend']}), {findings['dtype']}"
    largest = f"Largest difference of any pixel: {findings['largest_difference']}/255."
    top = 10
    for line in (
        f"{name}. Extension: {findings['status']}",
        f"{largest} {findings['speed']}",
    ):
        for part in textwrap.wrap(line, width // 7):
            pen.text((GAP, top), part, fill=FAINT, font=_font(13))
            top += 18
    titles = (
        f"without, {findings['median_without_s']:.2f} s",
        f"with, {findings['median_with_s']:.2f} s",
        f"difference x {AMPLIFIED}",
    )
    for column, title in enumerate(titles):
        pen.text((GAP + column * (CELL + GAP), HEAD - 28), title, fill=INK, font=_font(17))


def _font(size: int) -> Any:
    """The font that comes with Pillow; before 10.1 it has one size."""
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


# -- the VAE alone --------------------------------------------------------------------------------

SMALL = 256
"""Pictures up to this size are put together, four to one, so that there is more than one band."""


def examine(
    pipeline: Any, pictures: Sequence[Any], dtype: torch.dtype
) -> tuple[Sides | None, dict[str, Any]]:
    """Encode pictures, uint8 (height, width, 3), and decode them in all ways.

    Gives torch's and ours, made in bands, and what the report says; without pictures where the VAE
    is left alone. `pipeline` is not changed.
    """
    import torch

    from lib_rocm_sd.hosts.diffusers.pipeline import patched

    image = _together(pictures).to(pipeline.device)
    half = dtype if dtype != torch.float32 else torch.bfloat16
    single = copy.deepcopy(pipeline.vae).float()
    with torch.no_grad(), patched(SimpleNamespace(vae=single), vae="whole", wait=True) as patch:
        latent = single.encode(image).latent_dist.mean
    names = list(patch.vae.programs)
    findings: dict[str, Any] = {
        "programs": names,
        "left_alone": {role: list(why) for role, why in patch.vae.left_alone.items()},
        "size": list(image.shape[2:]),
    }
    if "decoder" not in names:
        return None, {**findings, "agree": True}
    with torch.no_grad():
        theirs = single.encode(image).latent_dist.mean
    findings["encoder_error"] = float((latent - theirs).abs().max() / theirs.abs().max())
    ways = {of: _decoded(pipeline.vae, theirs, of) for of in (torch.float32, half)}
    exact = ways[torch.float32]["torch"]
    findings["convolutions"] = sorted(
        {row["variant"] for row in report.snapshot()["rows"] if row["op"].startswith("conv")}
    )
    findings["bands"] = ways[dtype]["plan"]
    findings["decodes"] = [_row(of, images, exact) for of, images in ways.items()]
    findings["agree"] = vae_agrees(findings)
    caption = "the VAE alone, the same latent decoded by torch, and by our program in bands"
    shown = (ways[dtype][way][0].round().to(torch.uint8) for way in ("torch", "banded"))
    without, with_ = (picture.permute(1, 2, 0).numpy() for picture in shown)
    return Sides(caption, without, with_, 0.0, 0.0), findings


def _together(pictures: Sequence[Any]) -> torch.Tensor:
    """(1, 3, height, width) in -1..1: the first picture, or the first four as one."""
    import torch

    images = [torch.from_numpy(picture).permute(2, 0, 1).float() for picture in pictures[:4]]
    image = images[0]
    if len(images) == 4 and max(image.shape) <= SMALL:
        image = torch.cat([torch.cat(images[:2], 2), torch.cat(images[2:], 2)], 1)
    return image[None] / 127.5 - 1


def _decoded(vae: Any, latent: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What torch, our whole frame and our bands make of `latent`, on the CPU, in 0..255."""
    import torch

    from lib_rocm_sd.hosts.diffusers.pipeline import patched

    vae = copy.deepcopy(vae).to(dtype)
    images: dict[str, Any] = {}
    for way in ("torch", "whole", "banded"):
        chosen = False if way == "torch" else way
        with torch.no_grad(), patched(SimpleNamespace(vae=vae), vae=chosen, wait=True) as patch:
            image = vae.decode(latent.to(dtype)).sample
            plans = {role: program.last_plan for role, program in patch.vae.programs.items()}
        images[way] = ((image.float() / 2 + 0.5).clamp(0, 1) * 255).cpu()
        images["plan"] = str(plans.get("decoder"))
    return images


def _row(dtype: torch.dtype, images: dict[str, Any], exact: torch.Tensor) -> dict[str, Any]:
    """One dtype's differences, of 255; those of bands after rounding, as a picture is stored."""
    bands = (images["banded"].round() - images["whole"].round()).abs()
    gaps = {way: (images[way] - exact).abs() for way in ("torch", "whole", "banded")}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "bands_largest": int(bands.max()),
        "bands_share": float((bands > 0).float().mean()),
        "torch_vs_float32_mean": float(gaps["torch"].mean()),
        "ours_vs_float32_mean": float(max(gaps["whole"].mean(), gaps["banded"].mean())),
        "torch_vs_float32_largest": float(gaps["torch"].max()),
        "ours_vs_float32_largest": float(max(gaps["whole"].max(), gaps["banded"].max())),
    }
