"""The little model as tests use it: in float32, once per file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.commands import little_model


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """Skips where diffusers or transformers is missing."""
    for package in ("diffusers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    return little_model.load(little_model.MODEL, torch.float32)
