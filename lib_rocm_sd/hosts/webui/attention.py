"""Attention forwards for the WebUI: all around attention as there, attention by the engine.

Whatever fails between projections and `to_out` ends in the forward that the WebUI would have used
without this extension; only "out of memory" is passed on. So do masks whose meaning is not clear,
and calls with gradients that our kernels refuse (followed.py); of the others these are ours too.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from lib_rocm_sd import functional, report
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.followed import STOPS, NotFollowedError, asked, attention
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host, session
from lib_rocm_sd.ops.attention.inputs import AttentionInputs


class Owner(Protocol):
    """Whose the forwards are."""

    stands_aside: bool
    """Whether the WebUI's own forwards are to compute everything."""

    def hosts_own(self, module: torch.nn.Module) -> host.Forward:
        """The WebUI's forward for a module."""


class Calls:
    """How many calls since `begin` were left to the WebUI's own forwards."""

    def __init__(self) -> None:
        self.left_to_host = 0

    def begin(self) -> None:
        self.left_to_host = 0


calls = Calls()


class UnclearMaskError(ValueError):
    """A mask that does not say to which keys it belongs."""


def cross_attention(owner: Owner) -> host.Forward:
    """A forward for ldm's and sgm's CrossAttention.

    Other keyword arguments are taken and ignored, as by the WebUI's own optimizers.
    """
    core = _Core("UNet")
    hypernetwork: Any = host.module("modules.hypernetworks.hypernetwork")

    def rocm_sd_cross_attention_forward(
        self: Any, x: torch.Tensor, context: Any = None, mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if owner.stands_aside:
            return owner.hosts_own(self)(self, x, context, mask, **kwargs)
        q = self.to_q(x)
        context_k, context_v = hypernetwork.apply_hypernetworks(
            core.shared.loaded_hypernetworks, x if context is None else context
        )
        k = self.to_k(context_k)
        v = self.to_v(context_v)
        out = core.attend(q, k, v, self.heads, mask, getattr(self, "scale", None))
        if out is None:
            del q, k, v, context_k, context_v
            return owner.hosts_own(self)(self, x, context, mask, **kwargs)
        return self.to_out(out)

    return rocm_sd_cross_attention_forward


def attn_block(owner: Owner) -> host.Forward:
    """A forward for the VAE's AttnBlock: one head of C channels over the H*W pixels.

    The 1x1 convolutions are called as modules, so that whatever patches them still works. A pixel's
    channels lie apart in their NCHW results and together for the kernel: one transposing copy each
    of q, k and v, none where a convolution gave channels-last. The output goes back to NCHW, so
    that the decoder's convolutions keep their layout.
    """
    core = _Core("VAE")

    def rocm_sd_attn_block_forward(self: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if owner.stands_aside:
            return owner.hosts_own(self)(self, x, **kwargs)
        normed = self.norm(x)
        q, k, v = (_pixels(layer(normed)) for layer in (self.q, self.k, self.v))
        del normed
        out = core.attend(q, k, v)
        if out is None:
            del q, k, v
            return owner.hosts_own(self)(self, x)
        out = out.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:]).contiguous()
        return x + self.proj_out(out)

    return rocm_sd_attn_block_forward


def _pixels(image: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) -> (B, H*W, C) with last stride 1."""
    return image.flatten(2).transpose(1, 2).contiguous()


class _Core:
    """Attention between the projections, on the WebUI's terms. Its modules are looked up once."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.shared: Any = host.module("modules.shared")
        self.devices: Any = host.module("modules.devices")

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int = 1,
        mask: Any = None,
        scale: float | None = None,
    ) -> torch.Tensor | None:
        """(B, Sq, heads*D) from tensors like it, by views; None if the WebUI has to compute it."""
        try:
            return self._compute(q, k, v, heads, mask, scale)
        except NotFollowedError as reason:
            why = str(reason)
        except STOPS:
            raise
        except Exception as error:
            if selftest.is_out_of_memory(error):
                raise
            why = trouble.once(error)
        calls.left_to_host += 1
        report.event(f"a call was left to the WebUI's own attention: {why}")
        return None

    def _compute(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: Any,
        scale: float | None,
    ) -> torch.Tensor:
        upcast = self.shared.opts.upcast_attn
        dtype = q.dtype
        if upcast:
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        if mask is not None:
            mask = mask_of_keys(mask, q.shape[0], k.shape[1])
        own = session.current().of_part(self.part)
        if torch.is_grad_enabled() and asked((q, k, v, mask)):
            return attention(AttentionInputs(q, k, v, mask, scale), own).to(dtype)
        with self.devices.without_autocast(disable=not upcast):
            return functional.attention(q, k, v, mask, scale, own).to(dtype)


def mask_of_keys(mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    """The WebUI's mask as one that broadcasts to (B, H, Sq, Sk).

    ldm's kind is boolean with one value per key, (B, ...) with Sk values in `...`; one of four
    dimensions is sgm's, taken as it is. Raises UnclearMaskError for any other.
    """
    if mask.dim() == 4 and mask.shape[-1] == keys:
        return mask
    if mask.dtype == torch.bool and mask.shape[0] == batch and mask[0].numel() == keys:
        return mask.reshape(batch, 1, 1, keys)
    raise UnclearMaskError(f"mask {tuple(mask.shape)} {mask.dtype} for {batch} x {keys} keys")
