"""What the first trial on a card runs beside the test problems: an image that fills work-groups,
and images that do not lie as the kernels read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lib_rocm_sd.ops.base import CPU, SEED, TrialInputs
from lib_rocm_sd.ops.group_norm import inputs as group_norm_inputs
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem, NormProblem, small_images
from lib_rocm_sd.ops.lazily import torch

_Make = Callable[..., Any]


def of_norm(problem: NormProblem) -> TrialInputs:
    """Trial inputs for the class of an image's norm."""
    return _inputs(problem, group_norm_inputs.norm_inputs)


def of_group_norm(problem: GroupNormProblem) -> TrialInputs:
    """Trial inputs for the class of a GroupNorm."""
    return _inputs(problem, group_norm_inputs.make_inputs)


def _inputs(problem: NormProblem | GroupNormProblem, make: _Make) -> TrialInputs:
    p, (small, _) = problem, small_images(problem)
    found = [
        (f"{small}, at an odd address", partial(_misaligned, small, make)),
        (f"{small}, with gaps", partial(_with_gaps, small, make)),
    ]
    most = whole.holds(p.channels, p.pixels, p.groups, p.form.vector) if p.channels_last else 0
    if most:
        full = replace(small, batch=1, height=1, width=most)
        found.append((str(full), partial(make, full, CPU, SEED)))
    return found


def _misaligned(problem: Any, make: _Make) -> Any:
    """x one half behind a multiple of 16 bytes."""
    made = make(problem, CPU, SEED)
    room = torch.zeros(made.x.numel() + 1, dtype=made.x.dtype)
    return made._replace(x=room[1:].as_strided(made.x.shape, made.x.stride(), 1).copy_(made.x))


def _with_gaps(problem: Any, make: _Make) -> Any:
    """x between whose pixels others lie."""
    made = make(problem, CPU, SEED)
    batch, channels, height, width = made.x.shape
    order = (0, 3, 1, 2) if problem.channels_last else (0, 1, 2, 3)
    sizes = (
        (height, 2 * width, channels) if problem.channels_last else (channels, height, 2 * width)
    )
    room = torch.zeros((batch, *sizes), dtype=made.x.dtype).permute(order)
    return made._replace(x=room[..., ::2].copy_(made.x))
