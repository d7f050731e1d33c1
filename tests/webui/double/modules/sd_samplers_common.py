"""Double of modules/sd_samplers_common.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Decoding, previews, interruption.
"""

import torch

from modules import devices, shared


class InterruptedException(BaseException):
    pass


def samples_to_images_tensor(sample, approximation=None, model=None):
    model = model or shared.sd_model
    with torch.no_grad(), devices.without_autocast():
        return model.decode_first_stage(sample.to(model.first_stage_model.dtype))


def decode_first_stage(model, x):
    return samples_to_images_tensor(x.to(devices.dtype_vae), 0, model)


def images_tensor_to_samples(image, approximation=None, model=None):
    model = model or shared.sd_model
    model.first_stage_model.to(devices.dtype_vae)
    image = image.to(shared.device, dtype=devices.dtype_vae) * 2 - 1
    return model.get_first_stage_encoding(model.encode_first_stage(image))


def store_latent(decoded):
    shared.state.current_latent = decoded
    every = shared.opts.show_progress_every_n_steps
    if shared.opts.live_previews_enable and every > 0 and shared.state.sampling_step % every == 0:
        preview = samples_to_images_tensor(decoded[:1])[0] * 0.5 + 0.5
        shared.state.assign_current_image(preview.clamp(0.0, 1.0))
