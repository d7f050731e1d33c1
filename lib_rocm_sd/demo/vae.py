"""The demo's look at the VAE alone: torch's and ours, whole and in bands, single and half."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from lib_rocm_sd import report
from lib_rocm_sd.demo.comparison import Sides, vae_agrees
from lib_rocm_sd.hosts.diffusers.pipeline import patched

SMALL = 256
"""Pictures up to this size are put together, four to one, so that there is more than one band."""


def examine(
    pipeline: Any, pictures: Sequence[Any], dtype: torch.dtype
) -> tuple[Sides | None, dict[str, Any]]:
    """Encode pictures, uint8 (height, width, 3), and decode them in all ways.

    Gives torch's and ours, made in bands, and what the report says; without pictures where the VAE
    is left alone. `pipeline` is not changed.
    """
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
    findings["decodes"] = [_row(of, made, exact) for of, made in ways.items()]
    findings["agree"] = vae_agrees(findings)
    caption = "the VAE alone, the same latent decoded by torch, and by our program in bands"
    shown = (ways[dtype][way][0].round().to(torch.uint8) for way in ("torch", "banded"))
    without, with_ = (picture.permute(1, 2, 0).numpy() for picture in shown)
    return Sides(caption, without, with_, 0.0, 0.0), findings


def _together(pictures: Sequence[Any]) -> torch.Tensor:
    """(1, 3, height, width) in -1..1: the first picture, or the first four as one."""
    images = [torch.from_numpy(picture).permute(2, 0, 1).float() for picture in pictures[:4]]
    image = images[0]
    if len(images) == 4 and max(image.shape) <= SMALL:
        image = torch.cat([torch.cat(images[:2], 2), torch.cat(images[2:], 2)], 1)
    return image[None] / 127.5 - 1


def _decoded(vae: Any, latent: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """What torch, our whole frame and our bands make of `latent`, on the CPU, in 0..255."""
    vae = copy.deepcopy(vae).to(dtype)
    made: dict[str, Any] = {}
    for way in ("torch", "whole", "banded"):
        chosen = False if way == "torch" else way
        with torch.no_grad(), patched(SimpleNamespace(vae=vae), vae=chosen, wait=True) as patch:
            image = vae.decode(latent.to(dtype)).sample
            plans = {role: program.last_plan for role, program in patch.vae.programs.items()}
        made[way] = ((image.float() / 2 + 0.5).clamp(0, 1) * 255).cpu()
        made["plan"] = str(plans.get("decoder"))
    return made


def _row(dtype: torch.dtype, made: dict[str, Any], exact: torch.Tensor) -> dict[str, Any]:
    """One dtype's differences, of 255; those of bands after rounding, as a picture is stored."""
    bands = (made["banded"].round() - made["whole"].round()).abs()
    gaps = {way: (made[way] - exact).abs() for way in ("torch", "whole", "banded")}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "bands_largest": int(bands.max()),
        "bands_share": float((bands > 0).float().mean()),
        "torch_vs_float32_mean": float(gaps["torch"].mean()),
        "ours_vs_float32_mean": float(max(gaps["whole"].mean(), gaps["banded"].mean())),
        "torch_vs_float32_largest": float(gaps["torch"].max()),
        "ours_vs_float32_largest": float(max(gaps["whole"].max(), gaps["banded"].max())),
    }
