"""Double of backend/nn/flux.py, without the turning of q and k.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

from backend.attention import attention_function


def attention(q, k, v, pe):
    return attention_function(q, k, v, q.shape[1], skip_reshape=True)
