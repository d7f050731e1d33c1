"""`inspect --beside-triton`: what it counts is what is executed."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="no triton: pip install -r requirements/triton.txt")
pytest.importorskip("tinygrad", reason="no tinygrad, which decodes AMD's instructions")

from lib_rocm_sd.arch import table
from lib_rocm_sd.commands import inspect
from lib_rocm_sd.lab.cycles import Kind
from lib_rocm_sd.lab.listing import Function, Instruction
from lib_rocm_sd.lab.loops import analysed
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests.verify.amdgpu.launch import missing
from tests.verify.amdgpu.test_amdgpu_triton import executable, run
from tests.verify.simt.attention import draw
from tools import beside_triton, pairs, triton_attention

COUNTS = ("matrix", "transcendental", "vector", "vector_slots", "scalar", "lds")


@pytest.mark.parametrize(("gfx", "queries"), [("gfx1100", 64), ("gfx942", 128)])
def test_what_stands_in_tritons_loop_is_what_a_pass_executes(gfx: str, queries: int) -> None:
    arch = table()[gfx]
    config = triton_attention.TritonConfig(queries, 32, 4, 1)
    made = triton_attention.compiled(arch, 64, config, tail=False, buffers=False)
    code = executable(made, arch)
    counts = []
    for tiles in (3, 2):
        problem = AttentionProblem(1, 1, queries, 32 * tiles, 64, "float16", "none")
        counts.append(run(arch, code, config, *draw(problem))[1])
    executed = pairs.per_pair(beside_triton.mix_between(*counts), arch, 32 * queries).as_dict()
    standing = beside_triton.tritons_loop(made, arch, config).as_dict()
    assert {name: executed[name] for name in COUNTS} == {name: standing[name] for name in COUNTS}
    assert standing["transcendental"] > 1 and standing["vector"] > 1
    # A ds_bpermute moves four bytes of each lane, though none of LDS's.
    assert executed["lds_bytes"] <= standing["lds_bytes"] <= executed["lds_bytes"] + 1


@pytest.mark.parametrize("gfx", ["gfx1201", "gfx942"])
def test_our_passes_do_the_work_of_their_tiles(gfx: str) -> None:
    reason = missing(gfx)
    if reason:
        pytest.skip(reason)
    arch = table()[gfx]
    config = attention_kernel.configs(arch, 64)[0]
    row = beside_triton.ours_of(arch, 64, config)
    assert row.per_pair is not None and not row.failure
    # Two products of 64 columns; 16 x 16 x 16 to an instruction. One exponential for each pair.
    assert row.per_pair.matrix == 2 * 64 * arch.wave_size / 16**3
    assert 1 <= row.per_pair.transcendental < 1.2
    # Keys and values are read once for all queries of a work-group, and by some of its waves twice.
    assert 4 * 64 / config.block_q <= row.per_pair.global_bytes <= 1.5 * 4 * 64 / config.block_q
    assert row.vgprs > 0 and row.waves_per_simd > 0 and not row.scratch_bytes


def test_a_loop_with_a_condition_in_it_is_not_counted() -> None:
    arch = table()["gfx1100"]
    wmma = "v_wmma_f32_16x16x16_f16"
    loop = [(wmma, None), ("s_cbranch_scc1", 3), ("v_add_f32_e32", None), ("s_cbranch_scc0", 0)]
    code = [Instruction((name,), target) for name, target in [*loop, ("s_endpgm", None)]]
    function = Function("kernel", tuple(code))
    with pytest.raises(pairs.NoPairsError, match="conditional"):
        pairs.pairs_in_loop(function, arch, 256)
    straight = replace(
        function, instructions=(code[0], code[2], replace(code[3], target=0), code[4])
    )
    assert analysed(straight, arch).loops[0].mix.of(Kind.VECTOR) == 1
    assert pairs.pairs_in_loop(straight, arch, 256).vector == 32 / 256


def test_the_page_has_the_best_of_each_and_what_failed() -> None:
    counted = pairs.PerPair(1, 1, 6, 5, 0.1, 1, 16, 2, 800, 0.6)
    ours = beside_triton.Row("gfx1201", 64, beside_triton.OURS, "64x64", 100, per_pair=counted)
    theirs = replace(ours, kernel=beside_triton.TRITON, config="slow", per_pair=counted)
    fast = replace(theirs, config="fast", per_pair=replace(counted, estimated_cycles=700, vector=8))
    spilled = replace(fast, config="spilled", scratch_bytes=4)
    broken = replace(theirs, config="broken", per_pair=None, failure="did not compile")
    text = beside_triton.page([ours, theirs, fast, spilled, broken])
    assert "| gfx1201 | 64 | 64x64 | fast | 0.75 | 1.00 | 1.14 | 1.00 | 0.60 | 0.60 |" in text
    assert "Triton (fewest) | slow" in text and "spilled |" not in text
    assert "- gfx1201, head_dim 64, Triton broken: did not compile" in text
    assert "not measured on any GPU" in text


def test_only_attention_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    args = parser.parse_args(["--op", "conv", "--arch", "gfx1100", "--beside-triton"])
    assert inspect.main(args) == 2
    assert "--op attention" in capsys.readouterr().err
