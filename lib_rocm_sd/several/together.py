"""A Program that can also make its rows of pictures that several processes make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import UNLIMITED_BYTES
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.vae.bands import Run, nothing
from lib_rocm_sd.vae.program import Program
from lib_rocm_sd.vae.shared import Ranks, Shared, make_shared
from lib_rocm_sd.vae.steps import Rows
from lib_rocm_sd.vae.trace import Chain, chain
from lib_rocm_sd.vae.weights import prepare


class TogetherProgram(Program):
    """A decoder or an encoder; all processes have the same weights."""

    @property
    def scale(self) -> int:
        """Which of vae/program.py's SCALES the images between steps are multiplied by."""
        return self._scale

    def take_scale(self, scale: int) -> None:
        """Use that of another process, which has found it."""
        if scale != self._scale:
            self._scale, self._hopeless = scale, False
            self.release()

    def look(self) -> None:
        """See what the module is now. Raises UnknownModuleError."""
        self._look()

    def chain_of(self, image: torch.Tensor) -> Chain:
        """What is done with one image like this (N, C, H, W)."""
        height, width = image.shape[2:]
        return chain(self._recipe, 1, height, width, self._weight.dtype)

    def whole_bytes(self, image: torch.Tensor, session: Session) -> int:
        """Device memory for one such image, not in bands, as the plan for it was made."""
        where = (self._weight.dtype, image.device, session.of_part(self._part), engine.renewals)
        height, width = image.shape[2:]
        plans = self._plans.get(where)
        return plans.planner((1, height, width)).whole().peak_bytes if plans else UNLIMITED_BYTES

    def together(
        self,
        image: torch.Tensor,
        parts: Sequence[Rows],
        ranks: Ranks,
        session: Session,
        progress: Callable[[int, int], None] = nothing,
        interrupt: Callable[[], bool] = bool,
    ) -> torch.Tensor:
        """The whole output for (N, C, H, W), one image after the other, made by all ranks.

        `parts`: rows of the smallest image, by rank. `progress` and `interrupt` are called between
        steps; raises Interrupted.
        """
        if not self._ready:
            self._ready = prepare(self._recipe, self.scales)
        made, found = self.chain_of(image), []
        for number, one in enumerate(image.split(1)):
            run = Run(made, self._ready, made.dtype, image.device, session=session)
            run.progress, run.interrupt = progress, interrupt
            run.done, run.total = number * len(made.steps), len(image) * len(made.steps)
            found.append(make_shared(Shared(run, ranks, parts), one))
        return torch.cat(found)
