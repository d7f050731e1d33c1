"""Reads the Decoder and Encoder of Wan's VAE, which is Qwen-Image's, too, for a single frame.

Their causal convolutions pad time with zeros in front: of a first frame only the last tap sees
anything, and what changes the number of frames is left out (the cache's mark "Rep"). Read in
diffusers 0.42.1, autoencoder_kl_wan.py and autoencoder_kl_qwenimage.py, and in Comfy-Org/ComfyUI
a125cd84 (0.3.64), comfy/ldm/wan/vae.py. Wan 2.2's VAE has other blocks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, Step

FAMILIES = (
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "comfy.ldm.wan.vae",
)
_PREFIXES = ("", "Wan", "QwenImage")


def _named(*names: str) -> tuple[str, ...]:
    return tuple(prefix + name for prefix in _PREFIXES for name in names)


class WanComfy:
    """ComfyUI's: conv1, middle, upsamples or downsamples, one after the other, and head."""

    blocks: tuple[str, str] = ("upsamples", "downsamples")
    """A decoder's and an encoder's."""
    middle: tuple[str, ...] = ("middle.0", "middle.1", "middle.2")
    ends: tuple[str, ...] = ("conv1", "head.0", "head.1", "head.2")
    """The first convolution; the last norm, its activation and the last convolution."""
    children: tuple[str, ...] = ("conv1", "middle", "head")
    first: tuple[str, ...] = ("residual.0", "residual.1", "residual.2")
    second: tuple[str, ...] = ("residual.3", "residual.4", "residual.6")
    """A residual block's norms, activations and convolutions."""
    dropout, shortcut = "residual.5", "shortcut"
    inside: tuple[str, ...] = ("residual", "shortcut")

    def __init__(self, found: Findings, role: str) -> None:
        self.found, self.role, self.down = found, role, role == "encoder"
        self.steps: list[Step] = []

    def coder(self, module: Any) -> None:
        """Reads a whole one into `steps`."""
        key = self.blocks[self.down]
        classes = _named("Decoder3d", "Encoder3d")
        if not self.found.block(module, self.role, classes, (*self.children, key), root=True):
            return
        conv_in, norm, silu, conv_out = self.ends
        self.conv(module, conv_in, "")
        if self.down:
            self.all_blocks(module, key)
        self.mid(module)
        if not self.down:
            self.all_blocks(module, key)
        self.normed_conv(module, (norm, silu, conv_out), "")

    def mid(self, module: Any) -> None:
        self.found.listed(module, "middle", "", 3)
        for path in self.middle:
            self.any_block(module.get_submodule(path), path)

    def all_blocks(self, module: Any, key: str) -> None:
        for index, block in enumerate(self.found.listed(module, key)):
            self.any_block(block, f"{key}.{index}")

    def any_block(self, block: Any, name: str) -> None:
        kind = type(block).__name__
        if kind in _named("Resample"):
            self.resample(block, name)
        elif kind in _named("AttentionBlock"):
            self.attention(block, name)
        else:
            self.residual(block, name)

    def residual(self, block: Any, name: str) -> None:
        if not self.found.block(block, name, _named("ResidualBlock"), self.inside):
            return
        self.found.no_dropout(block, self.dropout, name)
        if self.inside[0] == "residual":
            self.found.listed(block, "residual", name, 7)
        shortcut = getattr(block, self.shortcut, None)
        if type(shortcut) is nn.Identity:
            self.found.untouched(shortcut, f"{name}.{self.shortcut}")
            shortcut = None
        else:
            shortcut = self.found.causal_conv(block, self.shortcut, name, kernel=1)
        self.normed_conv(block, self.first, name)
        self.normed_conv(block, self.second, name, residual=True, shortcut=shortcut)

    def normed_conv(self, owner: Any, paths: tuple[str, ...], name: str, **how: Any) -> None:
        """RMSNorm, SiLU and a convolution, at these paths."""
        rms = self.rms(owner.get_submodule(paths[0]), f"{name}.{paths[0]}".strip("."))
        self.found.silu(owner, paths[1], name)
        self.conv(owner, paths[2], name, rms=rms, **how)

    def conv(self, owner: Any, path: str, name: str, **how: Any) -> None:
        conv = self.found.causal_conv(owner, path, name)
        if conv is not None:
            self.steps.append(ConvStep(f"{name}.{path}".strip("."), "3x3", conv, **how))

    def rms(self, norm: Any, name: str) -> Any:
        """A norm over channels without a bias."""
        if not self.found.block(norm, name, _named("RMS_norm"), (), own=("gamma",)):
            return None
        scale = norm.gamma.numel() ** 0.5
        self.found.settings(norm, name, {"channel_first": True, "scale": scale})
        if getattr(norm, "bias", None) not in (None, 0.0):
            self.found.add(f"{name} has a bias")
        return norm

    def resample(self, block: Any, name: str) -> None:
        """Doubles, or halves, sides; its convolution over time is not run for a first frame."""
        if not self.found.block(block, name, _named("Resample"), ("resample", "time_conv")):
            return
        kind = "downsample" if self.down else "upsample"
        if block.mode not in (f"{kind}2d", f"{kind}3d"):
            self.found.add(f"{name}.mode is {block.mode}")
            return
        before, _ = self.found.listed(block, "resample", name, 2) or (None, None)
        if isinstance(before, nn.ZeroPad2d if self.down else nn.Upsample):
            self.found.untouched(before, f"{name}.resample.0")
            self.found.class_forward(type(before), f"{name}.resample.0")
            expected = {"scale_factor": (2.0, 2.0), "mode": "nearest-exact"}
            expected = {"padding": (0, 1, 0, 1)} if self.down else expected
            self.found.settings(before, f"{name}.resample.0", expected)
        else:
            self.found.add(f"{name}.resample.0 is a {type(before).__name__}")
        conv = self.found.conv(block, "resample.1", name, stride=2 if self.down else 1)
        if conv is not None:
            self.steps.append(ConvStep(name, "3x3 stride 2" if self.down else "upsample", conv))

    def attention(self, block: Any, name: str) -> None:
        if not self.found.block(
            block, name, _named("AttentionBlock"), ("norm", "to_qkv", "proj"), own_forward=False
        ):
            return
        rms = self.rms(block.norm, f"{name}.norm")
        qkv = self.found.conv(block, "to_qkv", name, kernel=1)
        out = self.found.conv(block, "proj", name, kernel=1)
        if rms is not None and qkv is not None and out is not None:
            self.steps.append(AttentionStep(name, None, qkv, qkv, qkv, out, rms=rms))


class WanDiffusers(WanComfy):
    """Diffusers': conv_in, mid_block, up_blocks or down_blocks, norm_out, nonlinearity, conv_out.

    An encoder's blocks lie one after the other, a decoder's in groups with an upsampler.
    """

    blocks = ("up_blocks", "down_blocks")
    ends = ("conv_in", "norm_out", "nonlinearity", "conv_out")
    children = (*ends, "mid_block")
    first = ("norm1", "nonlinearity", "conv1")
    second = ("norm2", "nonlinearity", "conv2")
    dropout, shortcut = "dropout", "conv_shortcut"
    inside = (*first, *second, "dropout", "conv_shortcut")

    def mid(self, module: Any) -> None:
        mid = module.mid_block
        children = ("attentions", "resnets")
        if not self.found.block(mid, "mid_block", _named("MidBlock"), children):
            return
        resnets = self.found.listed(mid, "resnets", "mid_block")
        attentions = self.found.listed(mid, "attentions", "mid_block", len(resnets) - 1)
        for index, resnet in enumerate(resnets):
            if 0 < index <= len(attentions):
                self.attention(attentions[index - 1], f"mid_block.attentions.{index - 1}")
            self.residual(resnet, f"mid_block.resnets.{index}")

    def any_block(self, block: Any, name: str) -> None:
        if self.down:
            super().any_block(block, name)
            return
        if not self.found.block(block, name, _named("UpBlock"), ("resnets", "upsamplers")):
            return
        for index, resnet in enumerate(self.found.listed(block, "resnets", name)):
            self.residual(resnet, f"{name}.resnets.{index}")
        if block.upsamplers is not None:
            for upsampler in self.found.listed(block, "upsamplers", name, 1):
                self.resample(upsampler, f"{name}.upsamplers.0")
