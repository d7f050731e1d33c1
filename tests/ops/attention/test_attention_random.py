"""Attention on random problems against float64: hundreds under the SIMT shim, thousands on a GPU.

tests/ops/random/seeds.py says how there are more, or others.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.runtime import launcher
from tests import executed
from tests.ops.attention.judge import Numbers
from tests.ops.attention.layouts import ALL_LAYOUTS, lay_out
from tests.ops.attention.problems import LARGE, SMALL, Kind, draw
from tests.ops.attention.replay import GPU, Place, Result, every_config, solve
from tests.ops.random.seeds import FACTOR, FIRST_SEED, USUAL
from tests.verify import simt
from tests.verify.simt.attention import UNITS

pytestmark = pytest.mark.usefixtures("one_thread")
SEARCHED = (40, 64, 128, 160, 512)
"""Of these head_dims every config of the search space; of the others the default."""
OTHERS = ((8, 256), (24, 192), (72, 248), (120, 168), (80, 200))
"""Two for each unit."""
PER_CLASS = {"gfx1030": 4}
"""Dot products one by one take ten times as long as a matrix instruction."""


MASKS = ("none", "bool", "none", "float16", "none", "bfloat16", "none", "float32")


def classes(gfx: str, head_dims: Iterable[int], configs: int = 9) -> list[tuple[Place, Kind]]:
    """Up to so many configs of each head_dim; half types and masks go round."""
    found: list[tuple[Place, Kind]] = []
    for head_dim in head_dims:
        for index in range(min(configs, len(kernel.configs(Place(gfx).arch, head_dim)))):
            turn = len(found) + (UNITS.index(gfx) if gfx in UNITS else 0)
            dtype = kernel.DTYPES[(turn + turn // len(MASKS)) % 2]
            found.append((Place(gfx, index), Kind(dtype, head_dim, MASKS[turn % len(MASKS)])))
    return found


SHIM = [
    each
    for turn, gfx in enumerate(UNITS)
    for each in (*classes(gfx, SEARCHED), *classes(gfx, OTHERS[turn], 1))
]


def told(results: Iterable[Result]) -> str:
    """The problems that came out wrong, with the line that solves each again."""
    return "\n".join(str(result) for result in results if result.faults)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@(executed.known(by="shim") if USUAL else executed.always)
@pytest.mark.parametrize(("place", "kind"), SHIM, ids=str)
def test_under_the_shim(place: Place, kind: Kind) -> None:
    """Each problem a seed of its own, each config its own kernel, waves in any order."""
    count = max(1, round(FACTOR * PER_CLASS.get(place.gfx, 10)))
    first = FIRST_SEED + SHIM.index((place, kind)) * 1000
    results = solve(place, kind, SMALL, range(first, first + count))
    assert not told(results), told(results)


@pytest.fixture(scope="module")
def on_gpu() -> list[tuple[Place, Kind]]:
    """The classes that are solved on this machine's GPU, their kernels compiled side by side."""
    place = Place(GPU)
    others = sorted({*range(8, 257, 8)} - {*kernel.SHIPPED_HEAD_DIMS})
    found = [*every_config(place), *classes(GPU, others, 1)]
    launch = launcher.launcher_for(place.device, place.arch)
    assert isinstance(launch, launcher.Launcher)
    launch.build([where.spec(kind) for where, kind in found])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
def test_on_a_gpu(on_gpu: list[tuple[Place, Kind]], part: int) -> None:
    """Every head_dim; every config of the usual ones."""
    assert identify(Place(GPU).device).arch is not None
    found, each = [], max(1, round(FACTOR * 50))
    for turn, (place, kind) in enumerate(on_gpu[part::10]):
        first = FIRST_SEED + (part * 1000 + turn) * 1000
        found += solve(place, kind, LARGE, range(first, first + each))
    assert len(found) >= each
    assert not told(found), told(found)


CPU = torch.device("cpu")


def test_a_seed_is_one_problem() -> None:
    kind = Kind("bfloat16", 40, "float16")
    for seed in range(20):
        first, again = (draw(kind, seed, SMALL, CPU) for _ in range(2))
        assert first.story == again.story
        assert first.inputs[4] == again.inputs[4]
        for x, y in zip(first.inputs[:4], again.inputs[:4], strict=True):
            assert x is not None and y is not None
            assert x.stride() == y.stride()
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_stories_cover_what_they_should() -> None:
    """Among as many problems as the shim solves, each trait is met often."""
    stories = [draw(kind, seed, SMALL, CPU).story for _, kind in SHIM for seed in range(6)]
    traits = [
        "independent",
        "ties",
        "+-60000",
        "for each key more",
        "leads by",
        "keys from",
        "and back",
    ]
    traits += [
        "each 64 keys",
        "equal logits",
        "one query",
        "all but one",
        "is nan",
        "is inf",
        "is -inf",
    ]
    traits += ["extreme", "around 100", "a query without keys", "nothing before", "nothing from"]
    traits += ["causal", "scale -", "scale 0.0", "scale 1e-06", "left out -inf", *ALL_LAYOUTS]
    met = {trait: sum(trait in story for story in stories) for trait in traits}
    assert {trait: count for trait, count in met.items() if count < 3} == {}


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_layout_holds_what_was_laid_out(layout: str) -> None:
    x = torch.randn((2, 5, 3, 8), generator=torch.Generator().manual_seed(1)).half()
    view = lay_out(x, layout)
    dimension = {"repeated batch": 0, "repeated rows": 1, "repeated heads": 2}.get(layout)
    held = x if dimension is None else x.narrow(dimension, 0, 1).expand(x.shape)
    assert torch.equal(view, held)
    assert view.stride(3) == 1
    assert view.untyped_storage().nbytes() == 2 * (
        1
        + view.storage_offset()
        + sum((n - 1) * s for n, s in zip(x.shape, view.stride(), strict=True))
    )


def test_faults_say_what_is_wrong() -> None:
    good = Numbers(1e-4, 1e-4, 1e-5, 1e-5, 0.5, 0.0)
    assert good.faults(True) == []
    assert "3 elements" in Numbers(1e-4, 1e-4, 1e-5, 1e-5, 0.5, 3.0).faults(False)[0]
    assert "1.5 times" in Numbers(1e-4, 1e-4, 1e-5, 1e-5, 1.5, 0.0).faults(False)[0]
    worse = Numbers(3e-4, 1e-4, 2e-5, 1e-5, 0.5, 0.0)
    assert len(worse.faults(True)) == 2
    assert worse.faults(False) == []
