"""Patch parallel: each rank computes some rows of every image in a diffusers UNet.

A convolution needs the rows next to its own, GroupNorm the statistics of all, self-attention all
keys and values; these are exchanged where they are needed. All else, cross attention too, is local.

A block that is ours on all ranks is computed by its program (unet/divided.py), which exchanges by
itself; in any other one, the forwards of its convolutions, norms and attentions do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lib_rocm_sd.cards.batch import image_of, with_image
from lib_rocm_sd.cards.group import Agreement, Group
from lib_rocm_sd.cards.image_rows import Edges, Exact, RowSplit, Stale, row_split
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.modules.patches import Patch, put, take
from lib_rocm_sd.modules.stand_in import is_compiled
from lib_rocm_sd.ops.group_norm.formula import applied, moments_of, norm_from
from lib_rocm_sd.report import report
from lib_rocm_sd.unet.divided import among
from lib_rocm_sd.unet.parts import Resample
from lib_rocm_sd.unet.stand_in import BlockStandIn

BLOCKS: dict[str, set[str | None]] = {
    "down_block_types": {"DownBlock2D", "CrossAttnDownBlock2D"},
    "mid_block_type": {"UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None},
    "up_block_types": {"UpBlock2D", "CrossAttnUpBlock2D"},
}
"""Blocks in which rows meet only in convolutions, GroupNorm and self-attention."""


def obstacles(unet: nn.Module) -> list[str]:
    """Why the rows of this UNet's images cannot be split over ranks; empty if they can."""
    config: Any = getattr(unet, "config", None)
    if type(unet).__name__ != "UNet2DConditionModel" or config is None:
        return [f"{type(unet).__name__} is no UNet2DConditionModel of diffusers"]
    reasons = []
    for name, known in BLOCKS.items():
        value = getattr(config, name, None)
        kinds = value if isinstance(value, (list, tuple)) else [value]
        reasons += [f"a block is of another kind: {kind}" for kind in kinds if kind not in known]
    for name, module in unet.named_modules():
        if is_compiled(module):
            reasons.append(f"{name or 'the UNet'} is compiled")
        if isinstance(module, nn.Conv2d):
            reasons += [f"{name}: {why}" for why in _of_convolution(module)]
        if isinstance(module, nn.GroupNorm) and type(module).forward is not nn.GroupNorm.forward:
            reasons.append(f"{name}: a GroupNorm with a forward of its own")
        if getattr(module, "fused_projections", False):
            reasons.append(f"{name}: its projections are fused")
        if type(module).__name__ == "GatedSelfAttentionDense":
            reasons.append(f"{name}: attention to boxes beside the image")
    return reasons


def _of_convolution(module: nn.Conv2d) -> list[str]:
    reasons = []
    if type(module).forward is not nn.Conv2d.forward:
        reasons.append("a convolution with a forward of its own")
    padding = module.padding if isinstance(module.padding, str) else module.padding[0]
    rows = (module.kernel_size[0], module.stride[0], padding)
    if rows not in ((1, 1, 0), (3, 1, 1), (3, 2, 1)):
        reasons.append("kernel {}, stride {}, padding {}".format(*rows))
    if module.dilation[0] != 1 or module.padding_mode != "zeros":
        reasons.append(f"dilation {module.dilation[0]}, padding mode {module.padding_mode}")
    return reasons


RESIDUALS = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
"""What ControlNet and T2I-Adapter add: images of the UNet's sizes."""


class Exchanging:
    """A forward that exchanges what the module's needs, and so is no other computation. The program
    of a block, where that is the module itself, goes into its place.
    """

    lies_beneath = True

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class PatchParallel:
    """The forwards that stand in for those of a UNet and of some of its modules; and the Rows of
    its blocks' programs.
    """

    def __init__(self, unet: Any, exchange: Exact) -> None:
        self._unet, self._exchange = unet, exchange
        self._group = exchange.group
        self._agreement = Agreement(self._group)
        self._rows: RowSplit | None = None
        self._theirs: Callable[..., Any] = unet.forward
        named = unet.named_modules()
        self._names = {module: name for name, module in named if module._modules or "." not in name}
        self._forwards: dict[nn.Module, Exchanging] = {}
        self._children = [dict(module._modules) for module in self._names]
        self.ours: frozenset[nn.Module] = frozenset()
        """The blocks that were computed by their programs in the last call, on all ranks."""
        self._block, self._asked = "", 0
        self._digest = 0
        """Digests all that blocks of ours have asked in this call."""
        self.split_calls = self.whole_calls = 0

    def put_in(self) -> list[Patch]:
        """Replace the forwards; what to take back, in order."""
        forwards: list[tuple[Any, Callable[..., Any]]] = []
        for name, module in self._unet.named_modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1:
                forwards.append((module, partial(self._convolve, name, module, module.forward)))
            elif isinstance(module, nn.GroupNorm):
                forwards.append((module, partial(self._normalise, name, module, module.forward)))
            elif _attends_to_itself(module):
                forwards += _Attended(self, name, module).forwards()
        self._theirs = self._unet.forward
        self._forwards = {module: Exchanging(forward) for module, forward in forwards}
        patches = [
            put(module, "forward", forward)
            for module, forward in self._forwards.items()
            if not isinstance(vars(module).get("forward"), BlockStandIn)
        ]
        return [*patches, put(self._unet, "forward", Exchanging(self._forward))]

    def settle(self) -> None:
        """Raises ValueError where the ranks' calls did not belong together."""
        self._exchange.settle()
        self._agreement.look(to_the_end=True)

    @property
    def rows(self) -> RowSplit | None:
        """Who has which rows in this call; None where it is not split."""
        return self._rows

    def gathered(self, key: str, own: torch.Tensor) -> torch.Tensor:
        """All ranks' tokens (N, tokens, C) of which this rank has `own`, those of its rows."""
        assert self._rows is not None
        counts = self._rows.tokens(self._group.rank, own.shape[1])
        return torch.cat(self._exchange.parts(key, own, counts, 1), 1)

    @property
    def facts(self) -> Hashable:
        return self._rows, self._group.rank

    def is_ours(self, module: nn.Module) -> bool:
        return module in self.ours

    def beneath(self, module: nn.Module) -> Exchanging | None:
        return self._forwards.get(module)

    def begin(self, module: nn.Module) -> None:
        self._block, self._asked = f"{self._names[module]}: ", 0

    def edges(self, x: torch.Tensor, above: int, below: int) -> Edges:
        return self._exchange.edges(self._key(), x, above, below)

    def statistics(self, own: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange.parts(self._key(), own, [1] * self._group.size, 1), 1)

    def tokens(self, own: torch.Tensor) -> torch.Tensor:
        return self.gathered(self._key(), own)

    def _key(self) -> str:
        self._asked += 1
        key = f"{self._block}{self._asked}"
        self._digest = zlib.crc32(key.encode(), self._digest)
        return key

    def _agreed(self, rows: RowSplit) -> frozenset[nn.Module]:
        """The blocks that are ours on all ranks. Where images do not halve, diffusers tells a block
        how far to enlarge, on some ranks only: then none is ours that enlarges.
        """
        able = []
        for module in self._names:
            block = vars(module).get("forward")
            may = isinstance(block, BlockStandIn) and block.may_divide()
            up = may and isinstance(block.parts, Resample) and block.parts.up
            able.append(may and (rows.divides or not up))
        own = torch.tensor(able, device="cpu")  # no card is waited for
        everybodys = torch.stack(self._group.gather(own)).all(0).tolist()
        return frozenset(m for m, ours in zip(self._names, everybodys, strict=True) if ours)

    def _forward(self, sample: torch.Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        why = self._refusal(sample, args, kwargs)
        if why:
            self.whole_calls += 1
            report.event(f"distributed: the UNet is not split: {why}")
            return self._theirs(sample, timestep, *args, **kwargs)
        self._agreement.note(sample, _prompt(args, kwargs))
        self.split_calls += 1
        is_stale = isinstance(self._exchange, Stale)  # else nobody waits for the device
        self._exchange.begin(float(torch.as_tensor(timestep).flatten()[0]) if is_stale else 0.0)
        rows = self._split(sample)
        self.ours, self._digest = self._agreed(rows), 0
        self._rows = rows
        try:
            for name in RESIDUALS:
                if kwargs.get(name) is not None:
                    kwargs = {**kwargs, name: self._own(kwargs[name])}
            with among(self):
                result = self._theirs(self._own(sample), timestep, *args, **kwargs)
        finally:
            self._rows = None
        digests = self._group.gather(torch.tensor([self._digest], device="cpu"))
        if len({int(digest) for digest in digests}) > 1:
            raise RankError(
                "the ranks computed blocks in different ways, so exchanged other things"
            )
        sizes = [last - first for first, last in rows.parts]
        return with_image(result, self._group.concatenate(image_of(result), sizes, 2))

    def _refusal(self, sample: torch.Tensor, args: Any, kwargs: Any) -> str:
        """Why each rank computes this call whole."""
        if self._group.size == 1:
            return "there is one rank"
        if torch.is_grad_enabled() and sample.requires_grad:
            return "gradients are wanted"
        # After the prompt: class labels, a condition of time, then a mask over the image's tokens.
        if kwargs.get("attention_mask") is not None or (len(args) > 3 and args[3] is not None):
            return "self-attention has a mask"
        more = kwargs.get("cross_attention_kwargs") or {}
        if "gligen" in more:
            return "attention to boxes beside the image"
        if more.get("ip_adapter_masks") is not None:
            return "an IP-Adapter has a mask, which is of the whole image"
        if [module._modules for module in self._names] != self._children:
            return "its layers are others than at first: load adapters (LoRA) before patch_parallel"
        for module in self._forwards:
            name, forward = self._names.get(module, "."), vars(module).get("forward")
            if "." not in name and not isinstance(forward, (Exchanging, BlockStandIn)):
                return f"the forward of {name} is another than at first"
        if any(getattr(block, "s1", None) is not None for block in self._unet.up_blocks):
            return "FreeU transforms the whole image"
        if _prompt(args, kwargs) is None:
            return "it is called without a prompt"
        try:
            self._split(sample)
        except ValueError as error:
            return str(error)
        return ""

    def _split(self, sample: torch.Tensor) -> RowSplit:
        height, width = sample.shape[2:]
        return row_split(height, width, 2**self._unet.num_upsamplers, self._group.weights)

    def _own(self, image: Any) -> Any:
        """This rank's rows of an image (N, C, H, W), or of each image of a list."""
        if isinstance(image, (list, tuple)):
            return type(image)([self._own(item) for item in image])
        assert self._rows is not None
        first, last = self._rows.of(image.shape[2])[self._group.rank]
        return image[:, :, first:last]

    def _convolve(
        self, name: str, module: nn.Conv2d, theirs: Callable[..., Any], x: torch.Tensor
    ) -> torch.Tensor:
        """The rows of the output that belong to the rows of x."""
        if self._rows is None:
            whole: torch.Tensor = theirs(x)
            return whole
        stride, padding = module.stride[0], int(module.padding[0])
        last = self._group.rank == self._group.size - 1
        above, below = self._exchange.edges(name, x, padding, padding + 1 - stride)
        empty = x.new_zeros((x.shape[0], x.shape[1], padding, x.shape[3]))
        rows = [empty if above is None else above, x]
        if below is not None or last:
            rows.append(empty if below is None else below)
        sides = (0, int(module.padding[1]))
        return F.conv2d(torch.cat(rows, 2), module.weight, module.bias, module.stride, sides)

    def _normalise(
        self, name: str, module: nn.GroupNorm, theirs: Callable[..., Any], x: torch.Tensor
    ) -> torch.Tensor:
        """GroupNorm of x (N, C, H, W) by the statistics of all ranks' rows."""
        if self._rows is None:
            whole: torch.Tensor = theirs(x)
            return whole
        own = moments_of(x.flatten(2).transpose(1, 2)[:, None])
        everybodys = torch.cat(self._exchange.parts(name, own, [1] * self._group.size, 1), 1)
        affine = module.weight, module.bias, module.num_groups, module.eps
        return applied(x, norm_from(everybodys, *affine), False)


def _attends_to_itself(module: nn.Module) -> bool:
    """Whether it may attend to the image; that of a prompt is local, and always has one here."""
    layers = (getattr(module, name, None) for name in ("to_q", "to_k", "to_v"))
    has_all = all(isinstance(layer, nn.Module) for layer in layers)
    return has_all and not getattr(module, "is_cross_attention", False)


class _Attended:
    """An attention module: whether a call of it is of the image's tokens to each other, and the
    keys and values of that call.
    """

    def __init__(self, owner: PatchParallel, name: str, module: Any) -> None:
        self._owner, self._name, self._module = owner, name, module
        self._to_k, self._to_v = module.to_k.forward, module.to_v.forward
        self._theirs = module.forward
        self._itself = False
        self._ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def forwards(self) -> list[tuple[Any, Callable[..., Any]]]:
        """Modules and what stands in for their forwards."""
        module = self._module
        return [(module, self._forward), (module.to_k, self._keys), (module.to_v, self._values)]

    def _forward(self, x: Any, context: Any = None, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.pop("encoder_hidden_states", context)
        self._itself = context is None and self._owner.rows is not None
        try:
            return self._theirs(x, context, *args, **kwargs)
        finally:
            self._itself, self._ready = False, None

    def _keys(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = self._to_k(x, *args, **kwargs)
        if not self._itself:
            return keys
        both = torch.cat([keys, self._to_v(x, *args, **kwargs)], 2)
        everybodys = self._owner.gathered(self._name, both)
        self._ready = (x, everybodys[..., keys.shape[2] :])
        return everybodys[..., : keys.shape[2]]

    def _values(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._ready is not None and self._ready[0] is x:
            return self._ready[1]
        values = self._to_v(x, *args, **kwargs)
        return self._owner.gathered(f"{self._name} v", values) if self._itself else values


@contextmanager
def patch_parallel(
    unet: nn.Module, group: Group, *, stale: bool = False
) -> Iterator[PatchParallel]:
    """Split the images of a diffusers UNet2DConditionModel by rows over the group, inside the
    `with` block.

    Every rank calls the pipeline with the same arguments and the same seed, and gets the whole.
    Exact: what is computed is the same, but for the order in which GroupNorm adds. `stale`: not
    exact, see image_rows.Stale; a rank waits for no other but in a picture's first steps. Blocks
    that `patched` has taken over, before or inside of this, stay ours.

    A call that cannot be split, such as of an image of too few rows, is made by each rank for
    itself, and told. Raises ValueError where the UNet cannot be split.
    """
    why = obstacles(unet)
    if why:
        more = f", and {len(why) - 3} more" if len(why) > 3 else ""
        raise ValueError(f"this UNet cannot be split by rows: {'; '.join(why[:3])}{more}")
    parallel = PatchParallel(unet, Stale(group) if stale else Exact(group))
    patches = parallel.put_in()
    try:
        yield parallel
        parallel.settle()
    finally:
        for patch in reversed(patches):
            take(patch)


def _prompt(args: Any, kwargs: Any) -> Any:
    """What a UNet is given after the image and the time step."""
    return args[0] if args else kwargs.get("encoder_hidden_states")
