"""Reads an upscaler's module into a Network, or says why it cannot.

Three families of networks, as spandrel builds them and, of the first two, as BasicSR does: RRDBNet
(ESRGAN, Real-ESRGAN), SRVGGNetCompact and SPAN; swinir.py has a fourth. Nothing is
assumed of what was not looked at: see hosts/read/vae.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.upscaler.steps import (
    ConvStep,
    EnlargeStep,
    Entry,
    Exit,
    Layer,
    Network,
    Residual,
    Slope,
    Step,
)

FAMILIES = ("spandrel.architectures", "basicsr.archs", "realesrgan.archs", "lib_rocm_sd.lab")
"""Packages that define such classes; the last has models of the same shapes for benchmarks."""
MISSING = {
    "DAT": "depthwise convolutions, attention between channels and means over the whole picture",
    "OmniSR": "depthwise convolutions, attention between channels and over grids, and max pooling",
}
"""What networks that people ask for have and no step does."""
RRDB_SCALE = 0.2
"""What dense blocks and RRDBs multiply by before they add what they began with."""


def read(module: nn.Module) -> Network:
    """The steps of an upscaler's network. The module is not changed.

    `reasons` is empty exactly if they were read completely.
    """
    cls = type(module)
    family = next((f for f in FAMILIES if f"{cls.__module__}.".startswith(f"{f}.")), "")
    reader = READERS.get(cls.__name__) if family else None
    if reader is None:
        why = f": it needs {MISSING[cls.__name__]}" if family and cls.__name__ in MISSING else ""
        return Network(reasons=(f"{cls.__name__} of {cls.__module__} is not known{why}",))
    findings = Findings(family)
    findings.everywhere()
    chain = reader(findings)
    chain.read(module)
    _check(findings, module, chain)
    if findings.reasons:
        return Network(reasons=tuple(findings.reasons))
    return Network(tuple(chain.steps), chain.entry, chain.exit)


def _check(findings: Findings, module: nn.Module, chain: Reader) -> None:
    """What only the whole shows: channels that fit, a whole scale, floats on one device."""
    tensors = list(module.parameters())
    if not all(t.is_floating_point() and t.dtype.itemsize > 1 for t in tensors):
        findings.add(f"weights are {', '.join(sorted({str(t.dtype) for t in tensors}))}")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) != 1 or "meta" in devices:
        findings.add(f"weights lie on {', '.join(sorted(devices))}")
    if findings.reasons:
        return
    network = Network(tuple(chain.steps), chain.entry, chain.exit)
    channels = network.channels
    for step in chain.steps:
        if not isinstance(step, ConvStep):
            continue
        taken = sum(channels[image] for image in step.reads)
        if taken != step.layer.in_channels:
            findings.add(f"{step.name} takes {step.layer.in_channels} channels, there are {taken}")
        if any(channels[r.image] != step.layer.out_channels for r in step.residuals):
            findings.add(f"{step.name} is added to an image of other channels")
    if channels[-1] != network.exit.channels * network.exit.shuffle**2:
        findings.add(f"the last image has {channels[-1]} channels")
    if network.growth[-1] * network.exit.shuffle % network.entry.unshuffle:
        findings.add("the result is smaller than the picture")


class Reader:
    """What all networks share. Methods append steps; what is not as expected goes to `findings`."""

    classes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.steps: list[Step] = []
        self.entry, self.exit = Entry(0), Exit(0)

    def read(self, module: Any) -> None:
        """Reads a whole network."""
        raise NotImplementedError

    @property
    def last(self) -> int:
        """The image that was made last."""
        return len(self.steps)

    def conv(
        self,
        owner: Any,
        path: str,
        within: str = "",
        reads: tuple[int, ...] | None = None,
        kernel: int = 3,
        **how: Any,
    ) -> int:
        """The image that a plain convolution makes, by default of the last one."""
        conv = self.findings.conv(owner, path, within, kernel=kernel)
        if conv is not None:
            layer = Layer((conv,), _Plain(conv), conv.in_channels, conv.out_channels)
            kind = how.pop("kind", "3x3" if kernel == 3 else "1x1")
            name = f"{within}.{path}" if within and path else within or path
            self.steps.append(ConvStep(name, reads or (self.last,), layer, kind, **how))
        return self.last

    def activation(self, module: Any, name: str) -> tuple[str, Slope]:
        """A module's kind, one of conv's ACTIVATIONS, and slope."""
        slope: Slope = 0.0
        if type(module) is nn.PReLU:
            slope, kind = module, "prelu"
        elif type(module) in (nn.LeakyReLU, nn.ReLU):
            slope, kind = float(getattr(module, "negative_slope", 0.0)), "leaky relu"
        elif type(module) is nn.SiLU:
            kind = "silu"
        else:
            what = "missing" if module is None else f"a {type(module).__name__}"
            self.findings.add(f"{name} is {what}, no activation that is known")
            return "none", 0.0
        self.findings.untouched(module, name)
        self.findings.class_forward(type(module), name)
        return kind, slope

    def upsample(self, module: Any, name: str) -> int:
        """Nearest neighbours' factor."""
        factor = getattr(module, "scale_factor", None)
        if type(module) is not nn.Upsample or module.mode != "nearest" or factor not in (2, 3):
            self.findings.add(f"{name} is a {type(module).__name__}, not nearest x2 or x3")
            return 1
        self.findings.untouched(module, name)
        self.findings.class_forward(nn.Upsample, name)
        return int(factor)

    def enlarged(self, name: str, factor: int) -> str:
        """The kind of the convolution that reads the last image enlarged; a step of its own where
        no convolution enlarges so.
        """
        if factor == 3:
            self.steps.append(EnlargeStep(name, self.last, 3))
        return "upsample" if factor == 2 else "3x3"

    def pixel_shuffle(self, module: Any, name: str) -> int:
        """The factor of a PixelShuffle."""
        if type(module) is not nn.PixelShuffle:
            self.findings.add(f"{name} is a {type(module).__name__}, not a PixelShuffle")
            return 1
        self.findings.untouched(module, name)
        self.findings.class_forward(nn.PixelShuffle, name)
        return int(module.upscale_factor)


class _Plain:
    """A convolution's own weight and bias, as they are when it is called."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self._conv = conv

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._conv.weight, self._conv.bias


class Dense(Reader):
    """RRDBNet's blocks, which spandrel and BasicSR name and nest differently."""

    def dense_block(self, block: Any, name: str, outer: tuple[Residual, ...], nested: bool) -> None:
        """Five convolutions, each of all before it. `outer`: what is added after that. `nested`: a
        convolution is a Sequential with its activation.
        """
        children = tuple(f"conv{n}" for n in range(1, 6))
        extra = ("conv1x1",) if nested else ("lrelu",)
        classes = ("ResidualDenseBlock_5C", "ResidualDenseBlock")
        if not self.findings.block(block, name, classes, (*children, *extra)):
            return
        start, images = self.last, [self.last]
        plus = getattr(block, "conv1x1", None) is not None
        for number, key in enumerate(children, 1):
            path, within = key, name
            how: dict[str, Any] = {}
            residuals = (Residual(start, RRDB_SCALE), *outer) if number == 5 else ()
            added = number if plus and number in (2, 4) else 0
            if added == 2:
                shortcut = self.conv(block, "conv1x1", name, reads=(start,), kernel=1)
                residuals = (Residual(shortcut, 1.0),)
            elif added == 4:
                residuals = (Residual(images[2], 1.0),)
            activation: Any = getattr(block, "lrelu", None)
            if nested:
                path, within = "0", f"{name}.{key}"
                layers = self.findings.listed(block, key, name, 1 if number == 5 else 2)
                if not layers:
                    return
                activation = layers[-1]
            owner = getattr(block, key) if nested else block
            if number < 5:
                kind, slope = self.activation(activation, f"{name}.{key}")
                how = {"activation": kind, "slope": slope}
            images.append(self.conv(owner, path, within, tuple(images), residuals=residuals, **how))

    def rrdb(self, block: Any, name: str, keys: tuple[str, ...], nested: bool) -> None:
        """Three dense blocks, of which the last adds also what the first began with."""
        if not self.findings.block(block, name, ("RRDB",), keys):
            return
        start = self.last
        for key in keys:
            outer = (Residual(start, RRDB_SCALE),) if key == keys[-1] else ()
            self.dense_block(getattr(block, key, None), f"{name}.{key}", outer, nested)


class SpandrelRrdb(Dense):
    """RRDBNet: `model` is a convolution, a block with a shortcut, pairs of Upsample, convolution
    and activation, then two convolutions more with one activation between.
    """

    def read(self, module: Any) -> None:
        findings = self.findings
        if not findings.block(module, "network", ("RRDBNet",), ("model",), root=True):
            return
        layers = findings.listed(module, "model")
        if len(layers) < 5:
            findings.add(f"model has {len(layers)} layers")
            return
        factor = module.shuffle_factor or 1
        self.conv(layers[0], "", "model.0")
        first = self.last
        body = layers[1]
        if findings.block(body, "model.1", ("ShortcutBlock",), ("sub",)):
            blocks = findings.listed(body, "sub", "model.1")
            for index, block in enumerate(blocks[:-1]):
                self.rrdb(block, f"model.1.sub.{index}", ("RDB1", "RDB2", "RDB3"), nested=True)
            if blocks:
                name = f"model.1.sub.{len(blocks) - 1}"
                self.conv(blocks[-1], "", name, residuals=(Residual(first, 1.0),))
        self._tail(layers)
        self._ends(layers[0], layers[-1], factor)

    def _ends(self, first: Any, last: Any, factor: int) -> None:
        if isinstance(first, nn.Conv2d) and isinstance(last, nn.Conv2d):
            self.entry = Entry(first.in_channels // factor**2, factor, reflects=True)
            self.exit = Exit(last.out_channels)

    def _tail(self, layers: list[Any]) -> None:
        """What follows the body: each convolution but the last with an activation after it."""
        index, last = 2, len(layers) - 1
        while index < last:
            kind = "3x3"
            if isinstance(layers[index], nn.Upsample):
                factor = self.upsample(layers[index], f"model.{index}")
                kind = self.enlarged(f"model.{index}", factor)
                index += 1
            activation, slope = self.activation(layers[index + 1], f"model.{index + 1}")
            self.conv(
                *(layers[index], "", f"model.{index}"),
                kind=kind,
                activation=activation,
                slope=slope,
            )
            index += 2
        if index != last:
            self.findings.add("model: convolutions and activations do not go together")
        else:
            self.conv(layers[last], "", f"model.{last}")


class BasicsrRrdb(Dense):
    """RRDBNet: conv_first, body, conv_body, conv_up1, conv_up2, conv_hr, conv_last and lrelu. Of
    scale 2 and 1 the picture's pixels become channels first.
    """

    def read(self, module: Any) -> None:
        children = (
            *("conv_first", "body", "conv_body", "conv_up1", "conv_up2", "conv_hr"),
            *("conv_last", "lrelu"),
        )
        if not self.findings.block(module, "network", ("RRDBNet",), children, root=True):
            return
        self.conv(module, "conv_first")
        first = self.last
        for index, block in enumerate(self.findings.listed(module, "body")):
            self.rrdb(block, f"body.{index}", ("rdb1", "rdb2", "rdb3"), nested=False)
        self.conv(module, "conv_body", residuals=(Residual(first, 1.0),))
        activation, slope = self.activation(getattr(module, "lrelu", None), "lrelu")
        for key in ("conv_up1", "conv_up2", "conv_hr"):
            kind = "3x3" if key == "conv_hr" else "upsample"
            self.conv(module, key, kind=kind, activation=activation, slope=slope)
        self.conv(module, "conv_last")
        factor = {2: 2, 1: 4}.get(module.scale, 1)
        if isinstance(module.conv_first, nn.Conv2d) and isinstance(module.conv_last, nn.Conv2d):
            self.entry = Entry(module.conv_first.in_channels // factor**2, factor)
            self.exit = Exit(module.conv_last.out_channels)


class Compact(Reader):
    """SRVGGNetCompact: convolutions and activations in turn, a pixel shuffle, and the picture
    itself, enlarged, added.
    """

    def read(self, module: Any) -> None:
        children = ("body", "upsampler")
        if not self.findings.block(module, "network", ("SRVGGNetCompact",), children, root=True):
            return
        layers = self.findings.listed(module, "body")
        if len(layers) % 2 == 0:
            self.findings.add(f"body has {len(layers)} layers")
            return
        for index in range(0, len(layers) - 1, 2):
            kind, slope = self.activation(layers[index + 1], f"body.{index + 1}")
            self.conv(layers[index], "", f"body.{index}", activation=kind, slope=slope)
        self.conv(layers[-1], "", f"body.{len(layers) - 1}")
        factor = self.pixel_shuffle(getattr(module, "upsampler", None), "upsampler")
        self.findings.settings(module, "network", {"upscale": factor})
        if isinstance(layers[0], nn.Conv2d):
            channels = layers[0].in_channels
            self.entry, self.exit = Entry(channels), Exit(channels, factor, base=True)


class Merged:
    """What SPAN's Conv3XC comes to at inference: a 1x1, a 3x3 and a 1x1 convolution in a row, and a
    1x1 beside them, as one 3x3.
    """

    def __init__(self, first: nn.Conv2d, middle: nn.Conv2d, last: nn.Conv2d, beside: nn.Conv2d):
        self._convs = (first, middle, last, beside)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        def both(conv: nn.Conv2d) -> tuple[torch.Tensor, torch.Tensor]:
            weight = conv.weight.detach().double()
            bias = weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.detach()
            return weight, bias.double()

        (w1, b1), (w2, b2), (w3, b3), (w4, b4) = map(both, self._convs)
        weight = torch.einsum("om,mnyx,ni->oiyx", w3[..., 0, 0], w2, w1[..., 0, 0])
        bias = w3[..., 0, 0] @ (w2.sum((2, 3)) @ b1 + b2) + b3 + b4
        return weight + F.pad(w4, (1, 1, 1, 1)), bias


class Span(Reader):
    """SPAN: six blocks of three convolutions and a gate, four images of which come together."""

    def read(self, module: Any) -> None:
        blocks = tuple(f"block_{n}" for n in range(1, 7))
        children = ("conv_1", *blocks, "conv_cat", "conv_2", "upsampler")
        findings = self.findings
        if not findings.block(module, "network", ("SPAN",), children, root=True, own=("no_norm",)):
            return
        first = self.merged(module, "conv_1", "", self.last)
        images = []
        for key in blocks:
            images.append(self.block(getattr(module, key, None), key))
        if findings.reasons:
            return
        (one, _), (last, inner) = images[0], images[-1]
        second = self.merged(module, "conv_2", "", last)
        self.conv(module, "conv_cat", reads=(first, second, one, inner), kernel=1)
        layers = findings.listed(module, "upsampler", "", 2)
        if not layers:
            return
        self.conv(layers[0], "", "upsampler.0")
        factor = self.pixel_shuffle(layers[1], "upsampler.1")
        mean = tuple(module.mean.flatten().tolist()) if module.no_norm is None else ()
        channels = module.in_channels
        if mean and len(mean) != channels:
            findings.add(f"means of {len(mean)} channels for {channels}")
        span = float(module.img_range) if mean else 1.0
        self.entry = Entry(channels, mean=mean, span=span)
        self.exit = Exit(module.out_channels, factor)

    def merged(self, owner: Any, key: str, within: str, reads: int, **how: Any) -> int:
        """The image that a Conv3XC makes."""
        module, name = getattr(owner, key, None), f"{within}.{key}" if within else key
        children = ("sk", "conv", "eval_conv")
        if not self.findings.block(module, name, ("Conv3XC",), children):
            return self.last
        self.findings.settings(module, name, {"training": False, "has_relu": False, "stride": 1})
        parts = self.findings.listed(module, "conv", name, 3)
        if not parts:
            return self.last
        find = self.findings.conv
        convs = [
            find(module, "conv.0", name, kernel=1),
            find(module, "conv.1", name, padding=0),
            find(module, "conv.2", name, kernel=1),
            find(module, "sk", name, kernel=1),
        ]
        find(module, "eval_conv", name)
        plain = [conv for conv in convs if conv is not None]
        if len(plain) == len(convs):
            layer = Layer(tuple(plain), Merged(*plain), plain[0].in_channels, plain[2].out_channels)
            self.steps.append(ConvStep(name, (reads,), layer, **how))
        return self.last

    def block(self, block: Any, name: str) -> tuple[int, int]:
        """The images that a SPAB makes: its result, and the first inside of it."""
        children = ("c1_r", "c2_r", "c3_r", "act1", "act2")
        if not self.findings.block(block, name, ("SPAB",), children):
            return 0, 0
        kind, _ = self.activation(block.act1, f"{name}.act1")
        # In place: so the block's first image, which is read again, has been through it too.
        self.findings.settings(block.act1, f"{name}.act1", {"inplace": True})
        start = self.last
        inner = self.merged(block, "c1_r", name, start, activation=kind)
        second = self.merged(block, "c2_r", name, inner, activation=kind)
        how = {"activation": "gate", "residuals": (Residual(start, 1.0),)}
        return self.merged(block, "c3_r", name, second, **how), inner


def _rrdb(findings: Findings) -> Reader:
    of_spandrel = findings.family.startswith("spandrel")
    return SpandrelRrdb(findings) if of_spandrel else BasicsrRrdb(findings)


READERS: dict[str, Callable[[Findings], Reader]] = {
    "RRDBNet": _rrdb,
    "SRVGGNetCompact": Compact,
    "SPAN": Span,
}
"""By the class of the whole network."""
