"""Transformer blocks some of whose parts are the host's own, and layers without a bias: what is
added in place, and which biases the norms add, hangs on both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lib_rocm_sd.unet.takeover import take_over
from tests.unet import unet_models as models

BF16 = torch.bfloat16
PARTS = ("attn1", "attn2", "ff")


def blocks(unet: Any) -> list[Any]:
    return [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"]


def out_of(block: Any, part: str) -> Any:
    """The layer whose product is added to the stream."""
    return block.ff.net[2] if part == "ff" else getattr(block, part).to_out[0]


def as_it_is(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Somebody else's forward."""
    return forward(*args, **kwargs)


@pytest.mark.parametrize("without", [(), ("attn1",), ("ff",), ("attn1", "attn2"), PARTS], ids=str)
@pytest.mark.parametrize(
    "theirs",
    [(), ("attn1",), ("attn2",), ("ff",), ("attn1", "attn2"), ("attn1", "ff"), ("attn2", "ff")],
    ids=str,
)
def test_any_part_may_be_the_hosts_and_any_layer_without_a_bias(
    theirs: tuple[str, ...], without: tuple[str, ...]
) -> None:
    """The first transformer's blocks are called as modules, the others are parts of it."""
    unet = models.ldm_unet(depth=2).to(BF16)
    for block in blocks(unet):
        for part in without:
            out_of(block, part).bias = None
    inputs = models.in_dtype(models.ldm_inputs(), BF16)
    exact = models.step(copy.deepcopy(unet).float(), models.in_dtype(inputs, torch.float32))
    own = models.step(unet, inputs)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in blocks(unet):
        for part in theirs:
            module = getattr(block, part)
            module.forward = partial(as_it_is, module.forward)
    for block in blocks(unet)[:2]:
        block.register_forward_pre_hook(lambda _, args: given.append((args[0], args[0].clone())))
    taken = take_over(unet)
    ours = models.step(unet, inputs)
    assert not any(row.left for row in taken.report())
    assert models.errors(ours, exact)[1] <= 1.1 * models.errors(own, exact)[1]
    assert len(given) == 2 and all(torch.equal(x, before) for x, before in given)
