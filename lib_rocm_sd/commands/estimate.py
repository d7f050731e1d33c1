"""`inspect --estimate`: the cost model of a decode and of a UNet's step, and what it assumes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog.unet import BATCH, SD15, SDXL, Unet, step
from lib_rocm_sd.catalog.vae import decoder
from lib_rocm_sd.commands.support import as_table
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.estimate import (
    ASSUMPTIONS,
    KINDS,
    Counted,
    Estimate,
    Target,
    counted,
    estimates,
    layout_bytes,
    target_of,
)
from lib_rocm_sd.lab.listing import NoListingError

PICTURES: tuple[tuple[Unet, int], ...] = ((SD15, 512), (SDXL, 1024))
"""Models, and the side of their pictures."""
STEP_HEADING = (
    f"ESTIMATE AND LOWER LIMIT, never measured: one denoising step, batch {BATCH}. It assumes:"
)


@dataclass(frozen=True)
class StepEstimate:
    """One model on one card."""

    title: str
    target: Target
    rows: list[Counted]
    layout_bytes: int

    @property
    def ms(self) -> float:
        """Milliseconds of all layers."""
        return sum(row.ms for row in self.rows)

    @property
    def gflop(self) -> float:
        """GFLOP of all layers."""
        return sum(row.gflop for row in self.rows)

    @property
    def layout_ms(self) -> float:
        """Milliseconds of the layout changes that we avoid."""
        return self.target.bytes_ms(self.layout_bytes)

    def of_kind(self, kind: str) -> float:
        """Milliseconds of one of KINDS."""
        return sum(row.ms for row in self.rows if row.kind == kind)


def estimated_steps(target: Target) -> list[StepEstimate]:
    """Estimates for each of PICTURES. Raises what `target.work_of` does."""
    found = []
    for unet, side in PICTURES:
        layers = step(unet, side, side)
        title = f"{unet.name} {side}x{side}"
        found.append(StepEstimate(title, target, counted(layers, target), layout_bytes(layers)))
    return found


def steps_as_dict(found: Sequence[StepEstimate]) -> dict[str, Any]:
    """Estimates for one card, as JSON."""
    target = found[0].target
    return {
        "arch": target.arch.gfx,
        "gfx": target.arch.gfx,
        **asdict(target.card),
        "steps": [_step(each) for each in found],
    }


def _step(found: StepEstimate) -> dict[str, Any]:
    return {
        "step": found.title,
        "batch": BATCH,
        "estimated_ms": round(found.ms, 3),
        "estimated_ms_by_kind": {kind: round(found.of_kind(kind), 3) for kind in KINDS},
        "gflop": round(found.gflop, 1),
        "layout_changes_gone_bytes": found.layout_bytes,
        "layout_changes_gone_ms": round(found.layout_ms, 3),
        "layers": [_layer(row) for row in found.rows],
    }


def _layer(row: Counted) -> dict[str, Any]:
    launches = [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(each).items()}
        for each in row.launches
    ]
    return {"layer": row.title, "kind": row.kind, "count": row.count, "launches": launches}


def steps_shown(found: Sequence[StepEstimate]) -> str:
    """Estimates for one card as text, slowest layers first."""
    return "\n\n".join(map(_step_shown, found))


def _step_shown(found: StepEstimate) -> str:
    target = found.target
    card = target.card
    head = (
        f"{target.arch.gfx}, {card.name} ({card.cu_count} CUs, {card.clock_mhz} MHz,"
        f" {card.bandwidth_gb_s:g} GB/s), a step of {found.title}, batch {BATCH}:"
        f" estimated {found.ms:.1f} ms or more, {found.gflop / found.ms:.1f} of"
        f" {target.peak_tflops:.1f} TFLOP/s"
    )
    kinds = ", ".join(f"{kind} {found.of_kind(kind):.2f}" for kind in KINDS)
    gone = (
        f"  torch's layout changes that are gone: {found.layout_bytes / 1e9:.2f} GB,"
        f" {found.layout_ms:.2f} ms or more"
    )
    heads: list[object] = ["layer", "calls", "config", "GFLOP", "est. ms", "arithmetic", "memory"]
    cells: list[list[object]] = [[*heads, "est. bound", "computed/needed"]]
    cells += [_cells(row) for row in sorted(found.rows, key=lambda row: -row.ms)]
    return f"{head}\n  {kinds}\n{gone}\n{as_table(cells)}"


def _cells(row: Counted) -> list[object]:
    first, *others = row.launches
    return [
        row.title,
        row.count,
        first.config,
        round(row.gflop, 1),
        round(row.ms, 3),
        round(row.count * first.compute_ms, 3),
        round(row.count * (first.memory_ms + sum(each.ms for each in others)), 3),
        round(first.bound, 3) if first.bound else "",
        round(first.padding, 2) if first.bound else "",
    ]


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
        if arch.card is None:
            texts.append(f"{arch.gfx}: no card's figures are listed here, no estimate")
            continue
        try:
            rows = subject.estimated(target_of(arch, arch.card))
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
    from lib_rocm_sd.lab.estimate import UNET_ASSUMPTIONS as SAID

    return Subject(STEP_HEADING, SAID, estimated_steps, steps_as_dict, steps_shown)


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
        "gfx": target.arch.gfx,
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
