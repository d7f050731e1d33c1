"""Which problems are measured for which: new sizes of a picture cost no new measurement."""

from __future__ import annotations

import pytest

from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem


@pytest.mark.parametrize("seq", [3700, 4096, 5120])
def test_pictures_of_about_the_same_size_are_measured_once(seq: int) -> None:
    like = ATTENTION.measured_as(AttentionProblem(2, 8, seq, seq, 40))
    assert like == AttentionProblem(2, 8, 4096, 4096, 40)


def test_few_keys_are_measured_as_they_are_and_very_many_as_fewer() -> None:
    assert ATTENTION.measured_as(AttentionProblem(2, 8, 4096, 77, 40)).seq_k == 77
    assert ATTENTION.measured_as(AttentionProblem(1, 8, 65536, 65536, 64)).seq_q == 16384
    assert ATTENTION.measured_as(AttentionProblem(1, 1, 99, 99, 512)).seq_q == 4096


def test_a_convolution_is_measured_at_one_size() -> None:
    op = CONVS["3x3"]
    sizes = [(64, 64), (150, 90), (1024, 1024), (1, 999)]
    found = {op.measured_as(ConvProblem("3x3", 1, *size, 128, 128, norm=True)) for size in sizes}
    assert found == {ConvProblem("3x3", 1, 512, 512, 128, 128, norm=True)}
    assert op.measured_as(ConvProblem("3x3", 3, 9, 9, 512, 512)).height == 256
