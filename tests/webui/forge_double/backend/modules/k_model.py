"""Double of backend/modules/k_model.py: what a step takes hangs on which attention is in use.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import torch

from backend import attention, memory_management


class KModel(torch.nn.Module):
    def __init__(self, model, diffusers_scheduler, k_predictor=None, config=None):
        super().__init__()
        self.computation_dtype = model.computation_dtype
        self.diffusion_model = model

    def memory_required(self, input_shape):
        area = input_shape[0] * input_shape[2] * input_shape[3]
        frugal = [attention.attention_pytorch, attention.attention_xformers]
        scaler = 1.28 if attention.attention_function in frugal else 1.65
        return scaler * area * memory_management.dtype_size(self.computation_dtype) * 16384
