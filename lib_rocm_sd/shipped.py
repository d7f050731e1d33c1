"""Which kernels are compiled ahead: of an op by itself, or of a part of a model. Needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.registry import FAMILIES

PARTS = {"vae": "lib_rocm_sd.vae.ahead", "unet": "lib_rocm_sd.unet.ahead"}
"""What is made of several ops; its kernels are theirs."""
NAMES = (*FAMILIES, *PARTS)
AT_START = ("attention", "vae", "unet")
"""What the WebUI's start compiles, what is needed first first."""


def shipped(arch: Arch, names: Iterable[str] = NAMES) -> dict[KernelSpec, str]:
    """What is compiled ahead for `arch`, in order; beside each the first of `names` that has it."""
    found: dict[KernelSpec, str] = {}
    for name in names:
        source: Any = FAMILIES.get(name) or importlib.import_module(PARTS[name])
        for spec in source.shipped_specs(arch):
            found.setdefault(spec, name)
    return found
