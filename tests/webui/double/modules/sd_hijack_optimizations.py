"""Double of modules/sd_hijack_optimizations.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
The class and, with their names, flags and priorities, the optimizers that an AMD user meets. They
differ in how they compute, so that a picture tells which one ran: Doggettx scales the keys and
slices, sdp calls torch's function, V1 goes by pairs of heads and leaves AttnBlock alone, as
InvokeAI does.
"""

import ldm.modules.attention
import ldm.modules.diffusionmodules.model
import sgm.modules.attention
import sgm.modules.diffusionmodules.model
import torch
from ldm.util import default

from modules import devices, shared
from modules.hypernetworks import hypernetwork

diffusionmodules_model_AttnBlock_forward = (  # noqa: N816
    ldm.modules.diffusionmodules.model.AttnBlock.forward
)
sgm_diffusionmodules_model_AttnBlock_forward = (  # noqa: N816
    sgm.modules.diffusionmodules.model.AttnBlock.forward
)


def _set_forwards(cross, block=None):
    ldm.modules.attention.CrossAttention.forward = cross
    sgm.modules.attention.CrossAttention.forward = cross
    if block is not None:
        ldm.modules.diffusionmodules.model.AttnBlock.forward = block
        sgm.modules.diffusionmodules.model.AttnBlock.forward = block


class SdOptimization:
    name: str = None
    label: str | None = None
    cmd_opt: str | None = None
    priority: int = 0

    def title(self):
        if self.label is None:
            return self.name
        return f"{self.name} - {self.label}"

    def is_available(self) -> bool:
        return True

    def apply(self):
        pass

    def undo(self):
        _set_forwards(hypernetwork.attention_CrossAttention_forward)
        ldm.modules.diffusionmodules.model.AttnBlock.forward = (
            diffusionmodules_model_AttnBlock_forward
        )
        sgm.modules.diffusionmodules.model.AttnBlock.forward = (
            sgm_diffusionmodules_model_AttnBlock_forward
        )


class SdOptimizationSdpNoMem(SdOptimization):
    name = "sdp-no-mem"
    label = "scaled dot product without memory efficient attention"
    cmd_opt = "opt_sdp_no_mem_attention"
    priority = 80

    def apply(self):
        _set_forwards(scaled_dot_product_attention_forward, sdp_attnblock_forward)


class SdOptimizationSdp(SdOptimizationSdpNoMem):
    name = "sdp"
    label = "scaled dot product"
    cmd_opt = "opt_sdp_attention"
    priority = 70


class SdOptimizationV1(SdOptimization):
    name = "V1"
    label = "original v1"
    cmd_opt = "opt_split_attention_v1"
    priority = 10

    def apply(self):
        _set_forwards(split_cross_attention_forward_v1)


class SdOptimizationInvokeAI(SdOptimization):
    name = "InvokeAI"
    cmd_opt = "opt_split_attention_invokeai"

    @property
    def priority(self):
        return 1000 if shared.device.type != "mps" and not torch.cuda.is_available() else 10

    def apply(self):
        _set_forwards(split_cross_attention_forward_invokeAI)


class SdOptimizationDoggettx(SdOptimization):
    name = "Doggettx"
    cmd_opt = "opt_split_attention"
    priority = 90

    def apply(self):
        _set_forwards(split_cross_attention_forward, cross_attention_attnblock_forward)


def list_optimizers(res):
    res.extend(
        [
            SdOptimizationSdpNoMem(),
            SdOptimizationSdp(),
            SdOptimizationV1(),
            SdOptimizationInvokeAI(),
            SdOptimizationDoggettx(),
        ]
    )


def _project(self, x, context):
    """Queries, keys, values (B, H, S, D), upcast if the setting asks; the dtype to return to."""
    q = self.to_q(x)
    context = default(context, x)
    context_k, context_v = hypernetwork.apply_hypernetworks(shared.loaded_hypernetworks, context)
    k, v = self.to_k(context_k), self.to_v(context_v)
    dtype = q.dtype
    if shared.opts.upcast_attn:
        q, k, v = q.float(), k.float(), v.float()
    return *(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)), dtype


def _finish(self, out, dtype):
    return self.to_out(out.to(dtype).transpose(1, 2).flatten(2))


def split_cross_attention_forward_v1(self, x, context=None, mask=None, **kwargs):
    q, k, v, dtype = _project(self, x, context)
    with devices.without_autocast(disable=not shared.opts.upcast_attn):
        pairs = [
            (q[:, i : i + 2] @ k[:, i : i + 2].transpose(-1, -2) * self.scale).softmax(-1)
            @ v[:, i : i + 2]
            for i in range(0, self.heads, 2)
        ]
    return _finish(self, torch.cat(pairs, dim=1), dtype)


def split_cross_attention_forward_invokeAI(  # noqa: N802
    self, x, context=None, mask=None, **kwargs
):
    q, k, v, dtype = _project(self, x, context)
    with devices.without_autocast(disable=not shared.opts.upcast_attn):
        out = (q @ (k * self.scale).transpose(-1, -2)).softmax(-1) @ v
    return _finish(self, out, dtype)


def split_cross_attention_forward(self, x, context=None, mask=None, **kwargs):
    q, k, v, dtype = _project(self, x, context)
    with devices.without_autocast(disable=not shared.opts.upcast_attn):
        k = k * self.scale
        half = max(1, q.shape[2] // 2)
        slices = [
            torch.einsum("bhid,bhjd->bhij", q[:, :, i : i + half], k).softmax(-1) @ v
            for i in range(0, q.shape[2], half)
        ]
    return _finish(self, torch.cat(slices, dim=2), dtype)


def scaled_dot_product_attention_forward(self, x, context=None, mask=None, **kwargs):
    q, k, v, dtype = _project(self, x, context)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False
    )
    return _finish(self, out, dtype)


def cross_attention_attnblock_forward(self, x):
    normed = self.norm(x)
    q, k, v = (layer(normed).flatten(2) for layer in (self.q, self.k, self.v))
    scores = torch.bmm(q.permute(0, 2, 1), k) * int(x.shape[1]) ** -0.5
    weights = torch.nn.functional.softmax(scores, dim=2, dtype=q.dtype)
    out = torch.bmm(v, weights.permute(0, 2, 1)).reshape(x.shape)
    projected = self.proj_out(out)
    projected += x
    return projected


def sdp_attnblock_forward(self, x):
    normed = self.norm(x)
    q, k, v = (
        layer(normed).flatten(2).transpose(1, 2).contiguous() for layer in (self.q, self.k, self.v)
    )
    dtype = q.dtype
    if shared.opts.upcast_attn:
        q, k, v = q.float(), k.float(), v.float()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v).to(dtype)
    return x + self.proj_out(out.transpose(1, 2).reshape(x.shape))
