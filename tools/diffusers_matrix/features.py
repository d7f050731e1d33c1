"""Features of diffusers that are switched on after a step with ours, and off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from tests.unet.unet_models import fill
from tools.diffusers_matrix import ways
from tools.diffusers_matrix.models import BATCH, MODELS, PROMPT, SD15, SDXL, TOKENS, Row, Scene, at
from tools.diffusers_matrix.ways import done

RANK, IMAGE = 4, 24
ALL = (*MODELS, at(11, 13))
"""The last one's sides are not twice those of smaller images."""
_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "ff.net.0.proj", "conv1", "conv2")


def lora(scene: Scene, seed: int) -> dict[str, torch.Tensor]:
    """A file of adapters for linear layers and convolutions, as PEFT names them."""
    found, drawn = {}, torch.Generator("cpu").manual_seed(seed)
    for name, layer in scene.unet.named_modules():
        layer = getattr(layer, "base_layer", layer)
        name = name.removesuffix(".base_layer")
        if not name.endswith(_LAYERS) or not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        out, *rest = layer.weight.shape
        down = torch.randn(RANK, *rest, generator=drawn) * layer.weight[0].numel() ** -0.5
        up = torch.randn(out, RANK, *[1] * (len(rest) - 1), generator=drawn) * RANK**-0.5
        for key, value in (("A", down), ("B", up)):
            found[f"unet.{name}.lora_{key}.weight"] = value.half().to(scene.dtype)
    return found


def _load(scene: Scene, name: str = "one", seed: int = 1, **options: Any) -> None:
    scene.pipeline.load_lora_weights(lora(scene, seed), adapter_name=name, **options)


def _loaded(scene: Scene) -> Callable[[], Any]:
    _load(scene)
    return lambda: scene.pipeline.unload_lora_weights()


def _fused_away(scene: Scene) -> Callable[[], Any]:
    """As who merges adapters for good."""
    _load(scene)
    scene.pipeline.fuse_lora()
    scene.pipeline.unload_lora_weights()
    return lambda: None


def _beside(do: Callable[[Any], Any], undo: Callable[[Any], Any]) -> Any:
    """What is done to a pipeline that has two adapters since before ours was on."""

    def change(scene: Scene) -> Iterator[None]:
        _load(scene)
        _load(scene, "two", 2)
        scene.pipeline.set_adapters(["one"], [1.0])
        yield
        do(scene.pipeline)
        yield
        undo(scene.pipeline)

    return change


def _swapped(scene: Scene) -> Iterator[None]:
    _load(scene)
    yield
    _load(scene, seed=2, hotswap=True)
    yield
    _load(scene, seed=1, hotswap=True)


def _scaled_by_argument(scene: Scene) -> Iterator[None]:
    _load(scene)
    yield
    scene.asks.append(lambda given: {**given, "cross_attention_kwargs": {"scale": 0.3}})
    yield
    scene.asks.clear()


def _loras() -> Iterator[Row]:
    def row(name: str, change: Any) -> Row:
        return Row(f"LoRA, {name}", change, SD15, needs="peft")

    yield row("loaded and unloaded", done(_loaded))
    weights = (lambda p: p.set_adapters(["one"], [0.3]), lambda p: p.set_adapters(["one"], [1.0]))
    yield row("scaled", _beside(*weights))
    both = (lambda p: p.set_adapters(["one", "two"]), lambda p: p.set_adapters(["two"]))
    yield row("two at once, then the other", _beside(*both))
    fused = (lambda p: p.fuse_lora(lora_scale=0.3), lambda p: p.unfuse_lora())
    yield row("fused", _beside(*fused))
    yield row("loaded, fused and unloaded", done(_fused_away))
    yield row("disabled", _beside(lambda p: p.disable_lora(), lambda p: p.enable_lora()))
    yield row("deleted", _beside(lambda p: p.delete_adapters("one"), lambda p: None))
    yield row("swapped hot", _swapped)
    yield row("scaled by cross_attention_kwargs", _scaled_by_argument)


def _ip_adapter_file(scene: Scene) -> dict[str, Any]:
    """With random weights, for each cross-attention."""
    state: dict[str, torch.Tensor] = {}
    number = 1
    for name in scene.unet.attn_processors:
        if name.endswith("attn1.processor"):
            continue
        width = scene.unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for key in ("k", "v"):
            state[f"{number}.to_{key}_ip.weight"] = scene.draw(width, PROMPT) * PROMPT**-0.5
        number += 2
    proj = {"proj.weight": scene.draw(4 * PROMPT, IMAGE) * IMAGE**-0.5}
    proj |= {"proj.bias": scene.draw(4 * PROMPT), "norm.weight": scene.draw(PROMPT)}
    return {"image_proj": {**proj, "norm.bias": scene.draw(PROMPT)}, "ip_adapter": state}


def _image_is_given(scene: Scene) -> None:
    images = {"image_embeds": [scene.draw(BATCH, 1, IMAGE)]}
    scene.asks.append(lambda given: {**given, "added_cond_kwargs": images})


def _load_image_adapter(scene: Scene) -> None:
    nowhere: dict[str, Any] = dict.fromkeys(("subfolder", "weight_name", "image_encoder_folder"))
    scene.pipeline.load_ip_adapter(_ip_adapter_file(scene), **nowhere)
    _image_is_given(scene)


def _ip_adapter(scene: Scene) -> Callable[[], Any]:
    _load_image_adapter(scene)

    def undo() -> None:
        scene.asks.clear()
        scene.pipeline.unload_ip_adapter()

    return undo


def _ip_adapter_scaled(scene: Scene) -> Iterator[None]:
    _load_image_adapter(scene)
    yield
    scene.pipeline.set_ip_adapter_scale(0.1)
    yield
    scene.pipeline.set_ip_adapter_scale(1.0)


def _beside_the_unet(name: str, make: Callable[[Scene], Any], ask: Callable[..., Any]) -> Any:
    """Another model, which is a part of the pipeline from the beginning, asked after a step."""

    def change(scene: Scene) -> Iterator[None]:
        other = fill(make(scene), seed=1).half().to(scene.device, scene.dtype)
        setattr(scene.pipeline, name, other)
        image = scene.draw(BATCH, 3, 128, 128)
        yield
        scene.asks.append(lambda given: ask(other, image, given))
        yield
        scene.asks.clear()

    return change


def _controlnet(scene: Scene) -> Any:
    from diffusers import ControlNetModel

    return ControlNetModel.from_unet(scene.unet)


def _controlled(other: Any, image: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
    down, mid = other(**given, controlnet_cond=image, return_dict=False)
    more = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    return {**given, **more}


def _t2i_adapter(scene: Scene) -> Any:
    from diffusers import T2IAdapter

    return T2IAdapter(channels=list(scene.unet.config.block_out_channels), num_res_blocks=1)


def _adapted(other: Any, image: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "down_intrablock_additional_residuals": list(other(image))}


def _masked(scene: Scene) -> Callable[[], Any]:
    mask = torch.ones(BATCH, TOKENS, device=scene.device)
    mask[:, 20:] = 0
    scene.asks.append(lambda given: {**given, "encoder_attention_mask": mask})
    return scene.asks.clear


def _gligen(scene: Scene) -> Callable[[], Any]:
    boxes = {"boxes": scene.draw(BATCH, 5, 4).sigmoid(), "masks": scene.draw(BATCH, 5) * 0 + 1}
    boxes["positive_embeddings"] = scene.draw(BATCH, 5, PROMPT)
    scene.asks.append(lambda given: {**given, "cross_attention_kwargs": {"gligen": boxes}})
    return scene.asks.clear


def _calls(on: Callable[[Any], Any], off: Callable[[Any], Any], part: str = "pipeline") -> Any:
    """What methods of the pipeline or its UNet switch on and off."""

    def do(scene: Scene) -> Callable[[], Any]:
        on(getattr(scene, part))
        return lambda: off(getattr(scene, part))

    return done(do)


def _layerwise(scene: Scene) -> Callable[[], Any]:
    """Weights lie in float8 between their calls, and nothing undoes that."""
    unet = scene.unet
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=scene.dtype)
    return lambda: None


def _unhook(unet: Any, *names: str) -> None:
    for module in unet.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        for name in names if registry is not None else ():
            registry.remove_hook(name, recurse=False)


def _grouped(offload_type: str, stream: bool) -> Any:
    def do(scene: Scene) -> Callable[[], Any]:
        more = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
        scene.unet.enable_group_offload(
            scene.device, torch.device("cpu"), offload_type, use_stream=stream, **more
        )
        names = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")

        def undo() -> None:
            _unhook(scene.unet, *names)
            scene.unet.to(scene.device)

        return undo

    return done(do)


def _offloaded(method: str) -> Any:
    def do(scene: Scene) -> Callable[[], Any]:
        getattr(scene.pipeline, method)(device=scene.device)

        def undo() -> None:
            scene.pipeline.remove_all_hooks()
            scene.unet.to(scene.device)

        return undo

    return done(do)


def _pag(scene: Scene) -> Callable[[], Any]:
    """The second half of a batch without self-attention in the middle."""
    from diffusers.models.attention_processor import PAGIdentitySelfAttnProcessor2_0

    attn = scene.first("mid_block.attentions.0.transformer_blocks.0.attn1")
    known = attn.processor
    attn.set_processor(PAGIdentitySelfAttnProcessor2_0())
    return lambda: attn.set_processor(known)


def _plain_processors(unet: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    unet.set_attn_processor(AttnProcessor())


def _switches() -> Iterator[Row]:
    free = {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}
    freeu = _calls(lambda p: p.enable_freeu(**free), lambda p: p.disable_freeu())
    yield Row("FreeU", freeu, at(24, 24))
    unet = (methodcaller("fuse_qkv_projections"), methodcaller("unfuse_qkv_projections"))
    fused = _calls(*unet, part="unet")
    yield Row("fused projections", fused, SD15, changes=False)
    on, off = methodcaller("enable_attention_slicing", 1), methodcaller("disable_attention_slicing")
    yield Row("attention slicing", _calls(on, off), SD15, changes=False)
    default = methodcaller("set_default_attn_processor")
    processors = _calls(_plain_processors, default, part="unet")
    yield Row("AttnProcessor, then the default", processors, SD15, changes=False)
    yield Row("layerwise casting", done(_layerwise), SD15)
    yield Row("perturbed attention", done(_pag), SD15)
    for kind in ("block_level", "leaf_level"):
        for stream in (False, True):
            name = f"group offload, {kind}{', with a stream' * stream}"
            yield Row(name, _grouped(kind, stream), SD15, changes=False, needs="cuda")
    for method in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        yield Row(method, _offloaded(method), SD15, changes=False, needs="cuda")


def _vae() -> Iterator[Row]:
    """What is done to a VAE, of which a program of ours is made."""
    vae = next(model for model in MODELS if model.name == "VAE")
    block = "mid_block.resnets.0"
    rows = [
        Row(f"{block}.forward", ways.of_instances(block)),
        Row("decoder.forward", ways.of_instances("decoder")),
        Row("torch.nn.GroupNorm.forward replaced", ways.of_class(lambda: nn.GroupNorm)),
        Row("torch.nn.Conv2d.forward replaced", ways.of_class(lambda: nn.Conv2d)),
        Row("torch.nn.functional.silu replaced", ways.of_class(lambda: nn.functional, "silu")),
        Row(f"forward hook on {block}", ways.hooks(block, ways.after())),
        Row("forward hook on decoder", ways.hooks("decoder", ways.after())),
        Row("conv1 pads in circles", ways.settings("conv1", padding_mode="circular")),
        Row("tiling", _calls(_tiled, lambda p: p.vae.disable_tiling())),
        *(
            Row(f"conv1.weight: {name}", ways.written("conv1.weight", write))
            for name, write in ways.WRITES.items()
        ),
        Row("conv2.bias: .data.copy_", ways.written("conv2.bias", ways.in_data)),
    ]
    yield from (replace(row, model=vae) for row in rows)


def _tiled(pipeline: Any) -> None:
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_latent_min_size, pipeline.vae.tile_sample_min_size = 8, 16


FEATURES: tuple[Row, ...] = (
    *(Row("plain", done(lambda scene: lambda: None), model, changes=False) for model in ALL),
    Row("ControlNet", _beside_the_unet("controlnet", _controlnet, _controlled), SD15),
    Row("T2I-Adapter", _beside_the_unet("adapter", _t2i_adapter, _adapted), SD15),
    Row("GLIGEN", done(_gligen), next(model for model in MODELS if model.name == "GLIGEN")),
    Row("encoder_attention_mask", done(_masked), SD15),
    Row("encoder_attention_mask", done(_masked), SDXL),
    Row("IP-Adapter", done(_ip_adapter), SD15),
    Row("IP-Adapter, scaled", _ip_adapter_scaled, SD15),
    *_loras(),
    *(replace(row, model=SDXL) for row in _loras() if "loaded" in row.name),
    *_switches(),
    *_vae(),
)
