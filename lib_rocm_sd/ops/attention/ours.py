"""Attention, forward: out = softmax(scale q k^T + mask) v.

q (B, Sq, H, D), k and v (B, Sk, H, D) in one dtype; the output is (B, Sq, H*D). `mask` is None or
broadcasts to (B, H, Sq, Sk): bool (True = attend) or additive fp16, bf16 or float32. A query whose
keys are all masked gives zeros. Or it is int32 (B, 1, 1, 1): how many of the first keys count.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionConfig, AttentionParams
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import (
    Call,
    KernelSpec,
    Launch,
    Run,
    halves_only,
    one_launch,
    reasons,
)
from lib_rocm_sd.ops.bound import Bound, Packet, Prepare
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import is_there, torch

# The kernel called again and again with tensors that differ only in where they lie. Between Python
# and the launch stand then few microseconds: sizes, strides and what follows from them are packed
# once, and a call fills in the addresses.


class BoundCall(Bound[AttentionParams]):
    """Callable like `Variant.run`. `first`: its arguments, but for addresses.

    `set_scale(params, scale)` writes what follows from the scale. `rows_aligned`: by their strides
    all rows are, if the first ones are. A packet's state is the scale that it has.
    """

    __slots__ = ("_rows_aligned", "_set_scale", "_shape")

    def __init__(
        self,
        first: AttentionParams,
        shape: tuple[int, int, int],
        rows_aligned: bool,
        prepare: Prepare,
        set_scale: Callable[[Any, float | None], None],
    ) -> None:
        super().__init__(first, prepare)
        self._shape = shape
        self._rows_aligned = rows_aligned
        self._set_scale = set_scale

    def __call__(self, call: Call[Any, AttentionInputs]) -> torch.Tensor:
        q, k, v, mask, scale = call.inputs
        out = q.new_empty(self._shape)
        try:
            packet = self.free.pop()
        except IndexError:
            packet = self._packet(scale)
        if packet.state != scale:
            self._set_scale(packet.params, scale)
            packet.state = scale
        params = packet.params
        params.q = q_at = q.data_ptr()
        params.k = k_at = k.data_ptr()
        params.v = v_at = v.data_ptr()
        params.out = out.data_ptr()
        if mask is not None:
            params.mask = mask.data_ptr()
        params.aligned = self._rows_aligned and not (q_at | k_at | v_at) & 15
        packet.launch()
        self.free.append(packet)
        return out

    def _packet(self, scale: float | None) -> Packet[AttentionParams]:
        packet = self.new()
        self._set_scale(packet.params, scale)
        packet.state = scale
        return packet


LOG2_E = math.log2(math.e)


LEAST_SCALE = 1e-30
"""In place of 0, with which keys past the end would be NaN; the weights are equal all the same."""


FLIP = 0x80008000
"""Changes the sign of two halves."""


LARGEST_ROW_STRIDE = 1 << 22
"""In elements: 256 rows are 2 GiB."""


LONGEST_PROMPT = 320
"""Keys up to which it is asked whose tiles fit them best."""


class MatrixAttention(KernelVariant[AttentionProblem, AttentionInputs]):
    """kernels/attention.hip."""

    def kernel_refusals(self, arch: Arch, problem: AttentionProblem) -> list[str]:
        p, refusals = problem, kernel.head_dim_refusals(problem.head_dim)
        space = () if refusals else kernel.configs(arch, p.head_dim)
        items = max((self.grid(p, config) * config.block for config in space), default=0)
        return refusals + reasons(
            halves_only(p.dtype),
            (
                p.mask not in (*kernel.MASK_KINDS, kernel.LENGTHS),
                f"a {p.mask} mask: the kernel takes bool, fp16, bf16, float32 and int32",
            ),
            (max(p.seq_q, p.seq_k) > 1 << 30, "more than 2^30 queries or keys"),
            one_launch(items),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        q, k, v = inputs[:3]
        tensors = (("q", q), ("k", k), ("v", v))
        strides = reasons(
            *(
                (t.shape[3] > 1 and t.stride(3) != 1, f"the last stride of {name} is not 1")
                for name, t in tensors
            )
        )
        return strides + gradient_refusals(q, k, v)

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        p = problem
        if arch is None:
            return ()
        space = kernel.ordered(arch, p.dtype, p.head_dim, p.mask)
        suited = _suited(arch, p, space)
        return sorted(space, key=lambda config: config != suited)

    def defaults(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        safe = kernel.configs(arch, problem.head_dim)[:1] if arch else ()
        return tuple(dict.fromkeys((*super().defaults(arch, problem), *safe)))

    def notes(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return kernel.table_reasons(arch) if arch else []

    def specs(
        self, arch: Arch, problem: AttentionProblem, config: AttentionConfig
    ) -> Sequence[KernelSpec]:
        return (self.spec(problem, config),)

    def spec(self, problem: AttentionProblem, config: AttentionConfig) -> KernelSpec:
        """The kernel that `run` launches."""
        return kernel.spec(problem.dtype, problem.head_dim, problem.mask, config)

    @staticmethod
    def grid(problem: AttentionProblem, config: AttentionConfig) -> int:
        """Most work-groups of such a problem."""
        return config.tiles(problem.seq_q) * problem.heads * problem.batch

    def bound(self, call: Call[AttentionProblem, AttentionInputs]) -> Run:
        """Where the launcher can prepare a launch: see BoundCall."""
        config, inputs = call.config, call.inputs
        prepare = getattr(call.launch, "prepare", None)
        if prepare is None:
            return self.run
        p, q = call.problem, inputs.q
        first = _params(config, q, inputs.k, inputs.v)
        if inputs.mask is not None:
            first.mask_stride = _mask_stride(inputs.mask, p)
        spec, device = self.spec(p, config), q.device
        sizes = (_groups(first), config.block)
        return BoundCall(
            first,
            (p.batch, p.seq_q, p.heads * p.head_dim),
            _aligned(first),
            lambda params: prepare(spec, *sizes, params, device),
            lambda params, scale: _set_scale(params, p.head_dim, scale),
        )

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        return self.launched(call, None)

    def launched(
        self,
        call: Call[AttentionProblem, AttentionInputs],
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `run`. The log-sum-exp goes to `lse`, where `spec` is of a kernel that leaves it."""
        config = call.config
        q, k, v, mask, scale = call.inputs
        p = call.problem
        out = q.new_empty((p.batch, p.seq_q, p.heads * p.head_dim))
        params = _params(config, q, k, v)
        params.q, params.k, params.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        params.out = out.data_ptr()
        _set_scale(params, p.head_dim, scale)
        if mask is not None:
            params.mask = mask.data_ptr()
            params.mask_stride = _mask_stride(mask, p)
        params.aligned = _aligned(params)
        params.lse = 0 if lse is None else lse.data_ptr()
        call.launcher(self.spec(p, config), _groups(params), config.block, params, q.device)
        return out


def _suited(
    arch: Arch, problem: AttentionProblem, space: Sequence[AttentionConfig]
) -> AttentionConfig:
    """The first config, unless the keys are few and another's tiles fit them better (with a mask
    those may spill registers, with lengths the first ones); on the development card, unless its
    groups left that idle.
    """
    first, few = space[0], [config for config in space if config.for_few_keys]
    if problem.seq_k <= LONGEST_PROMPT and problem.mask in kernel.UNBIASED:
        order = (first, *few) if problem.mask == "none" else (*few, first)
        best = min(order, key=lambda c: -(-problem.seq_k // c.block_k) * c.block_k)
        if best != first:
            return best
    if kernel.leaves_idle(first, MatrixAttention.grid(problem, first)):
        return kernel.narrower(arch, space) or first
    return first


def _params(
    config: AttentionConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> AttentionParams:
    """The kernel's arguments but for addresses, mask and scale."""
    params = AttentionParams(0, 0, 0, 0, 0, q.stride()[:3], k.stride()[:3], v.stride()[:3])
    batch, params.seq_q, params.heads, _ = q.shape
    params.seq_k, params.batch_heads = k.shape[1], batch * params.heads
    tiles = config.tiles(params.seq_q)
    if config.resident and params.seq_k <= config.block_k:
        at_once = config.groups * _compute_units(q.device)
        tiles = min(tiles, max(1, at_once // max(1, params.batch_heads)))
    params.head_groups = tiles
    return params


def _mask_stride(mask: torch.Tensor, p: AttentionProblem) -> tuple[int, ...]:
    """0 where it is broadcast."""
    return mask.expand(p.batch, p.heads, p.seq_q, p.seq_k).stride()


@cache
def _compute_units(device: torch.device) -> int:
    """1 where the kernel is executed on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _groups(params: AttentionParams) -> int:
    """Work-groups of a launch."""
    return int(params.head_groups) * int(params.batch_heads)


def _set_scale(params: AttentionParams, head_dim: int, scale: float | None) -> None:
    factor = (1.0 / math.sqrt(head_dim) if scale is None else scale) * LOG2_E
    params.scale, params.flip = abs(factor) or LEAST_SCALE, FLIP if factor < 0 else 0


def _aligned(params: AttentionParams) -> bool:
    """True when every row of q, k and v starts at a multiple of 16 bytes, and not so far from the
    one before that bytes from the first to the last row of a tile do not fit 32 bits (tile.h).
    """
    bits = params.q | params.k | params.v
    for stride in (*params.q_stride, *params.k_stride, *params.v_stride):
        bits |= stride * 2
    rows = max(params.q_stride[1], params.k_stride[1], params.v_stride[1])
    return bits % 16 == 0 and rows <= LARGEST_ROW_STRIDE


# Attention through a score matrix: two matrix products of torch's, a softmax of ours between them.
#
# For the VAE's mid-block, whose one head of 512 is too large for a fused kernel to be fast: slices
# of the matrix stay in the cache of a large GPU.


THREADS = 1024
MOST_HELD = 16
"""Vectors of four scores that a work-item keeps in registers."""
SLICE_BYTES = 128 << 20
"""Float32 scores held at a time; half as many bytes of weights beside them."""
LEAST_ROWS = 64


class SoftmaxParams(ctypes.Structure):
    """The one argument of softmax_rows; the same struct stands in softmax.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("scores", "weights", "sums")),
        ("keys", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    ]


@cache
def softmax_spec(dtype: str, held: int) -> KernelSpec:
    """The kernel for weights in one half type; `held`: see softmax.hip."""
    defines = {"BF16_HALVES": int(dtype == "bfloat16"), "THREADS": THREADS, "HELD": held}
    return KernelSpec("softmax.hip", "softmax_rows", tuple(defines.items()))


def held_of(keys: int) -> int:
    """Vectors of a row of `keys` that each work-item holds, a power of two; 0: read it twice."""
    vectors = -(-keys // (4 * THREADS))
    if keys % 4 or vectors > MOST_HELD:
        return 0
    return 1 << (vectors - 1).bit_length()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32, of halves."""
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return]


def _gives_float32() -> bool:
    """True where torch's matrix product of halves can give float32: 2.8 and newer."""
    return not is_there() or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


class ScoresAttention(KernelVariant[AttentionProblem, AttentionInputs]):
    """torch's matrix products around kernels/softmax.hip."""

    name = "torch + rocm_sd"
    preference = 15

    def kernel_refusals(self, arch: Arch, problem: AttentionProblem) -> list[str]:
        p = problem
        return reasons(
            halves_only(p.dtype),
            (p.mask != "none", "it takes no mask"),
            (p.head_dim <= 256, f"head_dim {p.head_dim}: fused kernels are faster up to 256"),
            (not _gives_float32(), "this torch has no float32 product of halves (2.8 and newer)"),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        return gradient_refusals(*inputs[:3])

    @staticmethod
    def slice_rows(problem: AttentionProblem) -> int:
        """Queries per slice."""
        rows = max(SLICE_BYTES // (4 * max(problem.seq_k, 1)), LEAST_ROWS)
        return min(rows // 64 * 64, max(problem.seq_q, 1))

    def workspace(self, problem: AttentionProblem) -> int:
        return self.slice_rows(problem) * (6 * problem.seq_k + 8 * problem.head_dim)

    def specs(self, arch: Arch, problem: AttentionProblem, config: None) -> Sequence[KernelSpec]:
        return (softmax_spec(problem.dtype, held_of(problem.seq_k)),)

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        launch = call.launcher
        q, k, v, _, scale = call.inputs
        batch, seq_q, heads, head_dim = q.shape
        out = q.new_empty((batch, seq_q, heads, head_dim))
        rows = self.slice_rows(call.problem)
        factor = (head_dim**-0.5 if scale is None else scale) * LOG2_E
        for b in range(batch):
            for h in range(heads):
                keys, values = k[b, :, h].T, v[b, :, h]
                for first in range(0, seq_q, rows):
                    part = q[b, first : first + rows, h]
                    out[b, first : first + rows, h] = _slice(launch, part, keys, values, factor)
        return out.flatten(2)


def _slice(
    launch: Launch, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, factor: float
) -> torch.Tensor:
    """(rows, D) float32 for q (rows, D), keys (D, Sk) and values (Sk, D)."""
    scores = product(q, keys)
    weights = torch.empty_like(scores, dtype=q.dtype)
    sums = scores.new_empty((scores.shape[0], 1))
    params = SoftmaxParams(
        *(scores.data_ptr(), weights.data_ptr(), sums.data_ptr()), scores.shape[1], factor
    )
    spec = softmax_spec(DTYPE_NAMES[q.dtype], held_of(scores.shape[1]))
    launch(spec, scores.shape[0], THREADS, params, q.device)
    del scores
    return product(weights, values).div_(sums)
