"""A model of diffusers as its pipeline, and where the little model lies."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from lib_rocm_sd.checks import UsageError

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-sd"
GUIDANCE = 3.0


def check_installed(*packages: str, by: str = "demo") -> None:
    """Raises UsageError where one of these cannot be imported. `by`: install.py's command."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            how = f"use `python3 install.py {by}`, which installs it"
            raise UsageError(f"this needs {error.name or package}: {how} ({error})") from error


def index_of(model: Path) -> dict[str, Any]:
    """What a folder says of its pipeline. OSError or ValueError where there is none."""
    index = json.loads((model / "model_index.json").read_text(encoding="utf-8"))
    if not isinstance(index, dict):
        raise ValueError("model_index.json holds no object")  # noqa: TRY004 - a file's fault
    return index


def kind_problem(model: Path) -> str:
    """Why the folder `model` makes no picture of a prompt by a UNet; empty if it does."""
    try:
        index = index_of(model)
    except (OSError, ValueError):
        return f"there is no model of diffusers in {model}"
    import diffusers

    name = str(index.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if not any(index.get("unet") or ()):
        return f"{name} in {model} has no UNet"
    options = inspect.signature(kind.__call__).parameters if kind is not None else {}
    if not {"prompt", "latents"} <= set(options) or "image" in options:
        return f"{name} in {model} is not known to make a picture of a prompt alone"
    return ""


def load(model: Path, dtype: Any) -> Any:
    """The pipeline in the folder `model`, of its own kind, from local files only, quiet."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.disable_progress_bar()
    without = {"safety_checker": None} if "safety_checker" in index_of(model) else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        str(model), local_files_only=True, low_cpu_mem_usage=False, **without
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


def picture(pipeline: Any, prompt: str, steps: int, seed: int, output_type: str) -> Any:
    """A picture from a prompt; a seed gives the same noise on every device, in any dtype."""
    return pipeline(
        prompt,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        latents=latents(pipeline, seed),
        output_type=output_type,
    ).images[0]
