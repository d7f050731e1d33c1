"""The figures of docs/scaling.md are what the model says."""

from __future__ import annotations

import re
from pathlib import Path

from lib_rocm_sd.commands import scaling as command
from lib_rocm_sd.lab import scaling as model
from lib_rocm_sd.lab.scaling import LINKS, Link

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
SHOWN = [link for link in LINKS if "xGMI" not in link.name and "10 Gbit" not in link.name]


def cells(start: str) -> list[str]:
    """Of the table's row that begins so."""
    (row,) = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", TEXT, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def said(way: str, link: Link) -> float:
    if way.startswith("guidance"):
        return model.guidance(model.by_name(_step(way)), link).speedup
    if way.startswith("patch"):
        return model.patches(model.by_name(_step(way)), 2, link).speedup
    size = re.findall(r"(\d+)x", way)[0]
    return model.vae(int(size), 2, link).speedup


def _step(way: str) -> str:
    _, name, kind = way.split(", ")
    return f"{name}, {kind.split()[-1]}"


def test_two_cards() -> None:
    ways = re.findall(r"^\| ((?:guidance|patch|VAE's).*?) \|", TEXT, re.MULTILINE)
    assert len(ways) == 8
    for way in ways:
        assert cells(way) == [f"{said(way, link):.2f}" for link in SHOWN], way


def test_the_check() -> None:
    for pair, model_ms in model.checked(LINKS[0]):
        error = f"−{1 - model_ms / pair.two_ms:.1%}".replace("%", " %")
        error = "fitted" if pair is model.PAIRS[0] else error
        shown = [*(f"{ms:.1f} ms" for ms in (pair.one_ms, pair.two_ms, model_ms)), error]
        assert cells(pair.name) == shown
    assert f"the {model.handoff_ms(LINKS[0]):.1f} ms" in TEXT


def test_the_farm() -> None:
    rows = {(row["cards"], row["load"], row["policy"]): row for row in command.farm([8, 64])}
    shown = re.findall(r"^\| (\d+), (\d+) % \|", TEXT, re.MULTILINE)
    assert len(shown) == 5
    for count, load in shown:
        told = []
        for policy in ("one card", "two cards", "two when idle"):
            row = rows[int(count), int(load) / 100, policy]
            full = row["busy"] > 0.99
            told.append("overloaded" if full else f"{row['p50_s']:.2f}, {row['p95_s']:.2f}")
        assert cells(f"{count}, {load} %") == told
