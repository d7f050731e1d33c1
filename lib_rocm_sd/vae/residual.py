"""A residual block, which all hosts' VAEs have alike but for the name of its shortcut."""

from __future__ import annotations

from typing import Any

from torch import nn

from lib_rocm_sd.modules.findings import Findings
from lib_rocm_sd.vae.steps import ConvStep, Step


def residual_block(
    found: Findings, made: list[Step], block: nn.Module, name: str, shortcut_name: str
) -> None:
    """Appends the two convolutions of `block`, whose shortcut is its child `shortcut_name`."""
    norm1 = found.group_norm(getattr(block, "norm1", None), f"{name}.norm1")
    conv1 = found.conv(getattr(block, "conv1", None), f"{name}.conv1")
    norm2 = found.group_norm(getattr(block, "norm2", None), f"{name}.norm2")
    conv2 = found.conv(getattr(block, "conv2", None), f"{name}.conv2")
    shortcut: Any = getattr(block, shortcut_name, None)
    nin = None
    if shortcut is not None:
        nin = found.conv(shortcut, f"{name}.{shortcut_name}", kernel=1)
    if conv1 is None or conv2 is None or norm1 is None or norm2 is None:
        return
    if (shortcut is None) != (conv1.in_channels == conv2.out_channels):
        found.add(f"{name}: {conv1.in_channels} to {conv2.out_channels} channels and {nin}")
    made.append(ConvStep(f"{name}.conv1", "3x3", conv1, norm1))
    made.append(ConvStep(f"{name}.conv2", "3x3", conv2, norm2, residual=True, shortcut=nin))
