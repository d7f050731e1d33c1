"""Reads the blocks of a UNet: which modules are some, by kind, and one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Calls
from lib_rocm_sd.dit import program
from lib_rocm_sd.dit.parts import Called
from lib_rocm_sd.hosts.read import crossed, dit, flux, qwen, unet_diffusers, video, zimage
from lib_rocm_sd.hosts.read.findings import FP32_LAYER_NORM, Findings
from lib_rocm_sd.hosts.read.unet_diffusers import Diffusers
from lib_rocm_sd.hosts.read.unet_ldm import OUTPUTS, Comfy, Forge, Ldm
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.unet import blocks, over_frames
from lib_rocm_sd.unet.kinds import TITLES, Kind, Reading
from lib_rocm_sd.unet.parts import Parts, ResnetOverFrames, Transformer
from lib_rocm_sd.unet.weights import is_laid, obstacles, slots_of


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
    every = [] if parts is None else parts.leaves()
    leaves = _fixed(found, every)
    _check_parameters(found, leaves, told)
    modules = list(_seen(module, parts))
    watch = Watch(modules, found.watched, found.functions)
    reasons = tuple(found.reasons)
    if reasons:
        return Reading(None, reasons, (), (), watch)
    partly, lasts = tuple(dict.fromkeys(found.partly)), len(leaves) == len(every)
    return Reading(parts, (), partly, tuple(leaves), watch, slots_of(leaves), lasts)


def _fixed(found: Findings, leaves: Iterable[Any]) -> list[nn.Module]:
    """Those whose weights are read where they lie: not what is called, nor a norm that casts its
    weights, unless these lie like the others.
    """
    modules = [leaf for leaf in leaves if not isinstance(leaf, Called)]
    plain = [leaf for leaf in modules if leaf not in found.casting]
    like = {(p.dtype, p.device) for leaf in plain for p in leaf.parameters()}
    norms = (leaf for leaf in modules if leaf in found.casting)
    alike = (n for n in norms if like >= {(p.dtype, p.device) for p in n.parameters()})
    return [*plain, *alike]


def _seen(module: nn.Module, parts: Any) -> Iterator[nn.Module]:
    """The modules to watch: not what is in blocks within, which are called."""
    inner = set(parts.blocks) if isinstance(parts, Transformer | ResnetOverFrames) else set()

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
        cls = type(leaf)
        wide = f"{cls.__module__}.{cls.__qualname__}" == FP32_LAYER_NORM
        for parameter in leaf.parameters():
            if not wide or parameter.dtype != torch.float32:
                dtypes.add(parameter.dtype)
            devices.add(parameter.device)
        if is_laid(leaf):
            weight: Any = leaf.weight
            for reason in obstacles(weight, told):
                found.add(reason)
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if not dtypes <= set(HALVES) or len(dtypes) > 1:
        found.add(f"its weights are {names}")
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        found.add(f"its weights lie on {', '.join(sorted(map(str, devices)))}")


Run = Callable[[Any, Any, blocks.Means, Calls], Any]


def _kinds(family: str, reader: Ldm) -> tuple[Kind, ...]:
    roles: tuple[tuple[str, Run], ...] = (
        *(("resnet", blocks.resnet), ("transformer", blocks.transformer), ("block", blocks.block)),
        *(("resample", blocks.resample), ("resample", blocks.resample), ("end", blocks.ends)),
    )
    return tuple(
        Kind(title, partial(_read, family, getattr(reader, role)), reader.calls[role], run)
        for title, (role, run) in zip(TITLES, roles, strict=False)
    )


_READERS: Mapping[str, Ldm] = {
    **dict.fromkeys(("ldm", "sgm"), Ldm()),
    "comfy": Comfy(),
    **dict.fromkeys(("backend", "ldm_patched"), Forge()),
    "diffusers": Diffusers(),
}
"""By the package that defines a UNet's classes."""
_KINDS = {family: _kinds(family, reader) for family, reader in _READERS.items()}


_Blocks = tuple[str, str, Callable[[Findings, nn.Module], Any], Callable[..., Any]]


def _transformers() -> Iterator[tuple[tuple[str, str], Kind]]:
    every: list[_Blocks] = [
        ("diffusers", dit.CLASS, dit.joint, dit.joint_call),
        ("diffusers", qwen.CLASS, qwen.joint, qwen.call),
        ("comfy", qwen.CLASS, qwen.joint, qwen.comfys_call),
        ("diffusers", flux.DOUBLES[0], flux.double, flux.double_call),
        ("diffusers", flux.SINGLES[0], flux.single, flux.single_call),
        ("diffusers", flux.DOUBLES[1], flux.double, flux.chroma_double_call),
        ("diffusers", flux.SINGLES[1], flux.single, flux.chroma_single_call),
    ]
    crossing: list[_Blocks] = [
        ("diffusers", crossed.NORM_TYPE, crossed.pixart, crossed.pixart_call),
        ("diffusers", "WanTransformerBlock", crossed.wan, crossed.wan_call),
        ("comfy", "PixArtMSBlock", crossed.comfys_pixart, crossed.comfys_pixart_call),
        ("comfy", "WanAttentionBlock", crossed.comfys_wan, crossed.comfys_wan_call),
    ]
    for family in ("comfy", "modules"):
        every.append((family, dit.COMFYS_CLASS, dit.comfys_joint, dit.comfys_call))
    for family in ("comfy", "backend"):
        every += [
            (family, "DoubleStreamBlock", flux.comfys_double, flux.comfys_double_call),
            (family, "SingleStreamBlock", flux.comfys_single, flux.comfys_single_call),
        ]
    for family, name, read, bind in every:
        alone = "Single" in name
        run: Run = program.single if alone else program.joint
        title = TITLES[-1 if alone else -2]
        yield (family, name), Kind(title, partial(_read, family, read), bind, run)
    for family, name, read, bind in crossing:
        yield (family, name), Kind(TITLES[2], partial(_read, family, read), bind, program.crossed)
    videos: list[tuple[_Blocks, int, Run]] = [
        (("diffusers", video.RESNET, video.resnet, video.resnet_call), 6, over_frames.resnet),
        (("comfy", video.COMFYS, video.comfys_resnet, video.comfys_call), 6, over_frames.resnet),
        (
            ("diffusers", video.TRANSFORMER, video.transformer, video.transformer_call),
            *(1, over_frames.transformer),
        ),
        (("diffusers", video.BLOCK, video.OverFrames().block, video.block_call), 2, blocks.block),
    ]
    for (family, name, read, bind), number, run in videos:
        yield (family, name), Kind(TITLES[number], partial(_read, family, read), bind, run)
    reading = partial(_read, "diffusers", zimage.sandwich)
    yield ("diffusers", zimage.CLASS), Kind(TITLES[-1], reading, zimage.call, program.sandwich)


_TRANSFORMERS = dict(_transformers())
"""By the package that defines a block's class, and its name; PixArt's has the class of a UNet's."""


def transformer_kind(module: nn.Module) -> Kind | None:
    """That of a transformer's block, by its class or one that it is derived from."""
    names = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(module).__mro__]
    if vars(module).get("norm_type") == crossed.NORM_TYPE:
        names.insert(0, ("diffusers", crossed.NORM_TYPE))
    return next((_TRANSFORMERS[name] for name in names if name in _TRANSFORMERS), None)


_IMAGE_ATTENTION = Kind(
    TITLES[-3],
    partial(_read, "diffusers", unet_diffusers.image_attention),
    unet_diffusers.image_attention_call,
    blocks.image_attention,
)


def blocks_of(model: nn.Module) -> list[tuple[nn.Module, Kind]]:
    """The blocks of a UNet, or of a ControlNet, each with its kind, in its own order."""
    inner = list(_within(model, set()))
    classes = [
        cls for each in (model, *(block for block, _ in inner[:1])) for cls in type(each).__mro__
    ]
    families = (cls.__module__.partition(".")[0] for cls in classes)
    family = next((name for name in families if name in _READERS), "")
    found: dict[nn.Module, Kind] = {}
    for path in _READERS[family].ends if family else ():
        try:
            end = model.get_submodule(path)
        except AttributeError:
            continue
        is_list = isinstance(end, (nn.ModuleList, nn.Sequential)) and path in OUTPUTS
        ends = [each for each in end.modules() if isinstance(each, nn.Conv2d)] if is_list else [end]
        found.update(dict.fromkeys(ends, _KINDS[family][-1]))
    return [*found.items(), *inner]


def _within(module: nn.Module, taken: set[nn.Module]) -> Iterator[tuple[nn.Module, Kind]]:
    if module in taken:
        return
    taken.add(module)
    of_transformer = transformer_kind(module)
    if of_transformer is not None:
        yield module, of_transformer
        for key, child in module.named_children():
            if key in video.WITHIN:
                yield from _within(child, taken)
        return
    if unet_diffusers.is_image_attention(module):
        yield module, _IMAGE_ATTENTION
        return
    known = _known(module)
    if known is None:
        for child in module.children():
            yield from _within(child, taken)
        return
    kinds, number = known
    yield module, kinds[number]
    for key in ("transformer_blocks", "time_stack") if number == 1 else ():
        inner = getattr(module, key, None)
        for block in inner if isinstance(inner, nn.ModuleList) else ():
            taken.add(block)
            yield block, kinds[2]


def _known(module: nn.Module) -> tuple[tuple[Kind, ...], int] | None:
    """The kinds of its family, and which of them it is, by its class or one that it is derived
    from.
    """
    for cls in type(module).__mro__:
        family = cls.__module__.partition(".")[0]
        names = _READERS[family].classes if family in _READERS else ()
        if cls.__name__ in names:
            return _KINDS[family], names.index(cls.__name__)
    return None
