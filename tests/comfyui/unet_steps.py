"""A model of the double whose diffusion_model is a UNet, and steps of it."""

from __future__ import annotations

from typing import Any

import torch

from lib_rocm_sd.hosts.comfyui import unet as ours
from lib_rocm_sd.hosts.comfyui.model import optimized
from tests.unet.unet_models import draw, errors

BF16 = torch.bfloat16
SIGMAS = torch.ones(2)
"""By which a run of a sampler is known."""
X, TIMES, CONTEXT = draw(2, 4, 8, 8), torch.tensor([500.0, 500.0]), draw(2, 7, 48).to(BF16)
TOTALS = {
    "residual block": 5,
    "transformer": 2,
    "transformer block": 4,
    "upsampling": 1,
    "downsampling": 1,
    "first and last layers": 2,
}


def model_of(comfy: Any, **config: Any) -> Any:
    """As a loader node makes one: amid inference mode, and in training mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        kind = comfy.unet.UNetModel
        base = comfy.base.BaseModel({"dtype": BF16, **config}, unet_model=kind)
        for parameter in base.parameters():
            parameter.requires_grad_(False)
    assert base.training and next(base.parameters()).is_inference()
    return comfy.patcher.ModelPatcher(base, None, None)


def with_ours(model: Any, level: str = "Auto") -> Any:
    return optimized(model, level, attention=False, unet=True)


@torch.inference_mode()
def step(model: Any, x: torch.Tensor = X, **given: Any) -> torch.Tensor:
    """A step of a sampler: the model's weights as its patches say, its options in a copy."""
    if model.model.current_patcher is not model:
        model.patch_model()
    model.model.current_patcher = model
    options = {"sample_sigmas": SIGMAS, **model.model_options["transformer_options"]}
    context = CONTEXT[: x.shape[0]]
    made: torch.Tensor = model.model.apply_model(
        x, TIMES[: x.shape[0]], c_crossattn=context, transformer_options=options, **given
    )
    return made


def near(made: torch.Tensor, theirs: torch.Tensor) -> bool:
    return errors(made, theirs)[0] < 0.04 and not torch.equal(made, theirs)


def counts() -> dict[str, int]:
    return {row.kind: row.ours for row in ours.rows()}


def strides(model: Any) -> list[tuple[Any, ...]]:
    """And whether each has memory of its own."""
    parameters = list(model.model.parameters())
    alone = [p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in parameters]
    return [(p.stride(), own) for p, own in zip(parameters, alone, strict=True)]


def forwards(model: Any) -> list[Any]:
    return [module for module in model.model.modules() if "forward" in vars(module)]


def lora(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    """For every weight and bias of a layer in a block."""
    named = model.model.named_parameters()
    return {
        key: 0.1 * draw(*p.shape, seed=seed + n)
        for n, (key, p) in enumerate(named)
        if "blocks" in key and "norm" not in key
    }
