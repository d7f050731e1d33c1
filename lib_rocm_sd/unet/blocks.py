"""The blocks of a UNet as programs: what each gives for one call, by compute.py.

Images are (N, C, H, W) in channels-last memory, where they come in and where they go out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, Routes
from lib_rocm_sd.engine.selftest import FAILURES, is_out_of_memory
from lib_rocm_sd.graphs.programs import Graphs
from lib_rocm_sd.modules.stand_in import TheirsError, UnknownModuleError
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.parts import (
    Attention,
    Block,
    BlockCall,
    Ends,
    FeedForward,
    ImageAttention,
    ImageAttentionCall,
    ImageCall,
    KeysValues,
    Resample,
    Resnet,
    Transformer,
    TransformerCall,
)
from lib_rocm_sd.unet.shared import Embeddings, Prompts, Regions
from lib_rocm_sd.unet.spot import SpotCheck
from lib_rocm_sd.unet.weights import UnetWeights


@dataclass(frozen=True, eq=False)
class Means:
    """What blocks compute with. `attends(module)`: why this attention is to be called as it is.
    `inner(module, x, given)`: a transformer's block that can be computed as a part of it.
    `name_of(module)`: its name in the UNet. `reread()`: a block was read anew amid a picture.
    """

    weights: UnetWeights
    attends: Callable[[nn.Module], str]
    embeddings: Embeddings
    prompts: Prompts
    regions: Regions
    graphs: Graphs
    inner: Callable[[nn.Module, torch.Tensor, Mapping[str, Any]], Inner | None]
    spot: SpotCheck
    name_of: Callable[[nn.Module], str]
    reread: Callable[[], None]


class Inner(NamedTuple):
    """A block of ours amid its transformer, whose calls have `routes`. `plan` asks for what blocks
    share, and who asks again is in another step.
    """

    plan: Callable[[], Plan]
    routes: Routes


class Plan(NamedTuple):
    """What computes a block: `run(calls, x, mine, **given)`, as `_block`. `given`: of the prompt,
    by the names that all blocks use. `held`: what else it depends on. `is_ours`: whether no module
    of the host is called amid it.
    """

    run: Callable[..., Any]
    given: Mapping[str, torch.Tensor]
    held: tuple[Any, ...]
    is_ours: bool


def resnet(parts: Resnet, call: ImageCall, means: Means, calls: Calls) -> torch.Tensor:
    """A residual block: two convolutions and what their norms need."""
    given = {"x": call.x}
    timed = parts.timed if call.emb is not None else None
    if timed is not None and call.emb is not None:
        given["embedding"] = means.embeddings.of(call.emb, timed, parts.embed_silu)
    first = means.weights.of(parts.conv1, bare=timed is not None and timed.conv is not None)
    convs = (first, means.weights.of(parts.conv2, parts.shortcut))
    return calls.recorded(partial(_resnet, parts, convs), given, tuple(map(ref, convs)))


def _resnet(
    parts: Resnet,
    convs: tuple[ConvWeights, ConvWeights],
    calls: Calls,
    x: torch.Tensor,
    embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a residual block on x (N, C, H, W). `embedding` (N, Co): what the time embedding adds,
    the first bias included; or of one that `modulates` (N, 2 Co).
    """
    x, first, second = pixels(x), parts.norm1, parts.norm2
    through = None if parts.shortcut is None else parts.shortcut.weight.flatten(1)
    added, modulation = (None, embedding) if parts.modulates else (embedding, None)
    if parts.resize:
        h, before = compute.activated(calls, "before", x, first), None
        h, x = (compute.resized(each, parts.resize) for each in (h, x))
    elif modulation is None and compute.is_librarys(
        calls, "conv1", x, convs[0], first, second, added
    ):
        h = compute.activated(calls, "conv1.before", x, first)
        h, _ = compute.conv(calls, "conv1.bare", h, convs[0])
        h = compute.activated(calls, "conv2.before", h, second, added)
        return image(compute.conv(calls, "conv2.bare", h, convs[1], None, x, through)[0])
    else:
        h, before = x, compute.norm_of(calls, "norm1", x, first)
    h, between = compute.conv(
        calls, "conv1", h, convs[0], before, next_norm=second, embedding=added
    )
    if modulation is not None:
        between = compute.modulated(between, modulation)
    return image(compute.conv(calls, "conv2", h, convs[1], between, x, through)[0])


def transformer(parts: Transformer, call: TransformerCall, means: Means, calls: Calls) -> Any:
    """A transformer over an image's pixels. Its blocks are called as modules, ours or not, unless
    all of it can be one program.
    """
    x = call.x
    inner = _inner(parts, call, means)
    plans = [each.plan() for each in inner]
    given = _given_to(plans)
    if given is not None:
        routes = [each.routes for each in inner]
        run = partial(_joined, parts, plans, routes)
        held = tuple((each, *plan.held) for each, plan in zip(routes, plans, strict=True))
        try:
            return call.answer(calls.recorded(run, {"x": x, **given}, held))
        except FAILURES as error:
            if is_out_of_memory(error):
                raise  # else the block that it was bars itself, called as a module
    h, x = into_tokens(parts, calls, x)
    means.weights.host_runs()  # blocks may be the host's
    for index, module in enumerate(parts.blocks):
        h = called(module, h, call.given(index))
    means.spot.is_whole = False
    return call.answer(from_tokens(parts, calls, h, x))


def _joined(
    parts: Transformer,
    plans: Sequence[Plan],
    routes: Sequence[Routes],
    calls: Calls,
    x: torch.Tensor,
    **given: torch.Tensor,
) -> torch.Tensor:
    """Run a transformer on x (N, C, H, W). Each block's program writes to the result of the one
    before.
    """
    h, x = into_tokens(parts, calls, x)
    for plan, each in zip(plans, routes, strict=True):
        own = {name: given[name] for name in plan.given}
        h = plan.run(calls.of(each), h, True, **own)
    return from_tokens(parts, calls, h, x)


def into_tokens(
    parts: Transformer, calls: Calls, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first block is given (N, tokens, E) of x (N, C, H, W); and x, as its pixels."""
    x = pixels(x)
    batch, height, width, channels = x.shape
    tokens = compute.group_norm(calls, "norm", x, parts.norm, False)
    h = compute.linear(calls, "proj_in", tokens.view(-1, channels), parts.proj_in)
    return h.view(batch, height * width, -1), x


def from_tokens(parts: Transformer, calls: Calls, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What the last block gave, h (N, tokens, E), added to the pixels x, as an image."""
    channels = x.shape[3]
    h = h.to(x.dtype).reshape(-1, h.shape[2])
    y = compute.linear(calls, "proj_out", h, parts.proj_out, residual=x.view(-1, channels))
    return image(y.view(*x.shape[:3], -1))


def _inner(parts: Transformer, call: TransformerCall, means: Means) -> list[Inner]:
    """Its blocks, where all of them can be parts of it; else none."""
    batch, channels, height, width = call.x.shape
    tokens, image = height * width, call.x
    if not image.is_contiguous(memory_format=torch.channels_last):
        image = image.contiguous()
    x = image.as_strided((batch, tokens, channels), (tokens * channels, channels, 1))
    found: list[Inner] = []
    for index, block in enumerate(parts.blocks):
        inner = means.inner(block, x, call.given(index))
        if inner is None:
            return []
        found.append(inner)
    return found


def _given_to(plans: Sequence[Plan]) -> dict[str, torch.Tensor] | None:
    """What these blocks are given beside x; None without blocks, or where two call different
    tensors by one name.
    """
    found: dict[str, torch.Tensor] = {}
    for plan in plans:
        for name, tensor in plan.given.items():
            if found.setdefault(name, tensor) is not tensor:
                return None
    return found if plans else None


def block(parts: Block, call: BlockCall, means: Means, calls: Calls) -> torch.Tensor:
    """Self-attention, cross-attention and feed-forward, each after a LayerNorm and added to x."""
    plan = planned(parts, call, means, ours_of(parts, call, means))
    given = {"x": call.x, **plan.given}
    if not plan.is_ours:
        made: torch.Tensor = plan.run(calls, **given)
        means.spot.is_whole = False
        return made
    return calls.recorded(plan.run, given, plan.held)


class Source(NamedTuple):
    """What queries attend to: `columns` of what a block is given by `name`, which are keys and
    values, or what `part` makes of it. `mask`: by which name, added to the scores. `image`: which
    of how many images is attended to. The result counts `scale` times, by what is given as
    `region`.
    """

    part: KeysValues
    name: str
    columns: tuple[int, int] | None
    mask: str = ""
    image: tuple[int, int] | None = None
    scale: float = 1.0
    region: str = ""


class Ours(NamedTuple):
    """A block's attentions that are ours in a call. `is_whole`: and so is all else of it."""

    own: Attention | None
    cross: Attention | None
    is_whole: bool


def ours_of(parts: Block, call: BlockCall, means: Means) -> Ours:
    """What of a block is ours in this call."""
    own = cross = None
    if _fits(call) or not parts.crosses_twice:
        own = _may_attend(parts.self_attention, parts.attn1, call.plain_own, means)
    if _fits(call):
        cross = _may_attend(parts.cross_attention, parts.attn2, call.plain_cross, means)
    whole = own is not None and parts.feed_forward is not None
    return Ours(own, cross, whole and (cross is not None or parts.attn2 is None))


def planned(parts: Block, call: BlockCall, means: Means, ours: Ours) -> Plan:
    """How a block is computed in this call, of which this is `ours`."""
    context, (own, cross, whole) = call.context, ours
    given: dict[str, torch.Tensor] = {}
    if call.positions is not None:
        given["positions"] = call.positions
    held: list[Any] = []

    def source(name: str, context: torch.Tensor, part: KeysValues, *prompts: Prompts) -> Source:
        made = f"made of {name}"
        ready = prompts[0].of(context, part) if prompts else None
        if ready is None or given.setdefault(made, ready.rows) is not ready.rows:
            given[name] = context
            return Source(part, name, None)
        held.append(ready.side)
        return Source(part, made, ready.side.columns[part])

    sources: dict[Attention, tuple[Source, ...]] = {}
    for attention in parts.crossing():
        if context is not None and attention in (own, cross):
            joint = () if parts.ff_in else (means.prompts,)  # these have a context of their own
            sources[attention] = (source("context", context, attention.to_kv, *joint),)
        else:
            means.prompts.skip(attention.to_kv)
    found: dict[int, Source] = {}  # who asks twice for a prompt is in another step
    if cross is not None and context is not None:
        if call.mask is not None:
            given["mask"] = call.mask
            sources[cross] = (sources[cross][0]._replace(mask="mask"),)
        for number, images, scale, region in call.more:
            shared, part = means.prompts.more[number : number + 1], cross.to_kv_more[number]
            if number not in found:
                found[number] = source(f"context {number}", images, part, *shared)
            each = found[number]
            if region is not None:
                name = f"region {number}.{region.image}"
                given[name] = means.regions.of(region, call.x, cross)
                each = each._replace(image=(region.image, images.shape[1]), region=name)
            sources[cross] += (each._replace(scale=scale),)
    more = parts.cross_attention.to_kv_more if parts.cross_attention is not None else ()
    for number, (prompts, part) in enumerate(zip(means.prompts.more, more, strict=False)):
        if number not in found:
            prompts.skip(part)
    read = tuple(each[1:] for all_of in sources.values() for each in all_of)  # not the layers
    run = partial(_block, parts, call, own, cross, sources)
    return Plan(run, given, (*held, read), whole)


def _block(
    parts: Block,
    call: BlockCall,
    own: Attention | None,
    cross: Attention | None,
    sources: Mapping[Attention, Sequence[Source]],
    calls: Calls,
    x: torch.Tensor,
    mine: bool = False,
    **given: torch.Tensor,
) -> torch.Tensor:
    """Run a transformer block on x (N, tokens, C). An attention without `sources` attends to x.
    `own`, `cross` None: the host's modules are called. `mine`: x may be written to. In between, x
    is (N * tokens, C), a stream to which products are added.
    """
    if parts.ff_in is not None and parts.norm_in is not None:
        if call.frames:
            x = _exchanged(x, call.frames)
        elif parts.ff_in.out._parameters.get("bias") is None:
            x = x.clone()  # else the norm makes a new one
        rows, mine = x.reshape(-1, x.shape[2]), True
        x = _fed(calls, " in", rows, parts.norm_in, parts.ff_in).view(x.shape)
    shape = x.shape
    x = x.reshape(-1, shape[2])
    normed, x, rest = compute.layer_norm(calls, "norm1", x, parts.norm1)
    normed = _placed(normed, shape, given)
    if own is not None:
        mixed = _attention(calls, "own", own, normed.view(shape), sources.get(own, ()), given)
        x, rest = compute.linear_added(calls, "own.out", mixed, own.to_out, x, mine)
    else:
        rest = (_theirs(call.attn1 or parts.attn1, normed, shape, call.own),)
    only = None
    if own is not None and cross is not None:
        only = _of_only_key(calls, cross, sources.get(cross, ()), given, shape[0])
    if only is not None:
        onto = rest[0] if rest and rest[0].ndim > 1 else x
        compute.added(onto.view(shape), only[:, None], 1.0, None)
    elif parts.norm2 is not None and parts.attn2 is not None:
        keeps = cross is None
        normed, x, rest = compute.layer_norm(calls, "norm2", x, parts.norm2, rest, keeps=keeps)
        normed = _placed(normed, shape, given)
        if cross is not None:
            read = sources.get(cross, ())
            mixed = _attention(calls, "cross", cross, normed.view(shape), read, given)
            x, more = compute.linear_added(calls, "cross.out", mixed, cross.to_out, x, True)
            rest += more
        else:
            rest = (_theirs(call.attn2 or parts.attn2, normed, shape, call.cross),)
    ff = parts.feed_forward
    if ff is None:
        normed, x, _ = compute.layer_norm(calls, "norm3", x, parts.norm3, rest, keeps=True)
        made = (_theirs(parts.ff, normed, shape, {}) + x).view(shape)
    else:
        made = _fed(calls, "", x, parts.norm3, ff, rest).view(shape)
    return _exchanged(made, call.x.shape[1]) if call.frames else made


def _exchanged(x: torch.Tensor, frames: int) -> torch.Tensor:
    """x (N * frames, tokens, C) as (N * tokens, frames, C), a new tensor."""
    apart = x.unflatten(0, (-1, frames)).transpose(1, 2)
    return apart.clone(memory_format=torch.contiguous_format).flatten(0, 1)


def _fed(
    calls: Calls, where: str, x: torch.Tensor, norm: nn.LayerNorm, ff: FeedForward, rest: Any = ()
) -> torch.Tensor:
    """x (rows, C) with its `rest`, and what a feed-forward makes of its norm: a new tensor."""
    names = f"norm3{where}", f"gated{where}", f"ff{where}"
    if rest and rest[0].ndim > 1:
        normed, x, _ = compute.layer_norm(calls, names[0], x, norm, rest)
        h = compute.linear(calls, names[1], normed, ff.gated, gate=True)
        return compute.linear(calls, names[2], h, ff.out, residual=x)
    normed, x, _ = compute.layer_norm(calls, names[0], x, norm, rest, ff.out, keeps=True)
    h = compute.linear(calls, names[1], normed, ff.gated, gate=True)
    return compute.linear_onto(calls, names[2], h, ff.out, x)


def _placed(
    rows: torch.Tensor, shape: torch.Size, given: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Rows, which are `shape`, with what tells where each of them is, if there is that."""
    if "positions" not in given:
        return rows
    return (rows.view(shape) + given["positions"][:, : shape[1]]).view(rows.shape)


def _may_attend(
    part: Attention | None, module: nn.Module | None, plain: bool, means: Means
) -> Attention | None:
    """`part` where ours may compute it in this call."""
    return None if part is None or module is None or not plain or means.attends(module) else part


def _fits(call: BlockCall) -> bool:
    """False for a context, or a mask of it, that a host's module would first have to make fit."""
    x, context, mask = call.x, call.context, call.mask
    if context is None:
        return mask is None and not call.more
    alike = [context, *(more.context for more in call.more), *([] if mask is None else [mask])]
    same = all(isinstance(each, torch.Tensor) and each.ndim > 2 for each in alike)
    same = same and all((each.dtype, each.device) == (x.dtype, x.device) for each in alike)
    same = same and context.ndim == 3 and all(each.shape[0] == call.batch for each in alike)
    return same and (mask is None or mask.shape == (call.batch, 1, context.shape[1]))


def _attention(
    calls: Calls,
    place: str,
    part: Attention,
    x: torch.Tensor,
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Attention of x (N, tokens, C) to x, or to all `sources`, added up: (N * tokens, C)."""
    batch, heads, rows = x.shape[0], part.heads, x.flatten(0, 1)
    if not sources:
        joint = compute.linear(calls, f"{place}.qkv", rows, *part.of_x)
        q, k, v = joint.view(batch, -1, 3, heads, joint.shape[1] // (3 * heads)).unbind(2)
        if calls.divided is not None:
            own = joint.view(batch, -1, joint.shape[1])[..., joint.shape[1] // 3 :]
            k, v = calls.divided.tokens(own).unflatten(2, (2, heads, q.shape[3])).unbind(2)
        return compute.attention(calls, place, q, k, v).flatten(0, 1)
    q = compute.linear(calls, f"{place}.q", rows, part.to_q)
    q = q.view(batch, -1, heads, q.shape[1] // heads)
    mixed: torch.Tensor | None = None
    for source in sources:
        where = place if mixed is None else f"{place}, {source.name}"
        made = given[source.name]
        if source.columns is None:
            made = made.reshape(-1, made.shape[-1])
            made = compute.linear(calls, f"{where}.kv", made, *source.part.layers)
        else:
            where = f"{where} in {made.stride(0)}"  # a route hangs on strides
            made = made.narrow(1, *source.columns)
        which, images = source.image or (0, 1)
        if source.image is not None:
            where = f"{where}, of {images}"  # and on how many keys there are
        made = made.unflatten(0, (batch, images, -1))[:, which]
        k, v = made.unflatten(2, (2, heads, q.shape[3])).unbind(2)
        more = compute.attention(calls, where, q, k, v, given.get(source.mask))
        if mixed is None:
            mixed = more
        else:
            mixed = compute.added(mixed, more, source.scale, given.get(source.region))
    assert mixed is not None
    return mixed.flatten(0, 1)


def _of_only_key(
    calls: Calls,
    part: Attention,
    sources: Sequence[Source],
    given: Mapping[str, torch.Tensor],
    batch: int,
) -> torch.Tensor | None:
    """What attention gives for each query where there is one key, whose value counts wholly: (N,
    C). None where there are more, or none.
    """
    if len(sources) != 1 or sources[0].mask:
        return None
    (source,) = sources
    rows = given[source.name].flatten(0, -2)
    if len(rows) != batch:
        return None
    if source.columns is None:
        made = compute.linear(calls, "cross.only", rows, source.part.layers[-1])
    else:
        made = rows.narrow(1, *source.columns)
    values = made[:, -part.to_out.in_features :].contiguous()
    return compute.linear(calls, "cross.only.out", values, part.to_out)


def image_attention(
    parts: ImageAttention, call: ImageAttentionCall, means: Means, calls: Calls
) -> torch.Tensor:
    """Attention of an image's pixels over the context and themselves."""
    ready = means.prompts.of(call.context, parts.added)
    if ready is None:
        run = partial(_image_attention, parts, None)
        return calls.recorded(run, {"x": call.x, "context": call.context})
    run = partial(_image_attention, parts, ready.side.columns[parts.added])
    return calls.recorded(run, {"x": call.x, "prompt": ready.rows}, (ready.side,))


def _image_attention(
    parts: ImageAttention,
    columns: tuple[int, int] | None,
    calls: Calls,
    x: torch.Tensor,
    context: torch.Tensor | None = None,
    prompt: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run it on x (N, C, H, W). Keys and values of the context are `columns` of the prompt, or are
    made here.
    """
    x = pixels(x)
    batch, channels, heads = x.shape[0], x.shape[3], parts.own.heads
    tokens = compute.group_norm(calls, "norm", x, parts.norm, False).view(-1, channels)
    joint = compute.linear(calls, "qkv", tokens, *parts.own.of_x)
    q, *own = joint.view(batch, -1, 3, heads, joint.shape[1] // (3 * heads)).unbind(2)
    if prompt is not None and columns is not None:
        made = prompt.narrow(1, *columns)
    else:
        assert context is not None
        made = compute.linear(calls, "kv", context.flatten(0, 1), *parts.added.layers)
    added = made.unflatten(0, (batch, -1)).unflatten(2, (2, heads, -1)).unbind(2)
    k, v = (torch.cat(each, 1) for each in zip(added, own, strict=True))
    mixed = compute.attention(calls, "attention", q, k, v).view(len(tokens), -1)
    y = compute.linear(calls, "out", mixed, parts.own.to_out, residual=x.view(-1, channels))
    return image(y.view(x.shape))


def resample(parts: Resample, call: ImageCall, means: Means, calls: Calls) -> torch.Tensor:
    """Upsampling or downsampling by two."""
    weights = means.weights.of(parts.conv)
    run = partial(_resample, parts, weights)
    return calls.recorded(run, {"x": call.x}, (ref(weights),))


def _resample(parts: Resample, weights: ConvWeights, calls: Calls, x: torch.Tensor) -> torch.Tensor:
    resize = compute.upsample if parts.up else compute.downsample
    return image(resize(calls, "conv", pixels(x), weights))


def ends(parts: Ends, call: ImageCall, means: Means, calls: Calls) -> torch.Tensor:
    """The first convolution, or the last norm, SiLU and convolution; or a ControlNet's result."""
    conv = None if parts.is_linear else parts.conv
    weights = None if conv is None else means.weights.of(conv)
    run, held = partial(_ends, parts, weights), () if weights is None else (ref(weights),)
    return calls.recorded(run, {"x": call.x}, held)


def _ends(parts: Ends, weights: ConvWeights | None, calls: Calls, x: torch.Tensor) -> torch.Tensor:
    x, norm = pixels(x), parts.norm
    if parts.is_linear:
        y = compute.linear(calls, "conv", x.view(-1, x.shape[3]), parts.conv)
        return image(y.view(*x.shape[:3], -1))
    if weights is None:
        assert norm is not None
        return image(compute.group_norm(calls, "norm", x, norm, parts.silu))
    scale = None if norm is None else compute.norm_of(calls, "norm", x, norm)
    return image(compute.conv(calls, "conv", x, weights, scale)[0])


def pixels(x: torch.Tensor) -> torch.Tensor:
    """An image (N, C, H, W) as (N, H, W, C), dense."""
    return x.permute(0, 2, 3, 1).contiguous()


def image(y: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) as (N, C, H, W), in the same memory."""
    return y.permute(0, 3, 1, 2)


def _theirs(
    module: Callable[..., Any], x: torch.Tensor, shape: torch.Size, given: Mapping[str, Any]
) -> torch.Tensor:
    """What a host's module gives for x (rows, C), which is `shape` to it: as rows, in x's dtype."""
    made = called(module, x.view(shape), given)
    return made.to(x.dtype).reshape(x.shape)


def called(module: Callable[..., Any], x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """What a host's module gives; what it raises goes to the host as it is.

    What it keeps out of sight of the block, as the WebUI does a hypernetwork, may be in training.
    """
    try:
        made: torch.Tensor = module(x, **given)
    except Exception as error:
        raise TheirsError(error) from error
    if torch.is_grad_enabled() and made.requires_grad:
        raise UnknownModuleError(("gradients are wanted",))
    return made
