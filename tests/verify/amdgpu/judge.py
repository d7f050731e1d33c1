"""How a case is executed as machine code, and its results are judged."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention.ours import MatrixAttention, ScoresAttention, held_of, softmax_spec
from lib_rocm_sd.ops.attention.with_lse import MatrixForward
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.torch import LibraryConv
from lib_rocm_sd.ops.group_norm import kernel as norm_kernel
from lib_rocm_sd.ops.group_norm import whole as whole_norm
from lib_rocm_sd.ops.layer_norm import kernel as layer_norm_kernel
from lib_rocm_sd.ops.layer_norm.heads import spec as heads_spec
from lib_rocm_sd.ops.layer_norm.op import RMS_NORM_HEADS
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from lib_rocm_sd.ops.linear.kernel import LinearConfig
from lib_rocm_sd.ops.linear.op import LINEAR, apart
from lib_rocm_sd.ops.linear.ours import MatrixLinear
from lib_rocm_sd.ops.linear.torch import LibraryLinear, TorchLinear, finished
from tests import compiled
from tests.ops.attention.judge import numbers, torchs_own
from tests.ops.attention_backward import judge as backward_judge
from tests.ops.layer_norm import judge as layer_norm_judge
from tests.ops.running import compute
from tests.verify.amdgpu import drawn, images
from tests.verify.amdgpu.case import CPU, Case, judged, largest
from tests.verify.amdgpu.errors import ExecutionError, RaceError, UnsupportedError
from tests.verify.amdgpu.launch import CodeLaunch
from tests.verify.amdgpu.lines import lines_of


@dataclass(frozen=True)
class Outcome:
    """`faults`: what is wrong, empty when it is right. `reached`: of each kernel, addresses of the
    instructions that were executed.
    """

    case: Case
    faults: tuple[str, ...]
    lane_instructions: int
    seconds: float
    reached: dict[KernelSpec, frozenset[int]]


@dataclass
class _Launch(CodeLaunch):
    """`specs`: what each of `counts` is of."""

    specs: list[KernelSpec] = field(default_factory=list)

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        super().__call__(spec, grid, block, params, device)
        if compiled.noting is None:
            self.specs.append(spec)

    def reached(self) -> dict[KernelSpec, frozenset[int]]:
        found: dict[KernelSpec, frozenset[int]] = {}
        for spec, counts in zip(self.specs, self.counts, strict=True):
            times = zip(counts.instructions, counts.executed, strict=True)
            here = {each.address for each, count in times if count}
            found[spec] = found.get(spec, frozenset()) | here
        return found


def execute(case: Case, kernels_dir: Path = KERNELS_DIR, changed: Any = None) -> Outcome:
    """Compile, execute, compare. What the executor raises is a fault, but for UnsupportedError."""
    launch = _Launch(
        *(case.arch, case.seed, kernels_dir, changed, case.compiled_by), schedule=case.schedule
    )
    start = time.monotonic()
    try:
        faults = _RUN[case.op](case, launch)
    except UnsupportedError:
        raise
    except ExecutionError as error:
        faults = [f"{type(error).__name__}: {error}{_lines(error, launch)}"]
    done = sum(counts.lane_instructions for counts in launch.counts)
    seconds = time.monotonic() - start
    return Outcome(case, tuple(faults), done, seconds, launch.reached())


def _lines(error: ExecutionError, launch: CodeLaunch) -> str:
    """Of the instructions of a race in global memory, in the kernel launched last."""
    if launch.last is None or not isinstance(error, RaceError) or not error.others:
        return ""
    known = lines_of(launch.last, launch.arch, launch.kernels_dir, launch.compiled_by)
    places = [known.get(address, ("?", 0)) for address in (error.address, *error.others)]
    return f", {' after '.join(f'{file}:{line}' for file, line in places)}"


def _config(case: Case) -> attention_kernel.AttentionConfig:
    """In an order that does not depend on lengths."""
    p = case.problem
    return attention_kernel.ordered(case.arch, p.dtype, p.head_dim, p.mask)[case.config]


def _attention(case: Case, launch: CodeLaunch) -> list[str]:
    config = _config(case)
    q, k, v = drawn.tensors(case.problem, case.layout, case.values, config.block_k)
    mask = drawn.mask(case.problem, case.mask_of)
    inputs = AttentionInputs(q, k, v, mask, case.scale)
    with launch.knows(q, k, v, mask):
        output = compute(ATTENTION, MatrixAttention(), launch, config, inputs)
    return numbers(output, *inputs).faults(case.values == "random" and case.scale != 0)


def _attention_and_lse(case: Case, launch: CodeLaunch) -> list[str]:
    given = backward_judge.drawn(case.problem, case.layout, case.seed, case.scale).forward
    with launch.knows(*(item for item in given if isinstance(item, torch.Tensor))):
        output, lse = compute(ATTENTION_AND_LSE, MatrixForward(), launch, _config(case), given)
    return numbers(output, *given).faults(True) + backward_judge.lse_faults(lse, given)


def _attention_backward(case: Case, launch: CodeLaunch) -> list[str]:
    config = MatrixBackward().configs(case.arch, case.problem)[case.config]
    inputs = backward_judge.drawn(case.problem, case.layout, case.seed, case.scale)
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        made = compute(ATTENTION_BACKWARD, MatrixBackward(), launch, config, inputs)
    return backward_judge.faults(made, inputs)


def _softmax(case: Case, launch: CodeLaunch) -> list[str]:
    q, k, v = drawn.tensors(case.problem, case.layout, case.values)
    inputs = AttentionInputs(q, k, v, None, case.scale)
    with launch.knows(q, k, v):
        output = compute(ATTENTION, ScoresAttention(), launch, None, inputs)
    exact = reference(inputs)
    return judged(largest(output, exact), largest(torchs_own(*inputs), exact))


def _layer_norm(case: Case, launch: CodeLaunch) -> list[str]:
    inputs = layer_norm_judge.placed(layer_norm_judge.draw(case.problem), case.layout)
    config, op = layer_norm_kernel.CONFIGS[case.config], layer_norm_judge.op_of(inputs)
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        output = compute(op, op.variants[0], launch, config, inputs)
    return layer_norm_judge.faults(output, inputs)


def _heads(case: Case, launch: CodeLaunch) -> list[str]:
    inputs = layer_norm_judge.placed(RMS_NORM_HEADS.make_inputs(case.problem, CPU, 1), case.layout)
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        output = compute(RMS_NORM_HEADS, RMS_NORM_HEADS.variants[0], launch, None, inputs)
    return layer_norm_judge.head_faults(output, inputs)


LINEAR_PARTS = (1, 3)
"""Of k, by the configs of linear layers: each size with one part, then each with so many."""


def linear_config(case: Case) -> LinearConfig:
    """A size, and parts of k."""
    every = linear_kernel.sizes(case.arch, case.problem.dtype)
    turn, size = divmod(case.config, len(every))
    return replace(every[size], parts=LINEAR_PARTS[turn])


def _linear_way(case: Case) -> tuple[Any, LinearConfig | None]:
    """Which of our variants, and its config."""
    if case.op == "linear gate":
        return LibraryLinear(), None
    return MatrixLinear(), linear_config(case)


def _linear(case: Case, launch: CodeLaunch) -> list[str]:
    """ "wide": rows of x and of the residual lie apart."""
    p = case.problem
    inputs = LINEAR.make_inputs(p, CPU, case.seed)
    before = inputs._replace(out=None)
    if inputs.residual is not None:  # which may be written over
        before = before._replace(residual=inputs.residual.clone())
    if case.layout == "wide":
        residual = None if inputs.residual is None else apart(inputs.residual, p.all_columns + 24)
        out = residual if p.in_place else None
        inputs = inputs._replace(x=apart(inputs.x, p.k + 16), residual=residual, out=out)
    ours, config = _linear_way(case)
    with launch.knows(*inputs.named.values()):
        output = compute(LINEAR, ours, launch, config, inputs)
    exact = LINEAR.reference(before)
    theirs = compute(LINEAR, TorchLinear(), None, None, before)
    if case.op == "linear gate":
        theirs = finished(F.linear(before.x, before.weight, before.bias), before)
    found = judged(largest(output, exact), largest(theirs, exact), 1e-7)
    if p.in_place and (inputs.out is None or output.data_ptr() != inputs.out.data_ptr()):
        found.append("not in place")
    return found


_RUN: dict[str, Any] = {
    "attention": _attention,
    "attention and lse": _attention_and_lse,
    "attention backward": _attention_backward,
    "softmax": _softmax,
    "conv": images.conv,
    "finish": images.conv,
    "finish pass": images.finish_pass,
    "group norm": images.group_norm,
    "whole group norm": images.whole_group_norm,
    "finalize": images.finalize,
    "layer norm": _layer_norm,
    "linear": _linear,
    "rms norm of heads": _heads,
    "linear gate": _linear,
}


def specs_of(case: Case) -> set[KernelSpec]:
    """The kernels that a case launches, as far as they are known beforehand."""
    p, arch = case.problem, case.arch
    if case.op == "softmax":
        return {softmax_spec(p.dtype, held_of(p.seq_k))}
    if case.op == "finalize":
        config = norm_kernel.configs(arch)[case.config]
        return {norm_kernel.merge_spec(config), norm_kernel.finalize_spec(config)}
    if case.op == "finish pass":
        config = norm_kernel.configs(arch)[case.config]
        flags = (p.shortcut != "none", p.statistics, p.kind == "upsample")
        return {norm_kernel.finish_spec(p.dtype, *flags, config)}
    if case.op == "group norm":
        config = norm_kernel.configs(arch)[case.config]
        every = norm_kernel.specs(p.form, p.silu, config)
        return {spec for spec in every if "merge" not in spec.entry}
    if case.op == "whole group norm":
        silu = p.silu and case.layout != "normed"
        return {whole_norm.spec(p.dtype, p.form.vector, silu, whole_norm.CONFIGS[case.config])}
    if case.op == "layer norm":
        threads = layer_norm_kernel.CONFIGS[case.config]
        return set(layer_norm_judge.op_of(p).variants[0].specs(arch, p, threads))
    if case.op == "rms norm of heads":
        return {heads_spec(p.dtype, p.rotary)}
    if case.op in ("linear", "linear gate"):
        way, tiles = _linear_way(case)
        return set(way.specs(arch, p, tiles))
    if case.op == "attention backward":
        backward = MatrixBackward()
        return set(backward.specs(arch, p, backward.configs(arch, p)[case.config]))
    if case.op == "attention and lse":
        return set(MatrixForward().specs(arch, p, _config(case)))
    if case.op == "attention":
        return set(MatrixAttention().specs(arch, p, _config(case)))
    variant: Any = {
        "conv": MatrixConv(getattr(p, "kind", "3x3")),
        "finish": LibraryConv(getattr(p, "kind", "3x3")),
    }[case.op]
    return set(variant.specs(arch, p, variant.configs(arch, p)[case.config]))
