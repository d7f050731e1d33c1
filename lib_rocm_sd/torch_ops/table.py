"""Every operator once, and how to call one with the inputs of the op that it is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.torch_ops import (
    attention,
    conv,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
    linear,
)
from lib_rocm_sd.torch_ops.torch_op import TorchOp

OPS: tuple[TorchOp, ...] = (
    attention.ATTEND,
    attention.AND_LSE,
    attention.BACKWARD,
    conv.CONV,
    conv.CONV_AND_NORM,
    group_norm.OF,
    group_norm.SILU,
    layer_norm.PLAIN,
    layer_norm.ADDED,
    linear.ROWS,
    layer_norm_backward.PLAIN,
    layer_norm_backward.ADDED,
    group_norm_backward.SILU,
)
DOORS: dict[str, Callable[[Any], Any]] = {
    ATTENTION.name: attention.attention_door,
    ATTENTION_AND_LSE.name: attention.attention_and_lse_door,
    ATTENTION_BACKWARD.name: attention.attention_backward_door,
    GROUP_NORM_SILU.name: group_norm.group_norm_silu_door,
    NORM.name: group_norm.group_norm_of_door,
    LAYER_NORM.name: layer_norm.layer_norm_door,
    LINEAR.name: linear.linear_door,
    LAYER_NORM_BACKWARD.name: layer_norm_backward.layer_norm_backward_door,
    GROUP_NORM_BACKWARD.name: group_norm_backward.group_norm_backward_door,
    **{op.name: partial(conv.conv_door, kind) for kind, op in CONVS.items()},
}
"""By the name of an op of ops/. The other ops of group norm are steps of these."""
