"""The blocks of a UNet that go over the frames of videos, as programs: see blocks.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lib_rocm_sd.calls import Calls
from lib_rocm_sd.unet import blocks, compute
from lib_rocm_sd.unet.blocks import Means, called, from_tokens, image, into_tokens, pixels
from lib_rocm_sd.unet.parts import (
    ImageCall,
    ResnetOverFrames,
    TransformerCall,
    TransformerOverFrames,
    VideoCall,
)


def resnet(parts: ResnetOverFrames, call: VideoCall, means: Means, calls: Calls) -> torch.Tensor:
    """A residual block of images, and one over their frames."""
    spot = means.spot
    if parts.images is not None:
        x = blocks.resnet(parts.images, ImageCall(call.x, call.emb), means, calls)
    for images in parts.blocks:
        spot.is_whole = False  # but where that is ours
        x = called(images, call.x, {"temb": call.emb})
        if images._forward_hooks or images._forward_pre_hooks:
            spot.is_whole = False
        if not spot.is_whole:
            means.weights.host_runs()
    embedding = means.embeddings.of(call.emb, parts.timed, True)
    given: dict[str, Any] = {"x": x, "embedding": embedding, "still": call.still}
    given["mix"] = parts.mixer.get_parameter("mix_factor").to(x.device)
    return calls.recorded(partial(_resnet, parts), given)


def _resnet(
    parts: ResnetOverFrames,
    calls: Calls,
    x: torch.Tensor,
    embedding: torch.Tensor,
    still: torch.Tensor,
    mix: torch.Tensor,
) -> torch.Tensor:
    """Run one on x (N * frames, C, H, W); `embedding` has the first bias included."""
    x = pixels(x)
    h = x.view(*still.shape, -1, x.shape[3])
    h = compute.activated(calls, "frames.before", h, parts.norm1)
    h = compute.conv_over_frames(calls, "frames.conv1", h, parts.conv1, None)
    h.flatten(0, 1).add_(embedding[:, None])
    h = compute.activated(calls, "frames.between", h, parts.norm2)
    h = compute.conv_over_frames(
        calls, "frames.conv2", h, parts.conv2, parts.conv2._parameters["bias"]
    )
    return image(torch.addcmul(x, h.view(x.shape), _share(mix, still, x)[..., None]))


def _share(mix: torch.Tensor, still: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """How much counts what goes over frames, for each of them: (N * frames, 1, 1)."""
    share = torch.sigmoid(-mix.float()).masked_fill(still.bool(), 0)
    return share.to(like.dtype).view(-1, 1, 1)


def transformer(
    parts: TransformerOverFrames, call: TransformerCall, means: Means, calls: Calls
) -> Any:
    """A transformer over each image's pixels and over their frames, whose blocks are called."""
    still, count = call.still, len(parts.blocks) // 2
    assert still is not None
    h, x = into_tokens(parts, calls, call.x)
    frames = torch.arange(still.shape[1], device=x.device).repeat(len(still))
    places = called(parts.place, frames, {"dtype": x.dtype})[:, None]
    share = _share(parts.mixer.get_parameter("mix_factor"), still, x)
    means.weights.host_runs()  # blocks may be the host's
    for index, (own, over) in enumerate(zip(parts.blocks, parts.blocks[count:], strict=False)):
        h = called(own, h, call.given(index))
        h = torch.lerp(h, called(over, h + places, call.given(count + index)), share)
    means.spot.is_whole = False
    return call.answer(from_tokens(parts, calls, h, x))
