"""All ops but attention on random calls: some under the SIMT shim, thousands on a GPU.

tests/ops/random/seeds.py says how there are more, or others.
"""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from tests import executed
from tests.ops.random.draw import FAMILIES, LARGE, SMALL
from tests.ops.random.seeds import FACTOR, FIRST_SEED, USUAL
from tests.ops.random.solve import CPU, GPU, call_of, solve
from tests.verify import simt
from tests.verify.simt.attention import UNITS

pytestmark = pytest.mark.usefixtures("one_thread")
AT_A_TIME = 8
SHIM = [
    pytest.param(
        family,
        gfx,
        marks=executed.known(by="shim") if USUAL else executed.always,
        id=f"{family} {gfx}",
    )
    for family in FAMILIES
    for gfx in UNITS
]


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize(("family", "gfx"), SHIM)
def test_under_the_shim(family: str, gfx: str) -> None:
    """Each unit other calls, waves in any order."""
    first = FIRST_SEED + 1000 * UNITS.index(gfx)
    found = solve(gfx, family, SMALL, range(first, first + max(1, round(FACTOR * AT_A_TIME))))
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str, part: int) -> None:
    each = max(1, round(FACTOR * 100))
    first = FIRST_SEED + 500_000 + part * each
    found = solve(GPU, family, LARGE, range(first, first + each))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_one_call(family: str) -> None:
    arch = by_gfx("gfx1100")
    assert arch is not None
    for seed in range(8):
        first, again = (call_of(family, SMALL, seed, arch) for _ in range(2))
        assert (first.problem, first.variant.name, first.config) == (
            again.problem,
            again.variant.name,
            again.config,
        )
        (inputs, story), (others, told) = first.inputs(CPU), again.inputs(CPU)
        assert story == told
        for x, y in zip(inputs, others, strict=True):
            if isinstance(x, torch.Tensor):
                assert x.stride() == y.stride()
                assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_calls_cover_what_they_should() -> None:
    """Among some hundreds, each trait is met often."""
    arch = by_gfx("gfx1100")
    assert arch is not None
    met: dict[str, int] = {}
    calls = [call_of(family, SMALL, seed, arch) for family in FAMILIES for seed in range(120)]
    for call in calls:
        _, story = call.inputs(CPU)
        told = f"{call.family}, {call.variant.name}, {call.problem}, {story}"
        for trait in TRAITS:
            met[trait] = met.get(trait, 0) + (trait in told)
    assert {trait: met[trait] for trait in TRAITS if met[trait] < 3} == {}


TRAITS = (
    *FAMILIES,
    *("torch + rocm_sd", "torch NCHW + rocm_sd", "bfloat16", "gate", "residual", "in place"),
    *("statistics", "embedding", "identity shortcut", "conv shortcut", "weights as they lie"),
    *("leaky relu", "prelu", "silu", "gate"),
    *("3x3 stride 2", "upsample", "NCHW", "NHWC", "SiLU", "added", "float32 gamma", "none gamma"),
    *("modulated, gated", "weights 1111", "rotary matrices", "of each image"),
    *("misaligned", "spread", "large", "small", "zeros", "nan", "inf", "-inf", "all gradients"),
)
