"""RMSNorm and rotary embedding of queries and keys, of one stream's rows or of two streams', which
come to lie one after another: kernels/rms_norm.hip.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, Variant, halves_only, one_launch, reasons
from lib_rocm_sd.ops.bound import Bound, Prepare
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.layer_norm.formula import is_float
from lib_rocm_sd.ops.lazily import torch

THREADS = 256
MOST_HEAD_DIM = 256
"""A wave of 32 work-items, of eight values each, makes a head's row."""
WEIGHTS = ("weight_q", "weight_k", "more_q", "more_k")
ROTARIES = ("none", "cos and sin", "matrices")
"""By ROTARY of the kernel, which reads so many floats per column of each tensor."""


@dataclass(frozen=True)
class HeadsProblem:
    """x (batch, tokens, 3 heads D) and more (batch, words, 3 heads D), without their tensors.
    `normed`: which of WEIGHTS there are. `rotary`: of ROTARIES; `own_rotary`: for each image.
    """

    batch: int
    tokens: int
    words: int
    heads: int
    head_dim: int
    dtype: str = "float16"
    normed: tuple[bool, ...] = (True, True, True, True)
    rotary: str = ROTARIES[0]
    own_rotary: bool = False

    def __str__(self) -> str:
        norms = "".join("01"[each] for each in self.normed)
        sizes = f"{self.batch}x({self.tokens}+{self.words})x{self.heads}x{self.head_dim}"
        own = " of each image" * self.own_rotary
        turned = f", rotary {self.rotary}{own}" if self.rotary != ROTARIES[0] else ""
        return f"{sizes} {self.dtype}, weights {norms}{turned}"

    @property
    def rows(self) -> int:
        """Rows of all heads."""
        return self.batch * (self.tokens + self.words) * 3 * self.heads

    @property
    def lanes(self) -> int:
        """Work-items of a row: a power of two."""
        return 1 << max(0, -(-self.head_dim // 8) - 1).bit_length()

    @property
    def grid(self) -> int:
        """Work-groups of a launch."""
        return -(-self.rows * self.lanes // THREADS)

    @property
    def shape(self) -> tuple[int, ...]:
        """The output's."""
        return self.batch, self.tokens + self.words, 3 * self.heads * self.head_dim


class HeadsInputs(NamedTuple):
    """x (N, tokens, 3 heads D): queries, keys and values of a stream; `more` (N, words, 3 heads D)
    of another, whose rows follow. Each weight (D) may be None: then its heads are not normalised.

    Pairs of columns of queries and keys are then multiplied by 2x2 matrices, float32, of N images
    or one: `rotary` (N, tokens + words, D / 2, 2, 2), or `rotary` (N, tokens + words, D) and
    `rotary_sin` like it: [[cos[2 i], -sin[2 i]], [sin[2 i + 1], cos[2 i + 1]]].
    """

    x: torch.Tensor
    more: torch.Tensor | None
    weight_q: torch.Tensor | None
    weight_k: torch.Tensor | None
    more_q: torch.Tensor | None
    more_k: torch.Tensor | None
    heads: int
    eps: float
    more_eps: float
    rotary: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None

    @property
    def weights(self) -> tuple[torch.Tensor | None, ...]:
        """By WEIGHTS."""
        return self.weight_q, self.weight_k, self.more_q, self.more_k


def problem_of(inputs: HeadsInputs) -> HeadsProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    x, more, heads = inputs.x, inputs.more, inputs.heads
    given: dict[str, Any] = dict(zip(WEIGHTS, inputs.weights, strict=True))
    given = {name: each for name, each in {"more": more, **given}.items() if each is not None}
    wrong = tensor_errors(x=x, **given)
    if not wrong:
        wrong = reasons(
            (
                x.ndim != 3 or heads < 1 or x.shape[-1] % (3 * heads),
                "x must be (N, tokens, 3 heads D)",
            ),
            (not is_float(x), f"dtype {x.dtype} is not a float type known here"),
        )
    if not wrong:
        head_dim = x.shape[2] // (3 * heads)
        for name, each in given.items():
            wanted = (len(x), *each.shape[1:2], x.shape[2]) if name == "more" else (head_dim,)
            alike = (each.dtype, each.device) == (x.dtype, x.device)
            wrong += reasons(
                (each.shape != wanted, f"{name} must be {wanted}"),
                (not alike, f"{name} must have the dtype and device of x"),
            )
    words = 0 if more is None or wrong else more.shape[1]
    if not wrong:
        wrong = _rotary_errors(inputs, head_dim, words)
        given |= {"rotary": inputs.rotary, "rotary_sin": inputs.rotary_sin}
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x, **given)}")
    normed = tuple(each is not None for each in inputs.weights)
    batch, tokens = x.shape[:2]
    rotary = (inputs.rotary is not None) * (1 + (inputs.rotary_sin is None))
    own = inputs.rotary is not None and len(inputs.rotary) > 1
    dtype = DTYPE_NAMES[x.dtype]
    return HeadsProblem(batch, tokens, words, heads, head_dim, dtype, normed, ROTARIES[rotary], own)


def _rotary_errors(inputs: HeadsInputs, head_dim: int, words: int) -> list[str]:
    cos, sin, x = inputs.rotary, inputs.rotary_sin, inputs.x
    if cos is None:
        return reasons((sin is not None, "rotary_sin goes with rotary"))
    wrong = tensor_errors(rotary=cos, **({} if sin is None else {"rotary_sin": sin}))
    if wrong:
        return wrong
    rest = (head_dim,) if sin is not None else (head_dim // 2, 2, 2)
    wanted = (x.shape[1] + words, *rest)
    shaped = cos.shape[1:] == wanted and len(cos) in (1, len(x))
    each = (cos,) if sin is None else (cos, sin)
    alike = all((t.dtype, t.device) == (torch.float32, x.device) for t in each)
    return reasons(
        (bool(head_dim % 2), f"head_dim {head_dim} is odd"),
        (not shaped, f"rotary must be {('1 or N', *wanted)}"),
        (sin is not None and sin.shape != cos.shape, "rotary_sin must have the shape of rotary"),
        (not alike, "rotary must be float32, on the device of x"),
    )


def _normed(inputs: HeadsInputs, dtype: torch.dtype) -> torch.Tensor:
    """What is made, in this dtype."""
    weights, parts = inputs.weights, []
    streams: list[tuple[torch.Tensor, float, tuple[torch.Tensor | None, ...]]] = []
    streams.append((inputs.x, inputs.eps, weights[:2]))
    if inputs.more is not None:
        streams.append((inputs.more, inputs.more_eps, weights[2:]))
    for rows, eps, of_heads in streams:
        *both, v = rows.to(dtype).unflatten(2, (3, inputs.heads, -1)).unbind(2)
        for place, weight in enumerate(of_heads):
            if weight is not None:
                scale = (both[place].square().mean(-1, keepdim=True) + eps).rsqrt()
                both[place] = both[place] * scale * weight.to(dtype)
        parts.append(torch.stack([*both, v], 2))
    made = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    matrices = _matrices(inputs)
    if matrices is not None:
        turned = made[:, :, :2].unflatten(-1, (-1, 2))
        turned = (matrices[:, :, None, None].to(dtype) @ turned[..., None]).flatten(-3)
        made = torch.cat((turned, made[:, :, 2:]), 2)
    return made.flatten(2)


def _matrices(inputs: HeadsInputs) -> torch.Tensor | None:
    """Those of the pairs, (N or 1, all tokens, D / 2, 2, 2)."""
    cos, sin = inputs.rotary, inputs.rotary_sin
    if cos is None or sin is None:
        return cos
    rows = (cos[..., ::2], -sin[..., ::2]), (sin[..., 1::2], cos[..., 1::2])
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def reference(inputs: HeadsInputs) -> torch.Tensor:
    """In float64."""
    return _normed(inputs, torch.float64)


def make_inputs(p: HeadsProblem, device: torch.device, seed: int) -> HeadsInputs:
    """Random; weights are about one."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def on_device(made: torch.Tensor) -> torch.Tensor:
        return made.to(DTYPES[p.dtype]).to(device)

    width = 3 * p.heads * p.head_dim
    x, more = (on_device(3 * drawn(p.batch, count, width)) for count in (p.tokens, p.words))
    drawn_weights = [on_device(1 + 0.3 * drawn(p.head_dim)) for _ in WEIGHTS]
    of_q, of_k, of_more_q, of_more_k = (
        weight if is_there else None
        for weight, is_there in zip(drawn_weights, p.normed, strict=True)
    )
    plain = (x, more if p.words else None, of_q, of_k, of_more_q, of_more_k, p.heads, 1e-6, 1e-5)
    pairs = {"matrices": (p.head_dim // 2, 2, 2)}.get(p.rotary, (p.head_dim,))
    shape = (p.batch if p.own_rotary else 1, p.tokens + p.words, *pairs)
    rotary = [drawn(*shape).to(device) for _ in range((0, 2, 1)[ROTARIES.index(p.rotary)])]
    return HeadsInputs(*plain, *rotary)


def test_problems(problem: HeadsProblem) -> tuple[HeadsProblem, ...]:
    """Small ones of the same heads: images of both streams, and a single row."""
    both = replace(problem, batch=2, tokens=19, words=7 if problem.words else 0, heads=3)
    return both, replace(both, batch=1, tokens=1, words=min(both.words, 1), heads=1)


def measured_as(problem: HeadsProblem) -> HeadsProblem:
    """The next power of two of tokens: no new size of a picture is measured."""
    return replace(problem, tokens=max(64, 1 << (max(problem.tokens, 1) - 1).bit_length()))


_ADDRESSES = ("x", "more", "out", *WEIGHTS, "rotary", "rotary_sin")


class HeadsParams(ctypes.Structure):
    """The argument of rms_norm_heads; the same struct stands in rms_norm.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("x", "more", "out", *WEIGHTS)),
        *((name, ctypes.c_uint32) for name in ("tokens", "words", "heads", "head_dim")),
        *((name, ctypes.c_uint32) for name in ("rows", "lane_bits", "aligned")),
        *((name, ctypes.c_float) for name in ("eps", "more_eps", "share")),
        *((name, ctypes.c_uint64) for name in ("rotary", "rotary_sin")),
        *((name, ctypes.c_uint32) for name in ("rotary_apart", "apart")),
    ]


@cache
def spec(dtype: str, rotary: str = ROTARIES[0]) -> KernelSpec:
    """The kernel."""
    defines = {"BF16_HALVES": int(dtype == "bfloat16"), "THREADS": THREADS}
    if rotary != ROTARIES[0]:
        defines["ROTARY"] = ROTARIES.index(rotary)
    return KernelSpec("rms_norm.hip", "rms_norm_heads", tuple(defines.items()))


def _template(p: HeadsProblem) -> HeadsParams:
    """The argument, but for addresses."""
    lane_bits = p.lanes.bit_length() - 1
    sizes = (p.tokens, p.words, p.heads, p.head_dim, p.rows, lane_bits)
    apart = (p.tokens + p.words) * p.head_dim * ROTARIES.index(p.rotary) if p.own_rotary else 0
    return HeadsParams(*(0,) * 7, *sizes, 0, 0.0, 0.0, 1.0 / p.head_dim, 0, 0, apart)


def _fill(params: HeadsParams, inputs: HeadsInputs) -> torch.Tensor:
    """The output, and in `params` where it and the inputs are."""
    x, more = inputs.x, inputs.more
    words = 0 if more is None else more.shape[1]
    out = x.new_empty((x.shape[0], x.shape[1] + words, x.shape[2]))
    params.eps, params.more_eps, params.apart = inputs.eps, inputs.more_eps, x.stride(1)
    every = 2 * params.apart
    read = (x, more, out, *inputs.weights, inputs.rotary, inputs.rotary_sin)
    for name, each in zip(_ADDRESSES, read, strict=True):
        at = 0 if each is None else each.data_ptr()
        setattr(params, name, at)
        every |= at
    params.aligned = not every & 15
    return out


def _readable(inputs: HeadsInputs) -> HeadsInputs:
    """The same, where the kernel can read it: dense; with a rotary embedding, rows of x may be
    parts of longer ones.
    """
    x = inputs.x
    dense: dict[str, Any] = {}
    (images, tokens), apart = x.shape[:2], x.stride(1)
    as_it_lies = inputs.rotary is not None and images * tokens * apart < 1 << 31
    as_it_lies &= x.stride(2) == 1 and (images < 2 or x.stride(0) == tokens * apart)
    for name, each in inputs._asdict().items():
        if isinstance(each, torch.Tensor) and not (name == "x" and as_it_lies):
            dense[name] = each.contiguous()
    return inputs._replace(**dense)


class BoundHeads(Bound[HeadsParams]):
    """Callable like `Variant.run`, for dense inputs of one key."""

    __slots__ = ()

    def __call__(self, call: Call[Any, Any]) -> torch.Tensor:
        packet = self.taken()
        made = _fill(packet.params, call.inputs)
        packet.launch()
        self.free.append(packet)
        return made


class KernelHeads(KernelVariant[HeadsProblem, HeadsInputs]):
    """kernels/rms_norm.hip: rows are read once and written where attention reads them."""

    def kernel_refusals(self, arch: Arch, problem: HeadsProblem) -> list[str]:
        p = problem
        return reasons(
            halves_only(p.dtype),
            (p.head_dim % 8 or not 8 <= p.head_dim <= MOST_HEAD_DIM, f"head_dim {p.head_dim}"),
            (p.rows * p.head_dim >= 1 << 31, f"{p.rows} rows are more than the kernel counts"),
            one_launch(p.grid * THREADS),
        )

    def specs(self, arch: Arch, problem: HeadsProblem, config: None) -> Sequence[KernelSpec]:
        return (spec(problem.dtype, problem.rotary),)

    def bound(self, call: Call[HeadsProblem, HeadsInputs]) -> Run:
        """Where nothing has to be copied and the launcher can prepare a launch."""
        problem, inputs = call.problem, call.inputs
        prepare: Any = getattr(call.launch, "prepare", None)
        if prepare is None or any(map(operator.is_not, _readable(inputs), inputs)):
            return self.run
        words = spec(problem.dtype, problem.rotary), problem.grid, THREADS
        device = inputs.x.device
        begin: Prepare = lambda params: prepare(*words, params, device)  # noqa: E731
        return BoundHeads(_template(problem), begin)

    def run(self, call: Call[HeadsProblem, HeadsInputs]) -> torch.Tensor:
        problem = call.problem
        params = _template(problem)
        made = _fill(params, _readable(call.inputs))
        kernel = spec(problem.dtype, problem.rotary)
        call.launcher(kernel, problem.grid, THREADS, params, made.device)
        return made


class TorchHeads(Variant[HeadsProblem, HeadsInputs]):
    """torch's operators in float32, rounded once."""

    name = "torch"
    last_resort = "norm of heads"

    def workspace(self, problem: HeadsProblem) -> int:
        return 3 * problem.rows * problem.head_dim * 4

    def run(self, call: Call[HeadsProblem, HeadsInputs]) -> torch.Tensor:
        dtype = call.inputs.x.dtype
        return _normed(call.inputs, torch.promote_types(dtype, torch.float32)).to(dtype)


_SD35 = HeadsProblem(2, 4096, 333, 24, 64, "bfloat16")
_FLUX = HeadsProblem(1, 512, 4096, 24, 128, "bfloat16", rotary="cos and sin")
USUAL = (
    ("SD 3.5 medium 1024x1024", _SD35),
    (
        "SD 3.5 medium 1024x1024, the picture alone",
        replace(_SD35, words=0, normed=(True, True, False, False)),
    ),
    ("SD 3 medium 1024x1024", replace(_SD35, dtype="float16", normed=(False,) * 4)),
    ("Flux 1024x1024", _FLUX),
    (
        "Flux 1024x1024, a single block",
        replace(_FLUX, tokens=4608, words=0, normed=(True, True, False, False)),
    ),
    ("Flux 1024x1024 in ComfyUI and Forge", replace(_FLUX, rotary="matrices", own_rotary=True)),
)
"""What attention of a diffusion transformer reads."""

ODD = (
    HeadsProblem(1, 1, 0, 1, 8),
    HeadsProblem(3, 5, 7, 2, 40, "bfloat16"),
    HeadsProblem(2, 17, 1, 3, 64, "float16", (True, False, False, True)),
    HeadsProblem(1, 2, 3, 5, 72, "bfloat16", (False, False, True, True)),
    HeadsProblem(2, 3, 5, 1, 128),
    HeadsProblem(1, 3, 2, 2, 200),
    HeadsProblem(2, 1, 4, 1, 256, "bfloat16", (False,) * 4),
    HeadsProblem(2, 5, 3, 3, 40, "bfloat16", rotary="cos and sin"),
    HeadsProblem(1, 3, 0, 5, 128, "float16", (True, True, False, False), "cos and sin"),
    HeadsProblem(3, 2, 5, 1, 24, "float16", (False, True, False, False), "cos and sin", True),
    HeadsProblem(2, 5, 3, 3, 40, "float16", (True, True, True, False), "matrices", True),
    HeadsProblem(1, 7, 2, 1, 128, "bfloat16", rotary="matrices"),
    HeadsProblem(2, 3, 0, 2, 8, "bfloat16", (False,) * 4, "matrices", True),
    HeadsProblem(1, 4, 3, 2, 5, "float16"),
)
"""Small shapes at which indexing errors show; of the last our kernel makes nothing."""
