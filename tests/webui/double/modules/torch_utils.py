"""Double of modules/torch_utils.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""


def get_param(model):
    module = getattr(model, "model", model)
    return next(module.parameters())
