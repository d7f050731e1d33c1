"""Double of comfy/model_management.py (Comfy-Org/ComfyUI a125cd84): loads are only noted."""

import torch

OOM_EXCEPTION = torch.cuda.OutOfMemoryError
_state = {"interrupted": False}
_required = []
"""What was asked for, in bytes, at each load."""


class InterruptProcessingException(Exception):  # noqa: N818
    pass


def get_torch_device():
    return torch.device("cpu")


def dtype_size(dtype):
    return dtype.itemsize


def get_free_memory(dev=None, torch_free_too=False):
    return 1 << 40


def free_memory(memory_required, device, keep_loaded=[]):  # noqa: B006
    _required.append(memory_required)


def load_models_gpu(
    models,
    memory_required=0,
    force_patch_weights=False,
    minimum_memory_required=None,
    force_full_load=False,
):
    _required.append(memory_required)


def interrupt_current_processing(value=True):
    _state["interrupted"] = value


def processing_interrupted():
    return _state["interrupted"]


def throw_exception_if_processing_interrupted():
    if _state["interrupted"]:
        _state["interrupted"] = False
        raise InterruptProcessingException
