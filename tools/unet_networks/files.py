"""Small files of networks (LoRA and its relatives) with random weights, by the formats' own names.

A change is about a third of the weight that it is added to. What the tensors of a format are called
and how they lie is what kohya's sd-scripts and LyCORIS write.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

RANK = 4
CHANGE = 0.3
Draw = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of file: which layers it changes, and what it has of one, by (its weight, Draw)."""

    title: str
    changes: Callable[[str, nn.Module], bool]
    tensors: Callable[[torch.Tensor, Draw], Tensors]
    prefix: str = "lora_unet"


def write(
    path: Path, kind: Kind, leaves: Mapping[str, nn.Module], diffusers: bool, seed: int
) -> int:
    """Save what `kind` has for these layers; how many it changes. Names are diffusers' or ldm's."""
    state: Tensors = {}
    changed = [name for name, leaf in leaves.items() if kind.changes(name, leaf)]
    for name in changed:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)

        def drawn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        weight: torch.Tensor = leaves[name].weight  # type: ignore[assignment]
        ldm = f"{kind.prefix}_{name.replace('.', '_')}"
        key = f"lora_unet_{_of_diffusers(name)}" if diffusers else ldm
        parts = kind.tensors(weight.float(), drawn)
        if leaves[name].bias is None:
            parts.pop("diff_b", None)  # the WebUI raises an error at the second step
        for part, tensor in parts.items():
            whole = tensor.half() if tensor.is_floating_point() else tensor
            state[f"{key}.{part}"] = whole.contiguous()
    save_file(state, path, metadata={"ss_network_dim": str(RANK)})
    return len(changed)


_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_WHOLE = {
    "input_blocks.0.0": "conv_in",
    "out.2": "conv_out",
    "time_embed.0": "time_embedding_linear_1",
    "time_embed.2": "time_embedding_linear_2",
}


def _of_diffusers(name: str) -> str:
    """What files for SD 1 and 2 call a layer of ldm's UNet with two blocks to a level."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.match(r"(input|middle|output)_blocks?\.(\d+)\.(?:(\d+)\.)?(.+)", name)
    if found is None:
        return name.replace(".", "_")
    side, first, second, rest = found.groups()
    number, part = int(first), second
    if side == "middle":
        attends = number == 1
        rest = f"{part}.{rest}" if part else rest
        place = f"mid_block_{'attentions_0' if attends else f'resnets_{number // 2}'}"
    elif rest in ("op", "conv"):
        up = side == "output"
        level = number // 3 if up else (number - 3) // 3
        return f"{'up' if up else 'down'}_blocks_{level}_{'up' if up else 'down'}samplers_0_conv"
    else:
        attends = part == "1"
        at = number - 1 if side == "input" else number
        kind = "attentions" if attends else "resnets"
        place = f"{'down' if side == 'input' else 'up'}_blocks_{at // 3}_{kind}_{at % 3}"
    return f"{place}_{(rest if attends else _RESNET.get(rest, rest)).replace('.', '_')}"


def _scale(weight: torch.Tensor) -> float:
    return CHANGE * weight[0].numel() ** -0.5


def _lora(weight: torch.Tensor, draw: Draw) -> Tensors:
    rows, columns, *kernel = weight.shape
    up = draw(rows, RANK, *([1] * len(kernel))) * (_scale(weight) * RANK**-0.5)
    down = draw(RANK, columns, *kernel)
    return {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(float(RANK))}


def _lora_peft(weight: torch.Tensor, draw: Draw) -> Tensors:
    made = _lora(weight, draw)
    return {"lora_A.weight": made["lora_down.weight"], "lora_B.weight": made["lora_up.weight"]}


def _lora_cp(weight: torch.Tensor, draw: Draw) -> Tensors:
    rows, columns = weight.shape[:2]
    up = draw(rows, RANK, 1, 1) * (_scale(weight) / RANK)
    middle = {"lora_mid.weight": draw(RANK, RANK, *weight.shape[2:])}
    return {"lora_up.weight": up, "lora_down.weight": draw(RANK, columns, 1, 1), **middle}


def _with_bias(kind: Callable[[torch.Tensor, Draw], Tensors]) -> Callable[..., Tensors]:
    """The WebUI adds it to the change of the weight, whatever kind of file it is in."""

    def tensors(weight: torch.Tensor, draw: Draw) -> Tensors:
        return {**kind(weight, draw), "bias": draw(*weight.shape) * (0.5 * _scale(weight))}

    return tensors


def _dora(weight: torch.Tensor, draw: Draw) -> Tensors:
    norms = weight.transpose(0, 1).flatten(1).norm(dim=1).view(1, -1, *[1] * (weight.ndim - 2))
    return {**_lora(weight, draw), "dora_scale": norms * (1 + 0.1 * draw(*norms.shape))}


def _loha(weight: torch.Tensor, draw: Draw) -> Tensors:
    rows, columns = weight.shape[0], weight[0].numel()
    return {
        "hada_w1_a": draw(rows, RANK) * (_scale(weight) / RANK),
        "hada_w1_b": draw(RANK, columns),
        "hada_w2_a": draw(rows, RANK),
        "hada_w2_b": draw(RANK, columns),
        "alpha": torch.tensor(float(RANK)),
    }


def _loha_cp(weight: torch.Tensor, draw: Draw) -> Tensors:
    rows, columns, *kernel = weight.shape
    return {
        "hada_w1_a": draw(RANK, rows) * (_scale(weight) / RANK**2),
        "hada_w1_b": draw(RANK, columns),
        "hada_t1": draw(RANK, RANK, *kernel),
        "hada_w2_a": draw(RANK, rows),
        "hada_w2_b": draw(RANK, columns),
        "hada_t2": draw(RANK, RANK, *kernel),
    }


def _factors(weight: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows and columns of the two matrices of a Kronecker product: 4 and 4, and the rest."""
    rows, columns = weight.shape[:2]
    return 4, 4, rows // 4, columns // 4


def _lokr(weight: torch.Tensor, draw: Draw) -> Tensors:
    a, c, b, d = _factors(weight)
    inner = d * weight[0, 0].numel()
    return {
        "lokr_w1": draw(a, c) * (_scale(weight) * RANK**-0.5),
        "lokr_w2_a": draw(b, RANK),
        "lokr_w2_b": draw(RANK, inner),
        "alpha": torch.tensor(float(RANK)),
    }


def _lokr_whole(weight: torch.Tensor, draw: Draw) -> Tensors:
    a, c, b, d = _factors(weight)
    first = {"lokr_w1_a": draw(a, RANK) * (_scale(weight) * RANK**-0.5), "lokr_w1_b": draw(RANK, c)}
    return {**first, "lokr_w2": draw(b, d, *weight.shape[2:])}


def _lokr_cp(weight: torch.Tensor, draw: Draw) -> Tensors:
    a, c, b, d = _factors(weight)
    return {
        "lokr_w1": draw(a, c) * (_scale(weight) / RANK),
        "lokr_t2": draw(RANK, RANK, *weight.shape[2:]),
        "lokr_w2_a": draw(RANK, b),
        "lokr_w2_b": draw(RANK, d),
    }


def _difference(weight: torch.Tensor, draw: Draw) -> Tensors:
    return {"diff": draw(*weight.shape) * _scale(weight)}


def _difference_bias(weight: torch.Tensor, draw: Draw) -> Tensors:
    return {**_difference(weight, draw), "diff_b": 0.1 * draw(len(weight))}


def _norm(weight: torch.Tensor, draw: Draw) -> Tensors:
    return {"w_norm": 0.2 * draw(len(weight)), "b_norm": 0.1 * draw(len(weight))}


def _ia3_rows(weight: torch.Tensor, draw: Draw) -> Tensors:
    return {"weight": CHANGE * draw(len(weight)), "on_input": torch.tensor(False)}


def _oft(weight: torch.Tensor, draw: Draw) -> Tensors:
    size = len(weight) // 4
    return {"oft_blocks": draw(4, size, size) * (0.2 * size**-0.5), "alpha": torch.tensor(1.0)}


def _boft(weight: torch.Tensor, draw: Draw) -> Tensors:
    return {"oft_blocks": 0.1 * draw(2, len(weight) // 4, 4, 4), "alpha": torch.tensor(1.0)}


def _glora(weight: torch.Tensor, draw: Draw) -> Tensors:
    rows, columns = weight.shape
    scale = _scale(weight) * RANK**-0.5
    return {
        "a1.weight": draw(RANK, columns) * (0.1 * RANK**-0.5),
        "a2.weight": draw(columns, RANK) * columns**-0.5,
        "b1.weight": draw(RANK, columns),
        "b2.weight": draw(rows, RANK) * scale,
        "alpha": torch.tensor(1.0),
    }


def _linear(name: str, leaf: nn.Module) -> bool:
    return isinstance(leaf, nn.Linear)


def _attention(name: str, leaf: nn.Module) -> bool:
    """What kohya's LoRA has by default: all linear layers of transformers, 1x1 convolutions too."""
    one = isinstance(leaf, nn.Conv2d) and leaf.kernel_size == (1, 1) and ".proj_" in name
    return one or (_linear(name, leaf) and ".transformer_blocks." in name)


def _both(name: str, leaf: nn.Module) -> bool:
    return isinstance(leaf, (nn.Linear, nn.Conv2d)) and "label_emb" not in name


def _wide(name: str, leaf: nn.Module) -> bool:
    return _both(name, leaf) and name not in ("input_blocks.0.0", "out.2")


def _conv(name: str, leaf: nn.Module) -> bool:
    return isinstance(leaf, nn.Conv2d) and leaf.kernel_size == (3, 3)


def _keys(name: str, leaf: nn.Module) -> bool:
    return name.endswith(("attn2.to_k", "attn2.to_v"))


def _norms(name: str, leaf: nn.Module) -> bool:
    return isinstance(leaf, (nn.GroupNorm, nn.LayerNorm))


KINDS = (
    Kind("LoRA, transformers", _attention, _lora),
    Kind("LoRA, linear and convolutions", _both, _lora),
    Kind("LoRA, PEFT's names", _linear, _lora_peft),
    Kind("LoRA, convolutions in three parts (CP)", _conv, _lora_cp),
    Kind("LoRA with a bias key", _both, _with_bias(_lora)),
    Kind("DoRA", _wide, _dora),
    Kind("LoHa", _both, _loha),
    Kind("LoHa, convolutions by CP", _conv, _loha_cp),
    Kind("LoHa with a bias key", _both, _with_bias(_loha)),
    Kind("LoKr", _both, _lokr),
    Kind("LoKr, second matrix whole", _both, _lokr_whole),
    Kind("LoKr, convolutions by CP", _conv, _lokr_cp),
    Kind("LoKr with a bias key", _both, _with_bias(_lokr)),
    Kind("full difference", _both, _difference),
    Kind("full difference with biases", _both, _difference_bias),
    Kind("norms", _norms, _norm),
    Kind("IA3", _keys, _ia3_rows),
    Kind("OFT", _wide, _oft, "oft_unet"),
    Kind("BOFT", _wide, _boft),
    Kind("GLoRA", _linear, _glora),
)
OTHER = Kind("LoRA", _attention, _lora)
"""The second of two at once."""
