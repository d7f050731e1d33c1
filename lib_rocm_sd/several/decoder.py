"""The copy of a VAE's decoder in a replica's process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lib_rocm_sd import policy
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.several import rebuilt
from lib_rocm_sd.several.together import TogetherProgram
from lib_rocm_sd.vae.shared import Ranks
from lib_rocm_sd.vae.steps import Rows


class CopiedDecoder:
    """`module`, whose weights come into `tensors`."""

    def __init__(self, module: nn.Module, session: Session) -> None:
        self.tensors = rebuilt.tensors(module)
        self._session = session.of_part("VAE decode")
        self._program = TogetherProgram(module)

    def picture(self, image: torch.Tensor, scale: int, rows: int) -> torch.Tensor:
        """The first `rows` of what it gives for `image`, all of it made here."""
        self._program.look()
        self._program.take_scale(scale)
        made = self._program(image, session=self._session)
        self._tidy()
        return made[:, :, :rows].contiguous()

    def together(
        self, image: torch.Tensor, scale: int, parts: Sequence[Rows], ranks: Ranks
    ) -> None:
        """Make this process's rows."""
        self._program.look()
        self._program.take_scale(scale)
        with torch.no_grad():
            self._program.together(image, parts, ranks, self._session)
        self._tidy()

    def release(self) -> None:
        """Give back what is kept beside the weights."""
        self._program.release()
        if self.tensors:
            empty_cache(self.tensors[0].device)

    def _tidy(self) -> None:
        if self._session.level == policy.MEMORY.name:
            self.release()
