"""Key lengths in a mask's place: what torch's operators make of them, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from tests.ops.running import compute
from tests.verify.simt.attention import draw, key_lengths

LENGTHS = key_lengths(1, 7, 15)
ROWS = torch.arange(15) < LENGTHS
TORCHS = ATTENTION.variants[2:]


@pytest.mark.parametrize("variant", TORCHS, ids=lambda each: each.name)
def test_they_are_a_mask_of_the_first_keys_to_torch(variant: Any) -> None:
    q, k, v = draw(AttentionProblem(3, 2, 5, 15, 24))
    made = [
        compute(ATTENTION, variant, None, None, AttentionInputs(q, k, v, mask))
        for mask in (LENGTHS, ROWS)
    ]
    assert torch.equal(*made)


def test_gradients_and_the_log_sum_exp_are_those_of_that_mask() -> None:
    found = []
    for mask in (LENGTHS, ROWS):
        q, k, v = (x.float().requires_grad_() for x in draw(AttentionProblem(3, 2, 5, 15, 24)))
        output = functional.attention(q, k, v, mask)
        lse = functional.attention_and_lse(q.detach(), k.detach(), v.detach(), mask)[1]
        found.append([lse, *torch.autograd.grad(output.square().sum(), (q, k, v))])
    assert all(map(torch.equal, *found))
    assert found[0][2][0, 1:].abs().max() == 0  # keys that do not count


@pytest.mark.parametrize(
    "mask", [LENGTHS[:2], LENGTHS.expand(3, 2, 1, 1), LENGTHS.expand(3, 1, 5, 15), LENGTHS.long()]
)
def test_what_is_no_number_for_each_image_is_refused(mask: torch.Tensor) -> None:
    q, k, v = draw(AttentionProblem(3, 2, 5, 15, 24))
    with pytest.raises(ValueError, match="mask"):
        functional.attention(q, k, v, mask)


def test_the_kernel_is_the_one_without_a_mask_that_also_reads_them() -> None:
    arch = by_gfx("gfx1100")
    assert arch is not None
    problem = AttentionProblem(2, 8, 4096, 77, 64, mask=kernel.LENGTHS)
    few, *_ = MatrixAttention().configs(arch, problem)
    assert few.for_few_keys
    plain = kernel.spec("float16", 64, "none", few)
    own = kernel.spec("float16", 64, kernel.LENGTHS, few)
    assert own.defines == (*plain.defines, ("KEY_LENGTHS", 1))
    assert kernel.ordered(arch, "float16", 64, kernel.LENGTHS) == kernel.ordered(
        arch, "float16", 64
    )
    assert MatrixBackward().refusals(arch, problem)[0].startswith("a int32 mask")
