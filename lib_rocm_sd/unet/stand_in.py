"""Stands in for `forward` of one block of a UNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Places, Routes, begin
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.modules.stand_in import StandIn, UnknownModuleError
from lib_rocm_sd.modules.watch import hooks_of_all, is_intercepted
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.unet import divided
from lib_rocm_sd.unet.blocks import Inner, Means, ours_of, planned
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.kinds import Kind, Reading
from lib_rocm_sd.unet.merged import MergedLayers, hosts_weight
from lib_rocm_sd.unet.parts import (
    Block,
    ImageAttentionCall,
    ImageCall,
    Parts,
    Resnet,
    TransformerCall,
    VideoCall,
)
from lib_rocm_sd.unet.weights import is_laid, laid

IMAGES = (ImageCall, TransformerCall, ImageAttentionCall, VideoCall)
"""What asks for an image (N, C, H, W); others ask for tokens."""


class BlockStandIn(StandIn):
    """Our program in the place of one block. It is read again when it has changed."""

    def __init__(
        self,
        module: nn.Module,
        kind: Kind,
        means: Means,
        hook: Hook,
        session: Session,
    ) -> None:
        super().__init__(module)
        self.kind = kind
        self._means, self._hook = means, hook
        self._session, self._places = session, Places()
        self._told: Callable[[str], None] = session.report.event
        self._barred = self._left = ""
        self._lacked = -1  # engine.drops when a call of some rows lacked a kernel
        self._last_refusal = ""
        self._replaced: tuple[str, ...] = ()
        self._leaves: tuple[nn.Module, ...] = ()
        self._reading = self._read()

    @property
    def reading(self) -> Reading:
        """The module as it is now."""
        if not self._reading.watch.same():
            self._reading = self._read()
            self._barred = self._left = ""
            self._means.reread()
        return self._reading

    @property
    def parts(self) -> Parts | None:
        """What was read last, which may have changed since."""
        return self._reading.parts

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the block is the module's own; empty where it is ours."""
        why = self._barred or self._means.spot.left.get(self.kind.title, "") or self._left
        return self.reading.reasons or ((why,) if why else ())

    @property
    def partly(self) -> tuple[str, ...]:
        """Why modules within are called as they are, or others in their place in the last call."""
        found = (f"{name} is replaced in this layer" for name in self._replaced)
        return (*self.reading.partly, *found)

    def forget(self) -> None:
        """Keep nothing of past calls: somebody may keep us."""
        self._places.forget()

    def renew(self) -> None:
        """Read the module again, and forget what failed."""
        self._barred = self._left = ""
        self._reading = self._read()

    def _read(self) -> Reading:
        """What calls lead to follows from it too, beside their facts."""
        self._places.forget()
        hook = self._hook
        made = self.kind.read(self.module, hook.hosts_own, hook.tells)
        self._means.weights.leave(set(self._leaves) - set(made.leaves))
        self._leaves = made.leaves
        self._merged = MergedLayers(made.leaves)
        self._convs = [leaf for leaf in made.leaves if is_laid(leaf)]
        return made

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        """A call that the module was read for, on an image or tokens like its weights."""
        rows = divided.current()
        if rows is not None and not rows.is_ours(self.module):
            return None
        if not self._hook.serves() or self._barred or self._means.spot.is_theirs:
            return None
        if self.module.training and not self._hook.rests:
            return None
        reading = self.reading
        if reading.parts is None:
            return None
        try:
            call = self.kind.bind(self.module, *args, **kwargs)
            self._left = ""
            self._replaced = getattr(call, "replaced", ())
        except UnknownModuleError as error:
            self._left = "; ".join(error.reasons)
            return None
        except (TypeError, AttributeError, ValueError):
            return None
        except Exception as error:  # short of memory, or nobody foresaw it
            if rows is not None:
                raise  # other ranks wait
            self._left = f"ours failed: {type(error).__name__}: {error}"
            return None
        if _suits(call, reading):
            return call
        if call is not None and isinstance(call.x, torch.Tensor) and call.x.dtype not in HALVES:
            self._left = f"it is computed in {str(call.x.dtype).removeprefix('torch.')}"
        weight = hosts_weight(reading.leaves[0]) if reading.leaves else None
        if weight is not None and weight.dtype not in HALVES:
            self._reading = self._read()  # dtypes are not watched
        return None

    def inner(self, x: torch.Tensor, given: Mapping[str, Any]) -> Inner | None:
        """This transformer block as a part of its transformer, where nothing but us computes it.

        x (N, tokens, C) is only looked at.
        """
        if not self.is_put_in or _is_hooked(self.module):
            return None
        call = self.asked(x, **given)
        parts = self._reading.parts
        if call is None or not isinstance(parts, Block):
            return None
        ours = ours_of(parts, call, self._means)
        if not ours.is_whole or self._why_not():
            return None
        return Inner(partial(planned, parts, call, self._means, ours), self._laid_routes(call))

    def _laid_routes(self, call: Any) -> Routes:
        """What a call's places lead to, with the weights laid as our programs read them.
        Convolutions first: facts are addresses, and one that lies as the host has it may be where
        another has been.
        """
        self._means.weights.lay(self._convs)
        rows = divided.current()
        facts, parts, slots = _facts(call), self._reading.parts, self._reading.slots
        if rows is not None:
            facts += (rows.facts,)
        routes = self._places.of((facts, laid(slots)))
        joint = parts.joint() if isinstance(parts, Block) and not routes else ()
        if joint and self._means.weights.join(joint):
            return self._places.of((facts, laid(slots)))
        return routes

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        why = super().refusal(*args, **kwargs)
        return why or ("" if divided.current() is not None else self._why_not())

    def may_divide(self) -> bool:
        """Whether it can compute this process's rows of an image, and has what it takes: asked
        before each call of the UNet, since all have to compute a block in one way.
        """
        able = self.is_put_in and self.reading.parts is not None and not self._barred
        if not able or self._lacked == engine.drops or self._why_not():
            return False
        try:
            with self._means.weights.lock:
                self._means.weights.lay(self._convs)
        except UnknownModuleError as error:
            self.tell("; ".join(error.reasons))
            return False
        return True

    def theirs(self, *args: Any, **kwargs: Any) -> Any:
        self._means.weights.host_runs()
        rows = divided.current()
        beneath = None if rows is None else rows.beneath(self.module)
        return super().theirs(*args, **kwargs) if beneath is None else beneath(*args, **kwargs)

    def _why_not(self) -> str:
        """Why no call of it is to be ours now."""
        spot = self._means.spot
        spot.look()
        if is_intercepted():
            return "somebody's mode sees what torch computes (TorchFunctionMode)"
        return (
            spot.left.get(self.kind.title, "")
            or self._hook.ready(self._reading.leaves)
            or self._means.weights.merge(self._merged, self._session)
        )

    def used(self, made: Any, asked: Any, theirs: Callable[[], Any]) -> Any:
        """Ours, but for the calls that are compared."""
        spot = self._means.spot
        elsewhere = divided.current() is not None or is_recording(asked.x.device)
        if elsewhere or not spot.is_due(self):
            return made
        return spot.compare(self, made, asked.x, theirs)

    def serve(self, asked: Any) -> Any:
        try:
            with self._means.weights.lock:
                return self._served(asked)
        except UnknownModuleError as error:
            self._left = "; ".join(error.reasons)
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._means.graphs.forget()
            self._means.prompts.forget()
            if not self._hook.spares or divided.current() is not None:
                raise  # other ranks cannot know that this one would begin anew
        raise UnknownModuleError(("ours ran out of memory",))

    def _served(self, asked: Any) -> Any:
        routes = self._laid_routes(asked)
        reading, rows = self._reading, divided.current()
        self._left = routes.left or ""
        if rows is not None:
            rows.begin(self.module)
        elif self._left:
            raise UnknownModuleError((self._left,))
        graphs = self._means.graphs if rows is None and reading.lasts else None
        calls = begin(self._session, routes, graphs, rows)
        self._means.spot.is_whole = True
        run = partial(self.kind.run, reading.parts, asked, self._means, calls)
        capture = engine.capture
        made = run() if capture is None else capture.within(self._means.name_of(self.module), run)
        if not self._means.spot.is_whole:
            self._means.weights.host_runs()
        if routes.left is None:
            routes.left = self.obstacle(routes)
        if rows is not None and routes.left:
            self._lacked = engine.drops
            self.tell(routes.left)
        return made

    def obstacle(self, routes: Routes) -> str:
        """Why the host computes this block faster: a kernel of ours is not tried yet, or barred,
        and what torch does in its stead is many operations. Empty where that is not so, and on a
        device that we have no kernels for.
        """
        found = (route for route in routes.values() if route.plan is not None)
        last = next((route for route in found if route.plan.variant.last_resort), None)  # type: ignore[union-attr]
        if last is None or identify(last.device).arch is None:
            return ""
        why = (reason for reasons in last.plan.refusals.values() for reason in reasons)  # type: ignore[union-attr]
        what = last.plan.variant.last_resort  # type: ignore[union-attr]
        return f"no {what} of ours: {next(why, 'none is left')}"

    def failed(self, error: Exception) -> str:
        """Bars ours until the module has changed or is taken over again. Raises the error where
        others wait for this process's rows: nobody can begin anew.

        What is seen when it is read again is told instead: dtypes are not watched.
        """
        if divided.current() is not None:
            raise error
        self._reading = self._read()
        if self._reading.reasons:
            return "; ".join(self._reading.reasons)
        self._barred = f"ours failed: {type(error).__name__}: {error}"
        return self._barred

    def tell(self, why: str) -> None:
        if why != self._last_refusal:
            self._last_refusal = why
            self._told(f"UNet, {self.kind.title}: a call was left to the host: {why}")


def _is_hooked(module: nn.Module) -> bool:
    """Whether a call of it does more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or hooks_of_all()


def _facts(call: Any) -> tuple[Any, ...]:
    """What the shapes in a block follow from, beside its weights."""
    return tuple(
        isinstance(each, torch.Tensor) and (each.shape, each.stride(), each.dtype, each.device)
        for each in (call.x, *call.others)
    )


def _suits(call: Any, reading: Reading) -> bool:
    """True where x has the weights' dtype and device, and all that ours reads is there."""
    if call is None:
        return False
    x = call.x
    weight = hosts_weight(reading.leaves[0]) if reading.leaves else x
    if type(x) is not torch.Tensor or weight is None:
        return False
    dtype = x.dtype
    return (
        dtype == weight.dtype
        and dtype in HALVES
        and x.device == weight.device
        and x.ndim == (4 if isinstance(call, IMAGES) else 3)
        and 0 not in x.shape
        and (type(call) is not ImageCall or _embeds(call.emb, reading.parts, dtype))
    )


def _embeds(emb: Any, parts: Any, dtype: torch.dtype) -> bool:
    """Whether there is an embedding where, and only where, the block reads one."""
    if type(parts) is not Resnet or parts.embed is None:
        return emb is None
    return type(emb) is torch.Tensor and emb.ndim == 2 and emb.dtype == dtype
