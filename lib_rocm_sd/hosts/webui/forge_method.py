"""A Forge's own attention, called alone by the speed test."""

from __future__ import annotations

import math
from typing import Any

import torch

from lib_rocm_sd.lab.speed_job import Attention


def method(packed: Any, spatial: Any) -> Attention:
    """q (B, Sq, H, D), k and v (B, Sk, H, D) to (B, Sq, H*D), by these functions of a Forge.

    A square image of one head goes through `spatial`, as in the VAE, where there is one.
    """

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(q.shape[1])
        if spatial is not None and q.shape == k.shape and (q.shape[2], side**2) == (1, q.shape[1]):
            images = (t.flatten(2).transpose(1, 2).unflatten(2, (side, side)) for t in (q, k, v))
            # its functions look at memory as NCHW has it
            made = spatial(*(image.contiguous() for image in images))
            return made.flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
        heads = q.shape[2]
        with torch.no_grad():
            out: torch.Tensor = packed(*(t.flatten(2) for t in (q, k, v)), heads)
        return out

    return attention
