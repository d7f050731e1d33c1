"""What stands between functional.py and a variant, and what tells calls of a convolution apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lib_rocm_sd
from lib_rocm_sd import functional
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv.inputs import ConvInputs, NextNorm
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band, Epilogue
from lib_rocm_sd.ops.conv.weights import ConvWeights

HOUSE = str(Path(lib_rocm_sd.__file__).parent)
X, IMAGE = torch.ones(2, 16), torch.ones(1, 4, 4, 16)
WEIGHTS = ConvWeights(torch.ones(16, 16, 3, 3), torch.ones(16))
CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    "attention": (lambda: functional.attention(*(X[None, :, None],) * 3), 4),
    "conv": (lambda: functional.conv("3x3", IMAGE, WEIGHTS), 4),
    "group_norm_silu": (lambda: functional.group_norm_silu(IMAGE, None, None, 2), 4),
    "group_norm_silu_backward": (
        lambda: functional.group_norm_silu_backward(IMAGE, IMAGE, None, None, 2),
        4,
    ),
    "layer_norm": (lambda: functional.layer_norm(X, None, None), 4),
    "layer_norm_backward": (lambda: functional.layer_norm_backward(X, X, None), 4),
    "linear": (lambda: functional.linear(X, X), 6),
}
"""With the most frames of ours before the variant's `run`."""


@contextmanager
def noted(names: list[str]) -> Iterator[None]:
    """Functions of the house that are called, in order."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("name", CALLS)
def test_few_frames_stand_between_a_call_and_its_variant(name: str) -> None:
    """A step of a model makes hundreds of calls, which the CPU has to submit."""
    call, most = CALLS[name]
    names: list[str] = []
    with torch.no_grad():
        call()
        with noted(names):
            call()
    before = names[: names.index("run", names.index("follow"))]
    assert len(before) <= most, before


def test_a_convolution_that_was_made_before_poses_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = functional.conv("3x3", IMAGE, WEIGHTS)[0]
    monkeypatch.setattr(conv_inputs, "tensor_errors", None)
    assert torch.equal(functional.conv("3x3", IMAGE, WEIGHTS)[0], expected)


def test_each_fact_of_a_convolution_tells_its_calls_apart() -> None:
    image, weight = torch.ones(1, 4, 4, 16), torch.ones(16, 16, 3, 3)
    first = ConvInputs(image, ConvWeights(weight))
    wide, one = torch.ones(1, 4, 4, 32), torch.ones(16)
    norm, following = torch.ones(1, 16, 2), NextNorm(one, one, 4, 1e-5)
    full = first._replace(shortcut=image, next_norm=following)
    others = [
        first,
        first._replace(x=torch.ones(1, 4, 5, 16)),
        first._replace(x=image.half()),
        first._replace(x=image.transpose(2, 3)),
        first._replace(weights=ConvWeights(weight[:8])),
        first._replace(weights=ConvWeights(weight.half())),
        first._replace(weights=ConvWeights(weight, in_rows=True)),
        first._replace(weights=ConvWeights(weight, None, torch.ones(16, 16))),
        first._replace(weights=ConvWeights(weight, None, torch.ones(16, 32))),
        first._replace(norm=norm),
        first._replace(norm=norm.double()),
        full,
        full._replace(shortcut=wide),
        full._replace(out=image),
        full._replace(out=torch.ones(1, 4, 4, 16)),
        full._replace(next_norm=replace(following, groups=2)),
        full._replace(next_norm=replace(following, gamma=one.double())),
        full._replace(next_norm=replace(following, beta=one.double())),
        first._replace(band=Band(1, 2)),
        first._replace(band=Band(0, 2)),
        first._replace(embedding=torch.ones(1, 16)),
        first._replace(embedding=torch.ones(1, 16).half()),
        first._replace(shortcut_weight=torch.ones(16, 16)),
        first._replace(epilogue=Epilogue()),
        first._replace(epilogue=Epilogue("silu")),
        first._replace(epilogue=Epilogue("prelu")),
        first._replace(epilogue=Epilogue("prelu"), weights=ConvWeights(weight, slopes=one)),
        full._replace(epilogue=Epilogue()),
        full._replace(epilogue=Epilogue(), second=image),
        full._replace(epilogue=Epilogue(), second=wide),
        full._replace(epilogue=Epilogue(), second=image.clone().requires_grad_()),
        first._replace(x=image.clone().requires_grad_()),
        first._replace(weights=ConvWeights(weight.clone().requires_grad_())),
        full._replace(next_norm=replace(following, gamma=one.clone().requires_grad_())),
    ]
    key_of = CONVS["3x3"].key_of
    assert len({key_of(each) for each in others}) == len(others)
    assert key_of(first) == key_of(first._replace(x=image.clone(), overflow=torch.zeros(1)))
    slopes = (full._replace(epilogue=Epilogue("leaky relu", s, s)) for s in (0.1, 0.2))
    assert len({key_of(each) for each in slopes}) == 1
