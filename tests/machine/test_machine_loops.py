"""From text to instructions, blocks and loops, on assembly written by hand."""

from __future__ import annotations

import pytest

from lib_rocm_sd.lab.cycles import NotUnderstoodError
from lib_rocm_sd.lab.listing import (
    Function,
    Instruction,
    ListingError,
    from_assembly,
    from_disassembly,
)
from lib_rocm_sd.lab.loops import blocks_of, loops_of, straight_blocks

NESTED = """
	.text
	.type	kernel,@function
kernel:                                 ; @kernel
; %bb.0:
	s_load_b64 s[0:1], s[2:3], 0x0
	v_dual_mov_b32 v1, 0 :: v_dual_add_f32 v2, v3, v4
.LBB0_1:                                ; =>This Loop Header: Depth=1
	v_add_f32_e32 v1, v1, v2            ; a comment
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
	ds_load_b128 v[4:7], v8
	s_cbranch_scc1 .LBB0_4
; %bb.3:
	v_exp_f32_e32 v9, v9
.LBB0_4:
	s_cbranch_scc0 .LBB0_2
; %bb.5:
	s_cbranch_vccnz .LBB0_1
.LBB0_6:
	s_endpgm
.Lfunc_end0:
	.size	kernel, .Lfunc_end0-kernel
	.section	.rodata,"a",@progbits
	.amdhsa_kernel kernel
	.end_amdhsa_kernel
"""

DISASSEMBLED = """
kernel.co:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001500 <kernel>:
	v_mov_b32_e32 v1, 0                                        // 000000001500: 7E020280
	v_add_f32_e32 v1, v1, v2                                   // 000000001504: 06020501
	s_delay_alu instid0(VALU_DEP_1) | instskip(NEXT) | instid1(VALU_DEP_2)// 000000001508: BF870112
	s_cbranch_scc0 65533                                       // 00000000150C: BFA1FFFD <kernel+4>
	s_endpgm                                                   // 000000001510: BFB00000
	s_code_end                                                 // 000000001514: BF9F0000
		...
"""


def _loops(function: Function) -> list[tuple[int, int, int | None, bool]]:
    blocks = blocks_of(function)
    return [
        (blocks[loop.header].first, loop.depth, loop.parent, loop.innermost)
        for loop in loops_of(blocks)
    ]


def _function(*edges: int | None | str) -> Function:
    """One instruction per edge: where it may branch to, None for none, "end", "jump N"."""
    made = []
    for edge in edges:
        if edge == "end":
            made.append(Instruction(("s_endpgm",)))
        elif isinstance(edge, str):
            made.append(Instruction(("s_branch",), int(edge.split()[1])))
        elif edge is None:
            made.append(Instruction(("v_nop",)))
        else:
            made.append(Instruction(("s_cbranch_scc0",), edge))
    return Function("f", tuple(made))


def test_assembly_becomes_instructions_with_targets() -> None:
    (function,) = from_assembly(NESTED)
    assert function.name == "kernel" and len(function.instructions) == 9
    assert function.instructions[1].mnemonics == ("v_dual_mov_b32", "v_dual_add_f32")
    assert [i.target for i in function.instructions] == [*[None] * 4, 6, None, 3, 2, None]


def test_a_nest_of_loops_is_found_outer_first() -> None:
    (function,) = from_assembly(NESTED)
    assert _loops(function) == [(2, 1, None, False), (3, 2, 0, True)]
    blocks = blocks_of(function)
    outer, inner = loops_of(blocks)
    starts = [blocks[index].first for index in sorted(inner.blocks)]
    assert starts == [3, 5, 6]
    assert [blocks[index].first for index in sorted(outer.blocks)] == [2, 7]
    assert [blocks[i].first for i in sorted(straight_blocks(blocks, [outer, inner]))] == [0, 8]


def test_a_disassembly_becomes_the_same() -> None:
    (function,) = from_disassembly(DISASSEMBLED)
    assert [i.mnemonic for i in function.instructions][2:4] == ["s_delay_alu", "s_cbranch_scc0"]
    assert function.instructions[3].target == 1
    assert _loops(function) == [(1, 1, None, True)]
    bare = DISASSEMBLED.replace("0000000000001500 <kernel>:", "kernel:").replace(" <kernel+4>", "")
    assert from_disassembly(bare) == [function]


def test_two_back_edges_to_one_header_are_one_loop() -> None:
    assert _loops(_function(None, None, 1, None, 1, "end")) == [(1, 1, None, True)]


def test_loops_side_by_side_and_a_block_that_loops_on_itself() -> None:
    assert _loops(_function(None, 1, None, 2, "end")) == [
        (1, 1, None, True),
        (2, 1, None, True),
    ]


def test_a_loop_with_two_entries_is_one_loop() -> None:
    # 0 -> 1 or 3; 1 -> 3 -> 1: entered at both ends
    assert _loops(_function(3, None, None, 1, "end")) == [(1, 1, None, True)]


def test_what_is_never_reached_has_no_loops() -> None:
    assert _loops(_function("jump 3", None, 1, "end")) == []


def test_a_call_is_not_followed() -> None:
    code = (Instruction(("s_swappc_b64",)), Instruction(("s_endpgm",)))
    with pytest.raises(NotUnderstoodError, match="s_swappc_b64 is not followed"):
        blocks_of(Function("f", code))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no instructions"),
        ("kernel:\n\twhat is this\n", "no instruction"),
        (DISASSEMBLED.replace("65533", "100"), "leads out of the function"),
        (DISASSEMBLED.replace("65533", "s[0:1]"), "has no distance"),
        (DISASSEMBLED.replace("v_mov_b32_e32 v1, 0 ", ".long 0x7e020280 "), "not decoded"),
    ],
)
def test_what_is_no_listing_raises(text: str, message: str) -> None:
    with pytest.raises(ListingError, match=message):
        from_disassembly(text)


def test_assembly_without_functions_or_labels_raises() -> None:
    with pytest.raises(ListingError, match="no functions"):
        from_assembly("\ts_endpgm\n")
    with pytest.raises(ListingError, match="a label that is not there"):
        from_assembly(NESTED.replace("\ts_cbranch_scc0 .LBB0_2", "\ts_cbranch_scc0 .LBB0_9"))
