"""Configs that are told apart by an argument only are tested as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lib_rocm_sd.arch import table
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.kernel import ConvConfig
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.trials.subject import Subject

OURS = next(v for v in CONVS["3x3"].variants if isinstance(v, MatrixConv))


def problem(side: int, channels: int = 1280) -> ConvProblem:
    plain = CONVS["3x3"].usual[0][1]
    return replace(
        plain,
        height=side,
        width=side,
        in_channels=channels,
        out_channels=channels,
        dtype="float16",
        in_rows=True,
    )


def configs(gfx: str) -> Iterator[ConvConfig]:
    for side in (8, 16, 24, 32, 64):
        yield from OURS.configs(table()[gfx], problem(side))


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942"])
def test_the_config_that_stands_for_others_has_their_kernels(gfx: str) -> None:
    found = [config for config in configs(gfx) if config.splits > 2]
    assert len({config.splits for config in found}) > 1
    for config in found:
        tested = OURS.tested_as(config)
        assert tested.splits == 2
        each = (OURS.specs(table()[gfx], problem(16), c) for c in (config, tested))
        assert len(set(map(tuple, each))) == 1


def test_one_that_is_not_split_stands_for_itself() -> None:
    whole = [config for config in configs("gfx1100") if config.splits <= 2]
    assert whole
    assert [OURS.tested_as(config) for config in whole] == whole


def test_what_stands_for_others_stands_for_itself() -> None:
    for op in ops():
        assert_stable(op)


def assert_stable(op: Op) -> None:  # type: ignore[type-arg]
    for variant in op.variants:
        for _, usual in op.usual:
            for config in variant.configs(table()["gfx1100"], usual):
                tested = variant.tested_as(config)
                assert variant.tested_as(tested) == tested


def test_a_trial_is_of_the_class() -> None:
    arch = table()["gfx1100"]
    first, *others = [config for config in configs("gfx1100") if config.splits > 1]
    alike = [c for c in others if replace(c, splits=first.splits) == first and c != first]
    assert alike
    one = Subject.of(CONVS["3x3"], OURS, first, problem(16), arch).identity
    assert all(Subject.of(CONVS["3x3"], OURS, c, problem(16), arch).identity == one for c in alike)
