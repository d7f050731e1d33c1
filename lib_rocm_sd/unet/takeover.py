"""Takes the blocks of a UNet over, says which are ours and why others are not, gives them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.calls import MOST_FACTS
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.modules.patches import named
from lib_rocm_sd.modules.stand_in import StandIn, brief
from lib_rocm_sd.unet.blocks import Inner, Means
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.kinds import TITLES, Kind, found_in
from lib_rocm_sd.unet.merged import MergedLayers
from lib_rocm_sd.unet.parts import Block, ImageAttention, Resnet, ResnetOverFrames
from lib_rocm_sd.unet.shared import Embeddings, Prompts, Regions
from lib_rocm_sd.unet.spot import STEPS, SpotCheck
from lib_rocm_sd.unet.stand_in import BlockStandIn
from lib_rocm_sd.unet.weights import UnetWeights


@dataclass(frozen=True)
class KindReport:
    """Counts the blocks of one kind: `total` in all, `ours` of them ours. `left`: why the others
    are not, and how many.

    `partly`: why modules within our blocks are called as they are, and in how many.
    """

    kind: str
    total: int
    ours: int
    left: Mapping[str, int]
    partly: Mapping[str, int]

    def __str__(self) -> str:
        notes = [f"{count} x {why}" for why, count in {**self.left, **self.partly}.items()]
        return f"{self.kind}: {self.ours} of {self.total}" + "".join(f"; {note}" for note in notes)


class UnetTakeover:
    """The blocks of one UNet, from `take_over` to `give_back`. See `take_over` below.

    The models are held weakly, their blocks not.
    """

    def __init__(self, models: Sequence[nn.Module], session: Session, hook: Hook) -> None:
        self._models = tuple(map(ref, models))
        self._session, self._hook = session, hook
        self._weights = UnetWeights(hook.tells)
        self.graphs = Graphs(session.report.event, hook.graphs)
        self._embeddings = Embeddings(self._ready, session, self.graphs, hook.tells)
        self._prompts = Prompts(self._ready, session, self.graphs, hook.tells)
        self.spot = SpotCheck(self._differs)
        self._regions = Regions()
        self._means = Means(
            *(self._weights, hook.attention, self._embeddings, self._prompts, self._regions),
            *(self.graphs, self._inner, self.spot),
            *(self._name_of, self._share),
        )
        self._stand_ins: dict[nn.Module, BlockStandIn] = {}
        self._elsewhere: dict[nn.Module, str] = {}
        self._merged: dict[tuple[nn.Module, ...], MergedLayers] = {}
        self._is_on = False

    def take_over(self, anew: bool = True) -> None:
        """Take over what can be, now; what is ours already stays so.

        Each block is read again. `anew` False: only one that has changed, failed or been displaced,
        which costs a UNet a millisecond.
        """
        self._is_on = True
        self._elsewhere.clear()
        found = [item for model in self._living() for item in found_in(model)]
        gone = set(self._stand_ins) - {module for module, _ in found}
        for module in gone:
            self._stand_ins.pop(module).take_out()
            self._weights.leave(module.modules())
        for module, kind in found:
            self._take(module, kind, anew)
        self._share()

    def _share(self) -> None:
        """Tell what the blocks share whose layers it is made for, as they were read last."""
        self._merged = {}
        self._weights.reread()
        ours = [each.parts for each in self._stand_ins.values() if each.is_put_in]
        within = [each.images for each in ours if isinstance(each, ResnetOverFrames)]
        resnets = [each for each in (*ours, *within) if isinstance(each, Resnet | ResnetOverFrames)]
        timed = (each.timed for each in resnets if each.embed_silu)
        self._embeddings.timed = tuple(each for each in timed if each is not None)
        blocks = [each for each in ours if isinstance(each, Block | ImageAttention)]
        alike = (each for each in blocks if getattr(each, "ff_in", None) is None)
        self._prompts.share([part for each in alike for part in each.crossing()])

    def _take(self, module: nn.Module, kind: Kind, anew: bool) -> None:
        current = vars(module).get("forward")
        stand_in = self._stand_ins.get(module)
        if current is not stand_in and isinstance(current, StandIn) and current.is_put_in:
            self._elsewhere[module] = kind.title  # of another take-over
            return
        if stand_in is None:
            stand_in = BlockStandIn(module, kind, self._means, self._hook, self._session)
            self._stand_ins[module] = stand_in
        elif anew or stand_in.reasons or not stand_in.is_put_in:
            stand_in.renew()
        if stand_in.reasons:
            stand_in.take_out()
            self._weights.leave(module.modules())
        else:
            stand_in.put_in()

    def _ready(self, layers: Sequence[nn.Module]) -> str:
        key = tuple(layers)
        merged = self._merged.get(key)
        if merged is None:
            if len(self._merged) >= MOST_FACTS:
                self._merged.clear()
            merged = self._merged[key] = MergedLayers(key)
        return self._hook.ready(layers) or self._weights.merge(merged, self._session, False)

    def _inner(self, module: nn.Module, x: torch.Tensor, given: Mapping[str, Any]) -> Inner | None:
        stand_in = self._stand_ins.get(module)
        return None if stand_in is None else stand_in.inner(x, given)

    def weights_changed(self) -> None:
        """Other values may be in the parameters: forget what was made of them."""
        self._weights.forget()
        self._embeddings.forget()
        self._prompts.forget()

    def step_begins(self, is_ours: Callable[[], bool] | None = None) -> None:
        """The UNet is about to be called, with a new time embedding. `is_ours()`: whether this call
        runs no code that could write to adapters, but that of blocks; `step_ends` is called then.
        """
        self._weights.step_begins(is_ours)
        self._embeddings.step_begins()
        self._prompts.step_begins()
        self._regions.forget()

    def step_ends(self) -> None:
        """That call of the UNet has ended."""
        self._weights.host_runs()

    def generation_begins(self, turn: int | None = None, steps: int = STEPS) -> None:
        """A picture of so many steps is about to be made: what was left since a comparison is read
        anew. `turn`: see SpotCheck.begin.
        """
        self.spot.look(wait=True)
        if self.spot.left:
            self.spot.left.clear()
            self.take_over()
        ours = [each for each in self._stand_ins.values() if each.is_put_in]
        self.spot.begin(ours if self._hook.compares else (), turn, steps)

    def _differs(self, block: BlockStandIn, how: str) -> dict[str, str]:
        """Why blocks of this one's kind are left: by title. It is not what the host computes."""
        block.renew()
        reasons = (*block.reading.reasons, *block.reading.partly)
        what = "; ".join(brief(reasons)) or "nothing that is looked at has changed"
        why = f"{self._name_of(block.module)} {how} from the host's own: {what}"
        self._session.report.event(f"UNet: {why}")
        alike = TITLES[1:3] if block.kind.title in TITLES[1:3] else (block.kind.title,)
        return dict.fromkeys(alike, why)

    def _living(self) -> list[nn.Module]:
        return [model for model in (known() for known in self._models) if model is not None]

    def _name_of(self, module: nn.Module) -> str:
        named = (pair for model in self._living() for pair in model.named_modules())
        return next((name for name, each in named if each is module), "a block")

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def stand_ins(self) -> tuple[BlockStandIn, ...]:
        """Stand-ins for the blocks that were found and belong to no other take-over."""
        return tuple(self._stand_ins.values())

    @property
    def extra_bytes(self) -> int:
        """Memory that is kept beside the UNet's own parameters."""
        return self._weights.extra_bytes

    def give_back(self) -> None:
        """Leave every block and every weight as it was; who has taken our place meanwhile stays."""
        self._is_on = False
        for stand_in in self._stand_ins.values():
            stand_in.take_out()
            stand_in.forget()
        self._stand_ins.clear()
        self._elsewhere.clear()
        self._merged = {}
        self.spot.begin(())
        self._embeddings.forget()
        self._prompts.forget()
        self._regions.forget()
        self.graphs.forget()
        self._weights.give_back()

    def report(self) -> list[KindReport]:
        """One row for each kind of block that there is."""
        rows: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
        for module, stand_in in self._stand_ins.items():
            reasons, partly = stand_in.reasons, stand_in.partly
            if not reasons and not stand_in.is_put_in:
                reasons = _displaced(module)
            rows.setdefault(stand_in.kind.title, []).append((reasons, () if reasons else partly))
        for module, title in self._elsewhere.items():
            if module not in self._stand_ins:
                current: Any = vars(module).get("forward")
                serves = isinstance(current, StandIn) and current.is_put_in
                rows.setdefault(title, []).append(((), ()) if serves else (_displaced(module), ()))
        return [_row(title, rows[title]) for title in TITLES if title in rows]


def _displaced(module: nn.Module) -> tuple[str, ...]:
    """Why calls of a block that was ours come elsewhere."""
    return (f"its forward has been replaced ({named(vars(module).get('forward'))})",)


def _row(title: str, found: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> KindReport:
    left = Counter("; ".join(brief(reasons)) for reasons, _ in found if reasons)
    partly = Counter(reason for _, reasons in found for reason in reasons)
    ours = sum(not reasons for reasons, _ in found)
    return KindReport(title, len(found), ours, dict(left), dict(partly))


def take_over(
    models: nn.Module | Sequence[nn.Module],
    session: Session = DEFAULT,
    hook: Hook | None = None,
) -> UnetTakeover:
    """Compute the blocks of a UNet, or of several models, by our programs until `give_back()`.

    Known are UNetModel of ldm, sgm and ComfyUI, and diffusers' UNet2DConditionModel, in half
    precision.
    A block that is not known, or whose forward another has replaced, is left alone; so is a call
    that a block was not read for: with gradients, in training, of another dtype, traced.
    """
    models = [models] if isinstance(models, nn.Module) else list(models)
    made = UnetTakeover(models, session, Hook() if hook is None else hook)
    made.take_over()
    made.generation_begins()
    return made
