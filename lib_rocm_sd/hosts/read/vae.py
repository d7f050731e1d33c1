"""Reads a host's Decoder or Encoder module into a Recipe, or says why it cannot.

Nothing is assumed of what was not looked at: a class that is not known, a child too many, a forward
replaced on an instance, a hook, or a setting that changes the arithmetic is a reason.
"""

from __future__ import annotations

from torch import nn

from lib_rocm_sd.hosts.read import vae_diffusers, vae_ldm
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.vae.steps import Recipe, Step


def read(module: nn.Module) -> Recipe:
    """The steps of ldm's, sgm's, SD3's, Flux's, ComfyUI's or diffusers' Decoder or Encoder.

    `reasons` is empty exactly if they were read completely. The module is not changed.
    """
    family = type(module).__module__
    found = Findings("diffusers" if family.split(".")[0] == "diffusers" else family)
    found.everywhere()
    role = "encoder" if "Encoder" in type(module).__name__ else "decoder"
    if family.split(".")[0] == "diffusers":
        steps = vae_diffusers.steps(found, module, role)
    elif vae_ldm.is_known(family):
        steps = vae_ldm.steps(found, module, role)
    else:
        return Recipe(role, (), (f"{type(module).__name__} of {family} is not known",))
    _check(found, module, steps)
    return Recipe(role, () if found.reasons else tuple(steps), tuple(found.reasons))


def _check(found: Findings, module: nn.Module, steps: list[Step]) -> None:
    """What only the whole shows: channels that fit, one float dtype, one device."""
    channels = steps[0].in_channels if steps else 0
    for step in steps:
        if step.in_channels != channels:
            found.add(f"{step.name} takes {step.in_channels} channels, there are {channels}")
        channels = step.out_channels
        if channels % 16 and step is not steps[-1]:
            found.add(f"{step.name} has {channels} channels, not a multiple of 16")
    tensors = list(module.parameters())
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        found.add(f"weights of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        found.add(f"weights are {', '.join(sorted(map(str, dtypes)))}")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1 or "meta" in devices:
        found.add(f"weights lie on {', '.join(sorted(devices))}")
