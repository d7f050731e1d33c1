"""Diffusers: a pipeline's attention through the engine, its VAE and its UNet's blocks as programs.

with patched(pipeline):
    image = pipeline("a red circle left of a blue square").images[0]

For a server: switch = switched_on(pipeline), and at its end switch.off().
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.attention import Serving
from lib_rocm_sd.hosts.diffusers import components
from lib_rocm_sd.hosts.diffusers.components import Attentions, ServedForward, is_served, itself
from lib_rocm_sd.hosts.diffusers.faster import compared
from lib_rocm_sd.hosts.diffusers.unet import UnetPatch, patched_unet
from lib_rocm_sd.hosts.diffusers.vae import VaePatch, patched_vae
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet import transformer_kind
from lib_rocm_sd.hosts.read.unet_diffusers import (
    HOME,
    PROCESSORS,
    TORCHS,
    code_of,
    is_image_attention,
)
from lib_rocm_sd.modules.faster import Contest, is_wanted
from lib_rocm_sd.modules.stand_in import COMPILED, is_compiling
from lib_rocm_sd.modules.watch import Code, is_intercepted
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.unet.takeover import UnetTakeover
from lib_rocm_sd.vae.policy import MODES, checked_budget

UNET, CONTROLNET = "UNet", "ControlNet"


@dataclass(frozen=True)
class PipelinePatch:
    """What `patched` did: how many attention modules run through the engine, and what it left."""

    replaced: int
    """How many have a processor of ours."""
    left_alone: Mapping[str, int]
    """How many modules compute attention as before, by what their processor is."""
    served: int = 0
    """How many keep their own processor, whose attention is served."""
    vae: VaePatch = field(default_factory=lambda: VaePatch({}, {}))
    unet: UnetPatch = field(default_factory=UnetPatch)
    controlnets: tuple[UnetPatch, ...] = ()
    contests: Mapping[str, Contest] = field(default_factory=dict)

    @property
    def slower(self) -> dict[str, list[str]]:
        """The models that torch's own code computes now since ours is slower, and how slow."""
        told = {name: contest.slower for name, contest in self.contests.items()}
        return {name: why for name, why in told.items() if why}


class EngineAttnProcessor:
    """Does what diffusers' AttnProcessor2_0 does, without copies of q, k and v.

    A copy of the module, or what is pickled of it, has a copy of `replaced` in its place. Who asks
    for its `__class__`, to make another or to see which are in use, gets that of `replaced`. Who
    keeps it until it is `off`, as diffusers does that fuses projections, has `replaced` from then.
    """

    def __init__(self, replaced: Any, upcast: bool, session: Session = DEFAULT) -> None:
        """`upcast`: compute in float32 where the module asks for it by `upcast_attention`."""
        self.replaced = replaced
        self._code = Code((), code_of(replaced))
        self._scales = type(replaced).__name__ != TORCHS
        self.upcast = upcast
        self.session = session
        self.off = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.replaced)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.replaced,)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of `attn` over (batch, tokens, width) or (batch, width, rows, columns)."""
        changed = not is_compiling() and (is_intercepted() or not self._code.same())
        if self.off or changed:  # somebody has changed what it would do
            given = (hidden_states, encoder_hidden_states, attention_mask, temb)
            made: torch.Tensor = self.replaced(attn, *given, *args, **kwargs)
            return made
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        shape = hidden_states.shape
        if len(shape) == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if encoder_hidden_states is None:
            context = hidden_states
        elif attn.norm_cross:
            context = attn.norm_encoder_hidden_states(encoder_hidden_states)
        else:
            context = encoder_hidden_states
        out = self._attend(attn, hidden_states, context, attention_mask)
        out = attn.to_out[1](attn.to_out[0](out))
        if len(shape) == 4:
            out = out.transpose(1, 2).reshape(shape)
        if attn.residual_connection:
            out = out + residual
        return out / attn.rescale_output_factor

    def _attend(
        self, attn: Any, x: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q, k, v = (
            item.unflatten(-1, (attn.heads, -1))
            for item in (attn.to_q(x), attn.to_k(context), attn.to_v(context))
        )
        dtype = q.dtype
        if self.upcast and attn.upcast_attention:
            q, k, v = q.float(), k.float(), v.float()
        if mask is not None:
            mask = attn.prepare_attention_mask(mask, k.shape[1], k.shape[0])
            mask = mask.view(k.shape[0], attn.heads, -1, mask.shape[-1])
        scale = attn.scale if self._scales else None
        return functional.attention(q, k, v, mask, scale, self.session).to(dtype)


@contextmanager
def patched(
    pipeline: Any,
    *,
    vae: bool | str = True,
    budget_bytes: int | None = None,
    unet: bool = False,
    session: Session = DEFAULT,
    wait: bool = False,
    compare: bool = True,
) -> Iterator[PipelinePatch]:
    """Run attention, VAE and UNet of `pipeline` by this extension inside the `with` block.

    `vae`: True or "auto" decodes and encodes the whole frame where memory allows it by the level
    of `session`, else in exact bands, and leaves to torch what our convolutions cannot do; "banded"
    always in bands; "whole" in bands only after an out of memory; False leaves the VAE alone.
    `budget_bytes`: device memory that a decode keeps to, beside the weights. Raises ValueError for
    anything else.

    `unet`: True computes the blocks of a UNet, or of the transformer of SD 3, Flux or Qwen-Image,
    in half precision, and of its ControlNets, where they are known, by our programs; convolution
    weights lie in channels-last memory meanwhile. False, until that is faster wherever it was
    measured, leaves all of it but its attention alone.

    Each kernel is tried on the card in a process of its own before it is launched in this one,
    once for a driver, a torch and these kernels. `wait`: False lets torch compute meanwhile, so
    that a first picture is partly or wholly torch's; True has first calls wait for it.

    `compare`: the first picture of a model at a size is ours and the second is torch's, once on a
    card; torch computes the model from then on where it was faster (modules/faster.py). False, or
    ROCM_SD_COMPARE_SPEED=0: ours computes whatever it can.

    Processors of other kinds than PROCESSORS (hosts/read/unet_diffusers.py) that are diffusers' own
    keep their place, and their calls of torch's attention are served (hosts/attention.py): those of
    transformers, of joint and fused projections, of IP-Adapters.

    On leaving it, each module has the very processor and forward that it had. Other processors,
    what torch.compile has compiled, and a VAE whose structure is not known or whose tiling or
    slicing is switched on, stay as they are and are named in the report.
    """
    mode = "auto" if vae is True else vae
    if mode is not False and mode not in MODES:
        raise ValueError(f"vae is {vae!r}: it has to be True, False or of {', '.join(MODES)}")
    checked_budget(budget_bytes)
    gate.begin()
    session = session.patiently() if wait else session
    with ExitStack() as stack:
        found, left = stack.enter_context(_patched_attention(pipeline, session, unet))
        part = VaePatch({}, {})
        if mode is not False and getattr(pipeline, "vae", None) is not None:
            part = stack.enter_context(patched_vae(pipeline.vae, str(mode), budget_bytes, session))
        blocks: dict[str, list[UnetPatch]] = {UNET: [], CONTROLNET: []}
        takeovers: dict[torch.nn.Module, UnetTakeover | None] = {}
        for name, model in _unets(pipeline) if unet else ():
            if components.has_compiled(model):
                session.report.event(f"diffusers: the {name} is left alone: {COMPILED}")
            else:
                blocks[name].append(stack.enter_context(patched_unet(model, session, name)))
                takeovers[model] = blocks[name][-1].takeover
        contests: Mapping[str, Contest] = {}
        if compare and is_wanted():
            contests = stack.enter_context(compared(pipeline, found, takeovers, session))
        counts = len(found.replaced), dict(left), len(found.served)
        own, controls = next(iter(blocks[UNET]), UnetPatch()), tuple(blocks[CONTROLNET])
        yield PipelinePatch(*counts, part, own, controls, contests)


def _unets(pipeline: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The UNet, or the transformer if some of its blocks can be ours, and each ControlNet, as the
    report calls them.
    """
    own = getattr(pipeline, "transformer", None)
    if not isinstance(own, torch.nn.Module) or not any(map(transformer_kind, own.modules())):
        own = getattr(pipeline, "unet", None)
    control = getattr(pipeline, "controlnet", None)
    nets = ((CONTROLNET, net) for net in getattr(control, "nets", (control,)))
    for name, model in ((UNET, own), *nets):
        if isinstance(model, torch.nn.Module):
            yield name, model


class Switch:
    """`patched` from `switched_on` to `off`; `patch` says what it did."""

    def __init__(self, pipeline: Any, **options: Any) -> None:
        self._stack = ExitStack()
        self.patch: PipelinePatch = self._stack.enter_context(patched(pipeline, **options))

    def off(self) -> None:
        """Give everything back; a second time does nothing."""
        self._stack.close()


def switched_on(pipeline: Any, **options: Any) -> Switch:
    """`patched` with these options, until the result's `off` is called, in any thread.

    What is ours by another one already stays with that, and goes back when that ends.
    """
    return Switch(pipeline, **options)


@contextmanager
def _patched_attention(
    pipeline: Any, session: Session, unet: bool
) -> Iterator[tuple[Attentions, Counter[str]]]:
    """The attention modules that are ours, and how many are not, by what their processor is."""
    found, left = _look(pipeline, session, unet)
    if left:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(left.items()))
        session.report.event(f"diffusers: attention processors left alone: {kinds}")
    try:
        found.put_in()
        yield found, left
    finally:
        found.take_out()


def _look(pipeline: Any, session: Session, unet: bool) -> tuple[Attentions, Counter[str]]:
    """`unet`: blocks are ours, and some attentions are such."""
    from diffusers.models import attention_processor as theirs

    known = {
        getattr(theirs, name): heeds for name, heeds in PROCESSORS.items() if hasattr(theirs, name)
    }
    found, left, mode = Attentions(), Counter[str](), Serving(session)
    for attn, compiled in components.attention_modules(pipeline):
        processor = attn.processor
        if isinstance(processor, EngineAttnProcessor) or is_served(attn):
            continue  # by an outer `with`
        if unet and not compiled and is_image_attention(attn) and attn.to_q.weight.dtype in HALVES:
            continue
        why_not = components.not_served(processor)
        changed = Findings(HOME)
        for owner, key in code_of(processor) if type(processor) in known else ():
            changed.function(owner, key, type(processor).__name__)
        if compiled:
            left[f"{type(processor).__name__} ({COMPILED})"] += 1
        elif changed.reasons:
            left["; ".join(changed.reasons)] += 1
        elif isinstance(attn, theirs.Attention) and _is_known(attn, known):
            ours = EngineAttnProcessor(processor, known[type(processor)], session)
            found.replaced.append((attn, ours))
        elif why_not:
            left[why_not] += 1
        else:
            found.served.append(ServedForward(attn, mode))
    return found, left


def _is_known(attn: Any, known: Mapping[type, bool]) -> bool:
    """Whether ours does all that this module's processor does."""
    norms = (getattr(attn, name, None) for name in ("norm_q", "norm_k"))
    return type(attn.processor) in known and all(norm is None for norm in norms)
