"""Which modules of a UNet are blocks that could be ours, by kind; and one of them, read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lib_rocm_sd.calls import Calls
from lib_rocm_sd.modules.findings import Findings
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.unet import blocks, read_comfy, read_diffusers, read_forge, read_ldm
from lib_rocm_sd.unet.parts import Parts, Transformer
from lib_rocm_sd.unet.weights import Slots, obstacles, slots_of


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of block as one family has it.

    `read(found, module)` gives its parts; `bind(module, *args, **kwargs)` what a call asks for,
    None if it is not for us, an UnknownModuleError where the report is to say why, a TypeError for
    arguments that are not known, another error where they are not what they should be; `run`
    computes it.
    """

    title: str
    read: Callable[[Findings, nn.Module], Any]
    bind: Callable[..., Any]
    run: Callable[[Any, Any, blocks.Means, Calls], Any]


@dataclass(frozen=True, eq=False)
class Reading:
    """A module as it was read: its parts, or the reasons why not. `partly`: why modules within are
    called as they are. `leaves`: those whose parameters we read, which are in `slots`.
    """

    parts: Parts | None
    reasons: tuple[str, ...]
    partly: tuple[str, ...]
    leaves: tuple[nn.Module, ...]
    watch: Watch
    slots: Slots = ((), ())


TITLES = (
    "residual block",
    "transformer",
    "transformer block",
    "upsampling",
    "downsampling",
    "first and last layers",
)


def _kinds(source: Any) -> tuple[Kind, ...]:
    return (
        Kind(TITLES[0], source.resnet, source.resnet_call, blocks.resnet),
        Kind(TITLES[1], source.transformer, source.transformer_call, blocks.transformer),
        Kind(TITLES[2], source.block, source.block_call, blocks.block),
        Kind(TITLES[3], source.resample, source.resample_call, blocks.resample),
        Kind(TITLES[4], source.resample, source.resample_call, blocks.resample),
        Kind(TITLES[5], source.end, source.end_call, blocks.ends),
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
    "ldm": _kinds(read_ldm),
    "sgm": _kinds(read_ldm),
    "comfy": _kinds(read_comfy),
    "backend": _kinds(read_forge),
    "ldm_patched": _kinds(read_forge),
    "diffusers": _kinds(read_diffusers),
}
_OF_DIFFUSERS = "diffusers"
"""All other families have the names of ldm's classes and modules."""
_ENDS = {
    "ldm": ("input_blocks.0.0", "out"),
    _OF_DIFFUSERS: ("conv_in", "conv_norm_out", "conv_out"),
}
"""Where a UNet's first and last layers are."""


def found_in(model: nn.Module) -> list[tuple[nn.Module, Kind, str]]:
    """The blocks of a UNet, each with its kind and family, in its own order."""
    family = _family(model)
    ends = dict.fromkeys(_at(model, path) for path in _names(_ENDS, family))
    found = [(end, _BY_FAMILY[family][-1], family) for end in ends if end is not None]
    return [*found, *_within(model, {end for end in ends if end is not None})]


def _within(module: nn.Module, taken: set[nn.Module]) -> Iterator[tuple[nn.Module, Kind, str]]:
    if module in taken:
        return
    taken.add(module)
    known = _known(module)
    if known is None:
        for child in module.children():
            yield from _within(child, taken)
        return
    yield (module, *known)
    kinds = _BY_FAMILY[known[1]]
    if known[0] is kinds[1]:
        for block in _listed(getattr(module, "transformer_blocks", None)):
            taken.add(block)
            yield block, kinds[2], known[1]


def _listed(blocks_of_it: Any) -> Iterable[nn.Module]:
    return blocks_of_it if isinstance(blocks_of_it, nn.ModuleList) else ()


def _known(module: nn.Module) -> tuple[Kind, str] | None:
    """Its kind and family, by its class or one that it is derived from."""
    for cls in type(module).__mro__:
        family = cls.__module__.partition(".")[0]
        names = _names(_NAMES, family)
        if cls.__name__ in names:
            return _BY_FAMILY[family][names.index(cls.__name__)], family
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


def read(
    module: nn.Module,
    kind: Kind,
    family: str,
    hosts_own: Iterable[str] = (),
    told: bool = False,
) -> Reading:
    """`module` as it is now. `hosts_own`: see Findings. `told`: see Hook.tells."""
    found = Findings(family, hosts_own)
    found.everywhere()
    parts: Parts | None = kind.read(found, module)
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
