"""Double of modules/lowvram.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
What is moved is the VAE and the UNet, to the device that is the CPU here, too: by new storages.
"""

import torch

from modules import shared

moves = []


def apply(sd_model):
    sd_model.lowvram = bool(shared.cmd_opts.lowvram or shared.cmd_opts.medvram)
    shared.parallel_processing_allowed = not sd_model.lowvram
    if not sd_model.lowvram:
        return
    vae = sd_model.first_stage_model
    encode, decode = vae.encode, vae.decode

    def send_me_to_gpu(module, _):
        moves.append(module)
        for parameter in module.parameters():
            parameter.data = torch.clone(parameter.data)

    def first_stage_model_encode_wrap(x):
        send_me_to_gpu(vae, None)
        return encode(x)

    def first_stage_model_decode_wrap(z):
        send_me_to_gpu(vae, None)
        return decode(z)

    vae.encode = first_stage_model_encode_wrap
    vae.decode = first_stage_model_decode_wrap
    if shared.cmd_opts.medvram:
        sd_model.model.register_forward_pre_hook(send_me_to_gpu)
        return
    diff_model = sd_model.model.diffusion_model
    diff_model.time_embed.register_forward_pre_hook(send_me_to_gpu)
    for block in getattr(diff_model, "input_blocks", ()):
        block.register_forward_pre_hook(send_me_to_gpu)
    if hasattr(diff_model, "middle_block"):
        diff_model.middle_block.register_forward_pre_hook(send_me_to_gpu)
    for block in getattr(diff_model, "output_blocks", ()):
        block.register_forward_pre_hook(send_me_to_gpu)
