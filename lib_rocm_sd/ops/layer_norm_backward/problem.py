"""The gradients of LayerNorm without a way to compute them: problems, their checks, cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem


@dataclass(frozen=True)
class LayerNormBackwardProblem(LayerNormProblem):
    """`wanted`: whether gradients of gamma and beta are, and not that of x alone."""

    wanted: bool = True

    def __str__(self) -> str:
        return f"{super().__str__()}{', all gradients' if self.wanted else ''}"

    @property
    def affine_dtype(self) -> str:
        """Dtype of the gradients of gamma and beta: gamma's, or x's where there is none."""
        return self.dtype if self.affine == "none" else self.affine


def test_problems(problem: LayerNormBackwardProblem) -> tuple[LayerNormBackwardProblem, ...]:
    """Rows of the same length: more than work-groups make evenly, and one."""
    return tuple(replace(problem, shape=(rows, problem.channels)) for rows in (77, 1))


_LARGE = LayerNormBackwardProblem((2, 4096, 320))

_FROZEN = replace(_LARGE, added=True, wanted=False)

USUAL = (
    ("SD1.5 512x512, 64x64", _LARGE),
    ("SD1.5 512x512, 64x64, added, frozen", _FROZEN),
    ("SD1.5 512x512, 16x16", replace(_LARGE, shape=(2, 256, 1280))),
    ("SD1.5 512x512, 16x16, added, frozen", replace(_FROZEN, shape=(2, 256, 1280))),
    ("SDXL 1024x1024, 64x64", replace(_LARGE, shape=(2, 4096, 640))),
    ("SDXL 1024x1024, 64x64, added, frozen", replace(_FROZEN, shape=(2, 4096, 640))),
)
"""What training Stable Diffusion meets, by name. Frozen: the norm's own parameters are not trained,
as with a LoRA."""

ODD = (
    LayerNormBackwardProblem((1, 8)),
    LayerNormBackwardProblem((3, 5, 7), "float16", True, "float32"),
    LayerNormBackwardProblem((37, 328), "bfloat16", True, "bfloat16", False),
    LayerNormBackwardProblem((2, 3, 3, 40), "float16", False, "none"),
    LayerNormBackwardProblem((69, 1280), "bfloat16", False, "float32"),
    LayerNormBackwardProblem((3, 6155), "float16", True, "float16"),
)
"""Small shapes at which indexing errors show."""
