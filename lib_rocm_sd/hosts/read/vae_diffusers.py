"""The Decoder and Encoder of diffusers' AutoencoderKL.

Children: conv_in, mid_block, up_blocks or down_blocks, conv_norm_out, conv_act, conv_out.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.vae_ldm import residual_block
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, Step

_PROCESSORS = {"AttnProcessor", "AttnProcessor2_0", "XFormersAttnProcessor", "SlicedAttnProcessor"}


def steps(found: Findings, module: nn.Module, role: str) -> list[Step]:
    """The steps; what is not as expected goes to `found`."""
    made: list[Step] = []
    levels = "down_blocks" if role == "encoder" else "up_blocks"
    children = ("conv_in", levels, "mid_block", "conv_norm_out", "conv_act", "conv_out")
    if not found.block(module, role, ("Decoder", "Encoder"), children, root=True):
        return made
    conv_in = found.conv(getattr(module, "conv_in", None), "conv_in")
    if conv_in is not None:
        made.append(ConvStep("conv_in", "3x3", conv_in))
    if role == "encoder":
        _levels(found, made, module, "down_blocks", "DownEncoderBlock2D", "downsamplers")
        _mid(found, made, getattr(module, "mid_block", None))
    else:
        _mid(found, made, getattr(module, "mid_block", None))
        _levels(found, made, module, "up_blocks", "UpDecoderBlock2D", "upsamplers")
    found.silu(getattr(module, "conv_act", None), "conv_act")
    norm = found.group_norm(getattr(module, "conv_norm_out", None), "conv_norm_out")
    conv = found.conv(getattr(module, "conv_out", None), "conv_out")
    if norm is not None and conv is not None:
        made.append(ConvStep("conv_out", "3x3", conv, norm))
    return made


def _mid(found: Findings, made: list[Step], mid: Any) -> None:
    if not found.block(mid, "mid_block", ("UNetMidBlock2D",), ("attentions", "resnets")):
        return
    resnets, attentions = list(mid.resnets), list(mid.attentions)
    if len(resnets) != len(attentions) + 1:
        found.add("mid_block: resnets and attentions do not go together")
        return
    for index, resnet in enumerate(resnets):
        if index > 0 and attentions[index - 1] is not None:
            _attention(found, made, attentions[index - 1], f"mid_block.attentions.{index - 1}")
        _resnet(found, made, resnet, f"mid_block.resnets.{index}")


def _levels(
    found: Findings, made: list[Step], module: nn.Module, key: str, cls: str, resize: str
) -> None:
    levels = getattr(module, key, None)
    if not isinstance(levels, nn.ModuleList):
        found.add(f"{key} is not a list")
        return
    for index, level in enumerate(levels):
        name = f"{key}.{index}"
        if not found.block(level, name, (cls,), ("resnets", resize)):
            continue
        resnets: Any = level.resnets
        for number, resnet in enumerate(resnets):
            _resnet(found, made, resnet, f"{name}.resnets.{number}")
        samplers: Any = getattr(level, resize, None)
        for number, sampler in enumerate(samplers if samplers is not None else ()):
            _resize(found, made, sampler, f"{name}.{resize}.{number}", resize == "downsamplers")


def _resize(found: Findings, made: list[Step], module: Any, name: str, down: bool) -> None:
    children = ("conv", "Conv2d_0")
    if not found.block(module, name, ("Downsample2D" if down else "Upsample2D",), children):
        return
    expected: dict[str, Any] = {"use_conv": True, "norm": None, "interpolate": True}
    expected |= {"padding": 0} if down else {"use_conv_transpose": False}
    found.settings(module, name, expected)
    key = "conv" if down or getattr(module, "name", "conv") == "conv" else "Conv2d_0"
    conv = found.conv(getattr(module, key, None), f"{name}.{key}", stride=2 if down else 1)
    if conv is not None:
        made.append(ConvStep(name, "3x3 stride 2" if down else "upsample", conv))


def _resnet(found: Findings, made: list[Step], block: Any, name: str) -> None:
    children = ("norm1", "conv1", "norm2", "dropout", "conv2", "conv_shortcut", "nonlinearity")
    if not found.block(block, name, ("ResnetBlock2D",), children):
        return
    expected = {
        "pre_norm": True,
        "up": False,
        "down": False,
        "upsample": None,
        "downsample": None,
        "output_scale_factor": 1.0,
        "time_emb_proj": None,
    }
    found.settings(block, name, expected)
    if getattr(block, "time_embedding_norm", "default") not in ("default", "group"):
        found.add(f"{name}.time_embedding_norm is {block.time_embedding_norm}")
    found.silu(getattr(block, "nonlinearity", None), f"{name}.nonlinearity")
    found.no_dropout(getattr(block, "dropout", None), f"{name}.dropout")
    residual_block(found, made, block, name, "conv_shortcut")


def _attention(found: Findings, made: list[Step], block: Any, name: str) -> None:
    children = ("group_norm", "to_q", "to_k", "to_v", "to_out")
    if not found.block(block, name, ("Attention",), children, own_forward=False):
        return
    expected = {
        "residual_connection": True,
        "rescale_output_factor": 1.0,
        "is_cross_attention": False,
        "only_cross_attention": False,
        "added_kv_proj_dim": None,
        "fused_projections": False,
        "is_causal": False,
    }
    found.settings(block, name, expected)
    processor = getattr(block, "processor", None)
    kind = type(processor)
    if kind.__name__ not in _PROCESSORS and not kind.__module__.startswith("lib_rocm_sd"):
        found.add(f"{name} has a {kind.__name__}")
    norm = found.group_norm(getattr(block, "group_norm", None), f"{name}.group_norm")
    outs = list(getattr(block, "to_out", None) or [None])
    for extra in outs[1:]:
        found.no_dropout(extra, f"{name}.to_out")
    named = [(key, getattr(block, key, None)) for key in children[1:4]]
    named.append(("to_out", outs[0]))
    q, k, v, out = (found.projection(layer, f"{name}.{key}") for key, layer in named)
    if norm is None or q is None or k is None or v is None or out is None:
        return
    heads, channels = int(getattr(block, "heads", 1)), norm.num_channels
    if channels % heads or abs(getattr(block, "scale", 0) - (channels // heads) ** -0.5) > 1e-9:
        found.add(f"{name}: {heads} heads of {channels} channels, scale {block.scale}")
    made.append(AttentionStep(name, norm, q, k, v, out, heads))
