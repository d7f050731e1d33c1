"""How tests look at a UNet that was taken over."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover
from tests.unet import unet_models as models

BF16 = torch.bfloat16


def rows(taken: UnetTakeover) -> dict[str, KindReport]:
    return {row.kind: row for row in taken.report()}


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return models.errors(ours, theirs)[0] < 0.05


def blocks_of(unet: nn.Module) -> list[Any]:
    name = "BasicTransformerBlock"
    return [module for module in unet.modules() if type(module).__name__ == name]


def own_forwards(unet: nn.Module) -> list[Any]:
    return [vars(module).get("forward") for module in unet.modules()]
