"""kernels/attention.hip, unchanged, executed as each matrix unit would, against float64."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionParams, configs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from tests import executed
from tests.ops.attention.judge import numbers
from tests.ops.attention.layouts import LAYOUTS, lay_out
from tests.ops.running import compute, sanitized
from tests.verify import simt
from tests.verify.simt.attention import (
    HEAD_DIMS,
    UNITS,
    Setting,
    attend,
    compare,
    draw,
    key_lengths,
    random_mask,
)
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

LENGTHS = ((1, 1), (17, 15), (77, 203), (113, 77), (64, 64), (65, 63), (15, 129), (33, 1), (1, 231))
"""Queries, keys: ones, primes, whole tiles and their neighbours."""
HALVES = ("float16", "bfloat16")


def check(setting: Setting, *inputs: torch.Tensor | None, scale: float | None = None) -> None:
    """No worse than torch in the same half type. NaN anywhere fails too."""
    q, k, v, mask = (*inputs, None)[:4]
    assert q is not None and k is not None and v is not None
    assert compare(setting, q, k, v, mask, scale) == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("gfx", UNITS)
def test_head_dims(gfx: str, head_dim: int) -> None:
    """Every unit sees every head_dim; half type, lengths, layouts and scheduling go round."""
    turn = UNITS.index(gfx) + HEAD_DIMS.index(head_dim)
    for step in (0, 1):
        seq_q, seq_k = LENGTHS[(2 * turn + step) % len(LENGTHS)]
        problem = AttentionProblem(2, 3, seq_q, seq_k, head_dim, HALVES[turn % 2])
        layouts = [LAYOUTS[(turn + step + i) % len(LAYOUTS)] for i in range(3)]
        check(Setting(gfx, seed=turn + step), *draw(problem, layouts))


@pytest.mark.parametrize("head_dim", sorted({*range(8, 257, 8)} - {*HEAD_DIMS}))
def test_the_other_head_dims(head_dim: int) -> None:
    turn = head_dim // 8
    problem = AttentionProblem(1, 2, 37, 77, head_dim, HALVES[turn % 2])
    check(Setting(UNITS[turn % len(UNITS)], turn), *draw(problem))


@pytest.mark.parametrize("gfx", UNITS)
def test_lengths(gfx: str) -> None:
    dtype = HALVES[UNITS.index(gfx) % 2]
    for seed, (seq_q, seq_k) in enumerate(LENGTHS):
        check(Setting(gfx, seed), *draw(AttentionProblem(1, 2, seq_q, seq_k, 40, dtype)))


@pytest.mark.parametrize("head_dim", [64, 160, 512])
@pytest.mark.parametrize("gfx", UNITS)
def test_every_config(gfx: str, head_dim: int) -> None:
    dtype = HALVES[(UNITS.index(gfx) + head_dim // 32) % 2]
    problem = AttentionProblem(1, 2, 77, 131, head_dim, dtype)
    configs = MatrixAttention().configs(Setting(gfx).arch, problem)
    for index in range(1, len(configs)):
        check(Setting(gfx, index, config=index), *draw(problem))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gfx", UNITS)
def test_layouts(gfx: str, layout: str) -> None:
    dtype = HALVES[UNITS.index(gfx) % 2]
    problem = AttentionProblem(2, 2, 49, 77, 40, dtype)
    check(Setting(gfx), *draw(problem, (layout,) * 3))


def test_one_tensor_for_q_k_and_v() -> None:
    qkv = torch.randn((2, 33, 3, 2, 64), generator=torch.Generator().manual_seed(1)).half()
    check(Setting("gfx1100"), qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])


def test_scale() -> None:
    q, k, v = draw(AttentionProblem(1, 2, 20, 40, 64))
    check(Setting("gfx1200"), q, k, v, scale=0.5)
    check(Setting("gfx1200"), q, k, v, scale=0.0)


MASKS = ("bool", "float16", "bfloat16", "float32")
MASK_SHAPES = ((2, 3, 50, 77), (2, 1, 50, 77), (1, 3, 1, 77), (1, 1, 1, 77), (2, 3, 50, 1))
"""Against (batch, heads, queries, keys) = (2, 3, 50, 77): what is 1 is broadcast by stride 0."""


@pytest.mark.parametrize("dtype", MASKS)
@pytest.mark.parametrize("gfx", UNITS)
def test_masks(gfx: str, dtype: str) -> None:
    turn = UNITS.index(gfx) + MASKS.index(dtype)
    head_dim = (40, 64, 160, 512)[turn % 4]
    problem = AttentionProblem(2, 3, 50, 77, head_dim, HALVES[turn % 2])
    inputs = draw(problem)
    for step in range(2):
        shape = MASK_SHAPES[(turn + 2 * step) % len(MASK_SHAPES)]
        check(Setting(gfx, turn + step), *inputs, random_mask(shape, dtype))


@pytest.mark.parametrize("gfx", UNITS)
def test_strided_masks(gfx: str) -> None:
    inputs = draw(AttentionProblem(2, 3, 50, 77, 64))
    transposed = random_mask((2, 3, 77, 50), "float32").transpose(2, 3)
    transposed[..., 0] = 0.0
    check(Setting(gfx), *inputs, transposed)
    check(Setting(gfx), *inputs, random_mask((50, 155), "float32")[:, 1::2].fill_(0.5))


@pytest.mark.parametrize("head_dim", [40, 72, 128, 512])
@pytest.mark.parametrize("gfx", UNITS)
def test_key_lengths(gfx: str, head_dim: int) -> None:
    """What lies in tiles behind is not read: it is not a number."""
    dtype = HALVES[(UNITS.index(gfx) + head_dim // 8) % 2]
    seq_k = keys_of_several_tiles(gfx, head_dim)
    q, k, v = draw(AttentionProblem(3, 2, 33, seq_k, head_dim, dtype))
    lengths = (1, 77 - head_dim % 3, seq_k)
    setting = Setting(gfx, head_dim)
    block_k = configs(setting.arch, head_dim)[0].block_k
    clean = k.clone(), v.clone()
    for image, length in enumerate(lengths):
        for x in (k, v):
            x[image, -(-length // block_k) * block_k :] = math.nan
    out = attend(setting, q, k, v, key_lengths(*lengths))
    assert numbers(out, q, *clean, key_lengths(*lengths)).faults(True) == []


@pytest.mark.parametrize("gfx", UNITS)
def test_key_lengths_out_of_range_are_the_nearest(gfx: str) -> None:
    q, k, v = draw(AttentionProblem(3, 2, 17, 77, 40))
    made = attend(Setting(gfx), q, k, v, key_lengths(0, -5, 78))
    assert torch.equal(made, attend(Setting(gfx), q, k, v, key_lengths(1, 1, 77)))


def keys_of_several_tiles(gfx: str, head_dim: int) -> int:
    """The last of them in part; on sm_90 so many that a pipeline copies whole tiles, too."""
    if gfx != "sm_90":
        return 131
    return 531 if head_dim == 512 else 301


@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("head_dim", [40, 160, 512])
@pytest.mark.parametrize("gfx", UNITS)
def test_fully_masked_queries_give_zeros(gfx: str, head_dim: int, dtype: str) -> None:
    seq_k = keys_of_several_tiles(gfx, head_dim)
    q, k, v = draw(AttentionProblem(1, 2, 35, seq_k, head_dim))
    mask = random_mask((1, 2, 35, seq_k), dtype)
    mask[:, 1, 7] = False if dtype == "bool" else -math.inf
    # Nothing in the first tiles of keys, something in the last.
    mask[:, :, 9, :-1] = False if dtype == "bool" else -math.inf
    mask[:, :, 9, -1] = True if dtype == "bool" else 1.0
    out = attend(Setting(gfx), q, k, v, mask)
    exact = reference(AttentionInputs(q, k, v, mask))
    assert (out.view(1, 35, 2, head_dim)[:, 7, 1] == 0).all()
    assert (out - exact).abs().max() < 4e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("gfx", UNITS)
def test_a_query_with_the_least_bias_everywhere_attends_to_all(gfx: str, dtype: str) -> None:
    """It is finite, so it leaves out nothing where all keys have it."""
    q, k, v = draw(AttentionProblem(1, 2, 35, 77, 40))
    mask = random_mask((1, 1, 35, 77), dtype)
    mask[..., 7, :] = torch.finfo(mask.dtype).min
    out = attend(Setting(gfx), q, k, v, mask)
    exact = reference(AttentionInputs(q, k, v, mask))
    assert exact[:, 7].abs().max() > 0.1
    assert (out - exact).abs().max() < 4e-3


def planted_specials(what: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (1, 20, 2, 40), (1, 70, 2, 40) with one NaN or infinity."""
    q, k, v = draw(AttentionProblem(1, 2, 20, 70, 40))
    where, value = what.split(" ")
    target = {"q": q[0, 3, 1, 5:6], "k": k[0, 66, 1, 5:6], "v": v[0, 66, 1, 5:6]}[where]
    target.fill_(float(value))
    return q, k, v


@pytest.mark.parametrize(
    "what", [f"{x} {value}" for x in "qkv" for value in ("nan", "inf", "-inf")]
)
@pytest.mark.parametrize("gfx", UNITS)
def test_nan_and_infinity_propagate(gfx: str, what: str) -> None:
    inputs = planted_specials(what)
    out, exact = attend(Setting(gfx), *inputs).double(), reference(AttentionInputs(*inputs))
    assert not exact.isfinite().all()
    torch.testing.assert_close(out, exact, rtol=0, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("scale", [None, 0.125, -1.0])
@pytest.mark.parametrize("gfx", UNITS)
def test_equal_scores_of_60000_squared(gfx: str, scale: float | None) -> None:
    """Such a score times the scale, rounded to float32, is off by 30 and more."""
    q, k, v = draw(AttentionProblem(1, 2, 20, 131, 40))
    q[:], k[:] = 60000.0, 60000.0
    assert (
        attend(Setting(gfx), q, k, v, None, scale) - reference(AttentionInputs(q, k, v))
    ).abs().max() < 1e-3


def test_a_row_of_minus_infinity_without_a_mask_is_nan() -> None:
    q, k, v = draw(AttentionProblem(1, 1, 5, 70, 40))
    q[0, 2] = 1.0
    k[:] = -math.inf
    assert attend(Setting("gfx1100"), q, k, v)[0, 2].isnan().all()


@pytest.mark.parametrize("head_dim", [40, 160, 512])
@pytest.mark.parametrize("gfx", UNITS)
def test_memory_and_undefined_behaviour(gfx: str, head_dim: int) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    turn = UNITS.index(gfx) + HEAD_DIMS.index(head_dim)
    setting = Setting(gfx, turn, sanitized("address,undefined"))
    seq_k = keys_of_several_tiles(gfx, head_dim)
    problem = AttentionProblem(1, 2, 17, seq_k, head_dim, HALVES[turn % 2])
    mask = random_mask((1, 2, 17, seq_k), MASKS[turn % 4])
    for layout in ("plain", "misaligned"):
        check(setting, *draw(problem, (layout,) * 3), mask)


@pytest.mark.parametrize("head_dim", [40, 160, 512])
@pytest.mark.parametrize("gfx", UNITS)
def test_no_races(gfx: str, head_dim: int) -> None:
    """Lanes share memory across barriers only, work-groups write apart."""
    turn = UNITS.index(gfx) + HEAD_DIMS.index(head_dim)
    setting = Setting(gfx, turn, sanitized("thread"))
    seq_k = keys_of_several_tiles(gfx, head_dim)
    check(setting, *draw(AttentionProblem(2, 2, 65, seq_k, head_dim, HALVES[turn % 2])))


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
@pytest.mark.parametrize(("head_dim", "seq_q"), [(64, 160), (80, 160), (128, 160), (128, 170)])
def test_pipelines_with_sanitizers(head_dim: int, seq_q: int, sanitize: str) -> None:
    """With all queries of a work-group, and a rest of them: at 128 one that waves share, or not."""
    setting = Setting("sm_90", 1, sanitized(sanitize))
    check(setting, *draw(AttentionProblem(1, 2, seq_q, 300, head_dim, "float16")))


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
@pytest.mark.parametrize("head_dim", [88, 104])
def test_queries_in_lds_whose_rows_end_in_eight_columns(head_dim: int, sanitize: str) -> None:
    setting = Setting("sm_90", 1, sanitized(sanitize))
    for seq_q in (26, 150):
        check(setting, *draw(AttentionProblem(1, 1, seq_q, 130, head_dim, "float16")))


class Backwards(ShimLaunch):
    """Has the kernel read q, k and v from their last row to the first: a stride that is right in
    64 bits only, as that of rows further apart than there is memory for here.
    """

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        assert isinstance(params, AttentionParams)
        for name, rows in (("q", params.seq_q), ("k", params.seq_k), ("v", params.seq_k)):
            strides = getattr(params, f"{name}_stride")
            setattr(params, name, getattr(params, name) + 2 * strides[1] * (rows - 1))
            strides[1] = -strides[1]
        params.aligned = 0
        super().__call__(spec, grid, block, params, device)


@pytest.mark.parametrize("head_dim", [40, 512])
@pytest.mark.parametrize("gfx", UNITS)
def test_strides_of_rows_have_64_bits(gfx: str, head_dim: int) -> None:
    arch = by_gfx(gfx)
    assert arch is not None
    q, k, v = draw(AttentionProblem(1, 2, 37, 300, head_dim))
    for config in configs(arch, head_dim)[: None if gfx == "sm_90" else 1]:
        launch = Backwards(arch)
        with launch.knows(q, k, v):
            found = compute(ATTENTION, MatrixAttention(), launch, config, AttentionInputs(q, k, v))
        assert numbers(found, q.flip(1), k.flip(1), v.flip(1)).faults(True) == [], config


@pytest.mark.parametrize("head_dim", [40, 80, 128])
def test_keys_out_of_reach_of_addresses_that_move(head_dim: int) -> None:
    """Copies keep the upper half of their addresses; here they reach 4 KiB instead of 4 GiB."""
    q, k, v = draw(AttentionProblem(1, 2, 160, 300, head_dim, "float16"))
    near = simt.planted("nvidia/copies.h", "kReachBits = 32", "kReachBits = 12")
    check(Setting("sm_90", kernels_dir=near), q, k, v)
    unasked = simt.planted("nvidia/copies.h", "(u64)1 << kReachBits", "(u64)1 << 12")
    assert compare(Setting("sm_90", kernels_dir=unasked), q, k, v)


def test_misaligned_differs_from_plain_in_nothing() -> None:
    q, k, v = draw(AttentionProblem(1, 2, 33, 77, 72))
    plain = attend(Setting("gfx942"), q, k, v)
    q, k, v = (lay_out(x, "misaligned") for x in (q, k, v))
    other = attend(Setting("gfx942"), q, k, v)
    assert torch.equal(plain, other)


def test_the_order_of_waves_changes_nothing() -> None:
    q, k, v = draw(AttentionProblem(1, 2, 33, 131, 160))
    outs = [attend(Setting("gfx1100", seed), q, k, v) for seed in range(6)]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("head_dim", [40, 64, 128, 160])
def test_tiles_fit_the_lds_of_a_small_card(head_dim: int) -> None:
    """The kernel asserts it as it is compiled; at 160 rings of tiles would not fit."""
    q, k, v = draw(AttentionProblem(1, 2, 65, 131, head_dim, "float16"))
    arch = by_gfx("sm_80")
    assert arch is not None
    for config in range(len(configs(arch, head_dim))):
        check(Setting("sm_80", config=config), q, k, v)
