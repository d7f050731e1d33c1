"""Diffusers: torch's own code computes the models that are slower with ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

from lib_rocm_sd.cards.batch import GuidanceSplit
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.diffusers import components
from lib_rocm_sd.hosts.diffusers.components import Attentions
from lib_rocm_sd.hosts.diffusers.patch import Exchanging
from lib_rocm_sd.hosts.timed import TimedCalls
from lib_rocm_sd.modules.faster import Contest
from lib_rocm_sd.unet.takeover import UnetTakeover

_compared: WeakSet[nn.Module] = WeakSet()


class _Ours:
    """What of ours is in one model."""

    def __init__(
        self,
        model: nn.Module,
        attentions: Attentions,
        taken: Sequence[UnetTakeover],
        session: Session,
    ) -> None:
        self._model, self._session = model, session
        self._attentions, self._taken = attentions, taken
        self._holds = True

    def contest(self) -> Contest:
        """Who decides whether it stays there."""
        theirs = "torch's own code" if self._taken else "torch's attention"
        return Contest(self._model, self.switch, self.setting, theirs, self._tell)

    def switch(self, ours: bool) -> None:
        """Put it in, or leave the model as it was. Never raises."""
        self._holds = ours
        try:
            if ours:
                self._attentions.put_in()
            else:
                self._attentions.take_out()
            for taken in self._taken:
                if ours:
                    taken.take_over()
                    taken.generation_begins()
                else:
                    taken.give_back()
        except Exception as error:
            self.say(f"ours failed: {trouble.once(error)}")

    def setting(self) -> str | None:
        """The level, and what is ours; None where nothing is, or ranks compute a part each."""
        if isinstance(vars(self._model).get("forward"), (Exchanging, GuidanceSplit)):
            return None
        blocks = sum(row.ours for taken in self._taken for row in taken.report())
        if self._holds and not (blocks or self._attentions):
            return None
        return f"{self._session.level}, {self._attentions}, blocks: {len(self._taken)}"

    def say(self, what: str) -> None:
        self._session.report.event(f"diffusers: {what}")

    def _tell(self, what: str) -> None:
        self.say(f"{type(self._model).__name__}: {what}")


@contextmanager
def compared(
    pipeline: Any,
    attentions: Attentions,
    takeovers: Mapping[nn.Module, UnetTakeover | None],
    session: Session,
) -> Iterator[Mapping[str, Contest]]:
    """Leave pictures to torch where models are slower with ours, inside the `with` block. By
    model's class, who decides.

    A picture begins where the pipeline's scheduler has other timesteps: each makes its own.
    """

    def picture() -> Any:
        return getattr(getattr(pipeline, "scheduler", None), "timesteps", None)

    contests: dict[str, Contest] = {}
    with ExitStack() as stack:
        for model in components.models(pipeline):
            own = attentions.within(model)
            taken = [each for part in model.modules() if (each := takeovers.get(part))]
            is_coder = model is getattr(pipeline, "vae", None)
            if model in _compared or is_coder or not (own or taken):
                continue
            ours = _Ours(model, own, taken, session)
            contest = ours.contest()
            _compared.add(model)
            stack.callback(_compared.discard, model)
            stack.callback(TimedCalls(model, contest, picture, ours.say).end)
            stack.callback(contest.end)
            contests[type(model).__name__] = contest
        yield contests
