"""Attention, forward: out = softmax(scale q k^T + mask) v.

q (B, Sq, H, D), k and v (B, Sk, H, D) in one dtype; the output is (B, Sq, H*D). `mask` is None or
broadcasts to (B, H, Sq, Sk): bool (True = attend) or additive fp16, bf16 or float32. A query whose
keys are all masked gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import attention_kernel as kernel
from lib_rocm_sd.ops.attention_kernel import AttentionConfig, AttentionParams
from lib_rocm_sd.ops.base import KernelSpec, Launch, Op, Variant, reasons

LOG2_E = math.log2(math.e)
SLICE_BYTES = 64 << 20
"""Most scores that SlicedAttention holds at a time, as long as one query's fit."""
MAX_WORK_ITEMS = (1 << 32) - 1
"""HIP's limit of grid x block in one dimension."""


@dataclass(frozen=True)
class AttentionProblem:
    """One call, without its tensors. `mask` is "none" or the mask's dtype."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: str = "float16"
    mask: str = "none"

    def __str__(self) -> str:
        sizes = f"B{self.batch} H{self.heads} Sq{self.seq_q} Sk{self.seq_k} D{self.head_dim}"
        return f"{sizes} {self.dtype}" + ("" if self.mask == "none" else f" {self.mask} mask")

    @property
    def score_bytes(self) -> int:
        """Size of a whole score matrix in this dtype."""
        return self.batch * self.heads * self.seq_q * self.seq_k * _DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products."""
        return 4 * self.batch * self.heads * self.seq_q * self.seq_k * self.head_dim


_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_DTYPE_NAMES = {**{dtype: name for name, dtype in _DTYPES.items()}, torch.bool: "bool"}


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> str:
    named = {"q": q, "k": k, "v": v, "mask": mask}
    return ", ".join(
        f"{name} {tuple(t.shape)} {t.dtype} {t.device}"
        for name, t in named.items()
        if t is not None
    )


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> AttentionProblem:
    """The problem that these tensors pose.

    Raises ValueError, with all shapes, where they do not fit together.
    """
    wrong = reasons(
        (any(t.ndim != 4 for t in (q, k, v)), "q, k and v must be (batch, seq, heads, head_dim)"),
        (
            q.dtype not in _DTYPE_NAMES or q.dtype == torch.bool,
            f"dtype {q.dtype} is not a float type known here",
        ),
        (not q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype"),
        (not q.device == k.device == v.device, "q, k and v must be on one device"),
    )
    if not wrong:
        batch, seq_q, heads, head_dim = q.shape
        wrong = reasons(
            (k.shape != v.shape, "k and v must have one shape"),
            (
                (batch, heads, head_dim) != (k.shape[0], k.shape[2], k.shape[3]),
                "q and k must agree in all but seq",
            ),
        )
    if not wrong and mask is not None:
        wrong = _mask_errors(q, k, mask)
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {_shapes(q, k, v, mask)}")
    mask_name = "none" if mask is None else _DTYPE_NAMES[mask.dtype]
    return AttentionProblem(
        batch, heads, seq_q, k.shape[1], head_dim, _DTYPE_NAMES[q.dtype], mask_name
    )


def _mask_errors(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> list[str]:
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = len(padded) == 4 and all(
        size in (1, whole) for size, whole in zip(padded, full, strict=False)
    )
    return reasons(
        (not fits, f"the mask must broadcast to (batch, heads, seq_q, seq_k) = {full}"),
        (mask.device != q.device, "the mask must be on the device of q"),
        (
            mask.dtype not in _DTYPE_NAMES,
            f"a mask of {mask.dtype} is not known here: use bool or a float type",
        ),
    )


def _expand_mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask as a (B, H, Sq, Sk) view, broadcast dimensions with stride 0."""
    return mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax attention in the dtype of (B, H, S, D) inputs.

    A query whose keys are all masked gives zeros.
    """
    scores = (q @ k.transpose(-1, -2)) * scale
    if mask is None:
        return scores.softmax(-1) @ v
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -math.inf)
    scores = scores + bias.to(scores.dtype)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0) @ v


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The formula in float64, (B, Sq, H*D), holding all scores: for tests and self-tests."""
    q64, k64, v64 = (t.double().transpose(1, 2) for t in (q, k, v))
    out = _attend(q64, k64, v64, mask, _scale(q, scale))
    return out.transpose(1, 2).flatten(2)


class MatrixAttention(Variant[AttentionProblem]):
    """kernels/attention.hip."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        config = self.configs(arch, p)[0] if not kernel.head_dim_refusals(p.head_dim) else None
        items = self.grid(p, config) * config.block if config else 0
        return kernel.head_dim_refusals(p.head_dim) + reasons(
            (p.dtype not in kernel.DTYPES, f"{p.dtype}: the kernel takes fp16 and bf16"),
            (
                p.mask not in kernel.MASK_KINDS,
                f"a {p.mask} mask: the kernel takes bool, fp16, bf16 and float32",
            ),
            (max(p.seq_q, p.seq_k) > 1 << 30, "more than 2^30 queries or keys"),
            (items > MAX_WORK_ITEMS, f"{items} work-items are more than one launch may have"),
        )

    def input_refusals(self, *inputs: Any) -> list[str]:
        q, k, v = inputs[:3]
        named = (("q", q), ("k", k), ("v", v))
        return reasons(
            *(
                (t.shape[3] > 1 and t.stride(3) != 1, f"the last stride of {name} is not 1")
                for name, t in named
            ),
            (
                torch.is_grad_enabled() and any(t.requires_grad for _, t in named),
                "gradients are wanted, the kernel is forward only",
            ),
        )

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        return kernel.configs(arch, problem.head_dim) if arch else ()

    def specs(
        self, arch: Arch, problem: AttentionProblem, config: AttentionConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.spec(problem.dtype, problem.head_dim, problem.mask, config),)

    @staticmethod
    def grid(problem: AttentionProblem, config: AttentionConfig) -> int:
        """Work-groups of a launch."""
        return -(-problem.seq_q // config.block_q) * problem.heads * problem.batch

    def run(
        self,
        launch: Launch | None,
        config: AttentionConfig,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if launch is None:
            raise ValueError("MatrixAttention needs a launch")
        batch, seq_q, heads, head_dim = q.shape
        seq_k = k.shape[1]
        out = q.new_empty((batch, seq_q, heads * head_dim))
        params = AttentionParams(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0,
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
        )
        mask_name = "none"
        if mask is not None:
            mask = _expand_mask(mask, q, k)
            mask_name = _DTYPE_NAMES[mask.dtype]
            params.mask = mask.data_ptr()
            params.mask_stride = mask.stride()
        params.heads, params.seq_q, params.seq_k = heads, seq_q, seq_k
        params.q_blocks = -(-seq_q // config.block_q)
        params.scale = (1.0 / math.sqrt(head_dim) if scale is None else scale) * LOG2_E
        params.aligned = _aligned(params)
        spec = kernel.spec(_DTYPE_NAMES[q.dtype], head_dim, mask_name, config)
        launch(spec, params.q_blocks * heads * batch, config.block, params, q.device)
        return out


def _aligned(params: AttentionParams) -> bool:
    """True when every row of q, k and v starts at a multiple of 16 bytes."""
    bits = params.q | params.k | params.v
    for stride in (*params.q_stride, *params.k_stride, *params.v_stride):
        bits |= stride * 2
    return bits % 16 == 0


class SdpaAttention(Variant[AttentionProblem]):
    """torch's scaled_dot_product_attention, whichever backend torch picks."""

    name = "sdpa"
    preference = 10

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return []

    def workspace(self, problem: AttentionProblem) -> int:
        """The score matrix: torch holds it where it has no fused backend for a card."""
        return problem.score_bytes

    def run(
        self,
        launch: Launch | None,
        config: None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if mask is not None:
            mask = _expand_mask(mask, q, k)
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(2)


class SlicedAttention(Variant[AttentionProblem]):
    """The formula in float32 over slices of queries, with at most SLICE_BYTES of scores at a time.

    Runs everywhere.
    """

    name = "sliced"

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return []

    @staticmethod
    def slice_rows(problem: AttentionProblem) -> int:
        """Queries per slice; at least one."""
        return max(1, min(problem.seq_q, SLICE_BYTES // (problem.heads * problem.seq_k * 4)))

    def workspace(self, problem: AttentionProblem) -> int:
        p = problem
        keys = 2 * p.heads * p.seq_k * p.head_dim * 4
        return keys + self.slice_rows(p) * p.heads * (2 * p.seq_k + 2 * p.head_dim) * 4

    def run(
        self,
        launch: Launch | None,
        config: None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        rows = self.slice_rows(problem_of(q, k, v, mask))
        compute = torch.promote_types(q.dtype, torch.float32)
        mask = None if mask is None else _expand_mask(mask, q, k)
        images = []
        for b in range(q.shape[0]):
            keys, values = (t[b].transpose(0, 1).to(compute) for t in (k, v))
            slices = []
            for i in range(0, q.shape[1], rows):
                queries = q[b, i : i + rows].transpose(0, 1).to(compute)
                part = None if mask is None else mask[b, :, i : i + rows]
                out = _attend(queries, keys, values, part, _scale(q, scale))
                slices.append(out.transpose(0, 1).to(q.dtype))
            images.append(torch.cat(slices))
        return torch.stack(images).flatten(2)


def _mask_for(problem: AttentionProblem, generator: torch.Generator) -> torch.Tensor | None:
    """A random mask, broadcast over heads; the last of several queries may attend to nothing."""
    p = problem
    if p.mask == "none":
        return None
    shape = (p.batch, 1, p.seq_q, p.seq_k)
    keep = torch.rand(shape, generator=generator) < 0.8
    keep[..., 0] = True
    if p.seq_q > 1:
        keep[:, :, -1] = False
    if p.mask == "bool":
        return keep
    bias = torch.randn(shape, generator=generator).masked_fill_(~keep, -math.inf)
    return bias.to(_DTYPES[p.mask])


def make_inputs(problem: AttentionProblem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random q, k, v as views of (batch, seq, heads*head_dim), mask, scale.

    The same on every device.
    """
    p = problem
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(seq: int) -> torch.Tensor:
        flat = torch.randn((p.batch, seq, p.heads * p.head_dim), generator=generator)
        return flat.to(_DTYPES[p.dtype]).to(device).view(p.batch, seq, p.heads, p.head_dim)

    q, k, v = draw(p.seq_q), draw(p.seq_k), draw(p.seq_k)
    mask = _mask_for(p, generator)
    return q, k, v, None if mask is None else mask.to(device), None


def tolerance(problem: AttentionProblem) -> float:
    """Largest max |out - reference| / max |reference|: a few units in the last place."""
    return {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}.get(problem.dtype, 1e-12)


def output_shape(problem: AttentionProblem) -> tuple[int, ...]:
    """(batch, seq_q, heads * head_dim)."""
    return (problem.batch, problem.seq_q, problem.heads * problem.head_dim)


def test_problems(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """A small problem of the class (dtype, head_dim, mask kind), and one with the real tails."""
    small = replace(problem, batch=2, heads=2, seq_q=77, seq_k=131)
    tails = replace(
        small,
        seq_q=min(problem.seq_q, 128 + problem.seq_q % 128),
        seq_k=min(problem.seq_k, 128 + problem.seq_k % 128),
    )
    return (small, tails)


USUAL = (
    ("SD1.5 512x512, self, 64x64 latent", AttentionProblem(2, 8, 4096, 4096, 40)),
    ("SD1.5 512x512, self, 32x32", AttentionProblem(2, 8, 1024, 1024, 80)),
    ("SD1.5 512x512, self, 16x16", AttentionProblem(2, 8, 256, 256, 160)),
    ("SD1.5 512x512, text", AttentionProblem(2, 8, 4096, 77, 40)),
    ("SDXL 1024x1024, self, 64x64", AttentionProblem(2, 10, 4096, 4096, 64)),
    ("SDXL 1024x1024, self, 32x32", AttentionProblem(2, 20, 1024, 1024, 64)),
    ("SDXL 1024x1024, text", AttentionProblem(2, 10, 4096, 77, 64)),
    ("VAE mid-block, 512x512", AttentionProblem(1, 1, 4096, 4096, 512)),
)
"""What a Stable Diffusion user meets, by name."""

ODD = (
    AttentionProblem(1, 1, 1, 1, 8),
    AttentionProblem(2, 3, 17, 15, 40),
    AttentionProblem(1, 2, 113, 203, 72, "bfloat16"),
    AttentionProblem(1, 1, 65, 77, 80, "float16", "bool"),
    AttentionProblem(1, 2, 31, 154, 128, "bfloat16", "float32"),
    AttentionProblem(1, 1, 33, 65, 160, "float16", "float16"),
    AttentionProblem(1, 1, 34, 33, 248, "bfloat16"),
    AttentionProblem(1, 1, 35, 231, 256),
    AttentionProblem(1, 1, 37, 67, 512, "bfloat16", "bfloat16"),
)
"""Small shapes at which indexing errors show."""

ATTENTION: Op[AttentionProblem] = Op(
    name="attention",
    variants=(MatrixAttention(), SdpaAttention(), SlicedAttention()),
    problem_of=problem_of,
    reference=reference,
    make_inputs=make_inputs,
    tolerance=tolerance,
    output_shape=output_shape,
    test_problems=test_problems,
    cases=(*(problem for _, problem in USUAL), *ODD),
    usual=USUAL,
)
