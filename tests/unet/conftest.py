"""A UNet of the double, and what a step of it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unet import unet_models as models

BF16 = torch.bfloat16


@pytest.fixture
def unet() -> Any:
    """ldm's, in bfloat16."""
    return models.ldm_unet(depth=2).to(BF16)


@pytest.fixture
def inputs() -> dict[str, Any]:
    given: dict[str, Any] = models.in_dtype(models.ldm_inputs(), BF16)
    return given
