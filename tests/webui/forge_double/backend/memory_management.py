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
    """What has no room casts its weights in each call."""

    def __init__(self, model):
        self.model = model

    def model_load(self, model_gpu_memory_when_using_cpu_swap=-1):
        room = model_gpu_memory_when_using_cpu_swap
        layers = [m for m in self.model.model.modules() if hasattr(m, "parameters_manual_cast")]
        for layer in sorted(layers, key=module_size) if room >= 0 else ():
            room -= module_size(layer)
            if room < 0:
                layer.prev_parameters_manual_cast = layer.parameters_manual_cast
                layer.parameters_manual_cast = True
                layer.weight = torch.nn.Parameter(layer.weight.detach(), requires_grad=False)
        self.model.refresh_loras()
        return self.model.model

    def model_unload(self, avoid_model_moving=False):
        for layer in self.model.model.modules():
            if hasattr(layer, "prev_parameters_manual_cast"):
                layer.parameters_manual_cast = layer.prev_parameters_manual_cast
                del layer.prev_parameters_manual_cast


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


def module_size(module, exclude_device=None, include_device=None, return_split=False):
    return sum(each.numel() * each.element_size() for each in module.state_dict().values())


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
