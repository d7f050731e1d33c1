"""What others do to a UNet after a step with ours, a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from tools.diffusers_matrix import structure, ways, weights
from tools.diffusers_matrix.models import Row, Scene
from tools.diffusers_matrix.ways import of_class, of_diffusers, of_instances, settings

BLOCKS = (
    *("resnets.0", "attentions.0", "transformer_blocks.0", "upsamplers.0", "downsamplers.0"),
    *("conv_in", "conv_norm_out", "conv_out"),
)
"""A module of each kind that is a block of ours."""
WITHIN = (
    *("norm1", "conv1", "conv2", "time_emb_proj", "nonlinearity", "attentions.0.norm", "proj_in"),
    *("attn1", "attn2", "attn1.to_q", "attn2.to_k", "to_out.0", "ff", "ff.net.0", "ff.net.0.proj"),
    *("ff.net.2", "upsamplers.0.conv"),
)
"""Modules in these blocks."""
OF_TORCH = {
    **{f"{cls.__name__}.forward": (cls, "forward") for cls in (nn.GroupNorm, nn.LayerNorm)},
    **{f"{cls.__name__}.forward": (cls, "forward") for cls in (nn.Linear, nn.Conv2d, nn.SiLU)},
    "Dropout.forward": (nn.Dropout, "forward"),
    "Conv2d._conv_forward": (nn.Conv2d, "_conv_forward"),
    **{f"functional.{name}": (F, name) for name in ("silu", "group_norm", "layer_norm", "linear")},
    **{f"functional.{name}": (F, name) for name in ("conv2d", "gelu", "interpolate", "dropout")},
    "functional.scaled_dot_product_attention": (F, "scaled_dot_product_attention"),
}
"""Functions in torch's classes and modules that forwards come to."""
OF_DIFFUSERS = (
    ("models.resnet.ResnetBlock2D", "forward"),
    ("models.upsampling.Upsample2D", "forward"),
    ("models.downsampling.Downsample2D", "forward"),
    ("models.attention.BasicTransformerBlock", "forward"),
    ("models.attention.FeedForward", "forward"),
    ("models.activations.GEGLU", "forward"),
    ("models.activations.GEGLU", "gelu"),
    ("models.attention_processor.Attention", "forward"),
    ("models.attention_processor.AttnProcessor2_0", "__call__"),
    ("models.transformers.transformer_2d.Transformer2DModel", "forward"),
    ("models.transformers.transformer_2d.Transformer2DModel", "_get_output_for_continuous_inputs"),
)


def _named(names: Any, make: Callable[..., Any]) -> Iterator[Row]:
    for name, given in names.items():
        yield Row(name, make(*given))


def _forwards() -> Iterator[Row]:
    for path in (*BLOCKS, *WITHIN):
        yield Row(f"{path}.forward, none before, deleted after", of_instances(path, deleted=True))
    for path in (*BLOCKS, "attn1", "attn2", "conv1"):
        yield Row(f"{path}.forward, kept and put back after", of_instances(path))
    for path in ("attn2", "conv1", "norm1", "ff", "resnets.0", "transformer_blocks.0"):
        yield Row(f"{path}.forward, put back before", of_instances(path, first=True))
    yield Row("conv1._conv_forward", of_instances("conv1", "_conv_forward", deleted=True))
    method = "_get_output_for_continuous_inputs"
    yield Row(f"attentions.0.{method}", of_instances("attentions.0", method, deleted=True))


def _classes() -> Iterator[Row]:
    for name, (owner, key) in OF_TORCH.items():
        yield Row(f"torch.nn.{name} replaced", of_class(partial(_same, owner), key))
    for path, key in OF_DIFFUSERS:
        yield Row(f"{path.rpartition('.')[2]}.{key} replaced", of_diffusers(path, key))
    for module in ("models.upsampling", "models.attention_processor", "models.activations"):
        yield Row(f"F in diffusers.{module} replaced", of_diffusers(module, "F", _Functions))
    chunked = of_diffusers("models.attention", "_chunked_feed_forward")
    yield Row("diffusers' _chunked_feed_forward replaced", chunked, changes=False)
    call = of_class(lambda: nn.Module, "__call__", _called)
    yield Row("torch.nn.Module.__call__ replaced", call)


class _Functions:
    """torch.nn.functional as one Python module sees it."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return ways.wrapped(getattr(self._theirs, name))


def _same(owner: Any) -> Any:
    return owner


def _called(theirs: Any) -> Any:
    """As a profiler wraps the call of all modules."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = theirs(self, *args, **kwargs)
        return ways.scaled(made) if type(self) is nn.GroupNorm else made

    return call


def _hooks() -> Iterator[Row]:
    for path in ("resnets.0", "attentions.0", "transformer_blocks.0", "conv1", "attn2", "to_out.0"):
        yield Row(f"forward hook on {path}", ways.hooks(path, ways.after()))
        yield Row(f"forward pre-hook on {path}", ways.hooks(path, ways.ahead()))
        other = ways.hooks(path, ways.after(), before=ways.after(1.0))
        yield Row(f"forward hook on {path}, swapped for another", other)
    for path in ("resnets.0", "attn2"):
        yield Row(f"hook with names on {path}", ways.hooks(path, ways.with_names))
    for path in ("attentions.0", "transformer_blocks.0", "attn2"):
        yield Row(f"pre-hook with names on {path}", ways.hooks(path, ways.ahead_with_names))
    for kind in (nn.GroupNorm, nn.Conv2d, nn.Linear, nn.SiLU):
        change = ways.of_all(register_module_forward_hook, kind)
        yield Row(f"register_module_forward_hook for {kind.__name__}", change)
    for kind in (nn.Conv2d, nn.Linear):
        change = ways.of_all(register_module_forward_pre_hook, kind, is_ahead=True)
        yield Row(f"register_module_forward_pre_hook for {kind.__name__}", change)
    yield Row("accelerate's hook on resnets.0", _accelerate("resnets.0"), needs="accelerate")
    yield Row("accelerate's hook on conv1", _accelerate("conv1"), needs="accelerate")
    yield Row("diffusers' hook on transformer_blocks.0", _registry("transformer_blocks.0"))
    yield Row("diffusers' hook on attn1", _registry("attn1"))


def _accelerate(path: str) -> Any:
    def do(scene: Scene) -> Callable[[], Any]:
        theirs: Any = resolve_name("accelerate.hooks")

        class Scaled(theirs.ModelHook):  # type: ignore[misc]
            def post_forward(self, module: Any, output: Any) -> Any:
                return ways.scaled(output)

        modules = scene.every(path)
        for module in modules:
            theirs.add_hook_to_module(module, Scaled())
        return lambda: [theirs.remove_hook_from_module(module) for module in modules]

    return ways.done(do)


def _registry(path: str) -> Any:
    """As diffusers' caches and layerwise casting hook modules."""

    def do(scene: Scene) -> Callable[[], Any]:
        from diffusers.hooks import HookRegistry, ModelHook

        class Scaled(ModelHook):
            def post_forward(self, module: Any, output: Any) -> Any:
                return ways.scaled(output)

        found = [HookRegistry.check_if_exists_or_initialize(one) for one in scene.every(path)]
        for registry in found:
            registry.register_hook(Scaled(), "scaled")
        return lambda: [registry.remove_hook("scaled", recurse=False) for registry in found]

    return ways.done(do)


def _settings() -> Iterator[Row]:
    circular = {"padding_mode": "circular"}
    yield Row("conv1 pads in circles", settings("conv1", **circular))
    yield Row("conv_in pads in circles", settings("conv_in", **circular))
    yield Row("conv1 dilated", settings("conv1", dilation=(2, 2), padding=(2, 2)))
    yield Row("norm1.eps", settings("norm1", eps=9.0))
    yield Row("conv_norm_out.eps", settings("conv_norm_out", eps=9.0))
    yield Row("attentions.0.norm.num_groups", settings("attentions.0.norm", num_groups=2))
    yield Row("resnets.0.norm2.num_groups", settings("resnets.0.norm2", num_groups=2))
    yield Row("output_scale_factor", settings("resnets.0", output_scale_factor=2.0))
    yield Row("skip_time_act", settings("resnets.0", skip_time_act=True))
    yield Row("time_embedding_norm", settings("resnets.0", time_embedding_norm="none"))
    yield Row("upsamplers.0.use_conv", settings("upsamplers.0", use_conv=False))
    yield Row("attn1.heads", settings("attn1", heads=2))
    scale = settings("attn1", scale=9.0)
    yield Row("attn1.scale, which the processor does not read", scale, changes=False)
    yield Row("attn2.rescale_output_factor", settings("attn2", rescale_output_factor=0.5))
    yield Row("attn1.residual_connection", settings("attn1", residual_connection=True))
    alike = settings("transformer_blocks.0", norm_type="layer_norm_i2vgen")
    yield Row("another norm_type of the same", alike, changes=False)
    vectors = settings("attentions.0", is_input_continuous=False)
    yield Row("is_input_continuous, so that forward raises", vectors, changes=False)
    chunked = ways.done(_chunked)
    yield Row("enable_forward_chunking", chunked, changes=False)
    yield Row("dropout, all in training", ways.done(partial(_dropped, "")))
    yield Row("dropout alone in training", ways.done(partial(_dropped, "resnets.0.dropout")))
    yield Row("attention's dropout alone in training", ways.done(partial(_dropped, "to_out.1")))
    yield Row("a TorchFunctionMode", ways.done(_mode))


def _chunked(scene: Scene) -> Callable[[], Any]:
    blocks = scene.every("transformer_blocks.0")
    for block in blocks:
        block.set_chunk_feed_forward(16, 1)
    return lambda: [block.set_chunk_feed_forward(None, 0) for block in blocks]


def _dropped(path: str, scene: Scene) -> Callable[[], Any]:
    """As who wants pictures to vary leaves dropouts on. All is dropped: what part of it is depends
    on how a tensor lies.
    """
    modules = scene.every(path)
    dropouts = [
        one for module in modules for one in module.modules() if isinstance(one, nn.Dropout)
    ]
    for dropout in dropouts:
        dropout.p = 1.0
    for module in modules:
        module.train()

    def undo() -> None:
        for module in modules:
            module.eval()
        for dropout in dropouts:
            dropout.p = 0.0

    return undo


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * ways.BY if func is F.group_norm else made


def _mode(scene: Scene) -> Callable[[], Any]:
    mode = _Doubling()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


CHANGES: tuple[Row, ...] = (
    Row("nothing", ways.done(lambda scene: lambda: None), changes=False),
    *_forwards(),
    *_classes(),
    *_hooks(),
    *weights.rows(),
    *_settings(),
    *structure.rows(),
)
