"""Small random VAEs of every kind that is read, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.engine.planner import VariantPlan
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.vae import Ldm, read
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv
from lib_rocm_sd.vae.forecast import ConvWay
from lib_rocm_sd.vae.plan import BandPlan, BandPlanner, Leg
from lib_rocm_sd.vae.program import Program
from lib_rocm_sd.vae.steps import Recipe
from lib_rocm_sd.vae.trace import Chain, chain
from tests import doubles


def _no_half() -> str:
    """Why this torch cannot convolve fp16 on the CPU; empty if it can."""
    try:
        nn.functional.conv2d(torch.zeros(1, 1, 3, 3).half(), torch.zeros(1, 1, 3, 3).half())
    except RuntimeError as error:
        return str(error)
    return ""


needs_half = pytest.mark.skipif(bool(_no_half()), reason=_no_half())


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights at which each block changes its input by about its size."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, tensor in module.named_parameters():
        share = (tensor.numel() / tensor.shape[0]) ** -0.5 if tensor.ndim > 1 else 0.3
        values = torch.randn(tensor.shape, generator=generator) * share
        is_gain = "norm" in name and name.endswith("weight")
        tensor.data.copy_(values + 1 if is_gain else values)
    return module.eval()


def config(widths: tuple[int, ...], blocks: int = 1, z: int = 4, **more: Any) -> dict[str, Any]:
    """What ldm's Decoder and Encoder are made by, without attention but in the middle."""
    settings = {"ch": widths[0], "ch_mult": [width // widths[0] for width in widths], "out_ch": 3}
    settings |= {"num_res_blocks": blocks, "z_channels": z, "in_channels": 3, "resolution": 4}
    return {**settings, "attn_resolutions": [], **more}


def _ldm_coder(role: str, widths: tuple[int, ...], groups: int, **settings: Any) -> nn.Module:
    kinds = doubles.module_of(doubles.VAE)
    module: nn.Module = getattr(kinds, role.capitalize())(**config(widths, **settings))
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm):
            norm.num_groups = groups
    return module


def ldm_coder(
    role: str, widths: tuple[int, ...] = (16, 32, 32), groups: int = 8, **settings: Any
) -> nn.Module:
    """ldm's Decoder or Encoder."""
    return fill(_ldm_coder(role, widths, groups, **settings))


def standard(role: str, latent: int = 4) -> Recipe:
    """Stable Diffusion's coder with its real channels, its weights, in half, on no device."""
    with torch.device("meta"):
        module = _ldm_coder(role, (128, 256, 512, 512), 32, z=latent, blocks=2).half()
    found = Findings(doubles.VAE)
    reader = Ldm(found, role)
    reader.coder(module)
    recipe = Recipe(role, tuple(reader.steps))
    assert not found.reasons
    return recipe


def diffusers_coder(
    role: str, widths: tuple[int, ...] = (16, 32, 32), **settings: Any
) -> nn.Module:
    """The decoder or encoder of diffusers' AutoencoderKL."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    made = diffusers.AutoencoderKL(
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        **settings,
    )
    return fill(getattr(made, role))


def coder(kind: str) -> nn.Module:
    """By name: family, role, and what is special."""
    family, role, *special = kind.split()
    settings: dict[str, Any] = {}
    if special == ["16-channel"]:
        settings = {"z": 16} if family == "ldm" else {"latent_channels": 16}
    if special == ["no-attention"]:
        settings = {"attn_type": "none"} if family == "ldm" else {"mid_block_add_attention": False}
    if special == ["inner-attention"]:
        settings = {"attn_resolutions": [2]}
    return (ldm_coder if family == "ldm" else diffusers_coder)(role, **settings)


KINDS = (
    "ldm decoder",
    "ldm encoder",
    "ldm decoder 16-channel",
    "ldm decoder no-attention",
    "ldm decoder inner-attention",
    "ldm encoder inner-attention",
    "diffusers decoder",
    "diffusers encoder",
    "diffusers decoder 16-channel",
    "diffusers encoder no-attention",
)


def image(
    kind: str, height: int = 9, width: int = 13, batch: int = 1, seed: int = 1
) -> torch.Tensor:
    """A random input: latents, or pixels of 4 times the size."""
    channels, factor = (3, 4) if "encoder" in kind else (16 if "16" in kind else 4, 1)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((batch, channels, height * factor, width * factor), generator=generator)


def own(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the module itself gives."""
    with torch.no_grad():
        made: torch.Tensor = module(x)
    return made


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    """max |one - other| / max |other|, in float64."""
    wide = other.double()
    return float((one.double() - wide).abs().max() / wide.abs().max())


def engine_plan(op: Op[Any, Any], problem: Any, gfx: str = "gfx1100") -> VariantPlan:
    """What the engine plans where our kernels run."""
    arch = by_gfx(gfx)
    able = next(variant for variant in op.variants if not variant.refusals(arch, problem))
    return VariantPlan(able, able.configs(arch, problem)[0], {}, "")


def way(problem: ConvProblem, gfx: str = "gfx1100") -> ConvWay:
    """How a convolution is run where our kernels run."""
    plan = engine_plan(CONVS[problem.kind], problem, gfx)
    return ConvWay(plan.variant, plan.config)


def library(problem: ConvProblem) -> ConvWay:
    """How a convolution is run where torch's, finished by a kernel of ours, is the fastest."""
    plan = engine_plan(CONVS[problem.kind], problem)
    variant = next(v for v in CONVS[problem.kind].variants if isinstance(v, LibraryConv))
    return (
        ConvWay(plan.variant, plan.config) if problem.out_channels % 8 else ConvWay(variant, None)
    )


def torchs(problem: ConvProblem) -> ConvWay:
    """How a convolution is run where nothing of ours can."""
    return ConvWay(CONVS[problem.kind].variants[-1], None)


def planner_of(module: nn.Module, x: torch.Tensor) -> BandPlanner:
    """Plans for one image like x, by torch's convolutions."""
    return BandPlanner(chain(read(module), 1, x.shape[2], x.shape[3], x.dtype), torchs)


def fixed(module: nn.Module, plan: BandPlan, like: Chain | None = None) -> Program:
    """A program that runs by `plan`, one image at a time, in place and in halves as `like` is."""
    program = Program(module)

    def planned(
        size: tuple[int, int, int], dtype: torch.dtype, *_: object
    ) -> tuple[BandPlan, Chain]:
        made = chain(read(module), 1, *size[1:], dtype)
        if like is not None:
            made = replace(made, in_place=like.in_place, halved=like.halved)
        return plan, made

    program._planned = planned  # type: ignore[method-assign, assignment]
    return program


def legs_of(module: nn.Module, rows: int, keep: str, hidden: str | None) -> BandPlan:
    """conv_in and mid whole, then each block of the decoder in bands."""
    steps = read(module).steps
    first = max(i for i, step in enumerate(steps) if step.name.startswith("mid")) + 1
    ends = [
        i + 1
        for i in range(first, len(steps))
        if steps[i].residual or i + 1 == len(steps) or not steps[i + 1].residual
    ]
    legs = [Leg(0, first, None, keep)]
    for start, stop in zip([first, *ends[:-1]], ends, strict=True):
        last = stop == len(steps)
        inside = hidden if stop == start + 2 else None
        legs.append(Leg(start, stop, rows, "output" if last else keep, inside))
    return BandPlan(tuple(legs), 0, 0, 0.0, 1)
