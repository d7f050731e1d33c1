"""Whoever asks a convolution for a gradient gets it, also where a kernel of ours could run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv.inputs import NextNorm
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests.ops.toy_op import GFX1100, engine_of

GIVEN = {
    "x": (1, 5, 6, 16),
    "norm": (1, 16, 2),
    "shortcut": (1, 5, 6, 16),
    "embedding": (1, 16),
    "weight": (16, 16, 3, 3),
    "bias": (16,),
    "shortcut_weight": (16, 16),
    "gamma": (16,),
    "beta": (16,),
}


@dataclass
class Ours:
    """A card on which our convolution is computed by the formula, out of autograd's sight."""

    calls: int = 0

    def run(self, variant: MatrixConv, call: Call[Any, Any]) -> Any:
        inputs = call.inputs
        self.calls += 1
        with torch.no_grad():
            y, norm = formula.reference(variant.kind, inputs)
        return y.to(inputs.x.dtype), None if norm is None else norm.float()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Ours:
    made = Ours()
    monkeypatch.setattr(MatrixConv, "run", lambda variant, call: made.run(variant, call))
    monkeypatch.setattr(MatrixConv, "bound", lambda variant, call: variant.run)
    user, _ = engine_of(GFX1100, launcher=lambda device, row: object())  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(functional, "engine", user.engine)
    return made


def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    return {name: torch.randn(s, generator=generator).half() for name, s in GIVEN.items()}


def convolved(given: dict[str, torch.Tensor], weights: ConvWeights | None = None) -> torch.Tensor:
    """All that a call makes, as one number."""
    weights = weights or ConvWeights(given["weight"], given["bias"], in_rows=True)
    names = ("norm", "shortcut", "embedding", "shortcut_weight")
    following = NextNorm(given["gamma"], given["beta"], 4, 1e-5)
    fused: Any = {name: given[name] for name in names}
    y, norm = functional.conv("3x3", given["x"], weights, next_norm=following, **fused)
    assert norm is not None
    return y.float().sum() + norm.sum()


@pytest.mark.parametrize("name", GIVEN)
def test_each_tensor_is_asked_whether_its_gradient_is_wanted(ours: Ours, name: str) -> None:
    given = drawn()
    convolved(given)
    assert ours.calls
    ours.calls = 0
    given[name].requires_grad_()
    convolved(given).backward()
    grad = given[name].grad
    assert grad is not None and grad.isfinite().all() and not ours.calls
    with torch.no_grad():
        convolved(given)
    assert ours.calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_call_without_gradients_kept_hides_none(mode: Any) -> None:
    given = drawn()
    for name in ("weight", "bias"):
        given[name].requires_grad_()
    for in_rows in (True, False):
        weights = ConvWeights(given["weight"], given["bias"], in_rows=in_rows)
        with mode():
            functional.conv("3x3", given["x"], weights)
        for _ in range(2):
            y, _ = functional.conv("3x3", given["x"], weights)
            found = torch.autograd.grad(y.sum(), (given["weight"], given["bias"]))
            assert all(each.isfinite().all() for each in found)
