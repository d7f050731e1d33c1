"""What is planned for real sizes of Stable Diffusion's VAE, without its memory."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from lib_rocm_sd.hosts.read import vae as reading
from lib_rocm_sd.vae import policy
from lib_rocm_sd.vae.forecast import Chosen
from lib_rocm_sd.vae.plan import MIN_ROWS, BandPlanner
from lib_rocm_sd.vae.policy import Plans, Wish
from lib_rocm_sd.vae.steps import Recipe
from tests import doubles
from tests.calls import calls_of
from tests.vae import vae_models

MIB, GIB = 1 << 20, 1 << 30


@lru_cache(maxsize=2)
def recipe(role: str) -> Recipe:
    """Stable Diffusion's coder, its weights on no device."""
    return vae_models.standard(role)


def planner(role: str, pixels: int, chosen: Chosen = vae_models.way) -> BandPlanner:
    size = pixels // 8 if role == "decoder" else pixels
    return Plans(recipe(role), torch.float16, chosen).planner((1, size, size))


def test_arithmetic_is_what_is_known_of_this_vae() -> None:
    """8.2 TFLOP at 1024x1024 with phase convolutions, the attention's 0.55 beside."""
    whole = planner("decoder", 1024).whole()
    assert 8.2e12 < whole.cost < 9.3e12


@pytest.mark.parametrize(
    ("role", "pixels", "budget", "host", "slowdown"),
    [
        ("decoder", 1024, 800 * MIB, 0, 1.2),
        ("decoder", 1024, 512 * MIB, 0, 1.5),
        ("decoder", 2048, 2 * GIB, 0, 1.4),
        ("decoder", 2048, 512 * MIB, 16 * GIB, 2.5),
        ("decoder", 4096, 2 * GIB, 16 * GIB, 2.5),
        ("decoder", 8192, 4 * GIB, 64 * GIB, 2.5),
        ("encoder", 2048, 1 * GIB, 0, 1.5),
        ("encoder", 4096, 2 * GIB, 0, 1.5),
    ],
)
def test_budgets_that_can_be_kept(
    role: str, pixels: int, budget: int, host: int, slowdown: float
) -> None:
    made = planner(role, pixels)
    found = made.cheapest(budget, host)
    assert found is not None
    assert found.peak_bytes <= budget and found.host_bytes <= host
    assert found.cost <= slowdown * made.whole().cost
    assert found.legs[0].start == 0 and found.legs[-1].stop == len(recipe(role).steps)
    for before, after in zip(found.legs, found.legs[1:], strict=False):
        assert before.stop == after.start and before.keep in ("device", "host")
    assert found.legs[-1].keep == "output"
    assert all(leg.rows is None or leg.rows >= MIN_ROWS for leg in found.legs)


def test_more_memory_never_costs_more() -> None:
    made = planner("decoder", 2048)
    costs = []
    for budget in (768, 1024, 1536, 2048, 3072, 4096, 5000):
        found = made.cheapest(budget * MIB, 64 * GIB)
        assert found is not None
        costs.append(found.cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(made.whole().cost, rel=1e-4)


def test_the_smallest_plan_is_the_smallest() -> None:
    made = planner("decoder", 1024)
    least = made.smallest(0)
    assert made.cheapest(least.peak_bytes - 1, 0) is None
    fits = made.cheapest(least.peak_bytes, 0)
    assert fits is not None and fits.peak_bytes <= least.peak_bytes


def test_torchs_convolutions_are_known_to_need_more() -> None:
    both = (vae_models.way, vae_models.torchs)
    ours, torchs = (planner("decoder", 1024, chosen).whole().peak_bytes for chosen in both)
    assert torchs > 1.5 * ours


def plans() -> Plans:
    return Plans(recipe("decoder"), torch.float16, vae_models.way)


def test_auto_takes_the_whole_frame_if_half_of_the_memory_holds_it() -> None:
    size = (1, 128, 128)
    plan, links = plans().plan(size, Wish("Auto"), 4 * GIB, 0)
    assert plan.whole and links.batch == 1
    plan, _ = plans().plan(size, Wish("Auto"), 1 * GIB, 0)
    assert not plan.whole and plan.peak_bytes <= GIB // 2


def test_performance_takes_the_whole_frame_if_the_memory_holds_it() -> None:
    assert plans().plan((1, 128, 128), Wish("Performance"), 950 * MIB, 0)[0].whole
    assert not plans().plan((1, 128, 128), Wish("Performance"), 800 * MIB, 0)[0].whole


def test_memory_takes_little_at_a_bearable_cost() -> None:
    whole = planner("decoder", 1024).whole()
    plan, _ = plans().plan((1, 128, 128), Wish("Memory"), 64 * GIB, 16 * GIB)
    assert not plan.whole
    assert plan.peak_bytes <= whole.peak_bytes // 3 and plan.cost <= 2.5 * whole.cost


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
def test_a_budget_holds_at_every_level(level: str) -> None:
    plan, _ = plans().plan((1, 128, 128), Wish(level, budget_bytes=600 * MIB), 64 * GIB, 0)
    assert plan.peak_bytes <= 600 * MIB


def test_what_fits_nowhere_gets_the_least() -> None:
    plan, _ = plans().plan((1, 128, 128), Wish("Auto", budget_bytes=1), 64 * GIB, 0)
    assert plan == planner("decoder", 1024).smallest(0)


def test_a_batch_goes_at_once_where_it_fits() -> None:
    made = plans()
    plan, links = made.plan((4, 64, 64), Wish("Auto"), 8 * GIB, 0)
    assert plan.whole and links.batch == 4
    plan, links = made.plan((4, 64, 64), Wish("Auto"), 1 * GIB, 0)
    assert plan.whole and links.batch == 1
    plan, links = made.plan((4, 64, 64), Wish("Memory"), 8 * GIB, 0)
    assert not plan.whole and links.batch == 1


def test_plans_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = plans(), []
    once = policy.choose
    monkeypatch.setattr(policy, "choose", lambda *a: calls.append(a) or once(*a))  # type: ignore[func-returns-value]
    for free in (3_000_000_000, 3_000_500_000, 2_999_999_000):
        made.plan((1, 128, 128), Wish("Auto"), free, 1 << 30)
    assert len(calls) == 1
    for height in range(40, 120):
        made.plan((1, height, 64), Wish("Auto"), 1 << 30, 1 << 30)
    assert len(made._plans) == policy.PLANS_KEPT
    assert len(made._planners) == policy.PLANNERS_KEPT


@pytest.mark.parametrize("side", [64, 128, 512])
def test_planning_is_little_work(side: int) -> None:
    """A first decode is not to be longer by much: a quarter of a million calls take 0.04 s."""
    made = Plans(recipe("decoder"), torch.float16, lru_cache(maxsize=None)(vae_models.way))
    wish = Wish("Memory")
    assert calls_of(lambda: made.plan((1, side, side), wish, 64 * GIB, 16 * GIB)) < 500_000


def test_host_memory_is_asked_of_the_operating_system() -> None:
    assert 1 << 20 < policy.host_available_bytes() < 1 << 44


def test_a_recipe_of_another_module_is_read_alike() -> None:
    """The meta module above is read without the checks on weights; with them it is refused."""
    with torch.device("meta"):
        module = doubles.module_of(doubles.VAE).Decoder(**vae_models.config((128, 256)))
    assert any("meta" in reason for reason in reading.read(module).reasons)
