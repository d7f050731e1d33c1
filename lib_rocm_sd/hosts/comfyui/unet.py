"""A model's UNet blocks: ours in the calls of one model's clone, ComfyUI's in all others.

All clones share one nn.Module. What makes a call ours is in the clone's options: a wrapper around
`BaseModel.apply_model`, which says so for its thread while the call runs. Blocks stay taken over
between calls, for weights of convolutions are laid anew. The first call without the wrapper finds
its blocks in the modules' places, and gives all of it back before anything is computed.

Read in Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/model_base.py, comfy/model_patcher.py,
comfy/patcher_extension.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.attention import KEY, Override
from lib_rocm_sd.hosts.comfyui.host import OPTIONS, PLACE, UNET, Kept, tally
from lib_rocm_sd.hosts.read import unet_ldm
from lib_rocm_sd.hosts.strides import NOTED, Strides, values_of
from lib_rocm_sd.modules.faster import Contest, is_wanted
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import KindReport, UnetTakeover

PART = "UNet"
"""Name of the part in the report's rows, like attention's in the WebUI."""
BLOCKS = "UNet, transformer blocks"
UNET_CLASS = ("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel")
CLASSES = {
    UNET_CLASS,
    ("comfy.ldm.modules.diffusionmodules.mmdit", "OpenAISignatureMMDITWrapper"),
    ("comfy.ldm.flux.model", "Flux"),
    ("comfy.ldm.chroma.model", "Chroma"),
    ("comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel"),
    ("comfy.ldm.pixart.pixartms", "PixArtMS"),
    ("comfy.ldm.wan.model", "WanModel"),
}
"""All but the first are transformers: of SD 3, Flux, Chroma, Qwen-Image, PixArt and Wan."""
CHANGES = ("patches", "patches_replace")
"""Options by which nodes change what a call computes."""
COMPILED = "torch.compile"
"""As ComfyUI calls its wrapper that puts a compiled model in the place of the UNet."""

_lock = threading.RLock()
_known: WeakKeyDictionary[nn.Module, Blocks] = WeakKeyDictionary()
_here = threading.local()
_last: list[ref[Blocks]] = []
"""Whose blocks were ours last."""


class ModelCall(Kept):
    """A wrapper of `BaseModel.apply_model`: the UNet's blocks are ours while it runs, but without a
    session. `reasons`: what is said in each workflow.
    """

    def __init__(self, session: Session | None, reasons: Sequence[host.Left] = ()) -> None:
        self.session, self.reasons = session, reasons

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        host.count_for_workflow()
        tally.stands(self.reasons)
        if self.session is None:
            return executor(*args, **kwargs)
        with ExitStack() as stack:
            try:
                blocks = self._begun(stack, self.session, executor.class_obj, args, kwargs)
            except Exception as error:
                tally.leave(UNET, f"ours failed: {trouble.once(error)}")
                blocks = None
                stack.__exit__(type(error), error, error.__traceback__)  # it is ComfyUI's time
            with nullcontext() if blocks is None else blocks.serving():
                made = executor(*args, **kwargs)
        if blocks is not None:
            tally.served(UNET)
        return made

    @staticmethod
    def _begun(
        stack: ExitStack,
        session: Session,
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Blocks | None:
        """The blocks that are ours in this call, which may be timed until `stack` ends."""
        options = _options(args, kwargs)
        unet: Any = getattr(model, "diffusion_model", None)
        why = obstacle(unet) or compiled(options) or "; ".join(unusable(args[0].device))
        if not why and is_wanted():
            blocks = blocks_of(unet)
            stack.push(partial(_ended, blocks.timed(session, options, args, kwargs)))
            why = blocks.why_theirs
        if why:
            tally.leave(UNET, why)
            return None
        blocks = begun(unet, model, options, session, args[0])
        _last[:] = [ref(blocks)]
        return blocks


def _ended(after: Callable[[bool], None], kind: Any, error: Any, trace: Any) -> None:
    """A timed call has ended, as a stack says it."""
    try:
        after(kind is None)
    except Exception as wrong:
        tally.leave(UNET, f"it is not timed: {trouble.once(wrong)}")


def _options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    return (args[PLACE] if len(args) > PLACE else kwargs.get(OPTIONS)) or {}


def begun(
    unet: nn.Module,
    model: Any,
    options: Mapping[str, Any],
    session: Session,
    latent: torch.Tensor,
    part: str = PART,
) -> Blocks:
    """Those of a UNet, or of a ControlNet, that is about to be called: see Blocks.begin."""
    with _lock:
        blocks = blocks_of(unet, part)
        blocks.begin(model, options, session, latent)
    return blocks


def blocks_of(unet: nn.Module, part: str = PART) -> Blocks:
    """Those of a UNet, or of a ControlNet, which may not be ours yet."""
    with _lock:
        blocks = _known.get(unet)
        if blocks is None:
            blocks = _known[unet] = Blocks(unet, part)
    return blocks


class Blocks:
    """Those of one UNet, or of a ControlNet, which is not held. `part`: as the report calls it."""

    def __init__(self, unet: nn.Module, part: str) -> None:
        self._unet, self._part = ref(unet), part
        self._taken: UnetTakeover | None = None
        self._by: Session | None = None
        self._strides: Strides | None = None
        self._weights: Any = None
        self._run: Any = None
        self._calls = 0
        self.attends = ""
        """Why attention in blocks is called as it is; empty where it is ours."""
        self.rows: tuple[KindReport, ...] = ()
        """As they were when they were last ours."""
        self._asked = ""
        self._contest = Contest(unet, self._switch, self._setting, "ComfyUI's own code", host.say)

    def timed(
        self,
        session: Session,
        options: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Callable[[bool], None]:
        """As Contest.before: whose blocks are to be in this call."""
        attention = "ours" if isinstance(options.get(KEY), Override) else "ComfyUI's"
        self._asked = f"{session.level}, attention is {attention}"
        nodes = {f"{kind} {name}": True for kind in CHANGES for name in options.get(kind) or ()}
        return self._contest.before(options.get("sample_sigmas"), args, {**kwargs, **nodes})

    def _setting(self) -> str | None:
        """What the call that is made asks for; None where no block can be ours."""
        nothing = self._taken is not None and not any(row.ours for row in self.look())
        return None if nothing else self._asked

    @property
    def why_theirs(self) -> str:
        """Why ComfyUI computes the blocks since ours is slower, or to be timed; else empty."""
        return self._contest.why_theirs

    def _switch(self, ours: bool) -> None:
        """The next call takes over by itself."""
        if not ours:
            with _lock:
                self.give_back()

    def begin(
        self, model: Any, options: Mapping[str, Any], session: Session, latent: torch.Tensor
    ) -> None:
        """The UNet is about to be called for a model, by its options, with a latent image."""
        unet, run = self._unet(), options.get("sample_sigmas")
        assert unet is not None
        if self._taken is not None and self._by is not session:
            self.give_back()
        if self._taken is None:
            self._strides = Strides(model, unet, _backup)
            self._taken = UnetTakeover([unet], session.of_part(self._part), ComfyHook(self))
            self._by, self._run = session, run
            self._taken.take_over()
            self._compare(run, latent)
        elif run is None or run is not self._run:  # what failed in the last one is tried again
            self._taken.take_over(anew=False)
            self._compare(run, latent)
            self._run = run
        weights = weights_of(model)
        if weights is None or weights != self._weights:
            self._taken.weights_changed()
        self._weights = weights
        self._taken.step_begins()
        self._look_at(options)

    def _compare(self, sigmas: Any, latent: torch.Tensor) -> None:
        """Begin to compare blocks with ComfyUI's in a sampler's run, whose first latent image
        decides which: the same run compares the same.
        """
        assert self._taken is not None
        if isinstance(sigmas, torch.Tensor):
            turn = abs(int(latent.flatten()[0].float() * (1 << 16)))
            self._taken.generation_begins(turn, max(len(sigmas) - 1, 1))
        elif not self._taken.spot.compared:
            self._taken.generation_begins()

    def _look_at(self, options: Mapping[str, Any]) -> None:
        self.attends = "" if isinstance(options.get(KEY), Override) else "attention is ComfyUI's"
        patches = unet_ldm.patches_of(options)
        if patches:
            tally.leave(BLOCKS, f"another node changes them ({', '.join(patches)})")
        replaced = [k for k in unet_ldm.REPLACED if options.get("patches_replace", {}).get(k)]
        if replaced:
            why = f"another node replaces it in some of them ({', '.join(replaced)})"
            tally.leave(f"{BLOCKS}' attention", why)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Calls of blocks are ours in this thread."""
        before = getattr(_here, "blocks", ())
        with _lock:
            self._calls += 1
        _here.blocks = (*before, self)
        try:
            yield
        finally:
            _here.blocks = before
            with _lock:
                self._calls -= 1

    def serves(self) -> bool:
        """Whether a block is asked amid a call of ours. If not, all is given back, unless such a
        call runs in another thread.
        """
        if self in getattr(_here, "blocks", ()):
            return True
        with _lock:
            if not self._calls:
                self.give_back()
        return False

    def give_back(self) -> None:
        """Leave the UNet as it is without us. Never raises."""
        self.look()
        held, self._taken, self._strides = (self._taken, self._strides), None, None
        self._by = self._weights = self._run = None
        for each in held:
            try:
                if each is not None:
                    each.give_back()
            except Exception as error:  # short of memory: the values are right all the same
                tally.leave(UNET, f"its weights lie otherwise than before: {trouble.once(error)}")

    def look(self) -> tuple[KindReport, ...]:
        """The blocks as they are now, or were last."""
        if self._taken is not None and self._taken.is_on:
            self.rows = tuple(self._taken.report())
        return self.rows


class ComfyHook(Hook):
    """ComfyUI computes under inference mode, with models that it never sets to evaluation."""

    rests = tells = spares = True

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def serves(self) -> bool:
        return self._blocks.serves()

    def attention(self, module: nn.Module) -> str:
        return self._blocks.attends


def obstacle(unet: Any) -> str:
    """Why no block of this model can be taken over; empty where some can."""
    cls = type(unet)
    if (cls.__module__, cls.__name__) in CLASSES:
        return ""
    return f"this model is {cls.__name__} of {cls.__module__}, not a UNet"


def compiled(options: Mapping[str, Any]) -> str:
    """Why blocks are not called one by one, where torch.compile has made one program of them."""
    wrappers = options.get("wrappers", {})
    names = {name for named in wrappers.values() for name in named}
    return f"{COMPILED} computes this model" if COMPILED in names else ""


def unusable(device: torch.device) -> list[str]:
    """Why our kernels cannot compute blocks on a device; starts to compile and try at the first
    use.
    """
    unfit = list(identify(device).reasons)
    if unfit:
        return unfit
    if engine.gate is None:
        gate.begin(host.say)
    known = engine.known(device, LAYER_NORM)
    return engine.usable(device, LAYER_NORM) if known is None else known


def _backup(model: Any) -> Mapping[str, Any]:
    return getattr(getattr(model, "current_patcher", None), "backup", None) or {}


def weights_of(model: Any) -> Any:
    """Equal only while ComfyUI has put no other values into the weights; None where it might."""
    return values_of(model) if hasattr(model, NOTED) else None


def rows() -> tuple[KindReport, ...]:
    """The blocks of the UNet whose blocks were ours last, if it is still there."""
    with _lock:
        blocks = _last[0]() if _last else None
        return () if blocks is None else blocks.look()
