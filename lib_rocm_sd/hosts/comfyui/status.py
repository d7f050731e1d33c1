"""What the last workflow ran, and why nothing faster did, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from lib_rocm_sd import cache
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import controlnets, host, unet
from lib_rocm_sd.hosts.comfyui.host import LEFT, tally
from lib_rocm_sd.hosts.comfyui.vae import usable
from lib_rocm_sd.hosts.ui.status import (
    CONTROLNET,
    StatusRow,
    counted,
    of_blocks,
    of_controlnets,
    rows_of,
    unmeasured,
)
from lib_rocm_sd.report import report

OTHERWISE = "ComfyUI computes everything by itself"
NOTHING = (
    "Nothing has come through ROCm SD's nodes yet. Put 'ROCm SD Optimization' between the "
    "checkpoint's loader and the sampler, and 'ROCm SD VAE' before VAE Decode."
)
HERE_NOTHING = (
    "This workflow: nothing has come through ROCm SD's nodes, or ComfyUI had it in its cache."
)


def text() -> str:
    """For people; never raises. What the last workflow did, then the rest."""
    try:
        return "\n".join(_lines())
    except Exception as error:
        return f"Not active: {trouble.once(error)}"


def _lines() -> list[str]:
    device = host.device()
    why = usable(device)
    line = _headline(device)
    lines = [f"{line[:1].upper()}{line[1:]}."]
    tried = gate.state()
    if tried.running:
        lines.append(f"Kernels are being tested ({tried.done} of {tried.total}).")
    if engine.unmeasured:
        lines.append(unmeasured(engine.unmeasured, "when the next workflows begin"))
    if why and not engine.usable(device):
        lines.append(f"The VAE is ComfyUI's own: {why[0]}.")
    last = [*_counted(tally.ours, tally.left, _blocks()), *_kernels()]
    heading = "The last workflow:"
    if not host.is_counted():
        lines += ["", HERE_NOTHING] if last else []
        heading = "The last one in which something did:"
    lines += ["", heading, *last] if last else ["", NOTHING]
    before = _counted(host.ours_before, host.left_before)
    if before:
        lines += ["", "Before it, since ComfyUI's start:", *before]
    if cache.unwritten():
        lines.append(f"The next start compiles the kernels again: {cache.unwritten()}.")
    events = report.snapshot()["events"]
    lines += [f"Event: {message}" for message in events if not message.startswith(LEFT)]
    return lines


def _counted(
    ours: Counter[str], left: Counter[tuple[str, str]], blocks: Iterable[StatusRow] = ()
) -> list[str]:
    """A line for each part of a model, and beneath it why calls were ComfyUI's."""
    rows, lines = {row.operation: row for row in blocks}, []
    for part in dict.fromkeys([*ours, *rows, *(what for what, _ in left)]):
        why = {reason: count for (what, reason), count in left.most_common() if what == part}
        total = ours[part] + sum(why.values())
        if part in rows:
            lines += _said(rows[part])
        else:
            lines.append(f"{part}: {ours[part]} of {counted(total, 'call')} ours")
        lines += [
            f"  ComfyUI's own, {counted(count, 'call')}: {reason}" for reason, count in why.items()
        ]
    return lines


def _blocks() -> list[StatusRow]:
    """Rows of the UNet whose blocks were ours in the last workflow, if they were."""
    rows = unet.rows() if tally.ours[host.UNET] else ()
    found = [of_blocks(of.kind, of.total, of.ours, {**of.left, **of.partly}) for of in rows]
    return found + (of_controlnets(controlnets.rows()) if tally.ours[CONTROLNET] else [])


def _kernels() -> list[str]:
    """What ran, with what kept out faster ways."""
    every = rows_of(report.snapshot()).values()
    return [line for rows in every for row in rows for line in _said(row, "not ")]


def _headline(device: torch.device) -> str:
    """The kernel that it tells of may be one that this model has never asked for."""
    line = engine.status_line(device, OTHERWISE)
    if engine.waits(device) and tally.ours:
        ours = f"some calls have run on our kernels ({identify(device).gfx})"
        return f"{ours}; others are ComfyUI's until their kernel has been tried, at its first use"
    return line


def _said(row: StatusRow, before: str = "") -> list[str]:
    return [f"{row.operation}: {row.runs}", *(f"  {before}{reason}" for reason in row.why)]
