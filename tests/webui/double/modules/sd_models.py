"""Double of modules/sd_models.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Loading a model hijacks it; a change of checkpoint does so again. A CheckpointInfo is a name here.
"""

from types import SimpleNamespace

import ldm.models.diffusion.ddpm

from modules import devices, lowvram, script_callbacks, sd_hijack, shared

model_data = SimpleNamespace(sd_model=None)
loaded = {"name": None, "family": "ldm", "whole": False}


def load_model(checkpoint_info=None, already_loaded_state_dict=None):
    name = checkpoint_info or shared.opts.sd_model_checkpoint
    if shared.sd_model is not None:
        sd_hijack.model_hijack.undo_hijack(shared.sd_model)
    seed = int(name.rsplit("-", 1)[1])
    model = ldm.models.diffusion.ddpm.LatentDiffusion(loaded["family"], seed, loaded["whole"])
    model.model.to(devices.dtype_unet)
    model.model.diffusion_model.dtype = devices.dtype_unet
    model.first_stage_model.to(devices.dtype_vae)
    loaded["name"] = name
    sd_hijack.model_hijack.hijack(model)
    lowvram.apply(model)
    shared.sd_model = model_data.sd_model = model
    script_callbacks.model_loaded_callback(model)
    return model


def reload_model_weights(sd_model=None, info=None, forced_reload=False):
    name = info or shared.opts.sd_model_checkpoint
    if name != loaded["name"] or forced_reload:
        load_model(name)
    return shared.sd_model
