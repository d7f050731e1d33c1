"""What the blocks of a UNet launch, so that it can be compiled ahead. Needs no torch, so that
install.py can use it.

It is what Auto launches. Under Auto torch's linear layers come first (ops/linear/torch.py): ours
are compiled, and tried, when a level is chosen that launches them, and no start waits for them.
Attention's kernels are attention's own. Convolutions are torch's so far (compute.py): those of ours
come first in `shipped_specs`, and in usual.py, as soon as the blocks launch them.
"""

from __future__ import annotations

from collections.abc import Iterator

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.group_norm import kernel as group_norm_kernel
from lib_rocm_sd.ops.layer_norm import kernel as layer_norm_kernel
from lib_rocm_sd.unet_step import STEPS, GroupNorm, LayerNorm

DTYPE = "float16"


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """All kernels of the UNets of Stable Diffusion 1.5 and XL in fp16."""
    return list(dict.fromkeys((*_layer_norm_specs(arch), *_group_norm_specs(arch))))


def channels(kind: type[LayerNorm] | type[GroupNorm]) -> list[int]:
    """Of all layers of a kind, each once."""
    found = (layer.channels for layers in STEPS for layer in layers if isinstance(layer, kind))
    return list(dict.fromkeys(found))


def _layer_norm_specs(arch: Arch) -> Iterator[KernelSpec]:
    """Also with a tensor added first, for a block whose attention somebody else computes."""
    for count in channels(LayerNorm):
        config = layer_norm_kernel.configs(arch, count)[0]
        held = layer_norm_kernel.tiling(count, config).held
        for added in (False, True):
            form = layer_norm_kernel.LayerNormForm(DTYPE, added, DTYPE, held)
            yield layer_norm_kernel.spec(form, config)


def _group_norm_specs(arch: Arch) -> Iterator[KernelSpec]:
    """Channels-last. SiLU where a convolution follows, none where a transformer does."""
    config = group_norm_kernel.configs(arch)[0]
    for count in channels(GroupNorm):
        form = group_norm_kernel.form_of(DTYPE, count, channels_last=True)
        for silu in (True, False):
            yield from group_norm_kernel.specs(form, silu, config)
