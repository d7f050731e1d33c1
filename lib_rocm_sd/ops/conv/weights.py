"""Weights of a convolution: as torch has them, and packed for our kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from lib_rocm_sd.ops.base import Launch, reasons
from lib_rocm_sd.ops.conv import kernel
from lib_rocm_sd.ops.conv.kernel import ConvConfig, PackParams
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.gradients import is_transformed, is_wanted
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.lazily import F, torch

_Plain: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"


@dataclass(frozen=True)
class PackedWeights:
    """What a kernel reads. `co` is padded to a multiple of 16; `bias` (co) is float32."""

    weights: torch.Tensor
    bias: torch.Tensor
    shortcut: torch.Tensor | None
    co: int


class ConvWeights:
    """weight (Co, Ci, 3, 3), bias (Co), 1x1 weight (Co, Cs) and bias (Co) of a shortcut, slopes
    (Co) of a PReLU.

    Packs and converts itself once per device, dtype and kernel; the tensors must not change. What
    was made lives as long as this object. With `in_rows` nothing is packed: kernels read weights as
    they lie in channels-last memory, and a copy is made only of what lies otherwise.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        shortcut_weight: torch.Tensor | None = None,
        shortcut_bias: torch.Tensor | None = None,
        in_rows: bool = False,
        slopes: torch.Tensor | None = None,
    ) -> None:
        biases = {"bias": bias, "shortcut_bias": shortcut_bias, "slopes": slopes}
        _check(weight, {name: b for name, b in biases.items() if b is not None})
        self.weight = weight
        self.shortcut_weight = shortcut_weight
        self.in_rows = in_rows
        self.slopes = slopes
        given = [b for b in (bias, shortcut_bias) if b is not None]
        wide = [b.double() for b in given] or [weight.new_zeros(weight.shape[:1]).double()]
        self.bias = wide[0] if len(wide) == 1 else wide[0] + wide[1]
        self.has_bias = bool(given)
        self._made: dict[torch.device, dict[object, Any]] = {}

    def _on(self, device: torch.device) -> dict[object, Any]:
        """What was made for `device`."""
        return self._made.setdefault(device, {})

    @property
    def followed(self) -> tuple[torch.Tensor | None, ...]:
        """What may have a gradient."""
        return self.weight, self.bias, self.shortcut_weight, self.slopes

    def plain(self, like: torch.Tensor) -> _Plain:
        """weight, bias and shortcut weight in the dtype and on the device of `like`. What autograd
        follows, or torch.func, is not kept.
        """
        fleeting = is_wanted(*self.followed) or is_transformed()
        made = {} if fleeting else self._on(like.device)
        key = ("plain", like.dtype, torch.is_inference_mode_enabled())
        if key not in made:
            weights = (None, None) if self.in_rows else self._weights(like)
            made[key] = (weights[0], self.bias.to(like), weights[1])
        weight, bias, shortcut = made[key]
        if weight is None:  # no copy is kept
            weight, shortcut = self._weights(like)
        return weight, bias, shortcut

    def _weights(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self.weight.to(like).contiguous(memory_format=torch.channels_last)
        return weight, None if self.shortcut_weight is None else self.shortcut_weight.to(like)

    def rows(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix (Co, 9 Ci) in its memory, like `like`: the weight itself where it lies so."""
        if _lies_in_rows(self.weight, like):
            return self.weight
        made, key = self._on(like.device), ("rows", like.dtype)
        if key not in made:
            made[key] = _laid(self.weight.detach().to(like), torch.channels_last)
        rows: torch.Tensor = made[key]
        return rows

    def phases(self, like: torch.Tensor) -> torch.Tensor:
        """(4 Co, Ci, 2, 2): the weights of all phases (see `phase_weights`), like `like`."""
        made, key = self._on(like.device), ("phases", like.dtype)
        if key not in made:
            weight = torch.cat(phase_weights(self.weight)).to(like)
            made[key] = weight.contiguous(memory_format=torch.channels_last)
        phases: torch.Tensor = made[key]
        return phases

    def bias_on(self, device: torch.device) -> torch.Tensor:
        """The bias (Co) in float32, the shortcut's added to it."""
        made = self._on(device)
        if "bias" not in made:
            made["bias"] = self.bias.to(device, torch.float32)
        bias: torch.Tensor = made["bias"]
        return bias

    def bias_padded(self, device: torch.device) -> torch.Tensor:
        """The same, to whole tiles of channels."""
        bias = self.bias_on(device)
        if bias.shape[0] % 16 == 0:
            return bias
        made = self._on(device)
        if "padded bias" not in made:
            made["padded bias"] = F.pad(bias, (0, -bias.shape[0] % 16))
        padded: torch.Tensor = made["padded bias"]
        return padded

    def slopes_padded(self, device: torch.device) -> torch.Tensor | None:
        """The slopes in float32, to whole tiles of channels."""
        made = self._on(device)
        if self.slopes is not None and "slopes" not in made:
            slopes = self.slopes.detach().to(device, torch.float32)
            made["slopes"] = F.pad(slopes, (0, -slopes.shape[0] % 16))
        return made.get("slopes")

    def bias_rows(
        self, bias: torch.Tensor, embedding: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """Each image's bias, float32, and values from one image's to the next's; 0: one for all.

        `bias` (>= Co) float32 is this object's, `embedding` (N, Co) is added to it. Where there is
        no bias, an embedding in float32 is read as it lies.
        """
        if embedding is None:
            return bias, 0
        whole = embedding.shape[1] == bias.shape[0]
        dense = embedding.stride(1) == 1 and embedding.stride(0) < 1 << 32
        if whole and dense and not self.has_bias and embedding.dtype == torch.float32:
            return embedding, embedding.stride(0)
        if not whole:
            embedding = F.pad(embedding, (0, bias.shape[0] - embedding.shape[1]))
        return bias + embedding, bias.shape[0]

    def packed(
        self,
        kind: str,
        x: torch.Tensor,
        shortcut: torch.Tensor | None,
        launch: Launch,
        config: ConvConfig,
    ) -> PackedWeights:
        """Packed for the kernel of this kind, to be multiplied with x (N, H, W, Ci)."""
        made = self._on(x.device)
        key = (kind, x.dtype, x.shape[3], shortcut is None, config.tile_halves)
        if key not in made:
            made[key] = self._pack(kind, x, shortcut, launch, config)
        packed: PackedWeights = made[key]
        return packed

    def _pack(
        self,
        kind: str,
        x: torch.Tensor,
        shortcut: torch.Tensor | None,
        launch: Launch,
        config: ConvConfig,
    ) -> PackedWeights:
        weight = self.weight.to(x.device)
        phases = phase_weights(weight) if kind == "upsample" else [weight]
        tiles = torch.cat([_tiles(w.float(), x.shape[3], kind) for w in phases])
        co = kernel.padded(weight.shape[0])
        bias = F.pad(self.bias.to(x.device, torch.float32), (0, co - weight.shape[0]))
        extra = None
        if shortcut is not None and self.shortcut_weight is not None:
            matrix = self.shortcut_weight.to(x.device).float()
            extra = matrix.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
        elif shortcut is not None:
            extra = torch.eye(16, device=x.device)
        packed = (
            _launch_pack(tiles, x, launch, config),
            bias,
            None if extra is None else _launch_pack(extra, x, launch, config),
        )
        return PackedWeights(*packed, co)


def _check(weight: torch.Tensor, biases: dict[str, torch.Tensor]) -> None:
    """ValueError, with shapes, for what does not go together."""
    given: dict[str, Any] = {"weight": weight, **biases}
    others = [name for name, t in given.items() if not isinstance(t, torch.Tensor)]
    wrong = [f"{name} must be a tensor" for name in others]
    if not wrong:
        made, at = weight.shape[:1], weight.device
        wrong = reasons(
            (weight.ndim != 4 or weight.shape[2:] != (3, 3), "weight must be (Co, Ci, 3, 3)"),
            *((not t.is_floating_point(), f"{name} must be a float") for name, t in given.items()),
            *((b.shape != made, f"{name} must be (Co)") for name, b in biases.items()),
            *((b.device != at, f"{name} must be on {at}") for name, b in biases.items()),
        )
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(weight=weight, **biases)}")


def _lies_in_rows(weight: torch.Tensor, like: torch.Tensor) -> bool:
    return (
        weight.dtype == like.dtype
        and weight.device == like.device
        and weight.is_contiguous(memory_format=torch.channels_last)
        and weight.data_ptr() % 16 == 0
    )


def matrix_of(weight: torch.Tensor) -> torch.Tensor:
    """A shortcut's weight (Co, Cs) with dense rows that a kernel can read; a copy if need be."""
    return _laid(weight, torch.contiguous_format)


def _laid(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    tensor = tensor.contiguous(memory_format=memory_format)
    aligned = tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.clone(memory_format=memory_format)


def phase_weights(weight: torch.Tensor) -> list[torch.Tensor]:
    """The four 2x2 weights that nearest x2 and then 3x3 comes to, phase 2 * py + px.

    Output row 2y + py sees input row y + py - 1 through the taps that fall on it, and row y + py
    through the others: for py = 0 rows 0 | 1 + 2 of the 3x3, for py = 1 rows 0 + 1 | 2.
    """

    def halves(w: torch.Tensor, phase: int, dim: int) -> torch.Tensor:
        first, second, third = w.unbind(dim)
        pair = (first, second + third) if phase == 0 else (first + second, third)
        return torch.stack(pair, dim)

    wide = weight.double()
    return [halves(halves(wide, py, 2), px, 3) for py in (0, 1) for px in (0, 1)]


def _tiles(weight: torch.Tensor, in_channels: int, kind: str) -> torch.Tensor:
    """(Co, Ci, T, T) -> (co / 16, ci / chunk, taps, chunk / 16, 16, 16), zero-padded."""
    chunk = kernel.chunk_of(in_channels, kind)
    out, taken = weight.shape[:2]
    padded = F.pad(weight.flatten(2), (0, 0, 0, in_channels - taken, 0, -out % 16))
    split = padded.unflatten(1, (-1, chunk // 16, 16)).unflatten(0, (-1, 16))
    return split.permute(0, 2, 5, 3, 1, 4)


def _launch_pack(
    tiles: torch.Tensor, x: torch.Tensor, launch: Launch, config: ConvConfig
) -> torch.Tensor:
    """Tiles (..., 16, 16) in the order of the matrix unit's lanes.

    After the last one there is memory for another, which is read ahead and not used.
    """
    plain = tiles.to(x.dtype).contiguous()
    count = plain.numel() // 256
    packed = x.new_empty(((count + 1) * config.tile_halves,))
    params = PackParams(plain.data_ptr(), packed.data_ptr())
    launch(kernel.pack_spec(DTYPE_NAMES[x.dtype]), count, config.wave_size, params, x.device)
    return packed
