"""How results of the kernels of images are judged: convolutions and group norms."""

from __future__ import annotations

from typing import Any

import torch

from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv
from lib_rocm_sd.ops.group_norm import formula
from lib_rocm_sd.ops.group_norm import kernel as norm_kernel
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm import whole as whole_norm
from lib_rocm_sd.ops.group_norm.inputs import NormInputs
from lib_rocm_sd.ops.group_norm.op import FINALIZE, GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.torch import TorchGroupNorm
from tests.ops.running import compute
from tests.verify.amdgpu import drawn
from tests.verify.amdgpu.case import CPU, Case, judged, largest
from tests.verify.amdgpu.launch import CodeLaunch


def conv(case: Case, launch: CodeLaunch) -> list[str]:
    p: ConvProblem = case.problem
    op = CONVS[p.kind]
    inputs = drawn.conv(p, case.layout, case.values)
    before = inputs
    if inputs.shortcut is not None:  # which may be written over
        before = inputs._replace(shortcut=inputs.shortcut.clone())
    output, norm = _run_conv(case, launch, inputs)
    exact, exact_norm = op.reference(before)
    theirs, _ = compute(
        op, op.variants[-1], None, None, before._replace(next_norm=None, out=None, overflow=None)
    )
    fits = exact.abs() < torch.finfo(theirs.dtype).max
    error = largest(theirs[fits], exact[fits])
    if case.op == "finish":  # torch rounds to half before bias and shortcut are added
        error *= 2
    found = judged(largest(output[fits], exact[fits]), error)
    found += _overflow_faults(inputs.overflow, output, exact)
    if output[..., p.out_channels :].any():
        found.append("the padding channels are not zero")
    if p.statistics and not largest(norm, exact_norm) <= 2e-3 * exact_norm.abs().max().item():
        found.append(f"the next norm is off by {largest(norm, exact_norm)}")
    return found


def _overflow_faults(
    flag: torch.Tensor | None, output: torch.Tensor, exact: torch.Tensor
) -> list[str]:
    """`output` is infinite where `exact` is too large for fp16, and only then there is a flag."""
    assert flag is not None
    known = output.dtype == torch.float16
    found = []
    if known and not output[exact.abs() > 65536].isinf().all():
        found.append("what does not fit is not infinite")
    if bool(flag.item()) != bool(known and not output.isfinite().all()):
        found.append(f"the flag of an overflow is {flag.item()}")
    return found


def _run_conv(case: Case, launch: CodeLaunch, inputs: ConvInputs) -> Any:
    """What the kernels give."""
    p = case.problem
    variant: Any = LibraryConv(p.kind) if case.op == "finish" else MatrixConv(p.kind)
    weights = inputs.weights
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    with launch.knows(*tensors, weights.weight, weights.bias_on(CPU)):
        config = variant.configs(case.arch, p)[case.config]
        return compute(CONVS[p.kind], variant, launch, config, inputs)


def finish_pass(case: Case, launch: CodeLaunch) -> list[str]:
    """STEP_FINISH alone: of "misaligned" images, too, and with phases."""
    p: ConvProblem = case.problem
    config = norm_kernel.configs(case.arch)[case.config]
    x, out, bias, shortcut = drawn.finish(p, case.layout)
    kept = None if shortcut is None else shortcut.clone()  # it may be written over
    flag = torch.zeros(1, dtype=torch.int32)
    with launch.knows(x, out, bias, shortcut, flag):
        made = launches.launch_finish(
            launch, config, x, out, bias, shortcut, flag, p.statistics, drawn.ABOVE[p.kind]
        )
    exact = drawn.finished(p, x, bias, kept)
    fits = exact.abs() < torch.finfo(out.dtype).max
    rounded = largest(exact.to(out.dtype)[fits], exact[fits])
    found = judged(largest(out[fits], exact[fits]), rounded)
    found += _overflow_faults(flag, out, exact)
    if made is not None:
        moments = formula.moments_of(exact)
        off = ((made - moments).abs() / (moments.abs() + 1))[..., 2:, :].max().item()
        found += [] if off <= 1e-5 else [f"a statistic is off by {off}"]
    return found


def group_norm(case: Case, launch: CodeLaunch) -> list[str]:
    inputs = GROUP_NORM_SILU.make_inputs(case.problem, CPU, 1)
    if case.layout == "misaligned":
        inputs = inputs._replace(x=drawn.misaligned(inputs.x))
    x, gamma, beta, groups, eps, silu, _ = inputs
    config = norm_kernel.configs(case.arch)[case.config]
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        statistics = launches.launch_statistics(launch, config, x)
        norm = launches.launch_finalize(launch, config, statistics, gamma, beta, groups, eps)
        output = launches.launch_apply(launch, config, x, norm, silu)
    exact = formula.reference(*inputs)
    theirs = compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, inputs)
    return judged(largest(output, exact), largest(theirs, exact), 1e-7)


def whole_group_norm(case: Case, launch: CodeLaunch) -> list[str]:
    """The image; where it is "normed" the norm alone."""
    inputs = GROUP_NORM_SILU.make_inputs(case.problem, CPU, 1)
    config = whole_norm.CONFIGS[case.config]
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        if case.layout == "normed":
            norm = launches.launch_whole(launch, config, *inputs[:5], silu=None)
        else:
            output = launches.launch_whole(launch, config, *inputs)
    if case.layout == "normed":
        exact = NORM.reference(NormInputs(*inputs[:5]))
        error, limit = largest(norm, exact), 2e-6 * exact.abs().max().item()
        return [] if error <= limit else [f"largest error {error}, {limit} allowed"]
    exact = formula.reference(*inputs)
    theirs = compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, inputs)
    return judged(largest(output, exact), largest(theirs, exact), 1e-7)


def finalize(case: Case, launch: CodeLaunch) -> list[str]:
    inputs = FINALIZE.make_inputs(case.problem, CPU, 3)
    config = norm_kernel.configs(case.arch)[case.config]
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        output = launches.launch_finalize(launch, config, *inputs)
    exact = formula.reference_norm(*inputs)
    error = largest(output, exact)
    limit = 2e-6 * exact.abs().max().item()
    return [] if error <= limit else [f"largest error {error}, {limit} allowed"]
