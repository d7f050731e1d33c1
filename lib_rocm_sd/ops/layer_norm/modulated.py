"""LayerNorm that a diffusion transformer scales and shifts for each image, of x or of x to which
another tensor is added, times a gate of each image: Peebles and Xie, "Scalable Diffusion Models
with Transformers" (2022), section 3.2, adaLN-Zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, TrialInputs, Variant, reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.layer_norm import formula, ours
from lib_rocm_sd.ops.layer_norm import inputs as layer_norm_inputs
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormConfig, LayerNormParams, ModulatedParams
from lib_rocm_sd.ops.layer_norm.ours import KernelNorm, Result
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.lazily import F, torch

MOST_OF_IMAGES = 1 << 31
"""Values from the first image's scale to the last one's: the kernel counts them in 32 bits."""


@dataclass(frozen=True)
class ModulatedProblem(LayerNormProblem):
    """x (N, tokens, C), without its tensors. `added`: times a gate. `affine` is the dtype of x."""

    modulated: ClassVar[bool] = True

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{sizes} {self.dtype}, modulated{', gated' * self.added}"

    @property
    def first(self) -> str:
        return "gated" if self.added else "nothing"


class ModulatedInputs(NamedTuple):
    """x (N, tokens, C), scale and shift (N, C); added like x, with a gate (N, C), or neither.

    LayerNorm(x + gate * added) * (1 + scale) + shift; with `added` also the sum.
    """

    x: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    eps: float
    added: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    @property
    def of_images(self) -> dict[str, torch.Tensor]:
        """Those that each image has a row of, by name."""
        named = {"scale": self.scale, "shift": self.shift, "gate": self.gate}
        return {name: each for name, each in named.items() if each is not None}


def problem_of(inputs: ModulatedInputs) -> ModulatedProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    x, added, rows = inputs.x, inputs.added, inputs.of_images
    given = rows if added is None else {"added": added, **rows}
    wrong = tensor_errors(x=x, **given)
    if not wrong:
        wrong = reasons(
            (x.ndim != 3, "x must be (N, tokens, C)"),
            (not formula.is_float(x), f"dtype {x.dtype} is not a float type known here"),
            ((added is None) != (inputs.gate is None), "what is added goes with a gate"),
            (added is not None and added.shape != x.shape, "added must have the shape of x"),
        )
    if not wrong:
        for name, each in given.items():
            shaped = name == "added" or each.shape == (x.shape[0], x.shape[2])
            alike = (each.dtype, each.device) == (x.dtype, x.device)
            wrong += reasons(
                (not shaped, f"{name} must be ({x.shape[0]}, {x.shape[2]})"),
                (not alike, f"{name} must have the dtype and device of x"),
            )
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x, **given)}")
    dtype = DTYPE_NAMES[x.dtype]
    return ModulatedProblem(tuple(x.shape), dtype, added is not None, dtype)


def _sum(inputs: ModulatedInputs, dtype: torch.dtype) -> torch.Tensor:
    """What is normalised, before it is rounded."""
    x = inputs.x.to(dtype)
    if inputs.added is None or inputs.gate is None:
        return x
    return x + inputs.gate.to(dtype)[:, None] * inputs.added.to(dtype)


def reference(inputs: ModulatedInputs) -> Result:
    """The norm of the rounded sum in float64, and the sum."""
    total = _sum(inputs, torch.float64)
    made = formula.normed(total.to(inputs.x.dtype), None, None, inputs.eps)
    made = made * (1 + inputs.scale.double()[:, None]) + inputs.shift.double()[:, None]
    return made if inputs.added is None else (made, total)


def make_inputs(p: ModulatedProblem, device: torch.device, seed: int) -> ModulatedInputs:
    """Random; scale, shift and gate are columns of one tensor, as one linear layer makes them."""
    plain = LayerNormProblem(p.shape, p.dtype, p.added, "none")
    x, _, _, eps, added = layer_norm_inputs.make_inputs(plain, device, seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    drawn = 0.3 * torch.randn(p.shape[0], 3 * p.channels, generator=generator)
    scale, shift, gate = drawn.to(DTYPES[p.dtype]).to(device).chunk(3, 1)
    return ModulatedInputs(x, scale, shift, eps, added, gate if p.added else None)


def test_problems(problem: ModulatedProblem) -> tuple[ModulatedProblem, ...]:
    """Rows of the same length: of two images, and a single one."""
    channels = problem.channels
    return tuple(replace(problem, shape=(n, tokens, channels)) for n, tokens in ((2, 19), (1, 1)))


def measured_as(problem: ModulatedProblem) -> ModulatedProblem:
    """The next power of two of tokens."""
    n, tokens, channels = problem.shape
    return replace(problem, shape=(n, max(64, 1 << (max(tokens, 1) - 1).bit_length()), channels))


def trial_inputs(p: ModulatedProblem) -> TrialInputs:
    """As those of a plain norm; and images' rows that lie apart otherwise than in one tensor."""
    small, _ = test_problems(p)
    apart = layer_norm_inputs.trial_inputs(p, make_inputs, test_problems)
    return (*apart, (f"{small}, rows of images copied", partial(_copied, small)))


def _copied(p: ModulatedProblem) -> ModulatedInputs:
    made = make_inputs(p, torch.device("cpu"), 1)
    return made._replace(scale=made.scale.contiguous())


class KernelModulated(KernelNorm[ModulatedProblem, ModulatedInputs]):
    """Scale, shift and gate are read as they lie in what a linear layer made of an embedding."""

    def kernel_refusals(self, arch: Arch, problem: ModulatedProblem) -> list[str]:
        return super().kernel_refusals(arch, problem) or reasons(
            (problem.rows >= 1 << 31, f"{problem.rows} rows are more than it counts")
        )

    def input_refusals(self, inputs: ModulatedInputs) -> list[str]:
        images, apart = inputs.x.shape[0], _image_stride(inputs)
        wide = images * (inputs.x.shape[2] if apart is None else apart) >= MOST_OF_IMAGES
        return super().input_refusals(inputs) + reasons((wide, "rows of images lie too far apart"))

    def readable(self, problem: ModulatedProblem, inputs: ModulatedInputs) -> ModulatedInputs:
        plain = LayerNormInputs(inputs.x, None, None, inputs.eps, inputs.added)
        x, _, _, _, added = ours.readable(replace(problem, affine="none"), plain)
        inputs = inputs._replace(x=x, added=added)
        if _image_stride(inputs) is not None:
            return inputs
        rows: dict[str, Any] = {name: each.contiguous() for name, each in inputs.of_images.items()}
        return inputs._replace(**rows)

    def template(
        self, problem: ModulatedProblem, config: LayerNormConfig, inputs: ModulatedInputs
    ) -> ModulatedParams:
        first = super().template(problem, config, inputs)
        values = (getattr(first, field[0]) for field in LayerNormParams._fields_)
        return ModulatedParams(*values, max(problem.shape[1], 1), inputs.scale.stride(0))

    def fill(self, params: Any, inputs: ModulatedInputs, rows_aligned: bool) -> Result:
        x, scale, shift, eps, added, gate = inputs
        params.more = at = 0 if gate is None else gate.data_ptr()
        return ours.fill(
            params, LayerNormInputs(x, scale, shift, eps, added), rows_aligned and not at & 15
        )


def _image_stride(inputs: ModulatedInputs) -> int | None:
    """Elements between two images' rows, dense and the same in all tensors of them; None where
    there is no such number.
    """
    rows = list(inputs.of_images.values())
    apart = {each.stride(0) for each in rows}
    dense = all(each.stride(1) == 1 or each.shape[1] < 2 for each in rows)
    return apart.pop() if dense and len(apart) == 1 else None


class TorchModulated(Variant[ModulatedProblem, ModulatedInputs]):
    """torch's operators in float32, whose results are rounded once."""

    name = "torch"
    last_resort = "modulated norm"

    def workspace(self, problem: ModulatedProblem) -> int:
        return 3 * problem.rows * problem.channels * 4

    def run(self, call: Call[ModulatedProblem, ModulatedInputs]) -> Result:
        inputs = call.inputs
        x = inputs.x
        wide = torch.promote_types(x.dtype, torch.float32)
        total = _sum(inputs, wide).to(x.dtype)
        made = F.layer_norm(total.to(wide), x.shape[-1:], None, None, inputs.eps)
        scale, shift = (each.to(wide)[:, None] for each in (inputs.scale, inputs.shift))
        made = torch.addcmul(shift, made, 1 + scale).to(x.dtype).contiguous()
        return made if inputs.added is None else (made, total.contiguous())


def _of_model(width: int, tokens: int, images: int = 2) -> tuple[ModulatedProblem, ...]:
    first = ModulatedProblem((images, tokens, width), "bfloat16", False, "bfloat16")
    return first, replace(first, added=True)


USUAL = (
    ("SD 3.5 medium 1024x1024, first", _of_model(1536, 4096)[0]),
    ("SD 3.5 medium 1024x1024, second", _of_model(1536, 4096)[1]),
    ("SD 3.5 medium, the prompt's second", _of_model(1536, 333)[1]),
    ("Flux 1024x1024, second", _of_model(3072, 4096, 1)[1]),
)
"""The first and the second norm of a transformer's block."""

ODD = (
    ModulatedProblem((3, 5, 7), "float16", True),
    ModulatedProblem((1, 1, 8)),
    ModulatedProblem((2, 17, 320), "bfloat16", True, "bfloat16"),
    ModulatedProblem((5, 3, 648), "float16", False),
    ModulatedProblem((2, 1, 12301), "bfloat16", True, "bfloat16"),
    ModulatedProblem((2, 2, 6184), "float16", True),
)
"""Small shapes at which indexing errors show."""
