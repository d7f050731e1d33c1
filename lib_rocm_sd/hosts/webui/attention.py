"""What computes attention in the WebUI's place: forwards for A1111's optimizers, functions for a
Forge's.

Whatever fails between projections and `to_out` of a forward ends in the one that the WebUI would
have used without this extension; only "out of memory" is passed on. So do masks whose meaning is
not clear, and calls with gradients that our kernels refuse (followed.py); of the others these are
ours too. A function of a Forge is given what ours runs out of memory at, too: it may need less.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from lib_rocm_sd import functional
from lib_rocm_sd.followed import asked, attention
from lib_rocm_sd.hosts.attention import attend, call_of, unclear
from lib_rocm_sd.hosts.ours import NotOursError, Tally
from lib_rocm_sd.hosts.read.unet_ldm import OVERRIDE
from lib_rocm_sd.hosts.webui import host, session
from lib_rocm_sd.lab.speed_job import Attention
from lib_rocm_sd.modules.patches import Patch, displaced_by, named, put, take
from lib_rocm_sd.modules.stand_in import is_compiling
from lib_rocm_sd.ops.attention.inputs import AttentionInputs

calls = Tally("a call was left to the WebUI's own {what}: {why}")
"""Those of the generation."""


class Owner(Protocol):
    """Whose the functions of a Forge are."""

    stands_aside: bool
    """Whether the WebUI's own are to compute everything."""


class ForwardOwner(Owner, Protocol):
    """Whose the forwards are."""

    def hosts_own(self, module: torch.nn.Module) -> host.Forward:
        """The WebUI's forward for a module."""


class UnclearMaskError(ValueError):
    """A mask that does not say to which keys it belongs."""


def cross_attention(owner: ForwardOwner) -> host.Forward:
    """A forward for ldm's and sgm's CrossAttention.

    Other keyword arguments are taken and ignored, as by the WebUI's own optimizers.
    """
    core = _Core("UNet")
    hypernetwork: Any = host.module("modules.hypernetworks.hypernetwork")

    def rocm_sd_cross_attention_forward(
        self: Any, x: torch.Tensor, context: Any = None, mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if owner.stands_aside:
            return owner.hosts_own(self)(self, x, context, mask, **kwargs)
        q = self.to_q(x)
        context_k, context_v = hypernetwork.apply_hypernetworks(
            core.shared.loaded_hypernetworks, x if context is None else context
        )
        k = self.to_k(context_k)
        v = self.to_v(context_v)
        out = core.attend(q, k, v, self.heads, mask, getattr(self, "scale", None))
        if out is None:
            del q, k, v, context_k, context_v
            return owner.hosts_own(self)(self, x, context, mask, **kwargs)
        return self.to_out(out)

    return rocm_sd_cross_attention_forward


def attn_block(owner: ForwardOwner) -> host.Forward:
    """A forward for the VAE's AttnBlock: one head of C channels over the H*W pixels.

    The 1x1 convolutions are called as modules, so that whatever patches them still works. A pixel's
    channels lie apart in their NCHW results and together for the kernel: one transposing copy each
    of q, k and v, none where a convolution gave channels-last. The output goes back to NCHW, so
    that the decoder's convolutions keep their layout.
    """
    core = _Core("VAE")

    def rocm_sd_attn_block_forward(self: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if owner.stands_aside:
            return owner.hosts_own(self)(self, x, **kwargs)
        normed = self.norm(x)
        q, k, v = (_pixels(layer(normed)) for layer in (self.q, self.k, self.v))
        del normed
        out = core.attend(q, k, v)
        if out is None:
            del q, k, v
            return owner.hosts_own(self)(self, x)
        out = out.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:]).contiguous()
        return x + self.proj_out(out)

    return rocm_sd_attn_block_forward


def _pixels(image: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) -> (B, H*W, C) with last stride 1."""
    return image.flatten(2).transpose(1, 2).contiguous()


class _Core:
    """Attention between the projections, on the WebUI's terms. Its modules are looked up once."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.shared: Any = host.module("modules.shared")
        self.devices: Any = host.module("modules.devices")

    def attend(self, *given: Any) -> torch.Tensor | None:
        """What `compute` makes of these; None if the WebUI has to compute it."""
        return calls.attention(self.compute, given, {}, failed="", spares=False)

    def compute(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int = 1,
        mask: Any = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """(B, Sq, heads*D) from tensors like it, by views."""
        upcast = self.shared.opts.upcast_attn
        dtype = q.dtype
        if upcast:
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        if mask is not None:
            mask = mask_of_keys(mask, q.shape[0], k.shape[1])
        own = session.current().of_part(self.part)
        if torch.is_grad_enabled() and asked((q, k, v, mask)):
            return attention(AttentionInputs(q, k, v, mask, scale), own).to(dtype)
        with self.devices.without_autocast(disable=not upcast):
            return functional.attention(q, k, v, mask, scale, own).to(dtype)


def mask_of_keys(mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    """The WebUI's mask as one that broadcasts to (B, H, Sq, Sk).

    ldm's kind is boolean with one value per key, (B, ...) with Sk values in `...`; one of four
    dimensions is sgm's, taken as it is. Raises UnclearMaskError for any other.
    """
    if mask.dim() == 4 and mask.shape[-1] == keys:
        return mask
    if mask.dtype == torch.bool and mask.shape[0] == batch and mask[0].numel() == keys:
        return mask.reshape(batch, 1, 1, keys)
    raise UnclearMaskError(f"mask {tuple(mask.shape)} {mask.dtype} for {batch} x {keys} keys")


class Function:
    """In the place of `theirs`, to which it is equal: Forge looks which function is in use, to tell
    how much memory a step takes. Who has kept it gets `theirs` while the owner stands aside.
    """

    def __init__(self, theirs: host.Forward, compute: host.Forward, owner: Owner) -> None:
        functools.update_wrapper(self, theirs)
        self.theirs = theirs
        self._compute = compute
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        if not (self._owner.stands_aside or is_compiling()):
            output = calls.attention(self._compute, args, kwargs)
        return self.theirs(*args, **kwargs) if output is None else output

    def __eq__(self, other: object) -> bool:
        return given(other) is self.theirs

    def __hash__(self) -> int:
        return hash(self.theirs)


def given(function: Any) -> Any:
    """The WebUI's function, of one that may be ours."""
    return function.theirs if isinstance(function, Function) else function


def packed(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of the UNet or transformer, as hosts/attention.py says. A model's override of it is
    asked by Neo's own.
    """
    if OVERRIDE in (kwargs.get("transformer_options") or ()):
        raise NotOursError(f"this model has an {OVERRIDE}")
    inputs, heads_apart = call_of(*args, **kwargs)
    mask = kwargs.get("mask", args[4] if len(args) > 4 else None)
    if mask is not None and mask.ndim == 3 and mask.shape[0] != 1:
        # torch's SDPA, which Forge gives it as it is, takes the first dimension for the heads.
        raise NotOursError(f"the meaning of a mask {tuple(mask.shape)} is not clear")
    own = session.current().of_part("UNet")
    return attend(inputs, own, host.say, heads_apart=heads_apart)


def spatial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the VAE, (B, C, H, W) each and the output: one head of C channels.

    One transposing copy each, none where a convolution gave channels-last.
    """
    if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
        raise unclear(q, k, v)
    q_rows, k_rows, v_rows = (_pixels(t).unsqueeze(2) for t in (q, k, v))
    inputs = AttentionInputs(q_rows, k_rows, v_rows)
    output = attend(inputs, session.current().of_part("VAE"), host.say)
    return output.transpose(1, 2).reshape(q.shape).contiguous()


class Bindings:
    """Every place where a Forge, or an extension in it, has one of its attention functions.

    A function is bound where it is defined, and once more in each Python module that has imported
    it by name. All of these are replaced, each is remembered, and all are given back.

    `make(theirs, name)`: what stands in for `theirs`, bound as `name` where it is defined. The
    caller locks.
    """

    def __init__(self, make: Callable[[Any, str], Function]) -> None:
        self._make = make
        self._functions: dict[int, Function] = {}
        self._patches: list[Patch] = []
        self._seen: tuple[int, int] = (0, 0)
        self._others: list[tuple[str, str]] = []

    @property
    def places(self) -> list[str]:
        """Where ours were put."""
        return [f"{patch.owner.__name__}.{patch.name}" for patch in self._patches]

    def put(self, kind: host.Kind) -> None:
        """Replace all bindings; where that was done, those that have come since."""
        seen = (len(sys.modules), len(host.scripts()))
        if self._patches and seen == self._seen:
            return
        self._seen = seen
        home = sys.modules[kind.attention]
        self._others = []
        for name in kind.names:
            theirs = given(getattr(home, name))
            if getattr(theirs, "__module__", None) == kind.attention:
                self._replace(home, name, self._function(theirs, name))
            else:
                self._others.append((named(theirs), f"{kind.attention}.{name}"))
        for module in host.python_modules():
            below = (f"{module.__name__}.".startswith(f"{each}.") for each in kind.elsewhere)
            if module is not home and not any(below):
                self._put_into(module, kind)

    def take(self) -> None:
        """Give all back, also what was bound while ours were in place. Who came after us stays."""
        if not self._patches:
            return
        for patch in self._patches:
            take(patch)
        self._patches = []
        for module in host.python_modules():
            for name, value in list(vars(module).items()):
                if type(value) is Function:
                    setattr(module, name, value.theirs)

    def displaced_by(self) -> dict[str, list[str]]:
        """Who sits where ours were put, or should have been, by name, and in which places."""
        found: dict[str, list[str]] = {}
        sitting = list(self._others)
        for patch in self._patches:
            other = displaced_by(patch)
            if other is not None:
                sitting.append((named(other), f"{patch.owner.__name__}.{patch.name}"))
        for name, place in dict.fromkeys(sitting):
            found.setdefault(name, []).append(place)
        return found

    def _put_into(self, module: ModuleType, kind: host.Kind) -> None:
        names = kind.names  # read once: a Forge has some ten thousand names to look at
        for name, value in list(vars(module).items()):
            if id(value) in self._functions:
                self._replace(module, name, self._functions[id(value)])
            elif name in names and getattr(value, "__module__", None) == kind.attention:
                # who imported it before another extension took its place at home
                self._replace(module, name, self._function(given(value), name))

    def _replace(self, module: ModuleType, name: str, function: Function) -> None:
        if vars(module)[name] is not function:
            self._patches.append(put(module, name, function))

    def _function(self, theirs: Any, name: str) -> Function:
        if id(theirs) not in self._functions:
            self._functions[id(theirs)] = self._make(theirs, name)
        return self._functions[id(theirs)]


# --- the WebUI's attention, called alone: for the speed test


class Method:
    """q (B, Sq, H, D), k and v (B, Sk, H, D) to (B, Sq, H*D), by the WebUI's forwards.

    A square image of one head goes through the VAE's AttnBlock, all else through the UNet's
    CrossAttention. `own` gives the WebUI's forward for a layer; None: what its class has now.
    """

    def __init__(
        self, cross: type, block: type, own: Callable[[nn.Module], host.Forward] | None
    ) -> None:
        self._cross = _layer(cross, ("to_q", "to_k", "to_v"))
        self._cross.to_out = nn.Sequential(nn.Identity(), nn.Identity())
        self._block = _layer(block, ("q", "k", "v"))
        self._block.norm = self._block.proj_out = nn.Identity()
        self._own = own
        self._zeros: dict[Any, torch.Tensor] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(q.shape[1])
        if q.shape == k.shape and q.shape[2] == 1 and side * side == q.shape[1]:
            return self._through_block(q, k, v, side)
        layer, heads, head_dim = self._cross, *q.shape[2:]
        layer.heads, layer.dim_head, layer.scale = heads, head_dim, head_dim**-0.5
        layer.to_q.value, layer.to_k.value, layer.to_v.value = (t.flatten(2) for t in (q, k, v))
        try:
            with autocast():
                out: torch.Tensor = self._forward(layer)(layer, layer.to_q.value, layer.to_k.value)
        finally:
            layer.to_q.value = layer.to_k.value = layer.to_v.value = None
        return out

    def _through_block(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, side: int
    ) -> torch.Tensor:
        """What the layer adds to its input: nothing, here."""
        layer = self._block
        images = [t.flatten(2).transpose(1, 2).unflatten(2, (side, side)) for t in (q, k, v)]
        layer.q.value, layer.k.value, layer.v.value = images
        layer.in_channels = q.shape[3]
        try:
            out: torch.Tensor = self._forward(layer)(layer, self._zero(images[0]))
        finally:
            layer.q.value = layer.k.value = layer.v.value = None
        return out.flatten(2).transpose(1, 2)

    def _forward(self, layer: Any) -> Any:
        return type(layer).forward if self._own is None else self._own(layer)

    def _zero(self, like: torch.Tensor) -> torch.Tensor:
        key = (like.shape, like.dtype, like.device)
        if key not in self._zeros:
            self._zeros = {key: torch.zeros(like.shape, dtype=like.dtype, device=like.device)}
        return self._zeros[key]


class _Given(nn.Module):
    """Gives `value`, whatever it is called with."""

    value: torch.Tensor | None = None

    def forward(self, _: Any) -> Any:
        return self.value


def _layer(kind: type, projections: tuple[str, ...]) -> Any:
    """A layer of the WebUI's class without weights, for inference."""
    made: Any = object.__new__(kind)
    nn.Module.__init__(made)
    for name in projections:
        setattr(made, name, _Given())
    return made.eval()


def of_functions(packed: Any, spatial: Any) -> Attention:
    """q (B, Sq, H, D), k and v (B, Sk, H, D) to (B, Sq, H*D), by these functions of a Forge.

    A square image of one head goes through `spatial`, as in the VAE, where there is one.
    """

    def by_functions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(q.shape[1])
        if spatial is not None and q.shape == k.shape and (q.shape[2], side**2) == (1, q.shape[1]):
            images = (t.flatten(2).transpose(1, 2).unflatten(2, (side, side)) for t in (q, k, v))
            # its functions look at memory as NCHW has it
            made = spatial(*(image.contiguous() for image in images))
            return made.flatten(2).transpose(1, 2)  # type: ignore[no-any-return]
        heads = q.shape[2]
        with torch.no_grad():
            out: torch.Tensor = packed(*(t.flatten(2) for t in (q, k, v)), heads)
        return out

    return by_functions


def autocast() -> AbstractContextManager[Any]:
    """As around the WebUI's UNet."""
    devices: Any = host.module("modules.devices")
    if devices is None or getattr(devices, "unet_needs_upcast", False):
        return nullcontext()
    context: AbstractContextManager[Any] = devices.autocast()
    return context
