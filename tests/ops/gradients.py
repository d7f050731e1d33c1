"""Gradients of norms on the CPU: how a kernel is run under the shim, whether they are right."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.base import Op
from tests.ops.attention.judge import Errors
from tests.ops.running import compute
from tests.verify.simt.launch import ShimLaunch

CPU = torch.device("cpu")


def draw(op: Op[Any, Any], problem: Any, seed: int = 1) -> Any:
    with torch.no_grad():
        return op.make_inputs(problem, CPU, seed)


def on_cpu(inputs: Any) -> Any:
    return type(inputs)(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in inputs))


def faults(op: Op[Any, Any], output: Any, inputs: Any) -> list[str]:
    """What is wrong: of a gradient, a largest error of more than twice that of torch on the CPU, an
    rms of more than 1.2 times, another dtype or layout, NaN anywhere; one that is not wanted.

    Torch's gradients of x + added are rounded twice, ours once. What is float32 may be off by 2e-6
    of the largest: a sum of thousands may be added in another order.
    """
    inputs = on_cpu(inputs)
    exact = op.reference(inputs)
    theirs = compute(op, op.variants[-1], None, None, inputs)
    found = []
    for name, mine, other, right in zip(("x", "gamma", "beta"), output, theirs, exact, strict=True):
        if right is None:
            found += [] if mine is None else [f"{name}: not wanted"]
            continue
        mine = mine.cpu()
        if (mine.dtype, mine.shape, mine.stride()) != (other.dtype, other.shape, other.stride()):
            found.append(f"{name}: {mine.dtype}, strides {mine.stride()}")
        slack = (2e-6 if mine.dtype == torch.float32 else 1e-7) * (1 + float(right.abs().max()))
        ours, torchs = Errors.of(mine, right), Errors.of(other, right)
        if not (
            ours.largest <= 2 * torchs.largest + slack and ours.rms <= 1.2 * torchs.rms + slack
        ):
            found.append(f"{name}: {ours}, torch's own {torchs}")
    return found


def same(a: Any, b: Any) -> bool:
    """To the bit."""
    return all(
        x is y or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values one element after a multiple of 16 bytes, NaN before and behind."""
    room = torch.full((x.numel() + 2,), math.nan, dtype=x.dtype, device=x.device)
    return room[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


def displaced(inputs: Any, *names: str) -> Any:
    """The inputs with these of them misaligned; all tensors where none is named."""
    chosen = names or tuple(
        name for name, t in inputs._asdict().items() if isinstance(t, torch.Tensor)
    )
    return inputs._replace(**{name: misaligned(getattr(inputs, name)) for name in chosen})


@dataclass(frozen=True)
class Setting:
    """How kernels are run: of which op, as which GPU, in which order, with which sanitizer and
    sources.
    """

    op: Op[Any, Any]
    gfx: str = "gfx1100"
    seed: int = 1
    sanitize: str | None = None
    kernels_dir: Path = KERNELS_DIR

    def on(self, gfx: str, seed: int = 1) -> Setting:
        return replace(self, gfx=gfx, seed=seed)

    def run(self, inputs: Any) -> Any:
        arch = by_gfx(self.gfx)
        assert arch is not None
        launch = ShimLaunch(arch, self.seed, self.sanitize, self.kernels_dir)
        problem, ours = self.op.problem_of(inputs), self.op.variants[0]
        assert not ours.refusals(arch, problem)
        (config,) = ours.configs(arch, problem)
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        with torch.no_grad(), launch.knows(*tensors):
            return compute(self.op, ours, launch, config, inputs)

    def faults(self, inputs: Any) -> list[str]:
        with torch.no_grad():
            return faults(self.op, self.run(inputs), inputs)
