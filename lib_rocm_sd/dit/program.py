"""A block of a diffusion transformer as a program: what it gives for one call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.calls import Calls, shielded
from lib_rocm_sd.dit.parts import (
    ATTENTION,
    Called,
    Crossed,
    Heads,
    Joint,
    Layer,
    Sandwich,
    Single,
    Stream,
    TokensCall,
)
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.ops.layer_norm.heads import HeadsInputs
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM_MODULATED, RMS_NORM_HEADS
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.blocks import Means, called

Rows = dict[str, torch.Tensor]
"""What a modulation makes, (N, C) each, by name."""


Rotary = tuple[torch.Tensor | None, torch.Tensor | None]
"""`rotary` and `rotary_sin` of HeadsInputs."""


def joint(parts: Joint, call: TokensCall, means: Means, calls: Calls) -> Any:
    """A block of two streams. Both results lie one after the other in one tensor, which a graph
    writes.
    """
    _attends(means, parts.picture.heads)
    made = calls.recorded(partial(_joint, parts), call.given)
    x = made[: call.x.numel()].view(call.x.shape)
    if parts.prompt.feed_forward is None or call.context is None:
        return call.answer(None, x)
    return call.answer(made[call.x.numel() :].view(call.context.shape), x)


def single(parts: Single, call: TokensCall, means: Means, calls: Calls) -> Any:
    """A block of one stream, which may be given in two tensors."""
    _attends(means, parts.heads)
    return call.answer(calls.recorded(partial(_single, parts), call.given))


def crossed(parts: Crossed, call: TokensCall, means: Means, calls: Calls) -> Any:
    """A block of one stream that attends to a prompt, too."""
    for heads in (parts.stream.heads, parts.crossing):
        _attends(means, heads)
    return call.answer(calls.recorded(partial(_crossed, parts), call.given))


def sandwich(parts: Sandwich, call: TokensCall, means: Means, calls: Calls) -> Any:
    """A block of one stream with norms around attention and feed-forward."""
    _attends(means, parts.heads)
    return call.answer(calls.recorded(partial(_sandwich, parts), call.given))


def _attends(means: Means, heads: Heads) -> None:
    why = means.attends(heads.module)
    if why:
        raise UnknownModuleError((why,))


def _joint(
    parts: Joint,
    calls: Calls,
    x: torch.Tensor,
    context: torch.Tensor,
    embedding: torch.Tensor,
    rotary: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    picture, prompt = parts.picture, parts.prompt
    x, context = x.contiguous(), context.contiguous()
    each = _modulation(calls, embedding, x.shape[2], picture.modulation, prompt.modulation)
    of_picture: Rows = dict(zip(picture.rows, each, strict=False))
    of_prompt: Rows = dict(zip(prompt.rows, each[len(picture.rows) :], strict=True))

    streams = [
        (_projected(calls, "x", x, picture, of_picture, picture.heads), picture.heads),
        (_projected(calls, "context", context, prompt, of_prompt, prompt.heads), prompt.heads),
    ]
    sizes = [x.shape[1], context.shape[1]]
    order = -1 if parts.prompt_first else 1
    turned = rotary, rotary_sin
    mixed = _attended(calls, "joint", parts.heads, *streams[::order], rotary=turned, mask=mask)
    del streams
    mixed, of_context = mixed.split(sizes[::order], 1)[::order]
    total = x
    if parts.own is not None:
        alone = _projected(calls, "own", x, picture, of_picture, parts.own, "own ")
        alone = _attended(calls, "own", parts.heads, (alone, parts.own))
        alone = _out(calls, "own.out", parts.own, alone)
        total = torch.addcmul(x, of_picture["own gate"][:, None], alone)
        del alone
    ends = prompt.feed_forward is None
    added = None if ends else _out(calls, "context.out", prompt.heads, of_context)
    mixed = _out(calls, "x.out", picture.heads, mixed)
    x, gate, h = _fed(calls, "x", total, mixed, picture, of_picture)
    del mixed, of_context, total
    flat = x.new_empty(x.numel() + (0 if ends else context.numel()))
    torch.addcmul(x, gate, h, out=flat[: x.numel()].view(x.shape))
    if added is not None:
        into = flat[x.numel() :].view(context.shape)
        context, gate, h = _fed(calls, "context", context, added, prompt, of_prompt)
        torch.addcmul(context, gate, h, out=into)
        _bound(parts, flat if parts.bounds_both else into)
    return flat


def _single(
    parts: Single,
    calls: Calls,
    x: torch.Tensor,
    embedding: torch.Tensor,
    context: torch.Tensor | None = None,
    rotary: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What attention makes comes to lie where the values were, next to what GELU makes."""
    x = x.contiguous() if context is None else torch.cat((context, x), 1)
    width = x.shape[2]
    each = _modulation(calls, embedding, width, parts.modulation)
    rows: Rows = dict(zip(ATTENTION, each, strict=True))
    inputs = ModulatedInputs(x, rows["scale"], rows["shift"], parts.norm.eps)
    normed = calls.run("norm", LAYER_NORM_MODULATED, inputs).flatten(0, 1)
    made = _linear(calls, "qkv", normed, *parts.heads.to_qkv)
    del inputs, normed
    qkv = made[:, : 3 * width].unflatten(0, x.shape[:2])
    stream, turned = (qkv, parts.heads), (rotary, rotary_sin)
    mixed = _attended(calls, "own", parts.count, stream, rotary=turned, mask=mask)
    joined = made[:, 2 * width :]
    joined[:, :width] = mixed.flatten(0, 1)
    del made, qkv, mixed, stream
    torch.ops.aten.gelu_(joined[:, width:], approximate="tanh")
    h = _linear(calls, "out", joined, parts.to_out).view(x.shape)
    torch.addcmul(x, rows["gate"][:, None], h, out=h)
    _bound(parts, h)
    return h


def _crossed(
    parts: Crossed,
    calls: Calls,
    x: torch.Tensor,
    context: torch.Tensor,
    embedding: torch.Tensor,
    rotary: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    x, stream, heads = x.contiguous(), parts.stream, parts.crossing
    each = _modulation(calls, embedding, x.shape[2], stream.modulation)
    rows: Rows = dict(zip(stream.rows, each, strict=True))
    mixed = _projected(calls, "own", x, stream, rows, stream.heads)
    if stream.heads.across:
        for made, norm in zip(mixed.chunk(3, 2), stream.heads.norms, strict=False):
            made.copy_(_rms(made, norm))
    turned = rotary, rotary_sin
    mixed = _attended(calls, "own", parts.heads, (mixed, stream.heads), rotary=turned)
    mixed = _out(calls, "own.out", stream.heads, mixed)
    x = torch.addcmul(x, rows["gate"][:, None], mixed)
    normed = x.flatten(0, 1)
    if isinstance(parts.norm, Called):
        normed = called(parts.norm.module, normed, {})
    elif parts.norm is not None:
        normed, _, _ = compute.layer_norm(calls, "cross.norm", normed, parts.norm)
    q = _linear(calls, "cross.q", normed, heads.to_qkv[0])
    kv = _linear(calls, "cross.kv", context.reshape(-1, context.shape[2]), *heads.to_qkv[1:])
    q, kv = (made.unflatten(0, (len(x), -1)) for made in (q, kv))
    k, v = kv.chunk(2, 2)
    if heads.across:
        q, k = (_rms(made, norm) for made, norm in zip((q, k), heads.norms, strict=True))
    q, k, v = (made.unflatten(2, (parts.heads, -1)) for made in (q, k, v))
    mixed = compute.attention(calls, "cross.attention", q, k, v, mask)
    del q, k, v, kv, normed
    flat = mixed.flatten(0, 1)
    x = _linear(calls, "cross.out", flat, heads.to_out, residual=x.flatten(0, 1))
    x, gate, h = _fed(calls, "x", x.view(mixed.shape), None, stream, rows)
    return torch.addcmul(x, gate, h)


def _sandwich(
    parts: Sandwich,
    calls: Calls,
    x: torch.Tensor,
    embedding: torch.Tensor | None = None,
    rotary: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    def attention(h: torch.Tensor) -> torch.Tensor:
        qkv = _linear(calls, "qkv", h.flatten(0, 1), *parts.heads.to_qkv)
        stream, turned = (qkv.unflatten(0, h.shape[:2]), parts.heads), (rotary, rotary_sin)
        mixed = _attended(calls, "own", parts.count, stream, rotary=turned, mask=mask)
        return _out(calls, "out", parts.heads, mixed)

    def feed_forward(h: torch.Tensor) -> torch.Tensor:
        up, gated = _linear(calls, "up", h.flatten(0, 1), *parts.up).chunk(2, 1)
        up = nn.functional.silu(up).mul_(gated)
        return _linear(calls, "down", up, parts.down).view(h.shape)

    x, rows = x.contiguous(), None
    if parts.modulation is not None and embedding is not None:
        made = _linear(calls, "modulation", embedding, parts.modulation)
        rows = made.view(len(x), 4, 1, -1).unbind(1)
    for place, part in ((0, attention), (2, feed_forward)):
        h = _rms(x, parts.norms[place])
        h = part(h if rows is None else h * (1 + rows[place]))
        h = _rms(h, parts.norms[place + 1])
        x = x + h if rows is None else torch.addcmul(x, rows[place + 1].tanh(), h)
    return x


def _modulation(
    calls: Calls, embedding: torch.Tensor, width: int, *layers: Layer | None
) -> tuple[torch.Tensor, ...]:
    """What these layers make, (N, C) each; without layers, the rows of `embedding` (N, rows, C)."""
    if None in layers:
        return embedding.unbind(1)
    made = _linear(calls, "modulation", nn.functional.silu(embedding), *layers)
    return made.view(len(made), -1, width).unbind(1)


def _linear(
    calls: Calls, place: str, x: torch.Tensor, *layers: Any, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`compute.linear`, where none of the layers is to be called as it is."""
    if not any(isinstance(layer, Called) for layer in layers):
        return compute.linear(calls, place, x, *layers, residual=residual)
    each = [
        called(layer.module, x, {})
        if isinstance(layer, Called)
        else compute.linear(calls, f"{place} {number}", x, layer)
        for number, layer in enumerate(layers)
    ]
    made = torch.cat(each, 1) if len(each) > 1 else each[0]
    return made if residual is None else residual + made


def _bound(parts: Joint | Single, made: torch.Tensor) -> None:
    if parts.bounded is not None and made.dtype == torch.float16:
        parts.bounded(made)


def _projected(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    stream: Stream,
    rows: Rows,
    heads: Heads,
    of: str = "",
) -> torch.Tensor:
    """Queries, keys and values (N, tokens, 3 C) of a stream x, normalised and modulated first."""
    inputs = ModulatedInputs(x, rows[f"{of}scale"], rows[f"{of}shift"], stream.norm1.eps)
    normed = calls.run(f"{place}.norm1", LAYER_NORM_MODULATED, inputs).flatten(0, 1)
    made = _linear(calls, f"{place}.qkv", normed, *heads.to_qkv)
    return made.unflatten(0, x.shape[:2])


def _attended(
    calls: Calls,
    place: str,
    count: int,
    *streams: tuple[torch.Tensor, Heads],
    rotary: Rotary = (None, None),
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention (N, tokens, C) of `count` heads among all tokens of one stream, or of two: of each
    its queries, keys and values, and the layers that made them. `mask` as TokensCall has it.
    """
    (qkv, heads), (more, others) = streams[0], (*streams, (None, None))[1]
    if more is not None or heads.norm_q is not None or rotary[0] is not None:
        q, k = _weights(heads, qkv)
        more_q, more_k = _weights(others, qkv)
        eps = heads.eps, 0.0 if others is None else others.eps
        inputs = HeadsInputs(qkv, more, q, k, more_q, more_k, count, *eps, *rotary)
        qkv = calls.run(f"{place}.qk", RMS_NORM_HEADS, inputs)
        del inputs
    del more, streams
    q, k, v = qkv.unflatten(2, (3, count, -1)).unbind(2)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None] * mask[:, :, None]
    return compute.attention(calls, f"{place}.attention", q, k, v, mask)


def _rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """RMSNorm of x (.., C), by torch: rows of our kernel are heads, which are not as long. On GPUs
    autocast would make it float32.
    """
    weight = norm._parameters["weight"].to(x)
    with shielded(x.device):
        return nn.functional.rms_norm(x, weight.shape, weight, norm.eps)


def _weights(
    heads: Heads | None, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of norms over each head, in the dtype and on the device of x."""
    none = heads is None or heads.across
    norms: Any = (None, None) if heads is None or none else heads.norms
    every = ({} if norm is None else norm._parameters for norm in norms)
    q, k = (next((each.to(x) for each in own.values() if each is not None), None) for own in every)
    return q, k


def _out(calls: Calls, place: str, heads: Heads, mixed: torch.Tensor) -> torch.Tensor:
    """What to_out makes of attention's result (N, tokens, C)."""
    made = _linear(calls, place, mixed.reshape(-1, mixed.shape[2]), heads.to_out)
    return made.view(*mixed.shape[:2], -1)


def _fed(
    calls: Calls,
    place: str,
    x: torch.Tensor,
    added: torch.Tensor | None,
    stream: Stream,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, to which what attention made is `added` with its gate; the gate (N, 1, C) of what the
    feed-forward makes of it, and that.
    """
    ff, norm2 = stream.feed_forward, stream.norm2
    assert ff is not None and norm2 is not None
    inputs = ModulatedInputs(x, rows["ff scale"], rows["ff shift"], norm2.eps)
    if added is None:
        h = calls.run(f"{place}.norm2", LAYER_NORM_MODULATED, inputs)
    else:
        inputs = inputs._replace(added=added, gate=rows["gate"])
        h, x = calls.run(f"{place}.norm2", LAYER_NORM_MODULATED, inputs)
    del inputs, added
    h = _linear(calls, f"{place}.up", h.flatten(0, 1), ff.up)
    h = nn.functional.gelu(h, approximate="tanh")
    h = _linear(calls, f"{place}.down", h, ff.down)
    return x, rows["ff gate"][:, None], h.view(x.shape)
