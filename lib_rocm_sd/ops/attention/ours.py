"""Attention, forward: out = softmax(scale q k^T + mask) v.

q (B, Sq, H, D), k and v (B, Sk, H, D) in one dtype; the output is (B, Sq, H*D). `mask` is None or
broadcasts to (B, H, Sq, Sk): bool (True = attend) or additive fp16, bf16 or float32. A query whose
keys are all masked gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.call import BoundCall
from lib_rocm_sd.ops.attention.formula import expand_mask
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionConfig, AttentionParams
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, Variant, halves_only, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import torch

LOG2_E = math.log2(math.e)


LEAST_SCALE = 1e-30
"""In place of 0, with which keys past the end would be NaN; the weights are equal all the same."""


FLIP = 0x80008000
"""Changes the sign of two halves."""


LARGEST_ROW_STRIDE = 1 << 22
"""In elements: 256 rows are 2 GiB."""


LONGEST_PROMPT = 320
"""Keys up to which it is asked whose tiles fit them best."""


class MatrixAttention(Variant[AttentionProblem, AttentionInputs]):
    """kernels/attention.hip."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p, found = problem, kernel.head_dim_refusals(problem.head_dim)
        space = () if found else kernel.configs(arch, p.head_dim)
        items = max((self.grid(p, config) * config.block for config in space), default=0)
        return found + reasons(
            halves_only(p.dtype),
            (
                p.mask not in kernel.MASK_KINDS,
                f"a {p.mask} mask: the kernel takes bool, fp16, bf16 and float32",
            ),
            (max(p.seq_q, p.seq_k) > 1 << 30, "more than 2^30 queries or keys"),
            one_launch(items),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        q, k, v = inputs[:3]
        named = (("q", q), ("k", k), ("v", v))
        strides = reasons(
            *(
                (t.shape[3] > 1 and t.stride(3) != 1, f"the last stride of {name} is not 1")
                for name, t in named
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
        """Where there is no mask and the launcher can prepare a launch: see call.py."""
        config, inputs = call.config, call.inputs
        prepare = getattr(call.launch, "prepare", None)
        if prepare is None or inputs.mask is not None:
            return self.run
        p, q = call.problem, inputs.q
        first = _params(config, q, inputs.k, inputs.v)
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
            mask = expand_mask(mask, q, k)
            params.mask = mask.data_ptr()
            params.mask_stride = mask.stride()
        params.aligned = _aligned(params)
        params.lse = 0 if lse is None else lse.data_ptr()
        call.launcher(self.spec(p, config), _groups(params), config.block, params, q.device)
        return out


def _suited(
    arch: Arch, problem: AttentionProblem, space: Sequence[AttentionConfig]
) -> AttentionConfig:
    """The first config, unless the keys are few and another's tiles fit them better (with a mask
    those may spill registers); on the development card, unless its groups left that idle.
    """
    first, few = space[0], [config for config in space if config.for_few_keys]
    if problem.seq_k <= LONGEST_PROMPT and problem.mask == "none":
        best = min((first, *few), key=lambda c: -(-problem.seq_k // c.block_k) * c.block_k)
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
