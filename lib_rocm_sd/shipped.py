"""Which kernels are compiled ahead: of an op by itself, or of a part of a model. Needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
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


def label(spec: KernelSpec) -> str:
    """What a person calls this kernel."""
    values = dict(spec.defines)
    words = [Path(spec.source).stem]
    words += [spec.entry[len("group_norm_") :]] if spec.entry.startswith("group_norm_") else []
    words += [f"head_dim {values['HEAD_DIM']}"] if "HEAD_DIM" in values else []
    words += [spec.entry[len("linear_") :]] if spec.entry.startswith("linear_") else []
    words += ["weights as they lie"] if values.get("WEIGHTS_IN_ROWS") else []
    words += ["stride 2"] if values.get("CONV_STRIDE") == 2 else []
    words += ["norm"] if values.get("NORM") else []
    words += [["", "shortcut", "1x1 shortcut"][values.get("SHORTCUT", 0)]]
    words += ["statistics"] if values.get("STATISTICS") else []
    words += ["SiLU"] if values.get("SILU") else []
    words += [["", "addition", "biases", "biases kept"][values.get("ADDED", 0)]]
    if "BF16_HALVES" in values:
        words.append("bfloat16" if values["BF16_HALVES"] else "float16")
    return ", ".join(word for word in words if word)
