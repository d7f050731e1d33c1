"""Double of comfy/ldm/modules/diffusionmodules/mmdit.py (Comfy-Org/ComfyUI a125cd84): SD 3's
transformer, of few channels, without positions.
"""

import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.ops import disable_weight_init as ops
from torch import nn


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features=None):
        super().__init__()
        self.fc1 = ops.Linear(in_features, hidden_features)
        self.act = nn.GELU(approximate="tanh")
        self.drop1, self.drop2, self.norm = nn.Dropout(0.0), nn.Dropout(0.0), nn.Identity()
        self.fc2 = ops.Linear(hidden_features, in_features)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


def modulate(x, shift, scale):
    return torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))


def split_qkv(qkv, head_dim):
    return qkv.unflatten(2, (3, -1, head_dim)).unbind(2)


class RMSNorm(nn.Module):
    def __init__(self, dim, elementwise_affine=False, eps=1e-6):
        super().__init__()
        self.eps, self.learnable_scale = eps, elementwise_affine
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        made = x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return made.to(x.dtype) * self.weight


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads=8, pre_only=False, qk_norm=None):
        super().__init__()
        self.num_heads, self.head_dim, self.pre_only = num_heads, dim // num_heads, pre_only
        self.qkv = ops.Linear(dim, dim * 3)
        if not pre_only:
            self.proj, self.proj_drop = ops.Linear(dim, dim), nn.Dropout(0.0)
        self.ln_q, self.ln_k = (
            RMSNorm(self.head_dim, True) if qk_norm == "rms" else nn.Identity() for _ in range(2)
        )

    def pre_attention(self, x):
        q, k, v = split_qkv(self.qkv(x), self.head_dim)
        return self.ln_q(q).flatten(2), self.ln_k(k).flatten(2), v

    def post_attention(self, x):
        return self.proj_drop(self.proj(x))


class DismantledBlock(nn.Module):
    def __init__(
        self, hidden_size, num_heads, pre_only=False, qk_norm=None, x_block_self_attn=False
    ):
        super().__init__()
        self.pre_only, self.scale_mod_only = pre_only, False
        self.x_block_self_attn = x_block_self_attn
        self.norm1 = ops.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(hidden_size, num_heads, pre_only, qk_norm)
        if x_block_self_attn:
            self.attn2 = SelfAttention(hidden_size, num_heads, False, qk_norm)
        if not pre_only:
            self.norm2 = ops.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
            self.mlp = Mlp(hidden_size, 4 * hidden_size)
        count = 2 if pre_only else 9 if x_block_self_attn else 6
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), ops.Linear(hidden_size, count * hidden_size)
        )

    def pre_attention(self, x, c):
        shift, scale, *rest = self.adaLN_modulation(c).chunk(2 if self.pre_only else 6, dim=1)
        qkv = self.attn.pre_attention(modulate(self.norm1(x), shift, scale))
        return qkv, None if self.pre_only else (x, *rest)

    def post_attention(self, attn, x, gate_msa, shift_mlp, scale_mlp, gate_mlp):
        x = x + gate_msa.unsqueeze(1) * self.attn.post_attention(attn)
        normed = modulate(self.norm2(x), shift_mlp, scale_mlp)
        return x + gate_mlp.unsqueeze(1) * self.mlp(normed)

    def pre_attention_x(self, x, c):
        made = self.adaLN_modulation(c).chunk(9, dim=1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = made
        normed = self.norm1(x)
        qkv = self.attn.pre_attention(modulate(normed, shift, scale))
        qkv2 = self.attn2.pre_attention(modulate(normed, shift2, scale2))
        return qkv, qkv2, (x, gate, shift_mlp, scale_mlp, gate_mlp, gate2)

    def post_attention_x(self, attn, attn2, x, gate_msa, shift_mlp, scale_mlp, gate_mlp, gate_msa2):
        both = self.attn.post_attention(attn), self.attn2.post_attention(attn2)
        x = x + gate_msa.unsqueeze(1) * both[0] + gate_msa2.unsqueeze(1) * both[1]
        normed = modulate(self.norm2(x), shift_mlp, scale_mlp)
        return x + gate_mlp.unsqueeze(1) * self.mlp(normed)


def block_mixing(*args, use_checkpoint=True, **kwargs):
    return _block_mixing(*args, **kwargs)


def _block_mixing(context, x, context_block, x_block, c, transformer_options={}):  # noqa: B006
    first, kept = context_block.pre_attention(context, c)
    alone = x_block.pre_attention_x(x, c) if x_block.x_block_self_attn else None
    second, of_x = (alone[0], alone[2]) if alone else x_block.pre_attention(x, c)
    qkv = [torch.cat(pair, dim=1) for pair in zip(first, second, strict=True)]
    heads, options = x_block.attn.num_heads, {"transformer_options": transformer_options}
    attn = optimized_attention(*qkv, heads=heads, **options)
    words = first[0].shape[1]
    after = None
    if not context_block.pre_only:
        after = context_block.post_attention(attn[:, :words], *kept)
    if alone is None:
        return after, x_block.post_attention(attn[:, words:], *of_x)
    attn2 = optimized_attention(*alone[1], heads=heads, **options)
    return after, x_block.post_attention_x(attn[:, words:], attn2, *of_x)


class JointBlock(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        pre_only, own = kwargs.pop("pre_only"), kwargs.pop("x_block_self_attn", False)
        self.context_block = DismantledBlock(*args, pre_only=pre_only, **kwargs)
        self.x_block = DismantledBlock(*args, pre_only=False, x_block_self_attn=own, **kwargs)

    def forward(self, *args, **kwargs):
        return block_mixing(*args, context_block=self.context_block, x_block=self.x_block, **kwargs)


class MMDiT(nn.Module):
    def __init__(self, depth=3, qk_norm=None, x_block_self_attn_layers=[], dtype=None):  # noqa: B006
        super().__init__()
        width = 16 * depth
        self.dtype, self.use_checkpoint = dtype, False
        self._x_embedder, self._out = ops.Linear(4, width), ops.Linear(width, 4)
        self.context_embedder, self._t_embedder = ops.Linear(48, width), ops.Linear(1, width)
        self.joint_blocks = nn.ModuleList(
            JointBlock(
                *(width, depth),
                pre_only=i == depth - 1,
                qk_norm=qk_norm,
                x_block_self_attn=i in x_block_self_attn_layers,
            )
            for i in range(depth)
        )
        self.to(dtype)

    def forward(self, x, t, y=None, context=None, control=None, transformer_options={}):  # noqa: B006
        size, c = x.shape[2:], self._t_embedder(t[:, None].to(x.dtype) / 1000)
        x, context = self._x_embedder(x.flatten(2).transpose(1, 2)), self.context_embedder(context)
        for block in self.joint_blocks:
            context, x = block(
                *(context, x),
                c=c,
                use_checkpoint=self.use_checkpoint,
                transformer_options=transformer_options,
            )
        return self._out(x).transpose(1, 2).unflatten(2, size)


class OpenAISignatureMMDITWrapper(MMDiT):
    def forward(
        self,
        x,
        timesteps,
        context=None,
        y=None,
        control=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        return super().forward(
            *(x, timesteps),
            context=context,
            y=y,
            control=control,
            transformer_options=transformer_options,
        )
