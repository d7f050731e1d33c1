"""The ControlNets of a model's step: their blocks are ours in the same clones' calls as the UNet's.

ComfyUI calls them beside the model, so what makes their calls ours is a wrapper around
`calc_cond_batch`, which calls both. Read in Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/samplers.py,
comfy/controlnet.py, comfy/cldm/cldm.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import unet
from lib_rocm_sd.hosts.comfyui.attention import KEY
from lib_rocm_sd.hosts.comfyui.host import OPTIONS, Kept, count_for_workflow, tally
from lib_rocm_sd.hosts.ui.status import CONTROLNET
from lib_rocm_sd.unet.takeover import KindReport

NAME, HOME = "ControlNet", "comfy.cldm.cldm"
READ = (KEY, "sample_sigmas")
"""What of a model's options counts for a ControlNet, which ComfyUI gives none of them."""
_last: list[WeakSet[unet.Blocks]] = [WeakSet()]
"""Those of the last step that had some."""


class StepCall(Kept):
    """A wrapper of `calc_cond_batch`: ControlNets' blocks are ours while it runs."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        count_for_workflow()
        try:
            begun = self._begun(*args, **kwargs)
        except Exception as error:
            tally.leave(CONTROLNET, f"ours failed: {trouble.once(error)}")
            begun = []
        with ExitStack() as stack:
            for blocks in begun:
                stack.enter_context(blocks.serving())
            made = executor(*args, **kwargs)
        for _ in begun:
            tally.served(CONTROLNET)
        return made

    def _begun(
        self, model: Any, conds: Sequence[Any], x_in: Any, timestep: Any, model_options: Any
    ) -> list[unet.Blocks]:
        nets = list(dict.fromkeys(_found_in(conds)))
        options: Mapping[str, Any] = model_options.get(OPTIONS, {})
        if not nets or unet.unusable(x_in.device):
            return []
        read = {key: options[key] for key in READ if key in options}
        begun = [unet.begun(net, net, read, self.session, x_in, CONTROLNET) for net in nets]
        _last[:] = [WeakSet(begun)]  # as a whole: the status is asked by another thread
        return begun


def _found_in(conds: Sequence[Any]) -> Iterator[nn.Module]:
    for cond in (each for some in conds for each in some or ()):
        control = cond.get("control")
        while control is not None:
            net: Any = getattr(control, "control_model", None)
            if type(net).__name__ == NAME and type(net).__module__ == HOME:
                yield net
            control = getattr(control, "previous_controlnet", None)


def rows() -> list[KindReport]:
    """The blocks of the ControlNets of the last step that had some, as far as they are there."""
    return [row for blocks in list(_last[0]) for row in blocks.look()]
