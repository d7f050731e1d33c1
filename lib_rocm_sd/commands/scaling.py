"""`python -m lib_rocm_sd scaling`: what several cards would take, by a model; a farm, simulated.

Nothing is measured, no torch is needed. docs/scaling.md tells what is assumed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lib_rocm_sd import __version__
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands.support import check_writable
from lib_rocm_sd.lab import scaling as model
from lib_rocm_sd.lab.rows import write_json
from lib_rocm_sd.lab.scaling import CARDS, LINKS, PICTURES, STEPS, VAE_MS, Link

LOADS = (0.3, 0.6, 0.8, 0.9)
REQUESTS = 10_000
"""How many each simulated farm gets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--link", default="", metavar="NAME", help="only links with this in them")
    parser.add_argument("--cards", type=int, action="append", help="2 to 64; default 2, 4 .. 64")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")


def main(args: argparse.Namespace) -> int:
    """Print the tables, and write them as JSON."""
    links = [link for link in LINKS if args.link.lower() in link.name.lower()]
    cards = args.cards or list(CARDS)
    if not links:
        names = ", ".join(one.name for one in LINKS)
        raise UsageError(f"no link has {args.link!r} in its name: {names}")
    if min(cards) < 2 or max(cards) > 64:
        raise UsageError(f"--cards has to be from 2 to 64: {cards}")
    check_writable(args, "json")
    document = {
        "rocm_sd": __version__,
        "kind": "a model and a simulation; nothing here was measured on several cards but `checks`",
        "links": [asdict(link) for link in links],
        "checks": [
            {
                "case": pair.name,
                "one_ms": pair.one_ms,
                "two_ms": pair.two_ms,
                "model_ms": round(model_ms, 2),
                "error": round(model_ms / pair.two_ms - 1, 4),
                "fitted": pair is model.PAIRS[0],
                "measured_on": model.TWO_H200,
            }
            for pair, model_ms in model.checked(LINKS[0])
        ],
        "steps": [row for link in links for row in step_rows(link, cards)],
        "vae": [
            _row(f"VAE {size}x{size}", "rows", link, model.vae(size, n, link))
            for link in links
            for size in VAE_MS
            for n in cards
        ],
        "pictures": [  # many of them; what links take of that is left out
            _row(one.name, way, None, split(one, n))
            for one in PICTURES
            for way, split in (("batch", model.batch), ("stages", model.stages))
            for n in cards
        ],
        "farm": farm(cards),
    }
    print(text(document))
    if args.json:
        write_json(args.json, document)
    return 0


def step_rows(link: Link, cards: list[int]) -> Iterator[dict[str, Any]]:
    """A step, in each way, over a link."""
    for step in STEPS:
        if 2 in cards:
            yield _row(step.name, "guidance", link, model.guidance(step, link))
        yield from (_row(step.name, "rows", link, model.patches(step, n, link)) for n in cards)


def _row(case: str, way: str, link: Link | None, split: model.Split) -> dict[str, Any]:
    has_time = not math.isnan(split.ms)
    return {
        "case": case,
        "way": way,
        "link": "any" if link is None else link.name,
        "cards": split.cards,
        "one_ms": round(split.one_ms, 3),
        "ms": round(split.ms, 3) if has_time else None,
        "speedup": round(split.speedup, 3) if has_time else None,
        "why": split.why,
    }


def farm(cards: list[int]) -> list[dict[str, Any]]:
    """Throughput and latency of farms, by load and by what is split."""
    kinds = [
        (one.share, tuple(one.seconds / model.picture_speedup(one, n) for n in (1, 2)))
        for one in PICTURES
    ]
    mean_s = sum(share * seconds[0] for share, seconds in kinds)
    rows = []
    for count in cards:
        for load in LOADS:
            drawn = model.drawn(REQUESTS, load * count / mean_s, kinds)
            for name, gang in model.POLICIES.items():
                served = model.simulate(drawn, count, gang)
                figures = {key: round(value, 4) for key, value in asdict(served).items()}
                rows.append({"cards": count, "load": load, "policy": name, **figures})
    return rows


_TITLES = (("A step", "steps"), ("A decode by the VAE", "vae"), ("Many pictures", "pictures"))


def text(document: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        "A model, not a measurement: docs/scaling.md has what it assumes.",
        '"blocks" are ours, "eager" are those of diffusers.',
        "",
        "Beside two H200s (ms for a step split by guidance)",
    ]
    for row in document["checks"]:
        said = "fitted" if row["fitted"] else f"off by {row['error']:+.1%}"
        lines.append(
            f"  {row['case']:8} one card {row['one_ms']:5.1f}  two, measured {row['two_ms']:5.1f}"
            f"  two, by the model {row['model_ms']:5.1f}  {said}"
        )
    for title, key in _TITLES:
        lines += ["", f"{title}: times as fast as one card", *_speedups(document[key])]
    lines += ["", "A farm: seconds from request to picture, half of them, 95 % and 99 %"]
    for row in document["farm"]:
        lines.append(
            f"  {row['cards']:2} cards, load {row['load']:.0%}, {row['policy']:14}"
            f" {row['per_s']:7.2f} a second, busy {row['busy']:4.0%}:"
            f" {row['p50_s']:7.2f} {row['p95_s']:7.2f} {row['p99_s']:7.2f}"
        )
    return "\n".join(lines)


def _speedups(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each case, way and link, with all numbers of cards."""
    lines: dict[tuple[str, str, str], str] = {}
    for row in rows:
        key = (row["case"], row["way"], row["link"])
        speedup = f"{row['speedup']:.2f}" if row["speedup"] else "-"
        begin = lines.get(key) or f"  {key[0]:26} {key[1]:9} {key[2]:20}"
        lines[key] = f"{begin}{'  ' if key in lines else ' '}{row['cards']}: {speedup}"
    return list(lines.values())
