"""Reads the blocks of a UNet: which modules are some, by kind, and one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from lib_rocm_sd.hosts.read import unet_comfy, unet_diffusers, unet_forge, unet_ldm
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.unet import blocks
from lib_rocm_sd.unet.kinds import TITLES, Kind, Reading
from lib_rocm_sd.unet.parts import Parts, Transformer
from lib_rocm_sd.unet.weights import obstacles, slots_of


def _read(
    family: str,
    parts_of: Callable[[Findings, nn.Module], Parts | None],
    module: nn.Module,
    hosts_own: Iterable[str],
    told: bool,
) -> Reading:
    """`module` as it is now. `hosts_own`: see Findings. `told`: see Hook.tells."""
    found = Findings(family, hosts_own)
    found.everywhere()
    parts = parts_of(found, module)
    leaves = [] if parts is None else parts.leaves()
    _check_parameters(found, leaves, told)
    modules = list(_seen(module, parts))
    watch = Watch(modules, found.watched, found.functions)
    reasons = tuple(found.reasons)
    if reasons:
        return Reading(None, reasons, (), (), watch)
    return Reading(parts, (), tuple(found.partly), tuple(leaves), watch, slots_of(leaves))


def _seen(module: nn.Module, parts: Parts | None) -> Iterator[nn.Module]:
    """The modules to watch: of a transformer not what is in its blocks."""
    inner = set(parts.blocks) if isinstance(parts, Transformer) else set()

    def walk(one: nn.Module) -> Iterator[nn.Module]:
        yield one
        for child in one.children():
            if child not in inner:
                yield from walk(child)

    return walk(module)


def _check_parameters(found: Findings, leaves: Iterable[nn.Module], told: bool) -> None:
    """One half dtype, on one device; convolutions that can be laid anew."""
    dtypes, devices = set(), set()
    for leaf in leaves:
        for parameter in leaf.parameters():
            dtypes.add(parameter.dtype)
            devices.add(parameter.device)
        if isinstance(leaf, nn.Conv2d) and leaf.kernel_size != (1, 1):
            for reason in obstacles(leaf.weight, told):
                found.add(reason)
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if not dtypes <= set(HALVES) or len(dtypes) > 1:
        found.add(f"its weights are {names}")
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        found.add(f"its weights lie on {', '.join(sorted(map(str, devices)))}")


def _kinds(source: Any, family: str) -> tuple[Kind, ...]:
    def kind(title: str, role: str, run: Any) -> Kind:
        reader = partial(_read, family, getattr(source, role))
        return Kind(title, reader, getattr(source, f"{role}_call"), run)

    return (
        kind(TITLES[0], "resnet", blocks.resnet),
        kind(TITLES[1], "transformer", blocks.transformer),
        kind(TITLES[2], "block", blocks.block),
        kind(TITLES[3], "resample", blocks.resample),
        kind(TITLES[4], "resample", blocks.resample),
        kind(TITLES[5], "end", blocks.ends),
    )


_NAMES = {
    "ldm": ("ResBlock", "SpatialTransformer", "BasicTransformerBlock", "Upsample", "Downsample"),
    "diffusers": (
        "ResnetBlock2D",
        "Transformer2DModel",
        "BasicTransformerBlock",
        "Upsample2D",
        "Downsample2D",
    ),
}
_BY_FAMILY: Mapping[str, tuple[Kind, ...]] = {
    "ldm": _kinds(unet_ldm, "ldm"),
    "sgm": _kinds(unet_ldm, "sgm"),
    "comfy": _kinds(unet_comfy, "comfy"),
    "backend": _kinds(unet_forge, "backend"),
    "ldm_patched": _kinds(unet_forge, "ldm_patched"),
    "diffusers": _kinds(unet_diffusers, "diffusers"),
}
_OF_DIFFUSERS = "diffusers"
"""All other families have the names of ldm's classes and modules."""
_ENDS = {
    "ldm": ("input_blocks.0.0", "out"),
    _OF_DIFFUSERS: ("conv_in", "conv_norm_out", "conv_out"),
}
"""Where a UNet's first and last layers are."""


def blocks_of(model: nn.Module) -> list[tuple[nn.Module, Kind]]:
    """The blocks of a UNet, each with its kind, in its own order."""
    family = _family(model)
    ends = dict.fromkeys(_at(model, path) for path in _names(_ENDS, family))
    found = [(end, _BY_FAMILY[family][-1]) for end in ends if end is not None]
    return [*found, *_within(model, {end for end in ends if end is not None})]


def _within(module: nn.Module, taken: set[nn.Module]) -> Iterator[tuple[nn.Module, Kind]]:
    if module in taken:
        return
    taken.add(module)
    known = _known(module)
    if known is None:
        for child in module.children():
            yield from _within(child, taken)
        return
    kinds, number = known
    yield module, kinds[number]
    inner = getattr(module, "transformer_blocks", None) if number == 1 else None
    for block in inner if isinstance(inner, nn.ModuleList) else ():
        taken.add(block)
        yield block, kinds[2]


def _known(module: nn.Module) -> tuple[tuple[Kind, ...], int] | None:
    """The kinds of its family, and which of them it is, by its class or one that it is derived
    from.
    """
    for cls in type(module).__mro__:
        family = cls.__module__.partition(".")[0]
        names = _names(_NAMES, family)
        if cls.__name__ in names:
            return _BY_FAMILY[family], names.index(cls.__name__)
    return None


def _names(table: Mapping[str, tuple[str, ...]], family: str) -> tuple[str, ...]:
    if family not in _BY_FAMILY:
        return ()
    return table[family if family == _OF_DIFFUSERS else "ldm"]


def _family(model: nn.Module) -> str:
    """That of the model's class, or of one that it is derived from; empty if none is known."""
    names = (cls.__module__.partition(".")[0] for cls in type(model).__mro__)
    return next((name for name in names if name in _BY_FAMILY), "")


def _at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
