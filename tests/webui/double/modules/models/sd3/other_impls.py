"""Double of modules/models/sd3/other_impls.py: the attention of SD 3's transformer and encoders.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

import torch.nn.functional as F
from torch import nn


def attention(q, k, v, heads, mask=None):
    batch = q.shape[0]
    q, k, v = (t.reshape(batch, -1, heads, q.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features=None, out_features=None, act_layer=nn.GELU):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer
        self.fc2 = nn.Linear(hidden_features, out_features or in_features)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))
