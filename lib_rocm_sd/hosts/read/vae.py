"""Reads a host's Decoder or Encoder module into a Recipe, or says why it cannot.

Nothing is assumed of what was not looked at: a class that is not known, a child too many, a forward
replaced on an instance, a hook, or a setting that changes the arithmetic is a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet_diffusers import PROCESSORS
from lib_rocm_sd.hosts.read.vae_frames import FAMILIES as FAMILIES_OF_FRAMES
from lib_rocm_sd.hosts.read.vae_frames import WanComfy, WanDiffusers
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, Recipe, Step

FAMILIES = (
    "modules.diffusionmodules.model",
    "sd3_impls",
    "flux.modules.autoencoder",
    "backend.nn.vae",
)


def read(module: nn.Module) -> Recipe:
    """The steps of ldm's, sgm's, SD3's, Flux's, ComfyUI's or diffusers' Decoder or Encoder, of
    Wan's and Qwen-Image's for a single frame.

    `reasons` is empty exactly if they were read completely. The module is not changed.
    """
    family = type(module).__module__
    of_diffusers = family.split(".")[0] == "diffusers"
    role = "encoder" if "Encoder" in type(module).__name__ else "decoder"
    of_frames = family in FAMILIES_OF_FRAMES
    if not (of_diffusers or of_frames or is_known(family)):
        return Recipe(role, (), (f"{type(module).__name__} of {family} is not known",))
    found = Findings("diffusers" if of_diffusers else family)
    found.everywhere()
    reader: Any = (Diffusers if of_diffusers else Ldm)(found, role)
    if of_frames:
        reader = (WanDiffusers if of_diffusers else WanComfy)(found, role)
    reader.coder(module)
    _check(found, module, reader.steps)
    steps = () if found.reasons else tuple(reader.steps)
    return Recipe(role, steps, tuple(found.reasons), of_frames)


def is_known(family: str) -> bool:
    """True for the Python modules that define ldm's classes, wherever a host keeps them."""
    return any(family == name or family.endswith(f".{name}") for name in FAMILIES)


def _check(found: Findings, module: nn.Module, steps: list[Step]) -> None:
    """What only the whole shows: channels that fit, one float dtype, one device."""
    channels = steps[0].in_channels if steps else 0
    for step in steps:
        if step.in_channels != channels:
            found.add(f"{step.name} takes {step.in_channels} channels, there are {channels}")
        channels = step.out_channels
        if channels % 16 and step is not steps[-1]:
            found.add(f"{step.name} has {channels} channels, not a multiple of 16")
    tensors = list(module.parameters())
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        found.add(f"weights of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        found.add(f"weights are {', '.join(sorted(map(str, dtypes)))}")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1 or "meta" in devices:
        found.add(f"weights lie on {', '.join(sorted(devices))}")


class Ldm:
    """The Decoder and Encoder that ldm, sgm, SD3, Flux, Forge and ComfyUI share in all but their
    files. What is not as expected goes to `found`.

    Children: conv_in, mid.block_1/attn_1/block_2, up[i].block/attn/upsample (run from the last to
    the first) or down[i].block/attn/downsample, norm_out, conv_out.
    """

    classes: ClassVar[tuple[str, ...]] = ("Decoder", "Encoder", "VAEDecoder", "VAEEncoder")
    levels: ClassVar[tuple[str, str]] = ("up", "down")
    """A decoder's and an encoder's."""
    children: ClassVar[tuple[str, ...]] = ("conv_in", "mid", "norm_out", "conv_out", "swish")
    norm_out: ClassVar[str] = "norm_out"

    def __init__(self, found: Findings, role: str) -> None:
        self.found, self.role, self.down = found, role, role == "encoder"
        self.steps: list[Step] = []

    def coder(self, module: Any) -> None:
        """Reads a whole one into `steps`."""
        levels = self.levels[self.down]
        children = (*self.children, levels)
        if not self.found.block(module, self.role, self.classes, children, root=True):
            return
        self.begin(module)
        self.conv(module, "conv_in")
        if self.down:
            self.all_levels(module, levels)
        self.mid(module)
        if not self.down:
            self.all_levels(module, levels)
        norm = self.found.group_norm(module, self.norm_out)
        conv = self.found.conv(module, "conv_out")
        if norm is not None and conv is not None:
            self.steps.append(ConvStep("conv_out", "3x3", conv, norm))

    def begin(self, module: Any) -> None:
        """What is said of the whole."""
        self.found.settings(module, self.role, {"give_pre_end": False, "tanh_out": False})
        self.swish(module, self.role)

    def swish(self, module: Any, name: str) -> None:
        """Newer ones call a function, which has no module."""
        if getattr(module, "swish", None) is not None:
            self.found.silu(module, "swish", name)

    def conv(self, module: Any, name: str) -> None:
        conv = self.found.conv(module, name)
        if conv is not None:
            self.steps.append(ConvStep(name, "3x3", conv))

    def mid(self, module: Any) -> None:
        mid = getattr(module, "mid", None)
        if self.found.block(mid, "mid", ("Module",), ("block_1", "attn_1", "block_2")):
            self.resnet(getattr(mid, "block_1", None), "mid.block_1")
            self.attention(getattr(mid, "attn_1", None), "mid.attn_1")
            self.resnet(getattr(mid, "block_2", None), "mid.block_2")

    def all_levels(self, module: Any, key: str) -> None:
        levels = getattr(module, key, None)
        if not isinstance(levels, nn.ModuleList):
            self.found.add(f"{key} is not a list")
            return
        self.found.settings(module, key, {"num_resolutions": len(levels)})
        order = range(len(levels)) if self.down else reversed(range(len(levels)))
        last, resize = (len(levels) - 1, "downsample") if self.down else (0, "upsample")
        for index in order:
            name, level = f"{key}.{index}", levels[index]
            if not self.found.block(level, name, ("Module",), ("block", "attn", resize)):
                continue
            self.level(module, level, name)
            sampler = getattr(level, resize, None)
            if sampler is None and index != last:
                self.found.add(f"{name} has no {resize}")
            elif sampler is not None and index == last:
                self.found.add(f"{name} has a {resize}, which is never run")
            elif sampler is not None:
                self.sampler(sampler, f"{name}.{resize}")

    def level(self, module: Any, level: Any, name: str) -> None:
        blocks, attentions = getattr(level, "block", None), getattr(level, "attn", None)
        attentions = [] if attentions is None else attentions
        if not isinstance(blocks, nn.ModuleList) or len(attentions) not in (0, len(blocks)):
            self.found.add(f"{name}: blocks and attentions do not go together")
            return
        run = getattr(module, "num_res_blocks", None)
        if run is not None and len(blocks) != run + (not self.down):
            self.found.add(f"{name} has {len(blocks)} blocks, num_res_blocks is {run}")
        for index, block in enumerate(blocks):
            self.resnet(block, f"{name}.block.{index}")
            if len(attentions):
                self.attention(attentions[index], f"{name}.attn.{index}")

    def sampler(self, module: Any, name: str) -> None:
        kind = "Downsample" if self.down else "Upsample"
        if not self.found.block(module, name, (kind,), ("conv",)):
            return
        if not getattr(module, "with_conv", True) or getattr(module, "conv", None) is None:
            self.found.add(f"{name} has no convolution")
            return
        self.found.settings(module, name, {"scale_factor": 2.0})
        self.resizing(module, "conv", name)

    def resizing(self, module: Any, key: str, name: str) -> None:
        """A sampler's convolution."""
        conv = self.found.conv(module, key, name, stride=2 if self.down else 1)
        if conv is not None:
            kind = "3x3 stride 2" if self.down else "upsample"
            self.steps.append(ConvStep(name, kind, conv))

    def resnet(self, block: Any, name: str) -> None:
        children = ("norm1", "conv1", "norm2", "dropout", "conv2", "nin_shortcut", "swish")
        if self.found.block(block, name, ("ResnetBlock",), children):
            self.found.no_dropout(block, "dropout", name)
            self.swish(block, name)
            self.convs(block, name, "nin_shortcut")

    def convs(self, block: Any, name: str, key: str) -> None:
        """The two convolutions of a residual block, whose shortcut is its child `key`."""
        found = self.found
        norm1, conv1 = found.group_norm(block, "norm1", name), found.conv(block, "conv1", name)
        norm2, conv2 = found.group_norm(block, "norm2", name), found.conv(block, "conv2", name)
        is_short, shortcut = getattr(block, key, None) is not None, None
        if is_short:
            shortcut = found.conv(block, key, name, kernel=1)
        if conv1 is None or conv2 is None or norm1 is None or norm2 is None:
            return
        if is_short == (conv1.in_channels == conv2.out_channels):
            sizes = f"{conv1.in_channels} to {conv2.out_channels} channels"
            found.add(f"{name}: {sizes} and {shortcut}")
        self.steps.append(ConvStep(f"{name}.conv1", "3x3", conv1, norm1))
        second = ConvStep(f"{name}.conv2", "3x3", conv2, norm2, residual=True, shortcut=shortcut)
        self.steps.append(second)

    def attention(self, block: Any, name: str) -> None:
        if type(block) is nn.Identity:
            self.found.untouched(block, name)
            return
        classes = ("AttnBlock", "MemoryEfficientAttnBlock")
        children = ("norm", "q", "k", "v", "proj_out")
        if self.found.block(block, name, classes, children, own_forward=False):
            out = getattr(block, "proj_out", None)
            self.projected(block, name, children, out)

    def projected(
        self, block: Any, name: str, children: Sequence[str], last: Any, heads: int = 1
    ) -> AttentionStep | None:
        """Attention between norm, three projections and a last one, which is named as a child."""
        norm = self.found.group_norm(block, children[0], name)
        q, k, v = (self.found.projection(block, key, name) for key in children[1:4])
        out = self.found.projection(last, "", f"{name}.{children[4]}")
        if norm is None or q is None or k is None or v is None or out is None:
            return None
        self.steps.append(step := AttentionStep(name, norm, q, k, v, out, heads))
        return step


class Diffusers(Ldm):
    """Those of diffusers' AutoencoderKL.

    Children: conv_in, mid_block, up_blocks or down_blocks, conv_norm_out, conv_act, conv_out.
    """

    classes: ClassVar[tuple[str, ...]] = ("Decoder", "Encoder")
    levels: ClassVar[tuple[str, str]] = ("up_blocks", "down_blocks")
    children: ClassVar[tuple[str, ...]] = (
        *("conv_in", "mid_block", "conv_norm_out"),
        *("conv_act", "conv_out"),
    )
    norm_out: ClassVar[str] = "conv_norm_out"

    def begin(self, module: Any) -> None:
        self.found.silu(module, "conv_act")

    def mid(self, module: Any) -> None:
        mid: Any = getattr(module, "mid_block", None)
        if not self.found.block(mid, "mid_block", ("UNetMidBlock2D",), ("attentions", "resnets")):
            return
        resnets, attentions = list(mid.resnets), list(mid.attentions)
        if len(resnets) != len(attentions) + 1:
            self.found.add("mid_block: resnets and attentions do not go together")
            return
        for index, resnet in enumerate(resnets):
            if index > 0 and attentions[index - 1] is not None:
                self.attention(attentions[index - 1], f"mid_block.attentions.{index - 1}")
            self.resnet(resnet, f"mid_block.resnets.{index}")

    def all_levels(self, module: Any, key: str) -> None:
        levels = getattr(module, key, None)
        if not isinstance(levels, nn.ModuleList):
            self.found.add(f"{key} is not a list")
            return
        kind = "DownEncoderBlock2D" if self.down else "UpDecoderBlock2D"
        resize = "downsamplers" if self.down else "upsamplers"
        for index, level in enumerate(levels):
            name = f"{key}.{index}"
            if not self.found.block(level, name, (kind,), ("resnets", resize)):
                continue
            resnets: Any = level.resnets
            for number, resnet in enumerate(resnets):
                self.resnet(resnet, f"{name}.resnets.{number}")
            samplers: Any = getattr(level, resize, None)
            for number, sampler in enumerate(samplers if samplers is not None else ()):
                self.sampler(sampler, f"{name}.{resize}.{number}")

    def sampler(self, module: Any, name: str) -> None:
        kind = "Downsample2D" if self.down else "Upsample2D"
        if not self.found.block(module, name, (kind,), ("conv", "Conv2d_0")):
            return
        expected: dict[str, Any] = {"use_conv": True, "norm": None, "interpolate": True}
        expected |= {"padding": 0} if self.down else {"use_conv_transpose": False}
        self.found.settings(module, name, expected)
        plain = self.down or getattr(module, "name", "conv") == "conv"
        self.resizing(module, "conv" if plain else "Conv2d_0", name)

    def resnet(self, block: Any, name: str) -> None:
        children = ("norm1", "conv1", "norm2", "dropout", "conv2", "conv_shortcut", "nonlinearity")
        if not self.found.block(block, name, ("ResnetBlock2D",), children):
            return
        expected: dict[str, Any] = {"pre_norm": True, "up": False, "down": False, "upsample": None}
        expected |= {"downsample": None, "output_scale_factor": 1.0, "time_emb_proj": None}
        self.found.settings(block, name, expected)
        if getattr(block, "time_embedding_norm", "default") not in ("default", "group"):
            self.found.add(f"{name}.time_embedding_norm is {block.time_embedding_norm}")
        self.found.silu(block, "nonlinearity", name)
        self.found.no_dropout(block, "dropout", name)
        self.convs(block, name, "conv_shortcut")

    def attention(self, block: Any, name: str) -> None:
        children = ("group_norm", "to_q", "to_k", "to_v", "to_out")
        fused = (*children, "to_qkv")  # which stays when projections are fused no more
        if not self.found.block(block, name, ("Attention",), fused, own_forward=False):
            return
        expected = {
            "residual_connection": True,
            "rescale_output_factor": 1.0,
            "is_cross_attention": False,
            "only_cross_attention": False,
            "added_kv_proj_dim": None,
            "is_causal": False,
        }
        self.found.settings(block, name, expected)
        kind = type(getattr(block, "processor", None))
        if kind.__name__ not in PROCESSORS and not kind.__module__.startswith("lib_rocm_sd"):
            self.found.add(f"{name} has a {kind.__name__}")
        last, *others = list(getattr(block, "to_out", None) or [None])
        for other in others:
            self.found.no_dropout(other, "", f"{name}.to_out")
        heads = int(getattr(block, "heads", 1))
        step = self.projected(block, name, children, last, heads)
        if step is None:
            return
        channels = step.in_channels
        if channels % heads or abs(getattr(block, "scale", 0) - (channels // heads) ** -0.5) > 1e-9:
            self.found.add(f"{name}: {heads} heads of {channels} channels, scale {block.scale}")
