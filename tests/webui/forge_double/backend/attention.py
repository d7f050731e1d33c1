"""Double of backend/attention.py, where SDPA was chosen for the UNet, and slices for the VAE.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import torch


def get_attn_precision(attn_precision=torch.float32):
    return attn_precision


def attention_pytorch(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def attention_xformers(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False):
    raise NotImplementedError


def normal_attention_single_head_spatial(q, k, v):
    rows = [t.flatten(2).transpose(1, 2) for t in (q, k, v)]
    scores = rows[0] @ rows[1].transpose(1, 2) * q.shape[1] ** -0.5
    return (scores.softmax(-1) @ rows[2]).transpose(1, 2).reshape(q.shape)


attention_function = attention_pytorch
attention_function_single_head_spatial = normal_attention_single_head_spatial
