"""`inspect --estimate`: the cost model of a decode, a step or an upscaled picture, and its
assumptions.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.catalog import dit
from lib_rocm_sd.catalog.unet import BATCH, SD15, SDXL, Unet, step
from lib_rocm_sd.catalog.unet import Layer as UnetLayer
from lib_rocm_sd.catalog.upscaler import SIDE, compact, rrdb, swinir
from lib_rocm_sd.catalog.vae import Layer, decoder, qwen_decoder
from lib_rocm_sd.commands.support import as_table
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.estimate import (
    ASSUMPTIONS,
    KINDS,
    UNET_ASSUMPTIONS,
    UPSCALER_ASSUMPTIONS,
    Estimate,
    Target,
    counted,
    estimates,
    layout_bytes,
    target_of,
)
from lib_rocm_sd.lab.listing import NoListingError

SUBJECTS = ("vae", "qwen-vae", "unet", "upscaler")
PICTURES: tuple[tuple[Unet, int], ...] = ((SD15, 512), (SDXL, 1024))
"""UNets, and the side of their pictures."""
IMAGE = 1024
"""Rows and columns of the image that is decoded."""
HEADING = f"Estimate, not a measurement: decoding one {IMAGE} x {IMAGE} image. It assumes:"
STEP_HEADING = (
    f"ESTIMATE AND LOWER LIMIT, never measured: one denoising step, batch {BATCH}. It assumes:"
)

UPSCALERS: dict[str, Callable[[int, int], Sequence[Layer | UnetLayer]]] = {
    "RRDBNet x4": rrdb,
    "SRVGGNetCompact x4": compact,
    "SwinIR-M x4": swinir,
    "SwinIR-L x4": partial(swinir, large=True),
}
UPSCALER_HEADING = (
    f"ESTIMATE AND LOWER LIMIT, never measured: upscaling one {SIDE} x {SIDE} picture. It assumes:"
)


def main(arches: Sequence[Arch], as_json: bool, subject: str) -> int:
    """0 when all could be estimated, else 1; a row of the manifest without a card is left out."""
    subjects: dict[str, tuple[Callable[[Target], Any], str, tuple[str, ...]]] = {
        "vae": (decode_of, HEADING, ASSUMPTIONS),
        "qwen-vae": (partial(decode_of, by=qwen_decoder), HEADING, ASSUMPTIONS),
        "unet": (steps_of, STEP_HEADING, UNET_ASSUMPTIONS),
        "upscaler": (pictures_of, UPSCALER_HEADING, UPSCALER_ASSUMPTIONS),
    }
    estimate, heading, assumptions = subjects[subject]
    cards: list[dict[str, Any]] = []
    texts: list[str] = []
    absent: list[str] = []
    failed = False
    for arch in arches:
        if arch.card is None:
            absent.append(f"{arch.gfx}: no card's figures are listed here, no estimate")
            texts.append(absent[-1])
            continue
        try:
            document, text = estimate(target_of(arch, arch.card))
        except (CompileError, NoListingError, ValueError) as error:
            absent.append(f"{arch.gfx}: no estimate: {error}")
            texts.append(absent[-1])
            failed = True
            continue
        print(f"{arch.gfx}: done", file=sys.stderr, flush=True)
        cards.append(document)
        texts.append(text)
    if as_json:
        print(
            json.dumps({"kind": "estimate", "assumptions": assumptions, "cards": cards}, indent=1)
        )
        print("\n".join(absent), file=sys.stderr)
    else:
        print("\n\n".join([*texts, "\n  ".join([heading, *assumptions])]))
    return int(failed)


def decode_of(
    target: Target, by: Callable[[int, int], Sequence[Layer]] = decoder
) -> tuple[dict[str, Any], str]:
    """A decode on one card, as JSON and as text. Raises what `target.work_of` does."""
    rows = estimates(by(IMAGE // 8, IMAGE // 8), target)
    ms, gflop = sum(row.ms for row in rows), sum(row.gflop for row in rows)
    serial = sum(max(row.serial_ms, row.memory_ms) for row in rows)
    overlapped = sum(max(row.overlapped_ms, row.memory_ms) for row in rows)
    document = {
        **_card_of(target),
        "estimated_ms": round(ms, 3),
        "estimated_serial_ms": round(serial, 3),
        "estimated_overlapped_ms": round(overlapped, 3),
        "gflop": round(gflop, 1),
        "launches": [_launch(row) for row in rows],
    }
    head = (
        f"{_card_named(target)}: estimated {ms:.1f} ms or more"
        f" ({overlapped:.1f} if all units always overlapped,"
        f" {serial:.1f} if none did), {gflop / ms:.1f} of"
        f" {target.peak_tflops:.1f} TFLOP/s"
    )
    table = as_table([["launch", *_HEADS], *([row.name, *_cells([row])] for row in rows)])
    return document, f"{head}\n{table}"


_HEADS = ("config", "GFLOP", "est. ms", "arithmetic", "memory", "est. bound", "computed/needed")


def _card_of(target: Target) -> dict[str, Any]:
    return {"arch": target.arch.gfx, "gfx": target.arch.gfx, **asdict(target.card)}


def _card_named(target: Target) -> str:
    card = target.card
    return (
        f"{target.arch.gfx}, {card.name} ({card.cu_count} CUs, {card.clock_mhz} MHz,"
        f" {card.bandwidth_gb_s:g} GB/s)"
    )


def _launch(row: Estimate) -> dict[str, Any]:
    """A launch as JSON."""
    values = asdict(row).items()
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in values}


def steps_of(target: Target) -> tuple[dict[str, Any], str]:
    """A step of each of PICTURES, and of SD 3's transformers, on one card, as JSON and as text.
    Raises what `target.work_of` does.
    """
    every = {f"{unet.name} {side}x{side}": step(unet, side, side) for unet, side in PICTURES}
    side = dit.SIDE
    every |= {f"{each.name} {side}x{side}": dit.step(each, side, side) for each in dit.MODELS}
    steps = [_step(title, layers, target) for title, layers in every.items()]
    documents, texts = zip(*steps, strict=True)
    return {**_card_of(target), "steps": list(documents)}, "\n\n".join(texts)


def _step(title: str, layers: Sequence[UnetLayer], target: Target) -> tuple[dict[str, Any], str]:
    rows, moved = counted(layers, target), layout_bytes(layers)
    ms, gflop = sum(row.ms for row in rows), sum(row.gflop for row in rows)
    by_kind = {kind: sum(row.ms for row in rows if row.kind == kind) for kind in KINDS}
    document = {
        "step": title,
        "batch": BATCH,
        "estimated_ms": round(ms, 3),
        "estimated_ms_by_kind": {kind: round(value, 3) for kind, value in by_kind.items()},
        "gflop": round(gflop, 1),
        "layout_changes_gone_bytes": moved,
        "layout_changes_gone_ms": round(target.bytes_ms(moved), 3),
        "layers": [
            {
                **{"layer": row.title, "kind": row.kind, "count": row.count},
                "launches": [_launch(each) for each in row.launches],
            }
            for row in rows
        ],
    }
    lines = [
        f"{_card_named(target)}, a step of {title}, batch {BATCH}:"
        f" estimated {ms:.1f} ms or more, {gflop / ms:.1f} of"
        f" {target.peak_tflops:.1f} TFLOP/s",
        "  " + ", ".join(f"{kind} {value:.2f}" for kind, value in by_kind.items()),
    ]
    if moved:
        gone = f"{moved / 1e9:.2f} GB, {target.bytes_ms(moved):.2f} ms or more"
        lines.append(f"  torch's layout changes that are gone: {gone}")
    slowest_first = sorted(rows, key=lambda row: -row.ms)
    cells = ([row.title, row.count, *_cells(row.launches, row.count)] for row in slowest_first)
    return document, "\n".join([*lines, as_table([["layer", "calls", *_HEADS], *cells])])


def pictures_of(target: Target) -> tuple[dict[str, Any], str]:
    """A picture by each of UPSCALERS on one card, as JSON and as text. Raises what `target.work_of`
    does.
    """
    pictures = [_picture(title, of(SIDE, SIDE), target) for title, of in UPSCALERS.items()]
    documents, texts = zip(*pictures, strict=True)
    return {**_card_of(target), "pictures": list(documents)}, "\n\n".join(texts)


def _picture(
    title: str, layers: Sequence[Layer | UnetLayer], target: Target
) -> tuple[dict[str, Any], str]:
    """Layers that differ in nothing but their names are one row."""
    count = Counter(layer.problem for layer in layers)
    first = {layer.problem: layer for layer in reversed(layers)}
    rows = [(n, row) for p, n in count.items() for row in estimates([first[p]], target)]
    ms, gflop = sum(n * row.ms for n, row in rows), sum(n * row.gflop for n, row in rows)
    document = {
        "upscaler": title,
        "side": SIDE,
        "estimated_ms": round(ms, 3),
        "gflop": round(gflop, 1),
        "launches": [{"count": n, **_launch(row)} for n, row in rows],
    }
    head = (
        f"{_card_named(target)}, {title} of {SIDE}x{SIDE}: estimated {ms:.1f} ms or more,"
        f" {gflop / ms:.1f} of {target.peak_tflops:.1f} TFLOP/s"
    )
    slowest_first = sorted(rows, key=lambda each: -each[0] * each[1].ms)
    cells = ([row.name, n, *_cells([row], n)] for n, row in slowest_first)
    return document, f"{head}\n{as_table([['first such layer', 'calls', *_HEADS], *cells])}"


def _cells(launches: Sequence[Estimate], count: int = 1) -> list[object]:
    """The cells of _HEADS, of so many times these launches: of the first the config and bound."""
    first, *others = launches
    return [
        first.config,
        round(count * sum(each.gflop for each in launches), 1),
        round(count * sum(each.ms for each in launches), 3),
        round(count * first.compute_ms, 3),
        round(count * (first.memory_ms + sum(each.ms for each in others)), 3),
        round(first.bound, 3) if first.bound else "",
        round(first.padding, 2) if first.bound else "",
    ]
