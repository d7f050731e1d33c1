"""What a host that makes room for a VAE before it runs has to leave free for ours."""

from __future__ import annotations

import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.policy import MEMORY
from lib_rocm_sd.vae.policy import FREE_SHARE
from lib_rocm_sd.vae.program import Program


def needed_bytes(
    program: Program,
    module: nn.Module,
    height: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    session: Session,
    mode: str,
    budget_bytes: int | None,
) -> int:
    """Device memory that has to be free for one image of `module`, whose program is `program`.

    What the whole frame takes, divided by the share of free memory that the level may plan with, or
    what the bands take. Kernels are compiled and tested now where they were not. Raises as
    Program.prepare does.
    """
    whole = mode == "auto" and budget_bytes is None and session.policy is not MEMORY
    plan = program.prepare(
        *(height, width, dtype, device),
        session=session,
        mode="whole" if whole else mode,
        budget_bytes=budget_bytes,
    )
    packed = sum(tensor.numel() for tensor in module.parameters()) * dtype.itemsize
    share = (session.policy.workspace_share or FREE_SHARE) if whole else 1.0
    return packed + int(plan.peak_bytes / share)
