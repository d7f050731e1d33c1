"""What runs in this ComfyUI, and why nothing faster does, as text."""

from __future__ import annotations

import torch

from lib_rocm_sd import cache
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import host, unet
from lib_rocm_sd.hosts.comfyui.host import LEFT, tally
from lib_rocm_sd.hosts.comfyui.vae import usable
from lib_rocm_sd.hosts.ui.status import StatusRow, counted, of_blocks, rows_of
from lib_rocm_sd.report import report

OTHERWISE = "ComfyUI computes everything by itself"


def text() -> str:
    """For people; never raises. What was counted is since ComfyUI's start."""
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
    if why and not engine.usable(device):
        lines.append(f"The VAE is ComfyUI's own: {why[0]}.")
    for rows in rows_of(report.snapshot()).values():
        for row in rows:
            lines += _said(row, "not ")
    for of in unet.rows():
        lines += _said(of_blocks(of.kind, of.total, of.ours, {**of.left, **of.partly}))
    lines += [f"Ours: {what}, {counted(count, 'call')}" for what, count in tally.ours.items()]
    lines += [
        f"ComfyUI's own: {what}, {counted(count, 'call')}: {reason}"
        for (what, reason), count in tally.left.most_common()
    ]
    if cache.unwritten():
        lines.append(f"The next start compiles the kernels again: {cache.unwritten()}.")
    events = report.snapshot()["events"]
    lines += [f"Event: {message}" for message in events if not message.startswith(LEFT)]
    return lines


def _headline(device: torch.device) -> str:
    """The kernel that it tells of may be one that this model has never asked for."""
    line = engine.status_line(device, OTHERWISE)
    if engine.waits(device) and tally.ours:
        ours = f"some calls have run on our kernels ({identify(device).gfx})"
        return f"{ours}; others are ComfyUI's until their kernel has been tried, at its first use"
    return line


def _said(row: StatusRow, before: str = "") -> list[str]:
    return [f"{row.operation}: {row.runs}", *(f"  {before}{reason}" for reason in row.why)]
