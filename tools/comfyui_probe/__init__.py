"""A custom node for tools/comfyui_speed.py and tools/comfyui_matrix: models of random weights in
their true shapes, and how long sampling and decoding take.

A model's and a VAE's weights come as one dict with a single-file checkpoint's names, in fp16, from
which ComfyUI finds out what they are. There is no text encoder: prompts are drawn, too.
"""

import sys
import time
from contextlib import ExitStack, contextmanager

import comfy.model_management as management
import comfy.ops
import comfy.samplers
import comfy.sd
import torch
from aiohttp import web
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from server import PromptServer

from . import extras

COMMON = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "use_spatial_transformer": True,
    "legacy": False,
    "use_checkpoint": False,
}
UNETS = {
    "SD 1.5": {
        **COMMON,
        "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "transformer_depth_middle": 1,
        "context_dim": 768,
        "num_heads": 8,
    },
    "SDXL": {
        **COMMON,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10,
        "context_dim": 2048,
        "num_head_channels": 64,
        "use_linear_in_transformer": True,
        "num_classes": "sequential",
        "adm_in_channels": 2816,
    },
    "small": {
        **COMMON,
        "num_res_blocks": [1, 1],
        "channel_mult": [1, 2],
        "transformer_depth": [1, 1],
        "transformer_depth_output": [1, 1, 1, 1],
        "transformer_depth_middle": 1,
        "context_dim": 768,
        "num_heads": 8,
    },
}
VAE = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}
seen = []


def drawn(module, prefix, generator):
    """Weights at which each layer keeps the size of what comes in."""
    made, device = {}, generator.device
    for name, tensor in module.state_dict().items():
        share = (tensor.numel() / tensor.shape[0]) ** -0.5 if tensor.ndim > 1 else 0.05
        value = torch.randn(tensor.shape, generator=generator, device=device) * share
        if tensor.ndim == 1 and "norm" in name and name.endswith("weight"):
            value += 1
        made[prefix + name] = value.half().cpu()
    return made


class RandomModels:
    CATEGORY = "ROCm SD tools"
    RETURN_TYPES = ("MODEL", "CONDITIONING", "CONDITIONING", "VAE")
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"kind": (list(UNETS), {}), "seed": ("INT", {"default": 0})}}

    def run(self, kind, seed):
        generator = torch.Generator(management.get_torch_device()).manual_seed(seed)
        unet = UNetModel(
            **UNETS[kind], dtype=torch.float16, device="meta", operations=comfy.ops.manual_cast
        )
        weights = drawn(unet, "model.diffusion_model.", generator)
        with torch.device("meta"):
            vae = AutoencoderKL(ddconfig=VAE, embed_dim=4)
        weights |= drawn(vae, "first_stage_model.", generator)
        if kind == "small":  # no checkpoint that ComfyUI would know
            prefix = "model.diffusion_model."
            own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            model = comfy.sd.load_diffusion_model_state_dict(own)
            prefix = "first_stage_model."
            own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            found = comfy.sd.VAE(sd=own)
        else:
            model, _, found, _ = comfy.sd.load_state_dict_guess_config(weights, output_clip=False)
        return model, self.prompt(kind, seed + 1), self.prompt(kind, seed + 2), found

    def prompt(self, kind, seed):
        generator = torch.Generator("cpu").manual_seed(seed)
        tokens = torch.randn((1, 77, UNETS[kind]["context_dim"]), generator=generator)
        more = {"pooled_output": torch.randn((1, 1280), generator=generator)}
        return [[tokens, more if kind == "SDXL" else {}]]


class RandomUpscaler:
    """ESRGAN x4. Who upscales moves it to the device first, and back last: this is what is timed,
    ComfyUI's way and ours alike.
    """

    CATEGORY = "ROCm SD tools"
    RETURN_TYPES = ("UPSCALE_MODEL",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"blocks": ("INT", {"default": 23})}}

    def run(self, blocks):
        from spandrel import ModelLoader
        from spandrel.architectures.ESRGAN.arch.RRDB import RRDBNet

        weights = drawn(RRDBNet(num_blocks=blocks), "", torch.Generator("cpu").manual_seed(0))
        made = ModelLoader().load_from_state_dict({k: v.float() for k, v in weights.items()})
        move, work = made.to, ExitStack()

        def to(device):
            if device != "cpu":
                work.enter_context(noted("upscale"))
            result = move(device)
            if device == "cpu":
                work.close()
            return result

        made.eval().to = to
        return (made,)


@contextmanager
def noted(what):
    """Note how long this takes, and the most memory that was allocated."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    try:
        yield
    finally:
        if cuda:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
        seen.append({"what": what, "s": time.perf_counter() - begin, "peak_mib": peak})


def timed(owner, name, what):
    """Note calls of `owner.name`."""
    real = getattr(owner, name)

    def called(*args, **kwargs):
        with noted(what):
            return real(*args, **kwargs)

    setattr(owner, name, called)


def at_work():
    """Whether kernels are compiled or tried in the background, if this extension is there."""
    engine = sys.modules.get("lib_rocm_sd.engine.engine")
    background = sys.modules.get("lib_rocm_sd.runtime.background")
    gate = None if engine is None else engine.engine.gate
    compiles = background is not None and background.state().running
    return bool(compiles or (gate is not None and gate.state().running))


@PromptServer.instance.routes.get("/probe/take")
async def take(request):
    found = {"seen": list(seen), "at_work": at_work(), "device": str(management.get_torch_device())}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    found["torch"] = torch.__version__
    seen.clear()
    return web.json_response(found)


timed(comfy.samplers.KSAMPLER, "sample", "sample")
timed(comfy.sd.VAE, "decode", "decode")
extras.RandomControlNet.UNETS, extras.RandomControlNet.drawn = UNETS, staticmethod(drawn)
NODE_CLASS_MAPPINGS = {
    "RandomModels": RandomModels,
    "RandomUpscaler": RandomUpscaler,
    **extras.NODES,
}
