"""The convolutions of Stable Diffusion's UNets that our kernel takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel, rows
from lib_rocm_sd.ops.conv.kernel import ConvForm
from lib_rocm_sd.unet import ahead
from lib_rocm_sd.unet_step import Conv


def launched() -> Iterator[tuple[ConvForm, rows.Layer]]:
    """At their pictures' sizes, for one picture and two."""
    convs = [layer for layer in ahead.launched() if isinstance(layer, Conv)]
    for layer in convs:
        for batch in (2, 4):
            form, sizes = ahead.convolved(replace(layer, batch=batch))
            if sizes.chunk:
                yield form, sizes


def searched(arch: Arch) -> dict[KernelSpec, int]:
    """Every config of the search space for these, with its work-items."""
    return {
        kernel.spec(form, config): config.block
        for form, layer in launched()
        for config in rows.configs(arch, form, layer)
    }
