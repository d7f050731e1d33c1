"""Double of comfy/ldm/modules/attention.py (Comfy-Org/ComfyUI a125cd84): calls of overrides.

With `_newer` also of 05080f60 (0.38): attention that a checkpoint prefers.
"""

import functools

import torch.nn.functional as F
from comfy.ops import disable_weight_init as ops
from torch import nn

_newer = [False]


class ComfyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = self.function = None


def wrap_attn(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        preferred = getattr(kwargs.pop("preferred_attention", None), "function", None)
        if "_inside_attn_wrapper" in kwargs:
            return func(*args, **kwargs)
        kwargs["_inside_attn_wrapper"] = True
        override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
        if override is None:
            return (preferred or func)(*args, **kwargs)
        return override(func, *args, **kwargs)

    return wrapper


@wrap_attn
def attention_pytorch(
    q,
    k,
    v,
    heads,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    **kwargs,
):
    if not skip_reshape:
        apart = q.shape[0], -1, heads, q.shape[-1] // heads
        q, k, v = (t.view(apart).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.ndim == 2 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


optimized_attention = attention_pytorch
optimized_attention_masked = optimized_attention


class CrossAttention(nn.Module):
    def __init__(
        self,
        query_dim,
        context_dim=None,
        heads=8,
        dim_head=64,
        dropout=0.0,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        if _newer[0]:
            self.comfy_attention = ComfyAttention()
        self.heads, self.attn_precision = heads, attn_precision
        width, other = heads * dim_head, context_dim or query_dim
        made = {"dtype": dtype, "device": device}
        self.to_q = operations.Linear(query_dim, width, bias=False, **made)
        self.to_k = operations.Linear(other, width, bias=False, **made)
        self.to_v = operations.Linear(other, width, bias=False, **made)
        last = operations.Linear(width, query_dim, **made)
        self.to_out = nn.Sequential(last, nn.Dropout(dropout))

    def forward(self, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006
        context = x if context is None else context
        q, k = self.to_q(x), self.to_k(context)
        v = self.to_v(context if value is None else value)
        options = {
            "attn_precision": self.attn_precision,
            "transformer_options": transformer_options,
        }
        if mask is not None:
            options["mask"] = mask
        if hasattr(self, "comfy_attention"):
            options["preferred_attention"] = self.comfy_attention
        return self.to_out(optimized_attention(q, k, v, self.heads, **options))


class GEGLU(nn.Module):
    def __init__(self, dim_in, dim_out, dtype=None, device=None, operations=ops):
        super().__init__()
        self.proj = operations.Linear(dim_in, 2 * dim_out, dtype=dtype, device=device)

    def forward(self, x):
        first, second = self.proj(x).chunk(2, -1)
        return first * F.gelu(second)


class FeedForward(nn.Module):
    def __init__(
        self,
        dim,
        dim_out=None,
        mult=4,
        glu=False,
        dropout=0.0,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        layer = operations.Linear(mult * dim, dim_out or dim, dtype=dtype, device=device)
        gated = GEGLU(dim, mult * dim, dtype, device, operations)
        self.net = nn.Sequential(gated, nn.Dropout(dropout), layer)

    def forward(self, x):
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    """The real one has a patch before, instead of and after each attention; here some of them."""

    def __init__(
        self,
        dim,
        n_heads,
        d_head,
        dropout=0.0,
        context_dim=None,
        gated_ff=True,
        checkpoint=True,
        ff_in=False,
        inner_dim=None,
        disable_self_attn=False,
        disable_temporal_crossattention=False,
        switch_temporal_ca_to_sa=False,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        made = {"dtype": dtype, "device": device, "operations": operations}
        self.ff_in, self.is_res, self.disable_self_attn = False, True, disable_self_attn
        if ff_in:
            self.norm_in = operations.LayerNorm(dim, dtype=dtype, device=device)
            self.ff_in = FeedForward(dim, glu=gated_ff, **made)
        self.switch_temporal_ca_to_sa = switch_temporal_ca_to_sa
        self.n_heads, self.d_head = n_heads, d_head
        self.attn1 = CrossAttention(dim, None, n_heads, d_head, **made)
        self.ff = FeedForward(dim, glu=gated_ff, **made)
        self.attn2 = CrossAttention(dim, context_dim, n_heads, d_head, **made)
        self.norm2, self.norm1, self.norm3 = (
            operations.LayerNorm(dim, dtype=dtype, device=device) for _ in range(3)
        )

    def forward(self, x, context=None, transformer_options={}):  # noqa: B006
        patches = transformer_options.get("patches", {})
        if self.ff_in:
            x = x + self.ff_in(self.norm_in(x))
        normed, given, value = self.norm1(x), None, None
        if "attn1_patch" in patches:
            given = value = normed
        for patch in patches.get("attn1_patch", []):
            normed, given, value = patch(normed, given, value, transformer_options)
        x = x + self._attend("attn1", normed, given, value, transformer_options)
        for patch in patches.get("middle_patch", []):
            x = patch(x, transformer_options)
        made = self._attend("attn2", self.norm2(x), context, None, transformer_options)
        for patch in patches.get("attn2_output_patch", []):
            made = patch(made, transformer_options)
        x = x + made
        return x + self.ff(self.norm3(x))

    def _attend(self, name, x, context, value, options):
        module, place = getattr(self, name), options.get("block")
        replaced = options.get("patches_replace", {}).get(name, {})
        patch = place and (replaced.get((*place, options["block_index"])) or replaced.get(place))
        if not patch:
            return module(x, context=context, value=value, transformer_options=options)
        context = x if context is None else context
        value = context if value is None else value
        q, k, v = module.to_q(x), module.to_k(context), module.to_v(value)
        named = {key: options[key] for key in options if key not in ("patches", "patches_replace")}
        more = {**named, "n_heads": self.n_heads, "dim_head": self.d_head}
        return module.to_out(patch(q, k, v, more))


class SpatialTransformer(nn.Module):
    def __init__(
        self,
        in_channels,
        n_heads,
        d_head,
        depth=1,
        dropout=0.0,
        context_dim=None,
        disable_self_attn=False,
        use_linear=False,
        use_checkpoint=True,
        attn_precision=None,
        dtype=None,
        device=None,
        operations=ops,
    ):
        super().__init__()
        made = {"dtype": dtype, "device": device}
        self.in_channels, self.use_linear = in_channels, use_linear
        self.norm = operations.GroupNorm(8, in_channels, 1e-6, **made)
        inner, layer = n_heads * d_head, operations.Linear if use_linear else operations.Conv2d
        size = {} if use_linear else {"kernel_size": 1}
        self.proj_in = layer(in_channels, inner, **size, **made)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                inner, n_heads, d_head, context_dim=context_dim, operations=operations, **made
            )
            for _ in range(depth)
        )
        self.proj_out = layer(inner, in_channels, **size, **made)

    def forward(self, x, context=None, transformer_options={}):  # noqa: B006
        height, width = x.shape[2:]
        transformer_options["activations_shape"] = list(x.shape)
        h = self.norm(x)
        h = h if self.use_linear else self.proj_in(h)
        h = h.flatten(2).mT.contiguous()
        h = self.proj_in(h) if self.use_linear else h
        for index, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = index
            h = block(h, context=context, transformer_options=transformer_options)
        h = self.proj_out(h) if self.use_linear else h
        h = h.mT.unflatten(2, (height, width)).contiguous()
        return x + (h if self.use_linear else self.proj_out(h))
