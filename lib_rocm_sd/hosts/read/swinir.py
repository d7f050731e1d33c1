"""Reads SwinIR, as spandrel builds it, into a Network: groups of blocks with attention in windows,
each with a convolution and a residual behind it, between convolutions.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read.upscaler import Reader
from lib_rocm_sd.upscaler.steps import (
    EnlargeStep,
    Entry,
    Exit,
    Norm,
    NormStep,
    Residual,
    WindowBlock,
    WindowStep,
)

_LAYERS = ("conv_first", "patch_embed", "patch_unembed", "pos_drop", "layers", "norm")
_TAILS = ("conv_before_upsample", "upsample", "conv_up1", "conv_up2", "conv_up3", "conv_hr")


class SwinIr(Reader):
    """SwinIR with each of its four ways to end: `pixelshuffle`, `pixelshuffledirect`,
    `nearest+conv` and none, which keeps the size and adds the picture.
    """

    def read(self, module: Any) -> None:
        findings = self.findings
        children = (*_LAYERS, "conv_after_body", *_TAILS, "conv_last", "lrelu")
        if not findings.block(module, "network", ("SwinIR",), children, root=True):
            return
        findings.settings(module, "network", {"start_unshuffle": 1})
        findings.no_dropout(module, "pos_drop")
        first = self.conv(module, "conv_first")
        self._patches(module, "")
        if getattr(module.patch_embed, "norm", None) is not None:
            self._norm_step(module, "patch_embed.norm")
        for index, group in enumerate(findings.listed(module, "layers")):
            self._group(group, f"layers.{index}", module.window_size)
        self._norm_step(module, "norm")
        self._convs(module, "conv_after_body", "", first)
        self._tail(module)
        if not isinstance(module.conv_first, nn.Conv2d) or findings.reasons:
            return
        channels, mean = module.conv_first.in_channels, tuple(module.mean.flatten().tolist())
        if len(mean) not in (1, channels):
            findings.add(f"means of {len(mean)} channels for {channels}")
        span, window = float(module.img_range), int(module.window_size)
        self.entry = Entry(channels, reflects=True, mean=mean, span=span, window=window)
        shuffle = self.exit.shuffle
        self.exit = Exit(channels, shuffle, mean=mean, span=span)
        growth = shuffle
        for step in self.steps:
            growth *= step.growth
        if growth != module.upscale:
            findings.add(f"network.upscale is {module.upscale}, its layers enlarge by {growth}")

    def _patches(self, owner: Any, within: str) -> None:
        """What makes rows of pixels of an image, and an image of rows."""
        for key, cls in (("patch_embed", "PatchEmbed"), ("patch_unembed", "PatchUnEmbed")):
            name = f"{within}.{key}" if within else key
            self.findings.block(getattr(owner, key, None), name, (cls,), ("norm",))
        if within and getattr(getattr(owner, "patch_embed", None), "norm", None) is not None:
            self.findings.add(f"{within}.patch_embed has a norm")

    def _norm(self, owner: Any, path: str, within: str = "") -> Norm | None:
        norm = self.findings.layer_norm(owner, path, within)
        return None if norm is None else Norm(norm, norm.eps)

    def _norm_step(self, owner: Any, path: str) -> None:
        norm = self._norm(owner, path)
        if norm is not None:
            self.steps.append(NormStep(path, self.last, norm))

    def _convs(self, owner: Any, key: str, within: str, start: int) -> None:
        """One convolution, or three with two leaky ReLUs between; image `start` is added to it."""
        residuals = (Residual(start, 1.0),)
        if isinstance(getattr(owner, key, None), nn.Conv2d):
            self.conv(owner, key, within, residuals=residuals)
            return
        layers, name = self.findings.listed(owner, key, within, 5), f"{within}.{key}"
        name = name.removeprefix(".")
        for index in range(0, len(layers), 2):
            how: dict[str, Any] = {"kernel": 1 if index == 2 else 3}
            if index < 4:
                kind, slope = self.activation(layers[index + 1], f"{name}.{index + 1}")
                how |= {"activation": kind, "slope": slope}
                if kind != "leaky relu":
                    self.findings.add(f"{name}.{index + 1} is no leaky ReLU")
            self.conv(
                layers[index], "", f"{name}.{index}", **how, residuals=residuals * (index > 2)
            )

    def _group(self, group: Any, name: str, window: int) -> None:
        """An RSTB: its blocks, a convolution or three, and what it began with."""
        children = ("residual_group", "conv", "patch_embed", "patch_unembed")
        if not self.findings.block(group, name, ("RSTB",), children):
            return
        self._patches(group, name)
        start, inner = self.last, f"{name}.residual_group"
        if not self.findings.block(group.residual_group, inner, ("BasicLayer",), ("blocks",)):
            return
        blocks = []
        for index, block in enumerate(self.findings.listed(group, "residual_group.blocks", name)):
            read = self._block(block, f"{inner}.blocks.{index}", window)
            if read is not None:
                blocks.append(read)
        self.steps.append(WindowStep(inner, self.last, window, tuple(blocks)))
        self._convs(group, "conv", name, start)

    def _block(self, block: Any, name: str, window: int) -> WindowBlock | None:
        findings = self.findings
        children = ("norm1", "attn", "drop_path", "norm2", "mlp")
        if not findings.block(block, name, ("SwinTransformerBlock",), children, own=("attn_mask",)):
            return None
        findings.settings(block, name, {"window_size": window})
        self._at_rest(block.drop_path, f"{name}.drop_path")
        attn, mlp = block.attn, block.mlp
        children = ("qkv", "attn_drop", "proj", "proj_drop", "softmax")
        own = ("relative_position_bias_table", "relative_position_index")
        if not findings.block(attn, f"{name}.attn", ("WindowAttention",), children, own=own):
            return None
        findings.settings(attn, f"{name}.attn", {"window_size": (window, window)})
        findings.torchs(attn, "softmax", f"{name}.attn", nn.Softmax, dim=-1)
        if not findings.block(mlp, f"{name}.mlp", ("Mlp",), ("fc1", "act", "fc2", "drop")):
            return None
        findings.torchs(mlp, "act", f"{name}.mlp", nn.GELU, approximate="none")
        for path in ("attn.attn_drop", "attn.proj_drop", "mlp.drop"):
            findings.no_dropout(block, path, name)
        paths = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        linears = [findings.linear(block, path, name) for path in paths]
        norms = [self._norm(block, key, name) for key in ("norm1", "norm2")]
        if any(each is None for each in (*linears, *norms)):
            return None
        shift, heads, scale = block.shift_size, attn.num_heads, float(attn.scale)
        return WindowBlock(shift, heads, scale, (norms[0], norms[1]), attn, *linears)  # type: ignore[arg-type]

    def _at_rest(self, module: Any, name: str) -> None:
        """A DropPath in evaluation, or nothing."""
        if type(module) is nn.Identity:
            return
        cls, package = type(module), self.findings.family.partition(".")[0]
        if cls.__name__ != "DropPath" or cls.__module__.partition(".")[0] != package:
            self.findings.add(f"{name} is a {cls.__name__} of {cls.__module__}")
            return
        self.findings.untouched(module, name)
        self.findings.settings(module, name, {"training": False})
        self.findings.class_forward(cls, name)

    def _tail(self, module: Any) -> None:
        """What follows the body, as the modules that are there say."""
        way = module.upsampler
        if way in ("pixelshuffle", "nearest+conv"):
            layers = self.findings.listed(module, "conv_before_upsample", "", 2)
            if not layers:
                return
            kind, slope = self.activation(layers[1], "conv_before_upsample.1")
            self.conv(layers[0], "", "conv_before_upsample.0", activation=kind, slope=slope)
        if way == "pixelshuffle":
            self._shuffled(module.upsample)
            self.conv(module, "conv_last")
        elif way == "pixelshuffledirect":
            layers = self._layers(module.upsample, "UpsampleOneStep")
            if len(layers) == 2:
                self.conv(layers[0], "", "upsample.0")
                factor = self.pixel_shuffle(layers[1], "upsample.1")
                self.exit = Exit(0, factor)
        elif way == "nearest+conv":
            kind, slope = self.activation(getattr(module, "lrelu", None), "lrelu")
            how: dict[str, Any] = {"activation": kind, "slope": slope}
            for key in ("conv_up1", "conv_up2", "conv_up3"):
                if key == "conv_up1" or getattr(module, key, None) is not None:
                    self.conv(module, key, kind="upsample", **how)
            self.conv(module, "conv_hr", **how)
            self.conv(module, "conv_last")
        else:
            self.conv(module, "conv_last", residuals=(Residual(0, 1.0),))

    def _layers(self, module: Any, cls: str) -> list[Any]:
        """The members of SwinIR's Sequential of that class."""
        count = len(module._modules) if isinstance(module, nn.Sequential) else 0
        children = map(str, range(count))
        known = self.findings.block(module, "upsample", (cls,), children, own_forward=False)
        return list(module) if known else []

    def _shuffled(self, module: Any) -> None:
        layers = self._layers(module, "Upsample")
        for index in range(0, len(layers) - 1, 2):
            self.conv(layers[index], "", f"upsample.{index}")
            factor = self.pixel_shuffle(layers[index + 1], f"upsample.{index + 1}")
            name = f"upsample.{index + 1}"
            self.steps.append(EnlargeStep(name, self.last, factor, shuffles=True))
