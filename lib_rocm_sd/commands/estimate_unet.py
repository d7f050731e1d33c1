"""`inspect --estimate unet`: what a step takes by the cost model, and what it assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib_rocm_sd.catalog.unet import BATCH, SD15, SDXL, Unet, step
from lib_rocm_sd.commands.support import as_table
from lib_rocm_sd.machine.estimate import Target
from lib_rocm_sd.machine.unet import KINDS, Counted, counted, layout_bytes

PICTURES: tuple[tuple[Unet, int], ...] = ((SD15, 512), (SDXL, 1024))
"""Models, and the side of their pictures."""
HEADING = (
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


def estimated(target: Target) -> list[StepEstimate]:
    """Estimates for each of PICTURES. Raises what `target.work_of` does."""
    found = []
    for unet, side in PICTURES:
        layers = step(unet, side, side)
        title = f"{unet.name} {side}x{side}"
        found.append(StepEstimate(title, target, counted(layers, target), layout_bytes(layers)))
    return found


def as_dict(found: Sequence[StepEstimate]) -> dict[str, Any]:
    """Estimates for one card, as JSON."""
    target = found[0].target
    return {
        "arch": target.arch.gfx,
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


def shown(found: Sequence[StepEstimate]) -> str:
    """Estimates for one card as text, slowest layers first."""
    return "\n\n".join(map(_shown, found))


def _shown(found: StepEstimate) -> str:
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
