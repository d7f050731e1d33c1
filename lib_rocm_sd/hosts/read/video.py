"""The blocks of Stable Video Diffusion's UNets over frames: their parts, and what a call asks for.

Read in diffusers 0.42.1, models/resnet.py and models/attention.py; Comfy-Org/ComfyUI a125cd84
(0.3.64), comfy/ldm/modules/diffusionmodules/openaimodel.py and util.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.hosts.read.unet_diffusers import Diffusers
from lib_rocm_sd.hosts.read.unet_ldm import FIRST, Comfy, Ldm, Options
from lib_rocm_sd.unet.parts import (
    BlockCall,
    ResnetOverFrames,
    TransformerCall,
    TransformerOverFrames,
    VideoCall,
)

RESNET, TRANSFORMER = "SpatioTemporalResBlock", "TransformerSpatioTemporalModel"
BLOCK, COMFYS = "TemporalBasicTransformerBlock", "VideoResBlock"
WITHIN = ("spatial_res_block", "transformer_blocks", "temporal_transformer_blocks")
"""Where these have blocks that they call."""
_LAYERS = ("norm1", "conv1", "time_emb_proj", "norm2", "dropout", "conv2", "nonlinearity")


def resnet_call(
    module: Any, hidden_states: Any, temb: Any = None, image_only_indicator: Any = None
) -> VideoCall | None:
    """Frames that do not fill videos, and an embedding of another kind, are not for us."""
    x, still = hidden_states, image_only_indicator
    fits = still.ndim == 2 and still.numel() == len(x) == len(temb) and temb.ndim == 2
    return VideoCall(x, temb, still) if fits and temb.dtype == x.dtype else None


def resnet(found: Findings, module: Any) -> ResnetOverFrames | None:
    children = ("spatial_res_block", "temporal_res_block", "time_mixer")
    if not found.block(module, "block", (RESNET,), children, root=True):
        return None
    inner, name = module.temporal_res_block, "temporal_res_block"
    if not found.block(inner, name, ("TemporalResnetBlock",), _LAYERS):
        return None
    found.silu(inner, "nonlinearity", name)
    made = _resnet(found, inner, name, _LAYERS[:6], module.time_mixer)
    return None if made is None else replace(made, blocks=(module.spatial_res_block,))


def _resnet(
    found: Findings, inner: Any, name: str, paths: Sequence[str], mixer: Any
) -> ResnetOverFrames | None:
    """What is over frames, its layers by their paths in `inner`, without what is of images."""
    first, conv, embedding, second, dropout, last = paths
    _look_at_mixer(found, mixer)
    found.no_dropout(inner, dropout, name)
    norm1, norm2 = (found.group_norm(inner, key, name) for key in (first, second))
    conv1, conv2 = (found.conv_over_frames(inner, key, name) for key in (conv, last))
    embed = found.linear(inner, embedding, name)
    if norm1 is None or norm2 is None or conv1 is None or conv2 is None or embed is None:
        return None
    return ResnetOverFrames((), norm1, conv1, embed, norm2, conv2, mixer)


class _ComfysImages(Comfy):
    """What ComfyUI's residual block of videos derives from."""

    classes: ClassVar[tuple[str, ...]] = (COMFYS, *Comfy.classes[1:])

    def begins(
        self,
        found: Findings,
        module: Any,
        name: str,
        number: int,
        children: Iterable[str],
        root: bool = True,
    ) -> bool:
        more = () if number else ("time_stack", "time_mixer")
        return super().begins(found, module, name, number, (*children, *more), root)


def comfys_resnet(found: Findings, module: Any) -> ResnetOverFrames | None:
    images, name = _ComfysImages().resnet(found, module), "time_stack"
    inner = getattr(module, name, None)
    lists = {"in_layers": 3, "emb_layers": 2, "out_layers": 4}
    children = (*lists, "skip_connection", "h_upd", "x_upd")
    if images is None or not found.block(inner, name, ("ResBlock",), children):
        return None
    plain = dict.fromkeys(("skip_t_emb", "use_scale_shift_norm", "updown"), False)
    found.settings(inner, name, {"exchange_temb_dims": True, **plain})
    found.torchs(inner, "skip_connection", name, nn.Identity)
    if not all([found.listed(inner, key, name, count) for key, count in lists.items()]):
        return None
    for key in ("in_layers.1", "emb_layers.0", "out_layers.1"):
        found.silu(inner, key, name)
    paths = ("in_layers.0", "in_layers.2", "emb_layers.1", *map("out_layers.{}".format, (0, 2, 3)))
    made = _resnet(found, inner, name, paths, module.time_mixer)
    return None if made is None else replace(made, images=images)


def comfys_call(
    module: Any, x: Any, emb: Any, num_video_frames: Any, image_only_indicator: Any = None
) -> VideoCall | None:
    still = image_only_indicator
    if still is None:
        still = x.new_zeros(len(x) // num_video_frames, num_video_frames)
    return resnet_call(module, x, emb, still) if still.shape[1] == num_video_frames else None


def _look_at_mixer(found: Findings, mixer: Any) -> None:
    """Notes what does not mix by a learned share, and not in frames that stand still."""
    found.block(mixer, "time_mixer", ("AlphaBlender",), (), own=("mix_factor",))
    blends = {"merge_strategy": "learned_with_images", "switch_spatial_to_temporal_mix": False}
    found.settings(mixer, "time_mixer", blends)
    found.function(type(mixer), "get_alpha", "time_mixer")


def transformer_call(
    module: Any,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    image_only_indicator: Any = None,
    return_dict: bool = True,
) -> TransformerCall | None:
    """The blocks over frames are given the context of the first frame, for each token."""
    x, context, still = hidden_states, encoder_hidden_states, image_only_indicator
    if still.ndim != 2 or not still.numel() == len(x) == len(context) or context.ndim != 3:
        return None
    frames, tokens = still.shape[1], x.shape[2:].numel()

    def given(index: int) -> dict[str, Any]:
        if index < len(module.transformer_blocks):
            return {"encoder_hidden_states": context}
        first = context[::frames, None].expand(-1, tokens, -1, -1)
        return {"num_frames": frames, "encoder_hidden_states": first.flatten(0, 1)}

    def answer(y: torch.Tensor) -> Any:
        if not return_dict:
            return (y,)
        home = vars(sys.modules[type(module).__module__])
        return home["TransformerTemporalModelOutput"](sample=y)

    return TransformerCall(x, given, answer, still)


def transformer(found: Findings, module: Any) -> TransformerOverFrames | None:
    """Where frames are is what its modules for that give, which are called."""
    own = ("norm", "proj_in", "proj_out", "time_pos_embed", "time_proj", "time_mixer")
    if not found.block(module, "transformer", (TRANSFORMER,), (*own, *WITHIN), root=True):
        return None
    _look_at_mixer(found, module.time_mixer)
    norm = found.group_norm(module, "norm")
    proj_in, proj_out = found.linear(module, "proj_in"), found.linear(module, "proj_out")
    blocks, over = (found.listed(module, key) for key in WITHIN[1:])
    if norm is None or proj_in is None or proj_out is None or len(blocks) != len(over):
        return None

    def place(frames: torch.Tensor, dtype: torch.dtype) -> Any:
        return module.time_pos_embed(module.time_proj(frames).to(dtype))

    return TransformerOverFrames(
        norm, proj_in, (*blocks, *over), proj_out, place, module.time_mixer
    )


def block_call(
    module: Any, hidden_states: Any, num_frames: Any, encoder_hidden_states: Any = None
) -> BlockCall | None:
    """A context that is not one for each token, of which how many frames there are follows, is not
    for us.
    """
    x, context = hidden_states, encoder_hidden_states
    own, cross = {"encoder_hidden_states": None}, {"encoder_hidden_states": context}
    call = BlockCall(x, context, own, cross, frames=num_frames)
    fits = not len(x) % num_frames and len(context) == call.batch
    return call if fits else None


class OverFrames(Diffusers):
    """Stable Video Diffusion's transformer blocks that attend over frames."""

    classes: ClassVar[tuple[str, ...]] = ("", "", BLOCK)
    block_settings: ClassVar[Options] = {"is_res": True, "_chunk_size": None}
    block_children: ClassVar[tuple[str, ...]] = (*Ldm.block_children, *FIRST)
