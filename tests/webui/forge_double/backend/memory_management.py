"""Double of backend/memory_management.py, whose device is the CPU and which moves nothing.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
`_asked` is the memory that models were loaded with.
"""

import torch

OOM_EXCEPTION = torch.cuda.OutOfMemoryError
VAE_ALWAYS_TILED = False
_asked = []
current_loaded_models = []
_free_bytes = 1 << 34


def get_torch_device():
    return torch.device("cpu")


class LoadedModel:
    def __init__(self, model):
        self.model = model


def load_models_gpu(models, memory_required=0, hard_memory_preservation=0):
    _asked.append(memory_required)
    for model in models:
        current_loaded_models.insert(0, LoadedModel(model))
        model.refresh_loras()


def load_model_gpu(model):
    return load_models_gpu([model])


def get_free_memory(dev=None, torch_free_too=False):
    return (_free_bytes, _free_bytes) if torch_free_too else _free_bytes


def dtype_size(dtype):
    return dtype.itemsize


def intermediate_device():
    return torch.device("cpu")


def vae_device():
    return torch.device("cpu")


def vae_offload_device():
    return torch.device("cpu")


def vae_dtype(device=None, allowed_dtypes=[]):  # noqa: B006 - as there
    return torch.float32


def soft_empty_cache(force=False):
    pass
