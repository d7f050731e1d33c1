"""What a convolution's weights keep for each device, and how it is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lib_rocm_sd.ops.conv.weights import ConvWeights


@pytest.mark.parametrize("device", [torch.device("meta"), None])
def test_a_devices_memory_is_given_back(device: torch.device | None) -> None:
    weights = ConvWeights(torch.randn(16, 16, 3, 3), torch.randn(16))
    here, there = torch.empty(1), torch.empty(1, device="meta")
    made = weights.plain(here)[0], weights.phases(here), weights.bias_on(here.device)
    away = weights.plain(there)[0], weights.phases(there), weights.bias_on(there.device)
    assert {tensor.device.type for tensor in away} == {"meta"}
    held = [weakref.ref(tensor) for tensor in away]
    del away
    assert weights.plain(here)[0] is made[0] and weights.phases(here) is made[1]

    weights.release(device)
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert (weights.phases(here) is made[1]) is (device is not None)
    assert torch.equal(weights.phases(here), made[1])
    assert torch.equal(weights.bias_on(here.device), made[2])
