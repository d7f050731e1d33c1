"""A VAE whose decoder and encoder are ours: a copy, the given one stays as it is.

The copy shares all with the given VAE but `first_stage_model`, in whose place it has something that
passes everything on, and ComfyUI's two estimates of memory. Read in Comfy-Org/ComfyUI a125cd84
(0.3.64): comfy/sd.py, class VAE; comfy/ldm/models/autoencoder.py.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.host import Kept, tally
from lib_rocm_sd.hosts.comfyui.model import WITHOUT, is_dynamic
from lib_rocm_sd.hosts.vae import ESTIMATES, ROLES, VIDEO, Estimate, VaeStandIn, VaeWish
from lib_rocm_sd.modules.stand_in import brief
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.program import PARTS, Program

_lock = threading.RLock()
_coders: weakref.WeakKeyDictionary[nn.Module, dict[str, Coder]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class NodeWish(Kept, VaeWish):
    """What a node asks of a VAE. `roles`: of PARTS, those that may be ours. `reasons`: what is said
    in each workflow. With it copies of a VAE share the session's plans.
    """

    session: Session = DEFAULT
    roles: tuple[str, ...] = ROLES
    reasons: tuple[host.Left, ...] = ()


class Coder(VaeStandIn):
    """Stands in for a decoder or encoder from `begin` to `end`."""

    passed_on = (MemoryError, Interrupted)
    wish: NodeWish

    def __init__(self, module: nn.Module, role: str) -> None:
        super().__init__(module, role)
        self.program = Program(module)
        self.was_left = False
        """Whether the last image was ComfyUI's. So may be the next: how the weights are loaded is
        known only after memory was made free for it.
        """

    @property
    def session(self) -> Session:
        return self.wish.session

    def begin(self, wish: NodeWish) -> None:
        """Serve the module's calls from now on, unless another does."""
        self.wish = wish
        other = self.put_in()
        if other:
            self.tell(f"its forward has been replaced ({other})")

    def end(self) -> None:
        """Leave the module as it was, and the device without anything of ours."""
        self.take_out()
        self.program.release()

    def unfit(self, dtype: torch.dtype, device: torch.device) -> str:
        """Why ours cannot run here with weights of this dtype; empty where it can.

        `device`: of the image. Weights that are brought in each call lie elsewhere, perhaps in
        another dtype, and what is said of them is said first.
        """
        why = list(identify(device).reasons)
        if not why and (self.program.reasons or dtype not in HALVES):
            why = brief(self.program.refresh())
        if not why and dtype not in HALVES:
            name = str(dtype).removeprefix("torch.")
            fp16 = "start ComfyUI with --fp16-vae, in which ours does not overflow"
            why = [f"its weights are {name}; {fp16}"]
        return "; ".join(why or usable(device))

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        image = args[0]
        if self.program.is_over_time:
            if self.frames != 1:
                return VIDEO
        elif not isinstance(image, torch.Tensor) or image.ndim != 4:
            return "it is not given pictures, (N, C, H, W), but perhaps a video"
        weight = next(self.module.parameters())
        return super().refusal(image) or self.unfit(weight.dtype, image.device)

    def serve(self, asked: torch.Tensor) -> torch.Tensor:
        """What the module gives for one image (N, C, H, W)."""
        image = self.run(asked, progress=host.progress_bar(), interrupt=host.interrupted)
        self.was_left = False
        shortage = self.shortage()
        if shortage:
            self.session.report.event(shortage)
        return image

    def used(self, made: Any, asked: torch.Tensor, theirs: Callable[[], Any]) -> Any:
        chosen = super().used(made, asked, theirs)
        if chosen is made:
            tally.served(PARTS[self.role])
        return chosen

    def tell(self, why: str) -> None:
        self.was_left = True
        tally.leave(PARTS[self.role], why)


def usable(device: torch.device) -> list[str]:
    """Why our kernels cannot run a VAE on a device; starts to compile and try at the first use."""
    if engine.gate is None and not identify(device).reasons:
        gate.begin(host.say)
    return engine.usable(device, CONVS["3x3"])


class FirstStage:
    """In the place of a VAE's first_stage_model: passes everything on to it, two calls in our way.

    Its decoder's and encoder's forward are ours only while one of these calls runs. A deep copy has
    a copy of the model, and is asked for the same.
    """

    def __init__(self, model: nn.Module, wish: NodeWish) -> None:
        self.rocm_sd_model = model
        self.rocm_sd_wish = wish

    def __getattr__(self, name: str) -> Any:
        if name in ("rocm_sd_model", "rocm_sd_wish"):
            raise AttributeError(name)  # of one that is being copied
        return getattr(self.rocm_sd_model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstStage:
        return FirstStage(copy.deepcopy(self.rocm_sd_model, memo), self.rocm_sd_wish)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._by("decoder", self.rocm_sd_model.decode, *args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self._by("encoder", self.rocm_sd_model.encode, *args, **kwargs)

    def _by(self, role: str, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            host.count_for_workflow()
            tally.stands(self.rocm_sd_wish.reasons)
            coder = coder_of(self.rocm_sd_model, role, self.rocm_sd_wish)
            if coder is None:
                return theirs(*args, **kwargs)
            coder.begin(self.rocm_sd_wish)
            coder.count_frames(args[0] if args else None, theirs)
            try:
                return theirs(*args, **kwargs)
            except host.Cancelled as cancelled:
                raise cancelled.error from None
            except Interrupted:
                host.stop_if_interrupted()
            except (RuntimeError, MemoryError) as error:
                kind = host.out_of_memory()
                if isinstance(error, kind) or not is_out_of_memory(error):
                    raise
                raise kind(str(error)) from None
            finally:
                coder.end()
        return theirs(*args, **kwargs)


class NodeEstimate(Estimate):
    """ComfyUI's estimate, or ours. A deep copy is of the copied model."""

    def __init__(
        self,
        theirs: Callable[[Any, Any], float],
        device: Any,
        model: nn.Module,
        role: str,
        wish: NodeWish,
    ) -> None:
        super().__init__(theirs, device)
        self.model, self._role, self._wish = model, role, wish

    def ours(self, height: int, width: int, dtype: torch.dtype, device: torch.device) -> int | None:
        coder = coder_of(self.model, self._role, self._wish)
        if coder is None or coder.was_left or coder.unfit(dtype, device):
            return None
        return coder.needed_bytes(height, width, dtype, device, self._wish, self._wish.session)

    def tell(self, why: str) -> None:
        tally.leave(PARTS[self._role], f"its {why}")


def with_ours(vae: Any, wish: NodeWish) -> Any:
    """A copy of `vae`, a comfy.sd.VAE, that decodes and encodes as `wish` says.

    What fails gives the VAE as it came, with a reason.
    """
    host.count_for_workflow()
    try:
        model = given(getattr(vae, "first_stage_model", None))
        if not isinstance(model, nn.Module):
            return vae
        made = copy.copy(vae)
        equip(made, model, wish)
    except Exception as error:
        tally.leave("VAE", f"the node failed: {trouble.once(error)}")
        return vae
    return made


def equip(vae: Any, model: nn.Module, wish: NodeWish) -> None:
    """Let a VAE, whose model is `model`, decode and encode as `wish` says from now on.

    One that DynamicVRAM loads brings its weights in each call, and its class loads it in no other
    way: Comfy-Org/ComfyUI 033046cc (0.38), comfy/sd.py, class VAE.
    """
    if is_dynamic(getattr(vae, "patcher", None)):
        dynamic = ("VAE", f"DynamicVRAM brings its weights in each call; {WITHOUT}")
        tally.stands([dynamic])
        wish = replace(wish, reasons=(dynamic,))
    device = getattr(vae, "device", None)
    theirs = {role: getattr(vae, name) for role, name in ESTIMATES.items()}
    vae.first_stage_model = FirstStage(model, wish)
    for role, own in theirs.items():
        own = own.theirs if isinstance(own, NodeEstimate) else own
        setattr(vae, ESTIMATES[role], NodeEstimate(own, device, model, role, wish))


def given(model: Any) -> Any:
    """What ComfyUI made, of a first_stage_model that may be ours."""
    return model.rocm_sd_model if isinstance(model, FirstStage) else model


def coder_of(model: nn.Module, role: str, wish: NodeWish) -> Coder | None:
    """The one of a model; None where the role is not ours to run, or cannot be looked at."""
    module = getattr(model, role, None)
    if role not in wish.roles or not isinstance(module, nn.Module):
        return None
    known = _coders.setdefault(model, {})
    if role not in known or known[role].module is not module:
        try:
            known[role] = Coder(module, role)
        except Exception as error:
            tally.leave(PARTS[role], f"it cannot be read: {trouble.once(error)}")
            return None
    return known[role]
