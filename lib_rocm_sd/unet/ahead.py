"""What the blocks of a UNet launch, so that it can be compiled ahead. Needs no torch, so that
install.py can use it.

It is what Auto launches, what a step launches most often first. Attention's kernels are its own,
but for one on the development card. Where a library's product comes first under Auto (ops/linear,
ops/conv), it is the passes around it: no start waits for a kernel that is launched only when
another level is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeGuard

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv import rows
from lib_rocm_sd.ops.conv.kernel import ConvForm
from lib_rocm_sd.ops.group_norm import kernel as group_norm_kernel
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.layer_norm import kernel as layer_norm_kernel
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.unet_step import (
    OTHER_STEPS,
    SD15,
    SDXL,
    STEPS,
    Attention,
    Conv,
    GroupNorm,
    Layer,
    LayerNorm,
    Linear,
    embeddings,
    prompts,
)

DTYPE = "float16"
GROUPS = 32
"""Groups of every GroupNorm in these UNets."""


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """All kernels of the UNets of Stable Diffusion 1.5 and XL in fp16, at any usual size."""
    layers = (*launched(), *launched(OTHER_STEPS))
    return list(dict.fromkeys(spec for layer in layers for spec in specs_of(arch, layer)))


def launched(steps: Iterable[Iterable[Layer]] = STEPS) -> list[Layer]:
    """The layers of all steps, each once, what is there most often first; and what diffusers has
    otherwise: a norm apart from the last convolution, residual blocks in another order.
    """
    found = Counter(layer for step in steps for layer in step)
    found.update([replace(layer, norm=False) for layer in found if _is_last(layer)])
    for unet in (SD15, SDXL):
        found.update(embeddings(unet, middle_last=True))
        found.update(prompts(unet, middle_last=True))
    return [layer for layer, _ in found.most_common()]


def _is_last(layer: Layer) -> TypeGuard[Conv]:
    """All other convolutions with a norm are a residual block's."""
    return (
        isinstance(layer, Conv) and layer.norm and not (layer.embedding or layer.shortcut_channels)
    )


def specs_of(arch: Arch, layer: Layer) -> Iterator[KernelSpec]:
    """What Auto launches for one layer."""
    if isinstance(layer, LayerNorm):
        yield from _layer_norm(arch, layer)
    elif isinstance(layer, GroupNorm):
        yield from _group_norm(arch, layer)
    elif isinstance(layer, Linear):
        yield from _linear(arch, layer)
    elif isinstance(layer, Conv):
        yield from _conv(arch, layer)
    elif isinstance(layer, Attention):
        yield from _attention(arch, layer)


def _layer_norm(arch: Arch, layer: LayerNorm) -> Iterator[KernelSpec]:
    """Also with a tensor added first, where a block may not write to what it is given or calls a
    host's module, and with biases.
    """
    config = layer_norm_kernel.configs(arch, layer.channels)[0]
    held = layer_norm_kernel.tiling(layer.channels, config).held
    for added in layer_norm_kernel.ADDED_KINDS:
        form = layer_norm_kernel.LayerNormForm(DTYPE, added, DTYPE, held)
        yield layer_norm_kernel.spec(form, config)


def _group_norm(arch: Arch, layer: GroupNorm) -> Iterator[KernelSpec]:
    """Channels-last, in one launch where it can be. One that is applied is tried with SiLU too."""
    form = group_norm_kernel.form_of(DTYPE, layer.channels, channels_last=True)
    pixels = layer.height * layer.width
    held = whole.configs(arch, layer.channels, pixels, GROUPS, form.vector)
    for silu in (True, False) if layer.applied else (False,):
        if held:
            yield whole.spec(DTYPE, form.vector, silu, held[0])
        else:
            steps = group_norm_kernel.specs(form, silu, group_norm_kernel.configs(arch)[0])
            yield from steps if layer.applied else steps[:-1]


def _linear(arch: Arch, layer: Linear) -> Iterator[KernelSpec]:
    """GEGLU's second half, and what is made of few rows by several weights."""
    if layer.gate:
        yield linear_kernel.gate_spec(DTYPE)
    elif linear_kernel.is_joint(arch, layer.rows, layer.columns):
        shape = (layer.rows, layer.k, layer.columns, layer.gate)
        config = linear_kernel.configs(arch, DTYPE, *shape)[0]
        split = linear_kernel.tiling(*shape, config).parts > 1
        many = len(layer.columns) > linear_kernel.FEW_WEIGHTS
        yield from linear_kernel.specs(DTYPE, layer.gate, split, config, many)


def _attention(arch: Arch, layer: Attention) -> Iterator[KernelSpec]:
    """What few queries take on the development card; the rest is attention's own."""
    space = attention_kernel.configs(arch, layer.head_dim)
    config = attention_kernel.narrower(arch, space)
    if config:
        yield attention_kernel.spec(DTYPE, layer.head_dim, "none", config)


def convolved(layer: Conv) -> tuple[ConvForm, rows.Layer]:
    """As our kernel takes it, with weights as they lie."""
    form = ConvForm(layer.kind, DTYPE, layer.norm, layer.shortcut, layer.statistics, in_rows=True)
    through = layer.shortcut_channels if layer.shortcut == "conv" else 0
    sizes = (layer.batch, *layer.out_size, layer.in_channels, layer.out_channels, through)
    return form, rows.Layer(*sizes)


def _conv(arch: Arch, layer: Conv) -> Iterator[KernelSpec]:
    form, sizes = convolved(layer)
    takes = layer.out_channels % 8 == 0  # a library's, with our passes around it
    configs = () if takes and arch.has_fast_libraries else rows.configs(arch, form, sizes)
    if takes and not configs:
        yield from _around_library(arch, layer)
    else:
        yield conv_kernel.spec(form, configs[0])
        if configs[0].splits > 1:
            yield conv_kernel.sum_spec(DTYPE)
    if layer.embedding and arch.has_fast_libraries:  # see compute.is_librarys
        yield from _before_library(arch, layer)
    if layer.statistics:
        config = group_norm_kernel.configs(arch)[0]
        yield group_norm_kernel.merge_spec(config)
        yield group_norm_kernel.finalize_spec(config)


def _before_library(arch: Arch, layer: Conv) -> Iterator[KernelSpec]:
    """Norm and SiLU in one launch, before each of a residual block's convolutions."""
    pixels = layer.out_size[0] * layer.out_size[1]
    first, second = (
        whole.configs(arch, channels, pixels, GROUPS, 8)
        for channels in (layer.in_channels, layer.out_channels)
    )
    for held in (*first, *second) if first else ():
        yield whole.spec(DTYPE, 8, True, held)


def _around_library(arch: Arch, layer: Conv) -> Iterator[KernelSpec]:
    config = group_norm_kernel.configs(arch)[0]
    if layer.norm:
        form = group_norm_kernel.form_of(DTYPE, layer.in_channels, channels_last=True)
        yield group_norm_kernel.apply_spec(form, True, config)
    added = layer.shortcut != "none"
    yield group_norm_kernel.finish_spec(DTYPE, added, layer.statistics, False, config)
