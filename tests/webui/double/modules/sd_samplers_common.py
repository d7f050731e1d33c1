"""Double of modules/sd_samplers_common.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Decoding, previews, interruption.
"""

import threading

import torch

from modules import devices, shared


class InterruptedException(BaseException):
    pass


approximation_indexes = {"Full": 0, "Approx NN": 1, "Approx cheap": 2, "TAESD": 3}


def _cheap_approximation(sample):
    """Of sd_vae_approx.py: as small as the latent."""
    return sample[:, :3].float()


def samples_to_images_tensor(sample, approximation=None, model=None):
    fast = shared.state.interrupted and shared.opts.live_preview_fast_interrupt
    if approximation is None or fast:
        approximation = approximation_indexes.get(shared.opts.show_progress_type, 0)
        lowvram = shared.sd_model.lowvram and not shared.opts.live_preview_allow_lowvram_full
        approximation = 1 if approximation == 0 and lowvram else approximation
    if approximation != 0:
        return _cheap_approximation(sample)
    model = model or shared.sd_model
    with torch.no_grad(), devices.without_autocast():
        return model.decode_first_stage(sample.to(model.first_stage_model.dtype))


def decode_first_stage(model, x):
    return samples_to_images_tensor(x.to(devices.dtype_vae), 0, model)


def sample_to_image(samples, index=0, approximation=None):
    preview = samples_to_images_tensor(samples[index : index + 1], approximation)[0] * 0.5 + 0.5
    return preview.clamp(0.0, 1.0)


def images_tensor_to_samples(image, approximation=None, model=None):
    model = model or shared.sd_model
    model.first_stage_model.to(devices.dtype_vae)
    image = image.to(shared.device, dtype=devices.dtype_vae) * 2 - 1
    if len(image) > 1:
        one_by_one = (model.encode_first_stage(torch.unsqueeze(img, 0)) for img in image)
        return torch.stack(
            [model.get_first_stage_encoding(posterior)[0] for posterior in one_by_one]
        )
    return model.get_first_stage_encoding(model.encode_first_stage(image))


def store_latent(decoded):
    """Without low-VRAM modes, previews are made by the thread of a request for progress."""
    shared.state.current_latent = decoded
    every = shared.opts.show_progress_every_n_steps
    if shared.opts.live_previews_enable and every > 0 and shared.state.sampling_step % every == 0:
        if shared.parallel_processing_allowed:
            request = threading.Thread(target=shared.state.do_set_current_image)
            request.start()
            request.join()
        else:
            shared.state.assign_current_image(sample_to_image(decoded))
