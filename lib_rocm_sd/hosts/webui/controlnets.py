"""ControlNets in the WebUI: their blocks are ours while the UNet's are.

sd-webui-controlnet builds them of ldm's or sgm's blocks. Its script has those of a picture from
`process` to `postprocess`, and moves them to the card amid the first call of the UNet. Read in
Mikubill/sd-webui-controlnet 56cec5b2: scripts/cldm.py, hook.py and controlnet.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.ui.status import CONTROLNET
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover

RESULTS = "zero_convs"
"""What a ControlNet has, and no other model of that extension."""


def models_of(params: Any) -> list[nn.Module]:
    """The ControlNets of the picture a step of which begins, by what its callback is given."""
    p = getattr(getattr(params, "denoiser", None), "p", None)
    return list(dict.fromkeys(_found_by(getattr(p, "scripts", None))))


def _found_by(runner: Any) -> Iterator[nn.Module]:
    for script in getattr(runner, "alwayson_scripts", None) or ():
        units = getattr(getattr(script, "latest_network", None), "control_params", None)
        for unit in units or ():
            model = getattr(getattr(unit, "control_model", None), "control_model", None)
            if isinstance(model, nn.Module) and hasattr(model, RESULTS):
                yield model


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
            self._taken.pop(model).give_back()
        self._wanted.clear()
        for taken in self._taken.values():
            taken.take_over(anew=False)
            taken.generation_begins(turn, steps)

    def hold(
        self, models: Iterable[nn.Module], session: Session, hook: Hook, moment: tuple[int, int]
    ) -> None:
        """Take over those among `models` that are not ours yet, in the generation that began by
        `moment`.
        """
        for model in models:
            self._wanted.add(model)
            if model in self._taken:
                continue
            taken = self._taken[model] = UnetTakeover([model], session.of_part(CONTROLNET), hook)
            taken.take_over()
            taken.generation_begins(*moment)

    def give_back(self) -> None:
        """Forgotten only when all of it is back."""
        for model, taken in list(self._taken.items()):
            taken.give_back()
            del self._taken[model]

    def report(self) -> list[KindReport]:
        """Rows of each model."""
        return [row for taken in list(self._taken.values()) for row in taken.report()]

    def news(self) -> Iterator[str]:
        """What comparisons found."""
        for taken in list(self._taken.values()):
            taken.spot.look(wait=True)
            yield from taken.spot.left.values()
