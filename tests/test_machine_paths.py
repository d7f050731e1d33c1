"""The usual way through a loop: what it leaves out, and that it is what is executed."""

from __future__ import annotations

import pytest

from lib_rocm_sd.arch import table
from lib_rocm_sd.machine import paths
from lib_rocm_sd.machine.classify import Kind
from lib_rocm_sd.machine.listing import Function, Instruction
from lib_rocm_sd.machine.mix import Mix

ARCH = table()["gfx1030"]
EXP, ADD, DOT = "v_exp_f32_e32", "v_add_f32_e32", "v_dot2_f32_f16"
LOAD, READ, AGAIN, END = "global_load_dword", "ds_read_b128", "s_cbranch_scc0", "s_endpgm"


def passed(*code: tuple[str, int] | str, times: tuple[int, ...] = ()) -> Mix:
    """One pass of a loop, with `times` for the loops inside it."""
    pairs = [(each, None) if isinstance(each, str) else each for each in code]
    made = tuple(Instruction((name,), target) for name, target in pairs)
    return paths.usual_pass(Function("kernel", made), ARCH, lambda inner: [*times][: len(inner)])


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


def test_what_loads_counts_and_doing_all_again_does_not() -> None:
    assert passed(EXP, ("s_cbranch_scc0", 3), LOAD, (AGAIN, 0), END).of(Kind.GLOBAL) == 1
    again = passed(EXP, ("s_cbranch_scc0", 4), LOAD, DOT, (AGAIN, 0), END)
    assert (again.of(Kind.GLOBAL), again.of(Kind.MATRIX)) == (0, 0)


def test_a_loop_inside_is_passed_as_often_as_is_said() -> None:
    code = (EXP, READ, DOT, (AGAIN, 1), ADD, READ, (AGAIN, 5), (AGAIN, 0), END)
    mix = passed(*code, times=(8, 3))
    assert mix.of(Kind.MATRIX) == 8 and mix.of(Kind.LDS) == 8 + 3
    assert mix.of(Kind.VECTOR) == mix.of(Kind.TRANSCENDENTAL) == 1


def test_no_loop_over_keys() -> None:
    with pytest.raises(paths.NoWayError, match="0 outer loops"):
        passed(ADD, (AGAIN, 0), END)
    with pytest.raises(paths.NoWayError, match="2 outer loops"):
        passed(EXP, (AGAIN, 0), EXP, (AGAIN, 2), END)


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_the_usual_way_is_about_what_is_executed(gfx: str) -> None:
    pytest.importorskip("tinygrad", reason="no tinygrad, which decodes AMD's instructions")
    from lib_rocm_sd.machine import pairs
    from lib_rocm_sd.ops import attention_kernel
    from tests.amdgpu.launch import missing
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
        usual, executed = (pairs.of(mix, arch, config.block_q * config.block_k) for mix in mixes)
        assert usual.matrix == executed.matrix
        assert usual.transcendental == pytest.approx(executed.transcendental, rel=0.05)
        assert usual.estimated_cycles == pytest.approx(executed.estimated_cycles, rel=0.15)
