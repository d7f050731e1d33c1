"""The gradients of GroupNorm and SiLU without a way to compute them: problems, checks, cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lib_rocm_sd.ops.group_norm import problem as forward
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem


@dataclass(frozen=True)
class GroupNormBackwardProblem(GroupNormProblem):
    """`affine`: "none" or the dtype of gamma and beta; the wider one where they differ. `wanted`:
    whether their gradients are, and not that of x alone.
    """

    wanted: bool = True

    def __str__(self) -> str:
        return f"{super().__str__()}{', all gradients' if self.wanted else ''}"

    @property
    def affine_dtype(self) -> str:
        """Dtype of the gradients of gamma and beta: their own, or x's where there is neither."""
        return self.dtype if self.affine == "none" else self.affine


def test_problems(problem: GroupNormBackwardProblem) -> tuple[GroupNormBackwardProblem, ...]:
    """As of the forward pass; and an image of several parts, where the class has such."""
    found = forward.small_images(problem)
    parts = replace(problem, batch=1, height=17, width=24)
    if problem.channels_last:
        most = whole.holds(problem.channels, problem.pixels, problem.groups, problem.form.vector)
        if 0 < most < parts.pixels:
            return found
    return (*found, parts)


_SILU = GroupNormBackwardProblem(2, 320, 64, 64, channels_last=False, silu=True)

USUAL = (
    ("SD1.5 512x512, 64x64", _SILU),
    ("SD1.5 512x512, 64x64, channels last", replace(_SILU, channels_last=True)),
    ("SD1.5 512x512, 32x32", replace(_SILU, channels=640, height=32, width=32)),
    ("SD1.5 512x512, 8x8", replace(_SILU, channels=2560, height=8, width=8)),
    ("SDXL 1024x1024, 128x128", replace(_SILU, height=128, width=128)),
    (
        "SDXL, 32x32, channels last",
        replace(_SILU, channels=1280, height=32, width=32, channels_last=True),
    ),
)
"""What training Stable Diffusion meets, by name."""

ODD = (
    GroupNormBackwardProblem(1, 8, 1, 1, groups=2),
    GroupNormBackwardProblem(2, 72, 7, 9, silu=True, groups=6),
    GroupNormBackwardProblem(2, 20, 5, 11, "bfloat16", True, True, 4, "float32", False),
    GroupNormBackwardProblem(3, 6, 17, 31, "float16", False, False, 2, "none"),
    GroupNormBackwardProblem(2, 40, 4, 6, "bfloat16", False, True, 8, "bfloat16"),
)
"""Small shapes at which indexing errors show."""
