"""ControlNets in the WebUI: their blocks are ours while the UNet's are.

sd-webui-controlnet builds them of ldm's or sgm's blocks. Its script has those of a picture from
`process` to `postprocess`, and moves them to the card amid the first call of the UNet. Read in
Mikubill/sd-webui-controlnet 56cec5b2: scripts/cldm.py, hook.py and controlnet.py. A Forge has a
list of its own on the patcher of the UNet, and calls them beside the UNet. Read in
lllyasviel/stable-diffusion-webui-forge dfdcbab6: backend/patcher/controlnet.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover

RESULTS = "zero_convs"
"""What a ControlNet has, and no other model that controls."""


def models_of(params: Any, patcher: Any = None) -> list[nn.Module]:
    """The ControlNets of the picture a step of which begins, by what its callback is given, or by
    a Forge's patcher of the UNet.
    """
    p = getattr(getattr(params, "denoiser", None), "p", None)
    owners = (*_units_of(getattr(p, "scripts", None)), *_linked_to(patcher))
    models = (getattr(owner, "control_model", None) for owner in owners)
    found = (each for each in models if isinstance(each, nn.Module) and hasattr(each, RESULTS))
    return list(dict.fromkeys(found))


def _units_of(runner: Any) -> Iterator[Any]:
    """What wraps the models of sd-webui-controlnet."""
    for script in getattr(runner, "alwayson_scripts", None) or ():
        units = getattr(getattr(script, "latest_network", None), "control_params", None)
        yield from (getattr(unit, "control_model", None) for unit in units or ())


def _linked_to(patcher: Any) -> Iterator[Any]:
    control = getattr(patcher, "controlnet_linked_list", None)
    while control is not None:
        yield control
        control = getattr(control, "previous_controlnet", None)


class ControlNets:
    """Take-overs, each of one model, which is not held. One that no picture wants is given back a
    picture later.
    """

    def __init__(self) -> None:
        self._taken: WeakKeyDictionary[nn.Module, UnetTakeover] = WeakKeyDictionary()
        self._wanted: WeakSet[nn.Module] = WeakSet()

    def begin(self, turn: int, steps: int) -> None:
        """A generation begins: see UnetTakeover.generation_begins."""
        for model in [each for each in self._taken if each not in self._wanted]:
            self._taken[model].give_back()
            del self._taken[model]
        self._wanted.clear()
        for taken in self.taken:
            taken.take_over(anew=False)
            taken.generation_begins(turn, steps)

    def hold(
        self,
        models: Iterable[nn.Module],
        make: Callable[[nn.Module], UnetTakeover],
        moment: tuple[int, int],
    ) -> None:
        """Take over those among `models` that are not ours yet, each by what `make` gives, in the
        generation that began by `moment`.
        """
        for model in models:
            self._wanted.add(model)
            if model in self._taken:
                continue
            taken = self._taken[model] = make(model)
            taken.take_over()
            taken.generation_begins(*moment)

    @property
    def taken(self) -> tuple[UnetTakeover, ...]:
        return tuple(self._taken.values())

    def give_back(self) -> None:
        """Forgotten only when all of it is back."""
        for model, taken in list(self._taken.items()):
            taken.give_back()
            del self._taken[model]

    def report(self) -> list[KindReport]:
        """Rows of each model."""
        return [row for taken in self.taken for row in taken.report()]

    def news(self) -> Iterator[str]:
        """What comparisons found."""
        for taken in self.taken:
            taken.spot.look(wait=True)
            yield from taken.spot.left.values()
