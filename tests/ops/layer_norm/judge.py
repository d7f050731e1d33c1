"""Whether a LayerNorm is right, for every test that compares one; and inputs in awkward places."""

from __future__ import annotations

import math
from typing import Any

import torch

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.layer_norm.biased import BiasedInputs, BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import HeadsInputs
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedInputs, ModulatedProblem
from lib_rocm_sd.ops.layer_norm.op import (
    LAYER_NORM,
    LAYER_NORM_BIASED,
    LAYER_NORM_MODULATED,
    RMS_NORM,
    RMS_NORM_HEADS,
)
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsInputs, RmsProblem
from tests.ops.attention.judge import Errors
from tests.ops.running import compute

CPU = torch.device("cpu")


def op_of(given: Any) -> Op[Any, Any]:
    """Of a problem or of inputs."""
    if isinstance(given, RmsProblem | RmsInputs):
        return RMS_NORM
    if isinstance(given, ModulatedProblem | ModulatedInputs):
        return LAYER_NORM_MODULATED
    biased = isinstance(given, BiasedProblem | BiasedInputs)
    return LAYER_NORM_BIASED if biased else LAYER_NORM


def draw(problem: LayerNormProblem, seed: int = 1) -> Any:
    return op_of(problem).make_inputs(problem, CPU, seed)


def on_cpu(inputs: Any) -> Any:
    moved: list[Any] = [t.cpu() if isinstance(t, torch.Tensor) else t for t in inputs]
    return type(inputs)(*moved)


def pair_of(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm, and the sum where there is one; on the CPU."""
    both = output if isinstance(output, tuple) else (output, None)
    return both[0].cpu(), None if both[1] is None else both[1].cpu()


def faults(output: Any, inputs: Any) -> list[str]:
    """What is wrong: a largest error of more than twice that of torch on the CPU, an rms of more
    than 1.2 times, another layout, NaN anywhere; a sum that is not torch's to the bit.
    """
    inputs, op = on_cpu(inputs), op_of(inputs)
    norm, total = pair_of(output)
    exact, _ = pair_of(op.reference(inputs))
    torchs, torchs_total = pair_of(compute(op, op.variants[-1], None, None, inputs))
    ours, theirs = Errors.of(norm, exact), Errors.of(torchs, exact)
    found = []
    if not (ours.largest <= 2 * theirs.largest + 1e-7 and ours.rms <= 1.2 * theirs.rms + 1e-8):
        found.append(f"{ours}, torch's own {theirs}")
    for made in (norm, total):
        if made is not None and (made.dtype != inputs.x.dtype or not made.is_contiguous()):
            found.append(f"{made.dtype}, strides {made.stride()}")
    if (total is None) != (torchs_total is None):
        found.append("a sum is there, or is not")
    elif total is not None and torchs_total is not None and not torch.equal(total, torchs_total):
        found.append("the sum is not torch's")
    return found


def head_faults(output: torch.Tensor, inputs: HeadsInputs) -> list[str]:
    """The same of RMSNorm over heads, but for values and heads without a weight: to the bit."""
    exact = RMS_NORM_HEADS.reference(inputs)
    torchs = compute(RMS_NORM_HEADS, RMS_NORM_HEADS.variants[-1], None, None, inputs)
    ours, theirs = Errors.of(output, exact), Errors.of(torchs, exact)
    found = []
    if not (ours.largest <= 2 * theirs.largest + 1e-7 and ours.rms <= 1.2 * theirs.rms + 1e-8):
        found.append(f"{ours}, torch's own {theirs}")
    kept = (exact == torchs) & (exact == exact.to(output.dtype))
    if not torch.equal(output[kept], torchs[kept]) or output.dtype != torchs.dtype:
        found.append("what stays as it is does not")
    if not output.is_contiguous() or output.shape != exact.shape:
        found.append(f"{tuple(output.shape)}, strides {output.stride()}")
    return found


def misaligned(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same values so many elements after a multiple of 16 bytes, NaN before and behind."""
    storage = torch.full((x.numel() + 2 * by,), math.nan, dtype=x.dtype, device=x.device)
    return storage[by : by + x.numel()].view(x.shape).copy_(x)


def apart(x: torch.Tensor, more: int) -> torch.Tensor:
    """The same rows in a tensor whose rows have so many more values, NaN."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + more), math.nan)
    return wide[..., : x.shape[-1]].copy_(x)


def placed(inputs: Any, layout: str) -> Any:
    """The same values elsewhere: "plain", "misaligned" or "apart"."""
    how = {"plain": lambda t: t, "misaligned": misaligned, "apart": lambda t: apart(t, 8)}[layout]
    moved: list[Any] = []
    for item in inputs:
        wanted = isinstance(item, torch.Tensor) and (item.ndim > 1 or layout == "misaligned")
        moved.append(how(item) if wanted else item)
    return type(inputs)(*moved)
