"""The kernels of attention's gradients under the shim, and that of the forward pass for them."""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention.with_lse import Both, MatrixForward
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from tests.ops.attention_backward.judge import faults
from tests.ops.running import compute
from tests.verify.simt.attention import Setting
from tests.verify.simt.launch import ShimLaunch


def forward(setting: Setting, given: AttentionInputs) -> Both:
    """The output and the log-sum-exp. Raises SimtError."""
    launch = ShimLaunch(setting.arch, setting.seed, setting.sanitize, setting.kernels_dir)
    p = ATTENTION_AND_LSE.problem_of(given)
    config = attention_kernel.ordered(setting.arch, p.dtype, p.head_dim, p.mask)[setting.config]
    with launch.knows(*(item for item in given if isinstance(item, torch.Tensor))):
        made: Both = compute(ATTENTION_AND_LSE, MatrixForward(), launch, config, given)
    return made


def gradients(setting: Setting, inputs: AttentionBackwardInputs) -> Grads:
    """What the two launches make of it. Raises SimtError."""
    launch = ShimLaunch(setting.arch, setting.seed, setting.sanitize, setting.kernels_dir)
    variant, problem = MatrixBackward(), ATTENTION_BACKWARD.problem_of(inputs)
    config = variant.configs(setting.arch, problem)[setting.config]
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        made: Grads = compute(ATTENTION_BACKWARD, variant, launch, config, inputs)
    return made


def compare(setting: Setting, inputs: AttentionBackwardInputs) -> list[str]:
    """What is wrong with them."""
    return faults(gradients(setting, inputs), inputs)
