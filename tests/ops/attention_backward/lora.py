"""A LoRA of the little model's attention layers, trained for a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib_rocm_sd.commands.little_model import MODEL

RANK, RATE = 4, 5e-3
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Adapted(torch.nn.Module):
    """A linear layer, and a product of low rank beside it, kept in float32."""

    def __init__(self, layer: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        down = torch.randn((RANK, layer.in_features), generator=generator) / layer.in_features
        self.down = torch.nn.Parameter(down)
        self.up = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        return made + x @ self.down.to(x.dtype).T @ self.up.to(x.dtype).T


class _Processor:
    """Attention as diffusers has it, by a function of q, k and v (B, S, H, D)."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        of = ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        q, k, v = (layer(x).unflatten(2, (attn.heads, -1)) for layer, x in of)
        made: torch.Tensor = attn.to_out[0](self.attend(q, k, v))
        return made


def losses(device: torch.device, dtype: torch.dtype, attend: Attend, steps: int) -> list[float]:
    """Of each step. Only the adapters learn; the rest has `dtype`."""
    import diffusers

    generator = torch.Generator("cpu").manual_seed(1)
    unet: Any = diffusers.UNet2DConditionModel.from_pretrained(
        str(MODEL / "unet"), local_files_only=True, low_cpu_mem_usage=False
    )
    unet.requires_grad_(False).to(dtype)
    unet.set_attn_processor(_Processor(attend))
    adapters = []
    for module in [each for each in unet.modules() if hasattr(each, "to_q")]:
        for name in ("to_q", "to_k", "to_v"):
            adapters.append(_Adapted(getattr(module, name), generator))
            setattr(module, name, adapters[-1])
    unet.to(device)
    size = unet.config.sample_size
    noisy, noise = (
        torch.randn((2, unet.config.in_channels, size, size), generator=generator) for _ in range(2)
    )
    context = torch.randn((2, 77, unet.config.cross_attention_dim), generator=generator)
    given = [t.to(device, dtype) for t in (noisy, context)]
    parameters = [p for adapter in adapters for p in (adapter.down, adapter.up)]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    found = []
    for _ in range(steps):
        made = unet(given[0], 500, given[1]).sample.float()
        loss = (made - noise.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().item())
    return found
