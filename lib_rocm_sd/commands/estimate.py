"""`inspect --estimate`: the cost model's table, and what it assumes. A UNet's: estimate_unet.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog.vae import decoder
from lib_rocm_sd.commands.support import as_table
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.listing import NoListingError
from lib_rocm_sd.machine.cards import CARDS
from lib_rocm_sd.machine.estimate import ASSUMPTIONS, Estimate, Target, estimates, target_of

SUBJECTS = ("vae", "unet")
IMAGE = 1024
"""Rows and columns of the image that is decoded."""
HEADING = f"Estimate, not a measurement: decoding one {IMAGE} x {IMAGE} image. It assumes:"


@dataclass(frozen=True)
class Subject:
    """What is estimated: of a card, and how that is shown."""

    heading: str
    assumptions: Sequence[str]
    estimated: Callable[[Target], Any]
    as_dict: Callable[[Any], dict[str, Any]]
    shown: Callable[[Any], str]


def main(arches: Sequence[Arch], as_json: bool, name: str = SUBJECTS[0]) -> int:
    """0 when all could be estimated, else 1; a row of the manifest without a card is left out."""
    subject = _vae() if name == SUBJECTS[0] else _unet()
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    failed = False
    for arch in arches:
        if arch.gfx not in CARDS:
            texts.append(f"{arch.gfx}: no card's figures are listed here, no estimate")
            continue
        try:
            rows = subject.estimated(target_of(arch, CARDS[arch.gfx]))
        except (CompileError, NoListingError, ValueError) as error:
            texts.append(f"{arch.gfx}: no estimate: {error}")
            failed = True
            continue
        print(f"{arch.gfx}: done", file=sys.stderr, flush=True)
        found.append(subject.as_dict(rows))
        texts.append(subject.shown(rows))
    if as_json:
        said = {"kind": "estimate", "assumptions": subject.assumptions, "cards": found}
        print(json.dumps(said, indent=1))
        print("\n".join(text for text in texts if "no estimate" in text), file=sys.stderr)
    else:
        said_last = [subject.heading, *(f"  {line}" for line in subject.assumptions)]
        print("\n\n".join([*texts, "\n".join(said_last)]))
    return int(failed)


def _vae() -> Subject:
    return Subject(HEADING, ASSUMPTIONS, _decode, _as_dict, _shown)


def _unet() -> Subject:
    from lib_rocm_sd.commands import estimate_unet as unet
    from lib_rocm_sd.machine.unet import ASSUMPTIONS as SAID

    return Subject(unet.HEADING, SAID, unet.estimated, unet.as_dict, unet.shown)


@dataclass(frozen=True)
class Decode:
    """The launches of a decode on a card."""

    target: Target
    rows: Sequence[Estimate]


def _decode(target: Target) -> Decode:
    return Decode(target, estimates(decoder(IMAGE // 8, IMAGE // 8), target))


def _as_dict(found: Decode) -> dict[str, Any]:
    target, rows = found.target, found.rows
    return {
        "arch": target.arch.gfx,
        **asdict(target.card),
        "estimated_ms": round(sum(row.ms for row in rows), 3),
        "estimated_serial_ms": round(_total(rows, "serial_ms"), 3),
        "estimated_overlapped_ms": round(_total(rows, "overlapped_ms"), 3),
        "gflop": round(sum(row.gflop for row in rows), 1),
        "launches": [
            {name: _rounded(value) for name, value in asdict(row).items()} for row in rows
        ],
    }


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def _total(rows: Sequence[Estimate], attribute: str) -> float:
    return sum(max(getattr(row, attribute), row.memory_ms) for row in rows)


def _shown(found: Decode) -> str:
    target, rows = found.target, found.rows
    card = target.card
    ms = sum(row.ms for row in rows)
    gflop = sum(row.gflop for row in rows)
    head = (
        f"{target.arch.gfx}, {card.name} ({card.cu_count} CUs, {card.clock_mhz} MHz,"
        f" {card.bandwidth_gb_s:g} GB/s): estimated {ms:.1f} ms or more"
        f" ({_total(rows, 'overlapped_ms'):.1f} if all units always overlapped,"
        f" {_total(rows, 'serial_ms'):.1f} if none did), {gflop / ms:.1f} of"
        f" {target.peak_tflops:.1f} TFLOP/s"
    )
    heads: list[object] = ["launch", "config", "GFLOP", "est. ms", "arithmetic", "memory"]
    cells: list[list[object]] = [[*heads, "est. bound", "computed/needed"]]
    cells += [
        [
            row.name,
            row.config,
            round(row.gflop, 1),
            round(row.ms, 3),
            round(row.compute_ms, 3),
            round(row.memory_ms, 3),
            round(row.bound, 3),
            round(row.padding, 2),
        ]
        for row in rows
    ]
    return f"{head}\n{as_table(cells)}"
