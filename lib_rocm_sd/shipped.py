"""Which kernels are compiled ahead: of an op by itself, or of a part of a model. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog import dit, unet, upscaler, vae
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec, Work
from lib_rocm_sd.ops.registry import FAMILIES

ATTENTION_PART, VAE_PART, UPSCALER_PART = "attention", "vae", "upscaler"
SD3_PART = f"unet {dit.SD3.name}"
QWEN_PART = f"{VAE_PART} Qwen-Image"
SWINIR_PART = f"{UPSCALER_PART} SwinIR"
PARTS = (VAE_PART, "unet", SD3_PART, UPSCALER_PART, SWINIR_PART, QWEN_PART)
"""What is made of several ops; its kernels are theirs."""
NAMES = (*FAMILIES, *PARTS)
UNETS = {
    f"unet {unet.SD15.name}": ((unet.SD15,), unet.STEPS[:1], unet.OTHER_STEPS),
    f"unet {unet.SDXL.name}": ((unet.SDXL,), unet.STEPS[1:], ()),
}
"""Parts of "unet": the UNets, and the steps of which they are made."""
_ALL_UNETS = {"unet": (unet.UNETS, unet.STEPS, unet.OTHER_STEPS), **UNETS}
AT_START = (ATTENTION_PART, next(iter(UNETS)), VAE_PART, *[*UNETS][1:])
"""What the WebUI's start compiles and tries, what is needed first first. UPSCALER_PART's kernels
wait for an upscaler, SWINIR_PART's for a SwinIR, SD3_PART's for such a checkpoint, QWEN_PART's for
such a VAE: nobody without one starts later for them."""


def in_order(model: str) -> tuple[str, ...]:
    """AT_START, but with what a checkpoint with the UNet, or transformer, `model` needs before all
    that it does not. In its own order where no such one is known.
    """
    first = f"unet {model}"
    others = (part for part in UNETS if part != first)
    known = first in (*UNETS, SD3_PART)
    return (ATTENTION_PART, first, VAE_PART, *others) if known else AT_START


def work(part: str, arch: Arch) -> Work:
    """What one of AT_START or PARTS asks on a GPU: ops and problems, each class at least once."""
    if part == VAE_PART:
        return vae.work()
    if part == QWEN_PART:
        return vae.qwen_work()
    if part == UPSCALER_PART:
        return upscaler.work()
    if part == SWINIR_PART:
        return upscaler.swinir_work()
    if part == SD3_PART:
        return dit.work()
    if part in _ALL_UNETS:
        unets, *lists = _ALL_UNETS[part]
        return unet.work(*lists, arch=arch, unets=unets)
    first = [problem for _, problem in ATTENTION.usual]
    return [(ATTENTION, problem) for problem in dict.fromkeys((*first, *ATTENTION.cases))]


def shipped(arch: Arch, names: Iterable[str] = NAMES) -> dict[KernelSpec, str]:
    """What is compiled ahead for `arch`, in order; beside each the first of `names` that has it."""
    owner: dict[KernelSpec, str] = {}
    for name in names:
        specs = FAMILIES[name].shipped_specs(arch) if name in FAMILIES else part_specs(name, arch)
        for spec in specs:
            owner.setdefault(spec, name)
    return owner


def part_specs(part: str, arch: Arch) -> list[KernelSpec]:
    """All kernels of one of PARTS, or of one of UNETS, in fp16, of QWEN_PART in bf16: what Auto
    launches where nothing was measured, and so what a step launches most often first. Where a
    library's product comes first, it is the passes around it: no start waits for a kernel that is
    launched only when another level is chosen.
    """
    asked = work(part, arch)
    if part in _ALL_UNETS:  # few queries take another kernel on the development card
        unets, *lists = _ALL_UNETS[part]
        every = unet.problems((step for steps in lists for step in steps), unets)
        asked += [(ATTENTION, p) for p in every if isinstance(p, AttentionProblem)]
    ours = (found for op, problem in asked for found in op.ours(arch, problem))
    specs = dict.fromkeys(spec for _, _, specs in ours for spec in specs)
    own = FAMILIES["attention"].shipped_specs(arch) if part in _ALL_UNETS else ()
    return [spec for spec in specs if spec not in own]


@cache
def unet_ops() -> frozenset[str]:
    """Names of what UNets and transformers ask and a VAE does not."""
    of_vae = {op.name for op, _ in vae.work()}
    return frozenset(op.name for op, _ in (*unet.work(), *dit.work())) - of_vae


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
    words += [["", "scaled", "leaky ReLU", "PReLU", "SiLU", "gate"][values.get("EPILOGUE", 0)]]
    words += ["SiLU"] if values.get("SILU") else []
    words += [["", "RMS", "RMS, SiLU"][values.get("RMS", 0)]]
    words += ["modulated"] if values.get("MODULATED") else []
    words += [["", "addition", "biases", "biases kept", "gated"][values.get("ADDED", 0)]]
    if "BF16_HALVES" in values:
        words.append("bfloat16" if values["BF16_HALVES"] else "float16")
    return ", ".join(word for word in words if word)
