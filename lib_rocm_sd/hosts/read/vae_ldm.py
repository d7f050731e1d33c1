"""The Decoder and Encoder that ldm, sgm, SD3, Flux, Forge and ComfyUI share in all but their files.

Children: conv_in, mid.block_1/attn_1/block_2, up[i].block/attn/upsample (run from the last to the
first) or down[i].block/attn/downsample, norm_out, conv_out.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, Step

_FAMILIES = (
    "modules.diffusionmodules.model",
    "sd3_impls",
    "flux.modules.autoencoder",
    "backend.nn.vae",
)
_CODERS = ("Decoder", "Encoder", "VAEDecoder", "VAEEncoder")
_ATTENTION = ("AttnBlock", "MemoryEfficientAttnBlock")


def is_known(family: str) -> bool:
    """True for the Python modules that define these classes, wherever a host keeps them."""
    return any(family == name or family.endswith(f".{name}") for name in _FAMILIES)


def steps(found: Findings, module: nn.Module, role: str) -> list[Step]:
    """The steps; what is not as expected goes to `found`."""
    made: list[Step] = []
    levels = "down" if role == "encoder" else "up"
    children = ("conv_in", levels, "mid", "norm_out", "conv_out", "swish")
    if not found.block(module, role, _CODERS, children, root=True):
        return made
    found.settings(module, role, {"give_pre_end": False, "tanh_out": False})
    if getattr(module, "swish", None) is not None:
        found.silu(module.swish, f"{role}.swish")
    _conv(found, made, getattr(module, "conv_in", None), "conv_in")
    if role == "encoder":
        _levels(found, made, module, "down", "downsample")
        _mid(found, made, getattr(module, "mid", None))
    else:
        _mid(found, made, getattr(module, "mid", None))
        _levels(found, made, module, "up", "upsample")
    norm = found.group_norm(getattr(module, "norm_out", None), "norm_out")
    conv = found.conv(getattr(module, "conv_out", None), "conv_out")
    if conv is not None and norm is not None:
        made.append(ConvStep("conv_out", "3x3", conv, norm))
    return made


def _conv(found: Findings, made: list[Step], module: Any, name: str) -> None:
    conv = found.conv(module, name)
    if conv is not None:
        made.append(ConvStep(name, "3x3", conv))


def _mid(found: Findings, made: list[Step], mid: Any) -> None:
    if found.block(mid, "mid", ("Module",), ("block_1", "attn_1", "block_2")):
        _resnet(found, made, getattr(mid, "block_1", None), "mid.block_1")
        _attention(found, made, getattr(mid, "attn_1", None), "mid.attn_1")
        _resnet(found, made, getattr(mid, "block_2", None), "mid.block_2")


def _levels(found: Findings, made: list[Step], module: nn.Module, key: str, resize: str) -> None:
    levels = getattr(module, key, None)
    if not isinstance(levels, nn.ModuleList):
        found.add(f"{key} is not a list")
        return
    count = len(levels)
    found.settings(module, key, {"num_resolutions": count})
    order = list(range(count)) if key == "down" else list(reversed(range(count)))
    for index in order:
        name, level = f"{key}.{index}", levels[index]
        if not found.block(level, name, ("Module",), ("block", "attn", resize)):
            continue
        _blocks(found, made, module, level, name)
        last = index == order[-1]
        sampler = getattr(level, resize, None)
        if sampler is None and not last:
            found.add(f"{name} has no {resize}")
        elif sampler is not None and last:
            found.add(f"{name} has a {resize}, which is never run")
        elif sampler is not None:
            _resize(found, made, sampler, f"{name}.{resize}", resize)


def _blocks(
    found: Findings, made: list[Step], module: nn.Module, level: nn.Module, name: str
) -> None:
    blocks: Any = getattr(level, "block", None)
    attentions: Any = getattr(level, "attn", None)
    attentions = [] if attentions is None else attentions
    if not isinstance(blocks, nn.ModuleList) or len(attentions) not in (0, len(blocks)):
        found.add(f"{name}: blocks and attentions do not go together")
        return
    run = getattr(module, "num_res_blocks", None)
    if run is not None and len(blocks) != run + name.startswith("up"):
        found.add(f"{name} has {len(blocks)} blocks, num_res_blocks is {run}")
    for index, block in enumerate(blocks):
        _resnet(found, made, block, f"{name}.block.{index}")
        if len(attentions):
            _attention(found, made, attentions[index], f"{name}.attn.{index}")


def _resize(found: Findings, made: list[Step], module: Any, name: str, resize: str) -> None:
    if not found.block(module, name, (resize.capitalize(),), ("conv",)):
        return
    if not getattr(module, "with_conv", True) or getattr(module, "conv", None) is None:
        found.add(f"{name} has no convolution")
        return
    found.settings(module, name, {"scale_factor": 2.0})
    down = resize == "downsample"
    conv = found.conv(module.conv, f"{name}.conv", stride=2 if down else 1)
    if conv is not None:
        made.append(ConvStep(name, "3x3 stride 2" if down else "upsample", conv))


def _resnet(found: Findings, made: list[Step], block: Any, name: str) -> None:
    children = ("norm1", "conv1", "norm2", "dropout", "conv2", "nin_shortcut", "swish")
    if not found.block(block, name, ("ResnetBlock",), children):
        return
    found.no_dropout(getattr(block, "dropout", None), f"{name}.dropout")
    if getattr(block, "swish", None) is not None:
        found.silu(block.swish, f"{name}.swish")
    residual_block(found, made, block, name, "nin_shortcut")


def _attention(found: Findings, made: list[Step], block: Any, name: str) -> None:
    if type(block) is nn.Identity:
        found.untouched(block, name)
        return
    children = ("norm", "q", "k", "v", "proj_out")
    if not found.block(block, name, _ATTENTION, children, own_forward=False):
        return
    norm = found.group_norm(getattr(block, "norm", None), f"{name}.norm")
    q, k, v, out = (
        found.projection(getattr(block, key, None), f"{name}.{key}") for key in children[1:]
    )
    if norm is not None and q is not None and k is not None and v is not None and out is not None:
        made.append(AttentionStep(name, norm, q, k, v, out))


def residual_block(
    found: Findings, made: list[Step], block: nn.Module, name: str, shortcut_name: str
) -> None:
    """Appends the two convolutions of `block`, whose shortcut is its child `shortcut_name`."""
    norm1 = found.group_norm(getattr(block, "norm1", None), f"{name}.norm1")
    conv1 = found.conv(getattr(block, "conv1", None), f"{name}.conv1")
    norm2 = found.group_norm(getattr(block, "norm2", None), f"{name}.norm2")
    conv2 = found.conv(getattr(block, "conv2", None), f"{name}.conv2")
    shortcut: Any = getattr(block, shortcut_name, None)
    nin = None
    if shortcut is not None:
        nin = found.conv(shortcut, f"{name}.{shortcut_name}", kernel=1)
    if conv1 is None or conv2 is None or norm1 is None or norm2 is None:
        return
    if (shortcut is None) != (conv1.in_channels == conv2.out_channels):
        found.add(f"{name}: {conv1.in_channels} to {conv2.out_channels} channels and {nin}")
    made.append(ConvStep(f"{name}.conv1", "3x3", conv1, norm1))
    made.append(ConvStep(f"{name}.conv2", "3x3", conv2, norm2, residual=True, shortcut=nin))
