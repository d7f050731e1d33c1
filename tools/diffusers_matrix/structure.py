"""Modules that others put in the place of others, or beside them, after a step with ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch import nn

from tools.diffusers_matrix import ways
from tools.diffusers_matrix.models import Row, Scene
from tools.diffusers_matrix.ways import of_instances


class _Another(nn.Module):
    """In the place of a module: it calls that."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return ways.scaled(self.theirs(*args, **kwargs))


def _turned(module: Any) -> Any:
    """The same with other weights."""
    made = deepcopy(module)
    for tensor in made.parameters():
        tensor.data = ways.other_values(tensor)
    return made


def _of_another_class(theirs: Any) -> Any:
    """The class of a module, with another forward."""
    base: Any = theirs
    forward = ways.wrapped(base.forward)
    return type(f"Other{base.__name__}", (base,), {"forward": forward})


def rows() -> Iterator[Row]:
    for path in ("norm1", "conv1", "time_emb_proj", "attn1", "attn2", "to_k", "ff", "ff.net.0"):
        yield Row(f"another module in the place of {path}", ways.another(path, _Another))
    for path in ("resnets.0", "attentions.0", "conv_in", "upsamplers.0", "conv_norm_out"):
        yield Row(f"another block in the place of {path}", ways.another(path, _Another))
    for path in ("conv1", "norm1", "to_out.0", "resnets.0", "transformer_blocks.0", "conv_out"):
        yield Row(f"a copy with other weights for {path}", ways.another(path, _turned), lies=False)
    relu = ways.another("nonlinearity", lambda module: nn.ReLU())
    yield Row("ReLU for nonlinearity", relu)
    for path in ("conv1", "norm1", "attn2", "resnets.0", "transformer_blocks.0", "conv_in"):
        yield Row(
            f"another __class__ of {path}", of_instances(path, "__class__", _of_another_class)
        )
    yield Row("ff.net has one more", ways.done(_one_more("ff.net")))
    more = ways.done(_one_more("transformer_blocks"))
    yield Row("transformer_blocks has a copy more", more, lies=False)
    yield Row("to_out has one more, not called", ways.done(_one_more("to_out")), changes=False)
    yield Row("a block has a child, not called", ways.done(_a_child), changes=False)
    yield Row("a processor of attn2", _processor("attn2"))
    yield Row("a processor of attn1", _processor("attn1"))


def _one_more(path: str) -> Any:
    def do(scene: Scene) -> Callable[[], Any]:
        found = scene.every(path)
        for one in found:
            one.append(deepcopy(one[0]) if path == "transformer_blocks" else nn.ReLU())

        def undo() -> None:
            for one in found:
                del one[-1]

        return undo

    return do


def _a_child(scene: Scene) -> Callable[[], Any]:
    blocks = scene.every("resnets.0")
    for block in blocks:
        block.add_module("more", nn.ReLU())

    def undo() -> None:
        for block in blocks:
            del block.more

    return undo


class _Processor:
    """As extensions write them."""

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return -0.5 * hidden_states


def _processor(path: str) -> Any:
    def do(scene: Scene) -> Callable[[], Any]:
        modules = scene.every(path)
        known = [module.processor for module in modules]
        for module in modules:
            module.set_processor(_Processor())

        def undo() -> None:
            for module, processor in zip(modules, known, strict=True):
                module.set_processor(processor)

        return undo

    return ways.done(do)
