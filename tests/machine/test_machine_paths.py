"""The usual way through a loop: what it leaves out, and that it is what is executed."""

from __future__ import annotations

import pytest

from lib_rocm_sd.arch import table
from lib_rocm_sd.lab import loops
from lib_rocm_sd.lab.cycles import Kind, Mix
from lib_rocm_sd.lab.listing import Function, Instruction
from tools import pairs

ARCH = table()["gfx1030"]
EXP, ADD, DOT = "v_exp_f32_e32", "v_add_f32_e32", "v_dot2_f32_f16"
LOAD, READ, AGAIN, END = "global_load_dword", "ds_read_b128", "s_cbranch_scc0", "s_endpgm"
WAVE_BYTES = 128
"""What LOAD loads for a wave."""


def function(code: tuple[tuple[str, int] | str, ...]) -> Function:
    """Of mnemonics, a branch with where it leads."""
    loops = [(each, None) if isinstance(each, str) else each for each in code]
    return Function("kernel", tuple(Instruction((name,), target) for name, target in loops))


def passed(
    *code: tuple[str, int] | str, loads: int = 0, chunks: tuple[pairs.Chunks, ...] = ()
) -> Mix:
    """One pass of a loop that has to execute LOAD so often."""
    return pairs.usual_pass(function(code), ARCH, loads * WAVE_BYTES, chunks)


def test_the_shorter_side_of_a_branch_counts() -> None:
    mix = passed(
        *(EXP, ("s_cbranch_scc1", 5), ADD, ADD, ("s_branch", 6)),
        *(ADD, (AGAIN, 0), END),
    )
    assert (mix.of(Kind.VECTOR), mix.of(Kind.TRANSCENDENTAL)) == (1, 1)


def test_what_is_skipped_without_lanes_counts() -> None:
    mix = passed(EXP, ("s_cbranch_execz", 3), ADD, (AGAIN, 0), END)
    assert mix.of(Kind.VECTOR) == 1
    assert passed(EXP, ("s_cbranch_vccz", 3), ADD, (AGAIN, 0), END).of(Kind.VECTOR) == 0


def test_a_way_loads_what_it_has_to_and_no_more() -> None:
    code = (EXP, ("s_cbranch_scc0", 3), LOAD, ("s_cbranch_scc0", 6), LOAD, LOAD, (AGAIN, 0), END)
    for loads, found in ((0, 0), (1, 1), (2, 2), (3, 3)):
        assert passed(*code, loads=loads).of(Kind.GLOBAL) == found
    with pytest.raises(loops.NoWayError, match="no way"):
        passed(*code, loads=4)


def test_a_loop_over_chunks_is_passed_as_often_as_is_said() -> None:
    code = (EXP, READ, LOAD, DOT, (AGAIN, 1), ADD, READ, LOAD, (AGAIN, 6), (AGAIN, 0), END)
    chunks = (pairs.Chunks(8, WAVE_BYTES), pairs.Chunks(3, WAVE_BYTES))
    mix = passed(*code, loads=11, chunks=chunks)
    assert (mix.of(Kind.MATRIX), mix.of(Kind.LDS), mix.of(Kind.GLOBAL)) == (8, 11, 11)
    assert mix.of(Kind.VECTOR) == mix.of(Kind.TRANSCENDENTAL) == 1
    again = passed(*code, loads=0, chunks=(pairs.Chunks(2, 0),))  # the second is not usual
    assert (again.of(Kind.MATRIX), again.of(Kind.LDS)) == (2, 2)
    with pytest.raises(loops.NoWayError, match="2 loops over chunks"):
        passed(*code, chunks=(*chunks, *chunks))


def test_a_loop_that_loads_keys_is_passed_until_they_are_loaded() -> None:
    keys = (EXP, LOAD, READ, (AGAIN, 1), LOAD, (AGAIN, 4), (AGAIN, 0), END)
    assert passed(*keys, loads=10).of(Kind.LDS) == 5  # the other loop loads values
    assert passed(*keys, loads=10).of(Kind.GLOBAL) == 10


def test_no_loop_over_keys() -> None:
    with pytest.raises(loops.NoWayError, match="0 outer loops"):
        passed(ADD, (AGAIN, 0), END)
    with pytest.raises(loops.NoWayError, match="2 outer loops"):
        passed(EXP, (AGAIN, 0), EXP, (AGAIN, 2), END)


def usual(*code: tuple[str, int] | str) -> list[Mix]:
    ways = loops.Ways(function(code), ARCH)
    return [ways.usual_pass(index) for index in range(len(ways.loops))]


def test_a_pass_is_the_cheapest_on_which_something_is_loaded() -> None:
    """Of a last chunk, a whole one, and none: a product's loop."""
    chunk = (DOT, ("s_cbranch_scc1", 8), ("s_cbranch_scc0", 6))
    (mix,) = usual(*chunk, *(ADD, LOAD, ("s_branch", 8)), *(LOAD, LOAD), (AGAIN, 0), END)
    assert (mix.of(Kind.MATRIX), mix.of(Kind.VECTOR), mix.of(Kind.GLOBAL)) == (1, 0, 2)


def test_loops_inside_are_not_counted_and_where_nothing_is_loaded_the_cheapest_way_is() -> None:
    outer, inner = usual(LOAD, DOT, ("s_cbranch_scc1", 4), ADD, (AGAIN, 1), (AGAIN, 0), END)
    assert (outer.of(Kind.GLOBAL), outer.of(Kind.MATRIX)) == (1, 0)
    assert (inner.of(Kind.MATRIX), inner.of(Kind.VECTOR)) == (1, 0)


@pytest.mark.parametrize(("gfx", "apart"), [("gfx1100", 0.06), ("gfx942", 0.15)])
def test_the_usual_way_is_about_what_is_executed(gfx: str, apart: float) -> None:
    pytest.importorskip("tinygrad", reason="no tinygrad, which decodes AMD's instructions")
    from lib_rocm_sd.ops.attention import kernel as attention_kernel
    from tests.verify.amdgpu.launch import missing
    from tools import key_loop

    reason = missing(gfx)
    if reason:
        pytest.skip(reason)
    arch = table()[gfx]
    for head_dim in (64, 512):
        config = attention_kernel.configs(arch, head_dim)[0]
        mixes = [
            count(arch, "float16", head_dim, config)
            for count in (key_loop.usual_pass, key_loop.executed_pass)
        ]
        usual, counted = (
            pairs.per_pair(mix, arch, config.block_q * config.block_k) for mix in mixes
        )
        assert usual.matrix == counted.matrix
        assert usual.transcendental == pytest.approx(counted.transcendental, rel=0.05)
        assert usual.estimated_cycles == pytest.approx(counted.estimated_cycles, rel=apart)
