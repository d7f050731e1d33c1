"""The little model as a diffusers pipeline, and where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-sd"
GUIDANCE = 3.0


def load(model: Path, dtype: Any) -> Any:
    """The StableDiffusionPipeline in `model`, from local files only, quiet."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.disable_progress_bar()
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        str(model), local_files_only=True, safety_checker=None, low_cpu_mem_usage=False
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: Any, seed: int) -> Any:
    """The noise to start from. Drawn in float32: torch draws other numbers in other dtypes."""
    import torch

    size = pipeline.unet.config.sample_size
    shape = (1, pipeline.unet.config.in_channels, size, size)
    noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
    return noise.to(pipeline.device, pipeline.dtype)
