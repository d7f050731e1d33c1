"""What is bound for inputs of one key keeps none of them: it lives as long as its route."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.catalog import unet as usual
from lib_rocm_sd.ops.base import Call, Op, Variant
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.keys import tensors_of
from lib_rocm_sd.ops.registry import ops
from tests.ops.launches import Launches

CPU = torch.device("cpu")
ARCHES = [table()[gfx] for gfx in ("gfx1100", "gfx942")]
MOST_CHANNELS = 640
"""Of a convolution; wider ones are bound alike."""


def cases() -> Iterator[Any]:
    """The test problems of each op, and of a UNet's step, by each variant that takes them."""
    work = [(op, problem) for op in ops() for _, problem in op.usual]
    seen = set()
    for op, whole in (*work, *usual.work()):
        for problem in op.test_problems(whole):
            for variant in op.variants:
                key = (op.name, variant.name, problem)
                wide = getattr(problem, "in_channels", 0) > MOST_CHANNELS
                if key not in seen and not wide and not variant.refusals(ARCHES[0], problem):
                    seen.add(key)
                    yield pytest.param(op, variant, problem, id=f"{op.name}, {variant.name}")


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    found = tensors_of(inputs)
    weights = [item.weight for item in inputs if isinstance(item, ConvWeights)]
    return found + weights


@pytest.mark.parametrize(("op", "variant", "problem"), list(cases()))
def test_it_keeps_no_tensor(op: Op[Any, Any], variant: Variant[Any, Any], problem: Any) -> None:
    kept = []
    for arch in ARCHES:
        for config in variant.configs(arch, problem)[:2]:
            with torch.no_grad():
                inputs = op.make_inputs(problem, CPU, 0)
                kept.append(variant.bound(Call(problem, inputs, Launches(), config)))
            gone = [weakref.ref(tensor) for tensor in tensors_in(inputs)]
            del inputs
            gc.collect()
            assert [each() for each in gone] == [None] * len(gone), variant.name
