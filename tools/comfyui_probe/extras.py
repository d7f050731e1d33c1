"""What else workflows of tools/comfyui_matrix take: adapters and pictures of random values.

ROCM_SD_MOTION names a file, to which a motion module of AnimateDiff's is written where ComfyUI
looks for them: its nodes know it by that name.
"""

import os
from pathlib import Path

import comfy.cldm.cldm
import comfy.controlnet
import comfy.model_management as management
import comfy.ops
import comfy.sd
import folder_paths
import torch
from safetensors.torch import save_file

RANK, IMAGE, FRAMES = 8, 64, 32
LORA = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "ff.net.0.proj", "in_layers.2")
_INT = {"required": {"seed": ("INT", {"default": 0})}}


def _generator(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


class RandomControlNet:
    CATEGORY = "ROCm SD tools"
    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "run"
    UNETS = {}
    drawn = None

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"kind": (list(cls.UNETS), {}), "seed": ("INT", {"default": 0})}}

    def run(self, kind, seed):
        config = {k: v for k, v in self.UNETS[kind].items() if k != "out_channels"}
        config.pop("transformer_depth_output")
        net = comfy.cldm.cldm.ControlNet(
            **config,
            hint_channels=3,
            dtype=torch.float16,
            device="meta",
            operations=comfy.ops.manual_cast,
        )
        generator = _generator(seed, management.get_torch_device())
        weights = type(self).drawn(net, "", generator)
        return (comfy.controlnet.load_controlnet_state_dict(weights),)


class _Random:
    """A node that draws values for a model."""

    CATEGORY = "ROCm SD tools"
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"model": ("MODEL",), **_INT["required"]}}


class RandomLora(_Random):
    """Adapters for linear layers and convolutions, added as ComfyUI's own loader adds a file's."""

    RETURN_TYPES = ("MODEL",)

    def run(self, model, seed):
        found, generator = {}, _generator(seed)
        for name, weight in model.model.diffusion_model.named_parameters():
            layer = name.removesuffix(".weight")
            if not name.endswith(tuple(f"{part}.weight" for part in LORA)):
                continue
            key = f"lora_unet_{layer.replace('.', '_')}"
            out, *rest = weight.shape
            down = torch.randn((RANK, *rest), generator=generator)
            up = torch.randn((out, RANK, *[1] * (len(rest) - 1)), generator=generator)
            found[f"{key}.lora_down.weight"] = down * weight[0].numel() ** -0.5
            found[f"{key}.lora_up.weight"] = up * RANK**-0.5
        return (comfy.sd.load_lora_for_models(model, None, found, 0.7, 0)[0],)


class RandomImageAdapter(_Random):
    """An IPAdapter's file, and embeddings of a picture and of nothing."""

    RETURN_TYPES = ("IPADAPTER", "EMBEDS", "EMBEDS")

    def run(self, model, seed):
        generator = _generator(seed)
        state, number = {}, 1
        for name, weight in model.model.diffusion_model.named_parameters():
            if name.endswith("attn2.to_k.weight"):
                width, context = weight.shape
                for key in ("k", "v"):
                    drawn = torch.randn((width, context), generator=generator) * context**-0.5
                    state[f"{number}.to_{key}_ip.weight"] = drawn
                number += 2
        proj = {
            "proj.weight": torch.randn((4 * context, IMAGE), generator=generator) * IMAGE**-0.5,
            "proj.bias": torch.zeros(4 * context),
            "norm.weight": torch.ones(context),
            "norm.bias": torch.zeros(context),
        }
        picture = torch.randn((1, IMAGE), generator=generator)
        return {"image_proj": proj, "ip_adapter": state}, picture, torch.zeros_like(picture)


class RandomImage:
    CATEGORY = "ROCm SD tools"
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"side": ("INT", {"default": 512, "max": 8192}), **_INT["required"]}}

    def run(self, side, seed):
        small = torch.rand((1, 3, 8, 8), generator=_generator(seed))
        image = torch.nn.functional.interpolate(small, size=(side, side), mode="bicubic")
        return (image.clamp(0, 1).movedim(1, -1),)


class NoClip:
    """For nodes that ask for a text encoder and do not use it."""

    CATEGORY = "ROCm SD tools"
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {}}

    def run(self):
        return (None,)


def _motion(channels, generator):
    """The tensors of one motion module."""
    device = generator.device

    def drawn(*shape):
        share = (torch.Size(shape).numel() / shape[0]) ** -0.5
        return (torch.randn(shape, generator=generator, device=device) * share).half().cpu()

    ones, zeros = torch.ones(channels).half(), torch.zeros(channels).half()
    made = {"norm.weight": ones.clone(), "norm.bias": zeros.clone()}
    for name in ("proj_in", "proj_out"):
        made |= {f"{name}.weight": drawn(channels, channels), f"{name}.bias": zeros.clone()}
    block = "transformer_blocks.0"
    for index in (0, 1):
        attention = f"{block}.attention_blocks.{index}"
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            made[f"{attention}.{name}.weight"] = drawn(channels, channels)
        made[f"{attention}.to_out.0.bias"] = zeros.clone()
        made[f"{attention}.pos_encoder.pe"] = drawn(1, FRAMES, channels)
        made |= {f"{block}.norms.{index}.weight": ones.clone()}
        made |= {f"{block}.norms.{index}.bias": zeros.clone()}
    made |= {f"{block}.ff_norm.weight": ones.clone(), f"{block}.ff_norm.bias": zeros.clone()}
    made[f"{block}.ff.net.0.proj.weight"] = drawn(8 * channels, channels)
    made[f"{block}.ff.net.0.proj.bias"] = torch.zeros(8 * channels).half()
    made[f"{block}.ff.net.2.weight"] = drawn(channels, 4 * channels)
    made[f"{block}.ff.net.2.bias"] = zeros.clone()
    return {f"temporal_transformer.{name}": value for name, value in made.items()}


def write_motion(file, widths=(320, 640, 1280, 1280)):
    """A file for SD 1.5, with random values."""
    place = Path(folder_paths.models_dir) / "animatediff_models" / file
    place.parent.mkdir(parents=True, exist_ok=True)
    generator = _generator(7, management.get_torch_device())
    state = {}
    for kind, order, count in (("down", widths, 2), ("up", widths[::-1], 3)):
        for block, channels in enumerate(order):
            for index in range(count):
                prefix = f"{kind}_blocks.{block}.motion_modules.{index}."
                found = _motion(channels, generator)
                state |= {prefix + name: value for name, value in found.items()}
    save_file(state, place)


if os.environ.get("ROCM_SD_MOTION"):
    write_motion(os.environ["ROCM_SD_MOTION"])
NODES = {
    cls.__name__: cls
    for cls in (RandomControlNet, RandomLora, RandomImageAdapter, RandomImage, NoClip)
}
