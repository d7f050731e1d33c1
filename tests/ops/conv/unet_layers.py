"""The convolutions of Stable Diffusion's UNets that our kernel takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog import unet
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel, rows, split
from lib_rocm_sd.ops.conv.call import form_of
from lib_rocm_sd.ops.conv.kernel import ConvForm
from lib_rocm_sd.ops.conv.problem import ConvProblem


def launched() -> Iterator[tuple[ConvForm, rows.Layer]]:
    """At their pictures' sizes, for one picture and two."""
    for problem in [p for p in unet.problems() if isinstance(p, ConvProblem)]:
        for batch in (2, 4):
            each = replace(problem, batch=batch)
            if split.layer_of(each).chunk:
                yield form_of(each), split.layer_of(each)


def searched(arch: Arch) -> dict[KernelSpec, int]:
    """Every config of the search space for these, with its work-items."""
    return {
        kernel.spec(form, config): config.block
        for form, layer in launched()
        for config in rows.configs(arch, form, layer)
    }
