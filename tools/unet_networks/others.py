"""What else there is around a UNet in the WebUI: patchers, optimizers, families, sizes, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.unet.unet_models import fill
from tools.unet_networks import files, models
from tools.unet_networks.compare import AS_AUTOMATIC, Bench, Row, Situation
from tools.unet_networks.models import Size
from tools.unet_networks.networks import load, switched
from tools.unet_networks.webui import WebUI

BOTH = ("SD 1.5", "SDXL")
OLDER: dict[str, Any] = {"_use_new_zipfile_serialization": False}
PLAIN = Situation("as it is", lambda: None)
SIZES = (
    Size(1, 9, 13),
    Size(2, 17, 15),
    Size(2, 12, 20, 154),
    Size(2, 15, 9, 231),
    Size(2, 16, 16, 308),
    Size(3, 11, 16),
    Size(4, 8, 24),
    Size(8, 13, 8),
)
"""Of latents. Where a side is no multiple of 8, halves on the way down are rounded up."""


def rows(webui: WebUI) -> Iterator[Row]:
    for part in (_families, _sizes, _optimizers, _patchers, _checkpoints, _precisions):
        yield from part(webui)


def _families(webui: WebUI) -> Iterator[Row]:
    """Each kind of UNet; SD 2's v-prediction asks the same of it as SD 2."""
    for family in (name for name in models.FAMILIES if name != models.SHALLOW):
        bench = Bench(webui, models.make(webui, family))
        yield from bench.rows("family", [PLAIN])
        if "inpainting" in family:
            yield from _four_channels(webui, bench)


def _four_channels(webui: WebUI, bench: Bench) -> Iterator[Row]:
    """A network of a UNet with 4 channels on the first convolution of one with 9."""
    whole = models.leaves(bench.model.unet)
    first: Any = whole["input_blocks.0.0"]
    narrow = nn.Conv2d(4, first.out_channels, 3).requires_grad_(False)
    narrow.weight.copy_(first.weight[:, :4])
    name = f"four-{bench.model.whole.is_sdxl}"
    path = webui.data / "lora" / f"{name}.safetensors"
    kind = files.Kind("LoRA", lambda name, leaf: True, files.KINDS[0].tensors)
    files.write(path, kind, {"input_blocks.0.0": narrow}, not bench.model.whole.is_sdxl, 3)
    webui.networks.list_available_networks()
    added = Situation("added", lambda: load(webui, [(name, 1.0)]), changes=True)
    removed = Situation("removed", lambda: load(webui, []))
    yield from bench.rows("network of 4 channels", [added, removed])


def _sizes(webui: WebUI) -> Iterator[Row]:
    for family in BOTH:
        model = models.make(webui, family)
        for size in SIZES:
            bench = Bench(webui, model, size)
            yield from bench.rows("size", [replace(PLAIN, name=str(size))])


def _optimizers(webui: WebUI) -> Iterator[Row]:
    """Attention by the WebUI's own optimizers, amid blocks that are ours."""
    for family in BOTH:
        bench = Bench(webui, models.make(webui, family))
        for name in [*webui.optimizers, "None"]:
            if name != AS_AUTOMATIC:
                bench.optimizer = name
                yield from bench.rows(f"attention by {name}", [PLAIN])
        bench.optimizer = AS_AUTOMATIC
        upcast = _setting(webui, upcast_attn=True)
        again = _setting(webui, upcast_attn=False)
        situations = [Situation("on", upcast), Situation("off again", again)]
        yield from bench.rows("upcast_attn", situations)


def _setting(webui: WebUI, **values: Any) -> Callable[[], None]:
    return lambda: webui.shared.opts.data.update(values)


def _patchers(webui: WebUI) -> Iterator[Row]:
    for family in BOTH:
        model = models.make(webui, family)
        yield from Bench(webui, model).rows("hypernetworks", _hypernetworks(webui))
        yield from Bench(webui, model).rows("ToMe", _tome(webui, model))
        side = 64 if model.whole.is_sdxl else 32  # twice the smallest tile where attention begins
        large = Bench(webui, model, Size(2, side, side), 2)
        yield from large.rows("HyperTile", _hypertile(webui, model, large.size))


def _hypernetworks(webui: WebUI) -> list[Situation]:
    """Two files for the width of the prompt's tokens and that of the images'."""
    module, shared = webui.module("modules.hypernetworks.hypernetwork"), webui.shared
    shared.hypernetworks = {}
    for seed, name in enumerate(("one", "two")):
        path = str(webui.data / f"{name}.pt")
        sizes = [models.TOKENS_WIDE, 128]
        made = module.Hypernetwork(name, sizes, [1, 2, 1], "linear", "Normal")
        for index, weights in enumerate(made.weights()):
            drawn = torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed))
            weights.data.copy_(drawn * (0.3 * weights.shape[-1] ** -0.5) * (1 + index % 2))
        # In the older format: the WebUI's check of pickles does not know all of the newer one.
        with mock.patch.object(torch, "save", partial(torch.save, **OLDER)):
            made.save(path)
        shared.hypernetworks[name] = path

    def loading(*names: str, by: float = 1.0) -> Callable[[], None]:
        return lambda: module.load_hypernetworks(list(names), [by] * len(names))

    return [
        Situation("one", loading("one"), changes=True),
        Situation("weight changed", loading("one", by=0.5), changes=True),
        Situation("two", loading("one", "two"), changes=True),
        Situation("removed", loading()),
    ]


def _tome(webui: WebUI, model: models.Model) -> list[Situation]:
    """It merges the tokens that are most alike, and rounding decides which are. Only those of full
    size: SDXL has none.
    """
    full = not model.whole.is_sdxl
    apply = webui.module("modules.sd_models").apply_token_merging

    def merging(ratio: float) -> Callable[[], None]:
        return lambda: apply(model.whole, ratio)

    return [
        Situation("ratio 0.5", merging(0.5), changes=full, most=2.0),
        Situation("ratio 0.2", merging(0.2), changes=full, most=2.0),
        Situation("off again", merging(0.0)),
    ]


def _hypertile(webui: WebUI, model: models.Model, size: Size) -> list[Situation]:
    module = webui.hypertile

    def tiled(enable: bool) -> Callable[[], None]:
        return lambda: module.hypertile_hook_model(
            model.whole.model,
            8 * size.width,
            8 * size.height,
            enable=enable,
            tile_size_max=128,
            swap_size=3,
            is_sdxl=model.whole.is_sdxl,
        )

    def seeded() -> None:
        module.set_hypertile_seed(5)

    return [
        Situation("on", tiled(True), seeded=seeded, changes=True),
        Situation("off again", tiled(False), seeded=seeded),
        Situation("on again", tiled(True), seeded=seeded, changes=True),
        Situation("off at last", tiled(False), seeded=seeded),
    ]


def _checkpoints(webui: WebUI) -> Iterator[Row]:
    """Another checkpoint's weights are loaded into the same object, as the WebUI does."""
    for family in BOTH:
        bench = Bench(webui, models.make(webui, family))
        unet = bench.model.unet
        one = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
        fill(unet, 5)
        two = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
        unet.load_state_dict(one)

        def loading(
            state: dict[str, torch.Tensor], *wanted: tuple[str, float], unet: Any = unet
        ) -> Callable[[], None]:
            def enter() -> None:
                load(webui, wanted)
                unet.load_state_dict(state)

            return enter

        name = _network(webui, bench.model)
        situations = [
            Situation("another", loading(two), changes=True),
            Situation("with a network", loading(two, (name, 1.0)), changes=True),
            Situation("the first, with it", loading(one, (name, 1.0)), changes=True),
            Situation("the first", loading(one)),
        ]
        yield from bench.rows("checkpoint", situations)


def _network(webui: WebUI, model: models.Model) -> str:
    """The name of a file for this model."""
    folder, name = webui.data / "lora", f"switch-{model.family.replace(' ', '-')}"
    leaves, ldm = models.leaves(model.unet), not model.whole.is_sdxl
    files.write(folder / f"{name}.safetensors", files.KINDS[1], leaves, ldm, 11)
    webui.networks.list_available_networks()
    return name


def _precisions(webui: WebUI) -> Iterator[Row]:
    yield from _upcast_sampling(webui)
    yield from _precision_half(webui)
    for dtype in (torch.bfloat16, torch.float32):
        for family in BOTH:
            bench = Bench(webui, models.make(webui, family, dtype))
            situation = replace(PLAIN, apart=0.0 if dtype == torch.float32 else None)
            yield from bench.rows(str(dtype).removeprefix("torch."), [situation])


def _upcast_sampling(webui: WebUI) -> Iterator[Row]:
    """--upcast-sampling: the WebUI's GroupNorm32 and GEGLU make their weights float32 for good."""
    for family in BOTH:
        model = models.make(webui, family)
        bench = Bench(webui, model)
        bench.anew = lambda model=model: model.unet.to(torch.float16)  # type: ignore[misc]
        webui.devices.unet_needs_upcast = True
        try:
            yield from bench.rows("--upcast-sampling", [PLAIN])
            name = _network(webui, model)
            yield from bench.rows("--upcast-sampling, networks", switched(webui, name))
            bench.anew = lambda: None
            yield from bench.rows("--upcast-sampling, after a step of the WebUI's", [PLAIN])
        finally:
            webui.devices.unet_needs_upcast = False


def _precision_half(webui: WebUI) -> Iterator[Row]:
    """--precision half: no autocast, and torch's GroupNorm in the place of GroupNorm32."""
    utils = [webui.module(f"{family}.modules.diffusionmodules.util") for family in ("ldm", "sgm")]
    kinds = [util.GroupNorm32 for util in utils]
    webui.devices.force_fp16 = True
    try:
        webui.devices.force_model_fp16()
        for family in BOTH:
            yield from Bench(webui, models.make(webui, family)).rows("--precision half", [PLAIN])
    finally:
        webui.devices.force_fp16 = False
        for util, kind in zip(utils, kinds, strict=True):
            util.GroupNorm32 = kind
