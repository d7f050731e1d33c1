"""A toy op, y = a x + x with neighbours swapped, by the kernel that hip_library executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lib_rocm_sd import arch
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Op, Variant
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject
from tests.runtime.code_objects import SCALE
from tests.runtime.driver_doubles import ScaleParams

ROW = arch.table()["gfx1100"]
SPEC = KernelSpec(SCALE, "scale", (("THREADS", 64),))
LAUNCHES = 3
"""In a trial: two test problems, and one of them on a stream of its own."""


@dataclass(frozen=True)
class Scaling:
    """`factor` is the class."""

    count: int
    factor: float
    dtype: str = "float32"


class Inputs(NamedTuple):
    x: torch.Tensor
    factor: float


class Scaler(Variant[Scaling, Inputs]):
    name = "rocm_sd"
    ours = True
    preference = 20

    def specs(self, arch: Arch, problem: Scaling, config: None) -> Sequence[KernelSpec]:
        return (SPEC,)

    def run(self, call: Call[Scaling, Inputs]) -> Any:
        launch, problem, inputs = call.launch, call.problem, call.inputs
        assert launch is not None
        out = torch.empty_like(inputs.x)
        params = ScaleParams(inputs.x.data_ptr(), out.data_ptr(), problem.count, inputs.factor)
        launch(SPEC, -(-problem.count // 64), 64, params, inputs.x.device)
        return out


class Slow(Variant[Scaling, Inputs]):
    name = "torch"

    def run(self, call: Call[Scaling, Inputs]) -> Any:
        inputs = call.inputs
        return inputs.x * inputs.factor + swapped(inputs.x)


def swapped(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 2).flip(1).reshape(-1)


def _inputs(problem: Scaling, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator("cpu").manual_seed(seed)
    return Inputs(torch.randn(problem.count, generator=generator).to(device), problem.factor)


def _problem(inputs: Inputs) -> Scaling:
    return Scaling(inputs.x.numel(), inputs.factor)


SCALING: Op[Scaling, Inputs] = Op(
    name="scaling",
    family="toy",
    title="Scaling",
    variants=(Scaler(), Slow()),
    problem_of=_problem,
    key_of=_problem,
    reference=lambda inputs: inputs.x.double() * inputs.factor + swapped(inputs.x.double()),
    make_inputs=_inputs,
    tolerance=lambda problem: 1e-6,
    output_shape=lambda problem: (problem.count,),
    test_problems=lambda problem: (Scaling(128, problem.factor), Scaling(256, problem.factor)),
    usual=(("usual", Scaling(1024, 2.0)),),
)


def subject(factor: float) -> Subject:
    return Subject.of(SCALING, SCALING.variants[0], None, Scaling(1024, factor), ROW)


def place(library: Path, *software: str) -> Place:
    return Place(0, "hip", "Fake RX 7900 XTX", ROW, str(library), software)
