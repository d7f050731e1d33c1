"""A diffusers VAE's decoder and encoder by all ranks: each makes its rows of every image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from lib_rocm_sd.cards.group import Agreement, Group
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.cards.vae_rows import TogetherProgram, parts_of, units
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.diffusers.vae import DiffusersStandIn
from lib_rocm_sd.hosts.vae import ROLES, VaeWish
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.program import Request
from lib_rocm_sd.vae.trace import Chain


class SharedProgram(TogetherProgram):
    """A Program whose images are made by the ranks of a group together, one after the other.

    `whole_runs`, `shared_runs` count images.
    """

    def __init__(self, module: nn.Module, group: Group, session: Session = DEFAULT) -> None:
        self._group, self._told = group, session.report
        self._agreement = Agreement(group)
        self.whole_runs = self.shared_runs = 0
        super().__init__(module)

    def _run(self, request: Request, plan: BandPlan, links: Chain, strict: bool) -> torch.Tensor:
        image, group = request.image, self._group
        one = self.chain_of(image)
        why = "there is one rank" if group.size == 1 else ""
        if group.size > units(one):
            why = f"{units(one)} ranks are the most for an image of this size, not {group.size}"
        if why or not image.shape[0]:
            self.whole_runs += image.shape[0]
            self._told.event(f"distributed: the VAE's {self._recipe.role} is not split: {why}")
            return super()._run(request, plan, links, strict)
        self._agreement.note(image)
        try:
            rows = parts_of(one, group.shares(units(one), 1))
            whole = self.together(image, rows, group, request.session)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The others wait for this rank: it cannot try smaller bands by itself.
            text = f"{group.members[group.rank]} has too little memory for its rows of the VAE"
            raise RankError(text) from error
        self.shared_runs += len(image)
        return whole

    def settle(self) -> None:
        """Raises ValueError where the ranks' images were not the same."""
        self._agreement.look(to_the_end=True)


class SharedStandIn(DiffusersStandIn):
    """In the place of a VAE's decoder or encoder; what ends the ranks is passed on."""

    passed_on: ClassVar[tuple[type[Exception], ...]] = (*DiffusersStandIn.passed_on, RankError)

    def __init__(self, vae: Any, role: str, group: Group, session: Session) -> None:
        super().__init__(vae, role, VaeWish("whole"), session)
        self.program: SharedProgram = SharedProgram(self.module, group, session)


@contextmanager
def vae_bands(
    vae: Any, group: Group, session: Session = DEFAULT
) -> Iterator[dict[str, SharedProgram]]:
    """Decode and encode with a diffusers VAE by all ranks inside the `with` block.

    Every rank gives the same image and gets the whole result: what one rank makes as a whole frame,
    to the bit where all run by one config. Ranks have some rows of 16 of the latent image, by their
    share. An image that is too small for them is made by each rank for itself, and told. Raises
    ValueError where neither part of the VAE can be run so. The programs, by role.
    """
    gate.begin()
    stand_ins: dict[str, SharedStandIn] = {}
    left: list[str] = []
    for role in ROLES:
        if isinstance(getattr(vae, role, None), nn.Module):
            stand_in = SharedStandIn(vae, role, group, session)
            why = stand_in.obstacles() or tuple(filter(None, [stand_in.put_in()]))
            if why:
                left.append(f"{role}: {'; '.join(why)}")
            else:
                stand_ins[role] = stand_in
    try:
        if not stand_ins:
            raise ValueError(f"this VAE cannot be run by ranks: {', '.join(left) or 'no parts'}")
        yield {role: stand_in.program for role, stand_in in stand_ins.items()}
        for stand_in in stand_ins.values():
            stand_in.program.settle()
    finally:
        for stand_in in stand_ins.values():
            stand_in.take_out()
