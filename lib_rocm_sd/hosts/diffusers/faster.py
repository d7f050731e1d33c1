"""Diffusers: torch's own code computes the models that are slower with ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.diffusers import components
from lib_rocm_sd.hosts.diffusers.components import Attentions, OurForward
from lib_rocm_sd.modules.faster import Contest
from lib_rocm_sd.unet.takeover import UnetTakeover


class Compared(OurForward):
    """The forward of a whole model, whose calls ours and torch's own code make in turns."""

    def __init__(self, model: nn.Module, contest: Contest) -> None:
        super().__init__(model)
        self._contest = contest

    def serve(self, *args: Any, **kwargs: Any) -> Any:
        return self._contest.call(args, kwargs, partial(self.theirs, *args, **kwargs))


class _Ours:
    """What of ours is in one model."""

    def __init__(
        self, attentions: Attentions, taken: Sequence[UnetTakeover], session: Session
    ) -> None:
        self._attentions, self._taken, self._session = attentions, taken, session

    def switch(self, ours: bool) -> None:
        """Put it in, or leave the model as it was. Never raises."""
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
            self._session.report.event(f"diffusers: ours failed: {trouble.once(error)}")

    def content(self) -> str:
        """In words."""
        rows = [row for taken in self._taken for row in taken.report()]
        blocks = "".join(f", {row.kind} {row.ours} of {row.total}" for row in rows)
        return f"{self._session.level}, {self._attentions}{blocks}"


@contextmanager
def compared(
    pipeline: Any,
    attentions: Attentions,
    takeovers: Mapping[nn.Module, UnetTakeover | None],
    session: Session,
) -> Iterator[Mapping[str, Contest]]:
    """Leave calls of models to torch where these are slower with ours, inside the `with` block. By
    model's class, who decides.
    """
    contests: dict[str, Contest] = {}
    with ExitStack() as stack:
        for model in components.models(pipeline):
            own = attentions.within(model)
            taken = [each for part in model.modules() if (each := takeovers.get(part))]
            known = isinstance(vars(model).get("forward"), Compared)  # by an outer `with`
            is_coder = model is getattr(pipeline, "vae", None)
            if known or is_coder or not (own or taken):
                continue
            ours = _Ours(own, taken, session)
            tell = partial(_tell, session)
            contest = Contest(model, ours.switch, ours.content, tell)
            forward = Compared(model, contest)
            stack.callback(forward.take_out)
            stack.callback(contest.end)
            forward.put_in()
            contests[type(model).__name__] = contest
        yield contests


def _tell(session: Session, what: str) -> None:
    session.report.event(f"diffusers: {what}")
