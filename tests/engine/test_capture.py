"""Which device is asked whether its calls are being captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lib_rocm_sd.engine import memory


@pytest.mark.parametrize("current", [0, 1])
def test_the_calls_own_device_is_asked(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """Of two cards the second is captured, whichever is current."""
    now = [current]

    @contextmanager
    def device(asked: torch.device) -> Iterator[None]:
        before = now[0]
        now[0] = before if asked.index is None else asked.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0] == 1)
    assert memory.is_recording(torch.device("cuda", 1))
    assert not memory.is_recording(torch.device("cuda", 0))
    assert memory.is_recording(torch.device("cuda")) is (current == 1)
    assert not memory.is_recording(torch.device("cpu"))
    assert now == [current]


@pytest.mark.gpu
def test_a_capture_on_the_second_card_is_seen_from_the_first() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    first, second = (torch.device("cuda", index) for index in (0, 1))
    asked = {}
    with torch.cuda.device(second):
        x = torch.zeros(4, device=second)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x += 1
            with torch.cuda.device(first):
                asked = {device: memory.is_recording(device) for device in (first, second)}
    assert asked == {first: False, second: True}
