"""What a UNet's forward gives: an image alone, in a tuple, or as diffusers' output class."""

from __future__ import annotations

from typing import Any

import torch


def image_of(made: Any) -> torch.Tensor:
    """The image of such a result."""
    image: torch.Tensor = made[0] if isinstance(made, tuple) else getattr(made, "sample", made)
    return image


def with_image(made: Any, image: torch.Tensor) -> Any:
    """The same kind of result, with another image."""
    if isinstance(made, tuple):
        return (image, *made[1:])
    return type(made)(sample=image) if hasattr(made, "sample") else image
