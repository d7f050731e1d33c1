"""What a convolution's weights keep for each device."""

from __future__ import annotations

import torch

from lib_rocm_sd.ops.conv.weights import ConvWeights


def test_what_was_made_for_a_device_stays() -> None:
    weights = ConvWeights(torch.randn(16, 16, 3, 3), torch.randn(16))
    here, there = torch.empty(1), torch.empty(1, device="meta")
    made = weights.plain(here)[0], weights.phases(here), weights.bias_on(here.device)
    away = weights.plain(there)[0], weights.phases(there), weights.bias_on(there.device)
    assert {tensor.device.type for tensor in away} == {"meta"}
    assert weights.plain(here)[0] is made[0]
    assert weights.phases(here) is made[1]
    assert weights.bias_on(here.device) is made[2]
