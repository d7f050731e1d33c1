"""Double of ldm_patched/modules/model_management.py, whose device is the CPU.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
`_asked` is the memory that models were loaded with.
"""

import torch

OOM_EXCEPTION = torch.cuda.OutOfMemoryError
_asked = []
current_loaded_models = []
_free_bytes = 1 << 34


def get_torch_device():
    return torch.device("cpu")


class LoadedModel:
    def __init__(self, model):
        self.model = model


def load_models_gpu(
    models,
    memory_required=0,
    force_patch_weights=False,
    minimum_memory_required=None,
    force_full_load=False,
):
    _asked.append(memory_required)
    for model in models:
        current_loaded_models.insert(0, LoadedModel(model))
        model.patch_model()


def get_free_memory(dev=None, torch_free_too=False):
    return (_free_bytes, _free_bytes) if torch_free_too else _free_bytes


def dtype_size(dtype):
    return dtype.itemsize
