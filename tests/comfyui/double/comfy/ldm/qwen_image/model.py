"""Double of comfy/ldm/qwen_image/model.py (Comfy-Org/ComfyUI a125cd84): of few channels."""

import torch
from comfy.ldm.flux.math import rope
from comfy.ldm.modules.attention import optimized_attention_masked
from comfy.ops import disable_weight_init as ops
from torch import nn
from torch.nn import functional


class GELU(nn.Module):
    def __init__(self, dim_in, dim_out, approximate="none"):
        super().__init__()
        self.proj, self.approximate = ops.Linear(dim_in, dim_out), approximate

    def forward(self, hidden_states):
        return functional.gelu(self.proj(hidden_states), approximate=self.approximate)


class FeedForward(nn.Module):
    def __init__(self, dim, mult=4):
        super().__init__()
        first, last = GELU(dim, mult * dim, approximate="tanh"), ops.Linear(mult * dim, dim)
        self.net = nn.ModuleList([first, nn.Dropout(0.0), last])

    def forward(self, hidden_states, *args, **kwargs):
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


def apply_rotary_emb(x, freqs_cis):
    return (freqs_cis @ x.unflatten(-1, (-1, 2, 1))).flatten(-3)


class Attention(nn.Module):
    def __init__(self, query_dim, dim_head=64, heads=8):
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        for key in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            self.add_module(key, ops.RMSNorm(dim_head, eps=1e-6))
        for key in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            self.add_module(key, ops.Linear(query_dim, query_dim))
        self.to_out = nn.ModuleList([ops.Linear(query_dim, query_dim), nn.Dropout(0.0)])
        self.to_add_out = ops.Linear(query_dim, query_dim)

    def forward(
        self,
        hidden_states,
        encoder_hidden_states=None,
        encoder_hidden_states_mask=None,
        attention_mask=None,
        image_rotary_emb=None,
        transformer_options={},  # noqa: B006
    ):
        split = lambda rows: rows.unflatten(-1, (self.heads, -1))  # noqa: E731
        x, words = hidden_states, encoder_hidden_states
        q = self.norm_q(split(self.to_q(x)))
        k, v = self.norm_k(split(self.to_k(x))), split(self.to_v(x))
        more_q = self.norm_added_q(split(self.add_q_proj(words)))
        more_k = self.norm_added_k(split(self.add_k_proj(words)))
        q, k = torch.cat((more_q, q), 1), torch.cat((more_k, k), 1)
        q, k = (apply_rotary_emb(each, image_rotary_emb) for each in (q, k))
        v = torch.cat((split(self.add_v_proj(words)), v), 1)
        made = optimized_attention_masked(
            *(each.flatten(2) for each in (q, k, v)),
            self.heads,
            attention_mask,
            transformer_options=transformer_options,
        )
        of_words, of_x = made.split([words.shape[1], x.shape[1]], 1)
        return self.to_out[1](self.to_out[0](of_x)), self.to_add_out(of_words)


class QwenImageTransformerBlock(nn.Module):
    def __init__(self, dim, num_attention_heads, attention_head_dim):
        super().__init__()
        for name in ("img", "txt"):
            self.add_module(f"{name}_mod", nn.Sequential(nn.SiLU(), ops.Linear(dim, 6 * dim)))
            for number in (1, 2):
                norm = ops.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
                self.add_module(f"{name}_norm{number}", norm)
            self.add_module(f"{name}_mlp", FeedForward(dim))
        self.attn = Attention(dim, attention_head_dim, num_attention_heads)

    def _modulate(self, x, mod_params):
        shift, scale, gate = mod_params[:, None].chunk(3, dim=-1)
        return torch.addcmul(shift, x, 1 + scale), gate

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        encoder_hidden_states_mask,
        temb,
        image_rotary_emb=None,
        transformer_options={},  # noqa: B006
    ):
        x, words = hidden_states, encoder_hidden_states
        img1, img2 = self.img_mod(temb).chunk(2, dim=-1)
        txt1, txt2 = self.txt_mod(temb).chunk(2, dim=-1)
        normed, gate = self._modulate(self.img_norm1(x), img1)
        normed_words, words_gate = self._modulate(self.txt_norm1(words), txt1)
        of_x, of_words = self.attn(
            normed,
            normed_words,
            encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
            transformer_options=transformer_options,
        )
        x, words = x + gate * of_x, words + words_gate * of_words
        normed, gate = self._modulate(self.img_norm2(x), img2)
        normed_words, words_gate = self._modulate(self.txt_norm2(words), txt2)
        x = torch.addcmul(x, gate, self.img_mlp(normed))
        return torch.addcmul(words, words_gate, self.txt_mlp(normed_words)), x


class QwenImageTransformer2DModel(nn.Module):
    def __init__(self, width=48, heads=2, dtype=None):
        super().__init__()
        self.dtype, self._head_dim = dtype, width // heads
        self._img_in, self._proj_out = ops.Linear(4, width), ops.Linear(width, 4)
        self._txt_in, self._time_in = ops.Linear(48, width), ops.Linear(1, width)
        self.transformer_blocks = nn.ModuleList(
            QwenImageTransformerBlock(width, heads, self._head_dim) for _ in range(3)
        )
        self.to(dtype)

    def forward(
        self,
        x,
        timestep,
        context,
        attention_mask=None,
        guidance=None,
        ref_latents=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        size, words = x.shape[2:], self._txt_in(context)
        temb = self._time_in(timestep[:, None].to(x.dtype) / 1000)
        x = self._img_in(x.flatten(2).transpose(1, 2))
        places = torch.arange(words.shape[1] + x.shape[1]).expand(len(x), -1)
        pe = rope(places, self._head_dim, 100).unsqueeze(2).to(x.dtype)
        for block in self.transformer_blocks:
            words, x = block(
                hidden_states=x,
                encoder_hidden_states=words,
                encoder_hidden_states_mask=attention_mask,
                temb=temb,
                image_rotary_emb=pe,
                transformer_options=transformer_options,
            )
        return self._proj_out(x).transpose(1, 2).unflatten(2, size)
