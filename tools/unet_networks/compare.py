"""A model by the WebUI alone and with our blocks, in the same situations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.hosts.webui.seams import make_optimization as our_optimizer
from lib_rocm_sd.hosts.webui.unet import WebUIHook
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.unet.unet_models import errors
from tools.unet_networks import models
from tools.unet_networks.webui import WebUI

STEPS = 4
LEAST_CHANGE = 0.05
"""Of the largest value of a step. Rounding to half precision changes less than a fifth of that."""
MOST_LARGEST = 1.25
"""Chance decides the largest of few values: a row's may be so many times the WebUI's. The mean of
all rows is judged, too.
"""
AS_AUTOMATIC = "Doggettx"
"""What "Automatic" is on a card of AMD's."""


@dataclass(frozen=True)
class Situation:
    """`enter` brings the WebUI there, from whatever was before.

    `apart`: our blocks leave all to it, so nothing but our attention is in the step, which may be
    so far from the WebUI's with that attention. `changes`: it must change a step. `most`: so many
    times the WebUI's error is right. `seeded` is called before each step.
    """

    name: str
    enter: Callable[[], None]
    apart: float | None = None
    changes: bool = False
    most: float = 1.0
    seeded: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Row:
    """A situation. Errors are shares of the largest value of the step in float32: the mean over
    steps of the largest, and of the root of the mean square.

    `changed`: by how much the situation changes a step of the WebUI's. `apart`: ours and the
    WebUI's; at most `most_apart` is right where there are no errors. `weights`: whether all
    parameters have the values that they have by the WebUI alone.
    """

    model: str
    what: str
    situation: str
    ours: tuple[float, float] | None
    webui: tuple[float, float] | None
    apart: float
    changed: float
    weights: bool
    blocks: str
    notes: list[str] = field(default_factory=list)
    most_apart: float = 0.0
    raised: str = ""
    most: float = 1.0

    @property
    def right(self) -> bool:
        if not self.weights:
            return False
        if self.ours is None or self.webui is None:
            return self.apart <= self.most_apart
        most = self.most * MOST_LARGEST, self.most
        pairs = zip(self.ours, self.webui, most, strict=True)
        return all(mine <= times * theirs for mine, theirs, times in pairs)

    def as_json(self) -> dict[str, Any]:
        """With three digits of each figure, and without what is as usual."""
        made = {**asdict(self), "right": self.right}
        usual = {"notes": [], "most_apart": 0.0, "raised": "", "most": 1.0}
        told = [key for key, value in made.items() if key not in usual or usual[key] != value]
        return {key: _rounded(made[key]) for key in told}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class _Seen:
    """What a situation gave: a step's results, or what was raised; and the parameters' bytes."""

    results: torch.Tensor | None
    raised: str
    weights: str
    exact: torch.Tensor | None = None
    report: Sequence[Any] = ()


class Bench:
    """One model and the steps that it is asked for."""

    def __init__(
        self, webui: WebUI, model: models.Model, size: models.Size | None = None, steps: int = STEPS
    ) -> None:
        self.webui, self.model = webui, model
        self.size = models.Size() if size is None else size
        self.seeds = range(steps)
        self.optimizer = AS_AUTOMATIC
        self.anew: Callable[[], Any] = lambda: None
        """Called before the WebUI's steps, before ours and after them."""
        self.ours = our_optimizer(webui.module("modules.sd_hijack_optimizations").SdOptimization)

    def rows(self, what: str, situations: Sequence[Situation]) -> list[Row]:
        """Each situation by the WebUI, then each with ours; afterwards all is as it was."""
        unet = self.model.unet
        self.anew()
        before, layout = digest(unet), _layout(unet)
        self.webui.apply_optimizer(self.optimizer)
        plain = self._results(Situation("", lambda: None))
        theirs = [self._seen(situation, exact=True) for situation in situations]
        self.anew()
        with self.taken_over() as taken:
            ours = [self._seen(situation, taken=taken) for situation in situations]
        self._given_back(before, layout, plain)
        return [self._row(what, *one, plain) for one in zip(situations, theirs, ours, strict=True)]

    @contextmanager
    def taken_over(self) -> Iterator[UnetTakeover]:
        """As with Enable on: our attention is the chosen optimizer, the blocks are ours."""
        self.webui.apply_optimizer(self.ours if self.optimizer == AS_AUTOMATIC else self.optimizer)
        taken = take_over(self.model.unet, hook=WebUIHook(lambda: bool(self.ours.stands_aside)))
        try:
            yield taken
        finally:
            taken.give_back()
            self.webui.apply_optimizer(self.optimizer)

    @contextmanager
    def _our_attention(self) -> Iterator[None]:
        """Whom all is left to has our attention, too."""
        self.webui.apply_optimizer(self.ours)
        try:
            yield
        finally:
            self.webui.apply_optimizer(self.optimizer)

    def _given_back(self, before: str, layout: Any, plain: torch.Tensor) -> None:
        unet = self.model.unet
        self.anew()
        if digest(unet) != before or _layout(unet) != layout:
            raise AssertionError("the weights are not those from before")
        if not torch.equal(self._results(Situation("", lambda: None)), plain):
            raise AssertionError("a step is not the one from before")

    def _seen(
        self, situation: Situation, exact: bool = False, taken: UnetTakeover | None = None
    ) -> _Seen:
        situation.enter()
        with_ours = situation.apart is not None and taken is None
        try:
            with self._our_attention() if with_ours else nullcontext():
                results = self._results(situation)
        except Exception as error:
            return _Seen(None, f"{type(error).__name__}: {error}", digest(self.model.unet))
        weights = digest(self.model.unet)
        report = [] if taken is None else taken.report()
        wide = None
        if exact and situation.apart is None:
            with _in_float32(self.webui, self.model):
                wide = self._results(situation)
        return _Seen(results, "", weights, wide, report)

    def _results(self, situation: Situation) -> torch.Tensor:
        made = []
        for seed in self.seeds:
            x, t, cond = models.inputs(self.model, self.size, seed)
            situation.seeded()
            with torch.no_grad(), self.webui.devices.autocast():
                made.append(self.model.whole.apply_model(x, t, cond).float())
        return torch.stack(made)

    def _row(
        self, what: str, situation: Situation, theirs: _Seen, ours: _Seen, plain: torch.Tensor
    ) -> Row:
        made, host, wide = ours.results, theirs.results, theirs.exact
        same = ours.weights == theirs.weights
        blocks = ", ".join(f"{row.ours}/{row.total}" for row in ours.report)
        notes = [str(row) for row in ours.report if row.left or row.partly]
        common = (self.model.family, what, situation.name)
        if made is None or host is None:
            apart = 0.0 if ours.raised == theirs.raised else float("inf")
            raised = theirs.raised or ours.raised
            return Row(*common, None, None, apart, 0.0, same, blocks, notes, raised=raised)
        changed = errors(host, plain)[0]
        if situation.changes and changed < LEAST_CHANGE:
            raise AssertionError(f"{common} changes nothing")
        return Row(
            *common,
            None if wide is None else _mean_errors(made, wide),
            None if wide is None else _mean_errors(host, wide),
            errors(made, host)[0],
            changed,
            same,
            blocks,
            notes,
            situation.apart or 0.0,
            most=situation.most,
        )


def _mean_errors(made: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    found = [errors(one, other) for one, other in zip(made, exact, strict=True)]
    return sum(item[0] for item in found) / len(found), sum(item[1] for item in found) / len(found)


def digest(unet: nn.Module) -> str:
    """Of the names and the exact values of all parameters, however they lie."""
    made = hashlib.sha256()
    for name, tensor in unet.named_parameters():
        made.update(f"{name} {tuple(tensor.shape)}".encode())
        made.update(tensor.detach().float().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _layout(unet: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.dtype, tensor.stride()) for name, tensor in unet.named_parameters()}


@contextmanager
def _in_float32(webui: WebUI, model: models.Model) -> Iterator[None]:
    """The same weights in float32; afterwards the parameters have their own memory again."""
    unet, devices = model.unet, webui.devices
    kept = [(parameter, parameter.data) for parameter in unet.parameters()]
    before = (unet.dtype, devices.dtype_unet, devices.unet_needs_upcast)
    for parameter, data in kept:
        parameter.data = data.float()
    unet.dtype = devices.dtype_unet = torch.float32
    devices.unet_needs_upcast = False
    try:
        yield
    finally:
        unet.dtype, devices.dtype_unet, devices.unet_needs_upcast = before
        for parameter, data in kept:
            parameter.data = data
