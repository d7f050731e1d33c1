"""What convolutions keep of their weights: as long as these live, and no longer."""

from __future__ import annotations

import gc

import pytest
import torch

from lib_rocm_sd.torch_ops import table, weights
from lib_rocm_sd.torch_ops.weights import KeptWeights


def test_it_is_kept_while_the_weight_lives() -> None:
    kept = KeptWeights()
    weight, bias = torch.randn(8, 4, 3, 3), torch.randn(8)
    first = kept(weight, bias)
    rows = first.rows(weight)
    assert rows.data_ptr() != weight.data_ptr()
    again = kept(weight, bias)
    assert again.weight is weight and again.rows(weight) is rows
    assert len(kept) == 1
    storage = weight.untyped_storage()._weak_ref()
    del first, again, weight
    gc.collect()
    assert len(kept) == 0
    assert torch.UntypedStorage._new_with_weak_ptr(storage) is None
    torch.UntypedStorage._free_weak_ref(storage)


def test_what_is_written_is_seen() -> None:
    kept = KeptWeights()
    weight, bias = torch.randn(8, 4, 3, 3), torch.randn(8)
    before = kept(weight, bias)
    assert kept(weight, bias).bias is before.bias
    with torch.no_grad():
        bias.add_(1)
    assert torch.equal(kept(weight, bias).bias, bias.double())
    assert not kept(weight, None).has_bias
    with torch.no_grad():
        weight.mul_(2)
    like = torch.empty(0)
    assert torch.equal(kept(weight, bias).rows(like), weight)


def test_on_another_stream_nothing_is_kept_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is recorded there has to make all from the weights, in memory of its own."""
    kept = KeptWeights()
    weight, bias = torch.randn(8, 4, 3, 3), torch.randn(8).half()
    like, at = torch.empty(0), torch.device("cpu")
    monkeypatch.setattr(weights, "on_first_stream", lambda tensor: False)
    assert torch.equal(kept(weight, bias).rows(like), weight)
    assert len(kept) == 0
    monkeypatch.undo()
    before = kept(weight, bias)
    rows, wide = before.rows(like), before.bias_on(at)
    monkeypatch.setattr(weights, "on_first_stream", lambda tensor: False)
    recorded = kept(weight, bias)
    assert recorded.rows(like) is not rows and recorded.bias_on(at) is not wide
    monkeypatch.undo()
    again = kept(weight, bias)
    assert again.rows(like) is rows and again.bias_on(at) is wide


def test_inference_tensors_are_not_kept() -> None:
    """Nobody counts what is written to them."""
    kept = KeptWeights()
    with torch.inference_mode():
        weight, bias = torch.randn(8, 4, 3, 3), torch.randn(8)
    assert torch.equal(kept(weight, bias).bias, bias.double())
    assert kept(torch.randn(8, 4, 3, 3), bias).has_bias
    assert len(kept) == 0


def test_the_operator_keeps_them() -> None:
    x, weight, bias = torch.randn(1, 3, 3, 4), torch.randn(8, 4, 3, 3), torch.randn(8)
    before = len(table.KEPT)
    first = torch.ops.rocm_sd.conv(x, weight, bias)
    assert len(table.KEPT) == before + 1
    with torch.no_grad():
        weight.zero_()
    made = torch.ops.rocm_sd.conv(x, weight, bias)
    assert torch.allclose(made, bias.expand_as(made)) and not torch.allclose(made, first)
