"""Which config a prompt's keys get, and what that saves in AMD's machine code."""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.arch import Arch, amd_table, table
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests.ops.running import compute
from tests.verify.amdgpu import launch
from tools import key_loop, pairs


def first(gfx: str, problem: AttentionProblem) -> kernel.AttentionConfig:
    return MatrixAttention().configs(table()[gfx], problem)[0]


def prompt(seq_k: int, head_dim: int = 40, mask: str = "none") -> AttentionProblem:
    return AttentionProblem(2, 8, 4096, seq_k, head_dim, "float16", mask)


@pytest.mark.parametrize("gfx", [gfx for gfx, row in table().items() if row.matrix != "dot2"])
@pytest.mark.parametrize("head_dim", [40, 64, 80])
def test_what_takes_the_tile_for_few_keys(gfx: str, head_dim: int) -> None:
    taken = {keys: first(gfx, prompt(keys, head_dim)).for_few_keys for keys in (77, 4096)}
    assert taken == {77: True, 4096: False}
    assert not first(gfx, prompt(77, head_dim, "float16")).for_few_keys


@pytest.mark.parametrize("keys", [1, 16, 64, 65, 80, 81, 96, 154, 231, 308, 320])
def test_it_is_taken_where_it_computes_fewer_columns(keys: int) -> None:
    usual = kernel.ordered(table()["gfx1100"], "float16", 40)[0]
    columns = {block_k: -(-keys // block_k) * block_k for block_k in (usual.block_k, 80)}
    taken = first("gfx1100", prompt(keys))
    assert taken.block_k == (80 if columns[80] < columns[usual.block_k] else usual.block_k)


def test_all_configs_stay_to_be_searched() -> None:
    for arch in amd_table().values():
        for keys in (77, 4096):
            found = MatrixAttention().configs(arch, prompt(keys))
            assert sorted(map(repr, found)) == sorted(map(repr, kernel.configs(arch, 40)))


def test_few_groups_take_a_narrow_config_on_the_development_card_only() -> None:
    few, many = (AttentionProblem(1, 1, rows, rows, 512) for rows in (4096, 16384))
    usual, narrow = kernel.configs(table()["sm_90"], 512)[:2]
    assert (first("sm_90", many), first("sm_90", few)) == (usual, narrow)
    assert narrow.block_q < usual.block_q
    loops, single = kernel.configs(table()["sm_90"], 64)[:2]
    half_filled, filled = (
        AttentionProblem(2, 20, 1024, 1024, 64),
        AttentionProblem(2, 10, 4096, 4096, 64),
    )
    assert (first("sm_90", filled), first("sm_90", half_filled)) == (loops, single)
    assert first("gfx942", few) == first("gfx942", many)


@pytest.mark.parametrize(
    ("gfx", "seq_k", "groups"), [("sm_90", 77, 1), ("sm_90", 81, 64), ("gfx1100", 77, 32)]
)
def test_groups_keep_the_keys_for_several_tiles_of_queries(
    gfx: str, seq_k: int, groups: int
) -> None:
    """Where all keys are one tile and copies pass no register; as if on one compute unit, which
    the 16 heads share.
    """
    config = next(each for each in kernel.configs(table()[gfx], 40) if each.for_few_keys)
    q, k = torch.zeros(2, 4096, 8, 40).half(), torch.zeros(2, seq_k, 8, 40).half()
    seen: list[tuple[int, int]] = []
    compute(
        ATTENTION,
        MatrixAttention(),
        lambda spec, grid, block, params, device: seen.append((grid, params.head_groups)),
        config,
        AttentionInputs(q, k, k),
    )
    assert seen == [(16 * groups, groups)]


def cycles(arch: Arch, config: kernel.AttentionConfig) -> float:
    """Estimated, of a SIMD, for 1024 of the pairs of a prompt's 77 keys."""
    mix = key_loop.executed_group(arch, "float16", 40, config, 77)
    return pairs.per_pair(mix, arch, config.block_q * 77).estimated_cycles


@pytest.mark.skipif(launch.missing() is not None, reason=str(launch.missing()))
@pytest.mark.parametrize(("gfx", "most"), [("gfx1100", 0.8), ("gfx1201", 0.85), ("gfx942", 0.95)])
def test_it_saves_cycles_on_a_prompt(gfx: str, most: float) -> None:
    """By the cost model, of machine code that is executed: an estimate, not a time."""
    arch = table()[gfx]
    usual = kernel.ordered(arch, "float16", 40)[0]
    assert cycles(arch, first(gfx, prompt(77))) < most * cycles(arch, usual)
