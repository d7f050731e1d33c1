"""The kernel of attention's gradients under the shim."""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.problem import AttentionBackwardInputs, Grads
from tests.ops.attention_backward.judge import faults
from tests.ops.running import compute
from tests.simt.attention import Setting
from tests.simt.launch import ShimLaunch


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
