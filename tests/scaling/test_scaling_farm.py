"""The simulated farm: closed forms where there are some, and the command."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from lib_rocm_sd.__main__ import main
from lib_rocm_sd.commands import scaling as command
from lib_rocm_sd.lab import scaling as queueing
from lib_rocm_sd.lab.scaling import POLICIES, Request, drawn, simulate

alone, pairs, when_idle = (POLICIES[name] for name in ("one card", "two cards", "two when idle"))


def mean_wait_s(per_s: float, service_s: float, cards: int) -> float:
    """Mean wait in an M/M/c queue: random arrivals, exponential service times (Erlang's C formula).

    Infinite where requests arrive as fast as they are served, or faster.
    """
    offered = per_s * service_s
    if offered >= cards:
        return math.inf
    term, total = 1.0, 1.0
    for k in range(1, cards):
        term *= offered / k
        total += term
    last = term * offered / cards * cards / (cards - offered)
    return last / (total + last) * service_s / (cards - offered)


def exponential(requests: list[Request], seed: int) -> list[Request]:
    """The same with exponential times of service."""
    drawn_ = random.Random(seed)
    return [Request(each.at_s, (each.seconds[0] * drawn_.expovariate(1.0),)) for each in requests]


@pytest.mark.parametrize(("cards", "load"), [(1, 0.7), (4, 0.6), (16, 0.8)])
def test_the_mean_wait_is_erlangs(cards: int, load: float) -> None:
    kinds = [(1.0, (1.0,))]
    runs = [
        simulate(exponential(drawn(40_000, load * cards, kinds, seed), seed), cards, alone)
        for seed in range(4)
    ]
    wait_s = sum(found.mean_wait_s for found in runs) / len(runs)
    assert wait_s == pytest.approx(mean_wait_s(load * cards, 1.0, cards), rel=0.1)
    for found in runs:
        assert found.per_s == pytest.approx(load * cards, rel=0.02)
        assert found.busy == pytest.approx(load, rel=0.03)


def test_the_mean_wait_of_equal_requests_is_half_of_it() -> None:
    """Pollaczek and Khinchine: without variance of service, M/D/1 waits half as long as M/M/1."""
    found = simulate(drawn(100_000, 0.7, [(1.0, (1.0,))], seed=3), 1, alone)
    assert found.mean_wait_s == pytest.approx(mean_wait_s(0.7, 1.0, 1) / 2, rel=0.05)


def test_erlangs_formula() -> None:
    assert mean_wait_s(0.5, 1.0, 1) == pytest.approx(1.0)
    # Two cards, offered 1: C = 1/3, so the wait is 1/3 of a service.
    assert mean_wait_s(1.0, 1.0, 2) == pytest.approx(1 / 3)
    assert mean_wait_s(2.0, 1.0, 2) == math.inf


def test_a_few_requests_by_hand() -> None:
    both = (4.0, 3.0)
    made = [Request(0.0, both), Request(0.0, both), Request(1.0, both)]
    one = simulate(made, 2, alone)
    assert (one.p50_s, one.p99_s, one.mean_s) == (4.0, 7.0, 5.0)
    two = simulate(made, 2, pairs)
    assert (two.p50_s, two.p99_s, two.mean_s) == (6.0, 8.0, (3 + 6 + 8) / 3)
    # The first has one behind it, so it takes one card; the third comes when nothing is free.
    idle = simulate(made, 2, when_idle)
    assert (idle.p50_s, idle.p99_s) == (4.0, 6.0)
    assert idle.busy == pytest.approx((4 + 4 + 2 * 3) / 2 / 7)


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [queueing.percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert queueing.percentile([7.0], 0.5) == 7.0


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "REQUESTS", 500)
    path = tmp_path / "scaling.json"
    options = ["--link", "pcie", "--cards", "2", "--cards", "8"]
    assert main(["scaling", *options, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert "A model, not a measurement" in told
    assert "off by" in told and "fitted" in told
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {row["link"] for row in found["steps"]} == {"PCIe 4.0 x16", "PCIe 5.0 x16"}
    assert {row["policy"] for row in found["farm"]} == set(queueing.POLICIES)
    assert all(row["why"] or row["speedup"] > 0 for row in found["steps"] + found["vae"])
    again = tmp_path / "again.json"
    assert main(["scaling", *options, "--json", str(again)]) == 0
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "carrier pigeon"], "no link has 'carrier pigeon'"),
        (["--cards", "1"], "from 2 to 64"),
        (["--cards", "65"], "from 2 to 64"),
        (["--json", "/nowhere/at/all.json"], "--json"),
    ],
)
def test_bad_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", *options]) == 2
    assert said in capsys.readouterr().err
