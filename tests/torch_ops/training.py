"""A LoRA trained on the little model's UNet, with torch's norms or with our operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows
from torch import nn

ROCM: Any = torch.ops.rocm_sd
STEPS, RANK, TEXT = 8, 4, 7
SIDE = 16
"""Of the latents."""


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """The same on every device and in every dtype."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))


class AfterNorm(nn.Module):
    """SiLU of what is no image: an image has passed it together with its norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.ndim == 4 else F.silu(x)


def _with_operators(unet: nn.Module, stack: ExitStack) -> None:
    """Norms, and SiLU after those of a residual block, by our operators until the stack closes."""
    for module in unet.modules():
        if isinstance(module, nn.LayerNorm):
            _set(stack, module, "forward", partial(_layer_norm, module))
        elif isinstance(module, nn.GroupNorm):
            _set(stack, module, "forward", partial(_group_norm, module, False))
    for block in unet.modules():
        if type(block).__name__ == "ResnetBlock2D":
            for norm in (block.norm1, block.norm2):
                _set(stack, norm, "forward", partial(_group_norm, norm, True))
            _set(stack, block, "nonlinearity", AfterNorm())
    _set(stack, unet.conv_norm_out, "forward", partial(_group_norm, unet.conv_norm_out, True))
    _set(stack, unet, "conv_act", nn.Identity())


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in owner.__dict__ or name in owner._modules:
        stack.callback(setattr, owner, name, getattr(owner, name))
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _layer_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return ROCM.layer_norm(x, norm.weight, norm.bias, norm.eps)


def _group_norm(norm: Any, silu: bool, x: torch.Tensor) -> torch.Tensor:
    affine = (norm.weight, norm.bias, norm.num_groups, norm.eps)
    return ROCM.group_norm_silu(x, *affine, silu)


def _lora(unet: nn.Module, stack: ExitStack) -> list[nn.Parameter]:
    """Beside each projection of attention."""
    found: list[nn.Parameter] = []

    def beside(module: nn.Linear, given: Any, made: torch.Tensor, down: Any, up: Any) -> Any:
        return made + (given[0].to(down.dtype) @ down @ up).to(made.dtype)

    names = ("to_q", "to_k", "to_v", "to_out.0")
    for number, (name, module) in enumerate(unet.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(names):
            device = module.weight.device
            down = nn.Parameter((drawn(number, module.in_features, RANK) / 8).to(device))
            up = nn.Parameter(torch.zeros(RANK, module.out_features, device=device))
            hook: Callable[..., Any] = partial(beside, down=down, up=up)
            stack.callback(module.register_forward_hook(hook).remove)
            found += (down, up)
    return found


def curve(unet: Any, ours: bool, norms: bool) -> list[float]:
    """The loss of each step. `norms`: gamma and beta are trained, too, and are put back."""
    device, dtype = unet.device, unet.dtype
    unet.requires_grad_(False)
    losses = []
    with ExitStack() as stack:
        trained = _lora(unet, stack)
        if norms:
            modules = (m for m in unet.modules() if isinstance(m, (nn.LayerNorm, nn.GroupNorm)))
            for each in itertools.chain.from_iterable(m.parameters() for m in modules):
                stack.callback(each.data.copy_, each.detach().clone())
                stack.callback(each.requires_grad_, False)
                each.requires_grad_()
                trained.append(each)
        if ours:
            _with_operators(unet, stack)
        optimizer = torch.optim.Adam(trained, lr=3e-3)
        channels, width = unet.config.in_channels, unet.config.cross_attention_dim
        for step in range(STEPS):
            kept = 0.3 + 0.6 * (step % 3) / 2
            clean, noise = (
                drawn(seed, 2, channels, SIDE, SIDE).to(device) for seed in (3, step % 3)
            )
            text = drawn(5, 2, TEXT, width).to(device, dtype)
            noisy = (kept**0.5 * clean + (1 - kept) ** 0.5 * noise).to(dtype)
            made = unet(noisy, 100 * (step % 3) + 50, encoder_hidden_states=text).sample
            loss = F.mse_loss(made.float(), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
