"""Double of modules/sd_vae.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Another VAE is loaded into the module that is there.
"""

from modules import devices, script_callbacks, sd_hijack, shared

unspecified = object()


def reload_vae_weights(sd_model=None, vae_file=unspecified):
    sd_model = sd_model or shared.sd_model
    sd_hijack.model_hijack.undo_hijack(sd_model)
    sd_model.first_stage_model.load_state_dict(vae_file)
    sd_model.first_stage_model.to(devices.dtype_vae)
    sd_hijack.model_hijack.hijack(sd_model)
    script_callbacks.model_loaded_callback(sd_model)
    return sd_model
