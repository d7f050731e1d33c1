"""The override with an engine: our kernel is launched, or the engine's reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.hosts import attention as host_attention
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.comfyui.attention import Override
from lib_rocm_sd.hosts.comfyui.host import session_of, tally
from lib_rocm_sd.ops.attention.kernel import AttentionParams
from tests.comfyui.conftest import left
from tests.comfyui.play import CARD
from tests.ops.launches import Launches


@pytest.fixture
def launches(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What the engine of a card launches, which computes nothing; self-tests are passed."""
    made = Launches()
    engine = Engine(identify=lambda device: CARD, launcher=lambda device, arch: made)
    monkeypatch.setattr(selftest, "check", lambda *words: selftest.Check(0.0, 1.0))
    monkeypatch.setattr(host_attention, "identify", lambda device: CARD)
    monkeypatch.setattr(host_attention, "engine", engine)
    monkeypatch.setattr(gate, "begin", lambda say: None)
    return made


def call(dtype: torch.dtype = torch.float16, head_dim: int = 64, **options: Any) -> Any:
    q, k, v = (torch.zeros(2, 3, rows, head_dim, dtype=dtype) for rows in (9, 7, 7))
    options = {"skip_reshape": True, **options}
    with torch.inference_mode(not options.pop("graded", False)):
        theirs: Any = lambda *args, **kwargs: "ComfyUI's"  # noqa: E731
        return Override(session_of("Auto"))(theirs, q, k, v, 3, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 160])
def test_our_kernel_reads_comfyuis_tensors_as_they_lie(
    launches: Launches, dtype: torch.dtype, head_dim: int
) -> None:
    made = call(dtype, head_dim)
    assert made.shape == (2, 9, 3 * head_dim) and made.dtype == dtype
    assert tally.ours["attention"] == 1 and not tally.left
    params = AttentionParams.from_buffer_copy(launches.seen[-1][3])
    apart = 9 * head_dim  # (B, H, S, D) of ComfyUI: heads are farther apart than rows
    assert list(params.q_stride) == [3 * apart, head_dim, apart]


def test_the_shape_that_is_asked_for(launches: Launches) -> None:
    assert call(skip_output_reshape=True).shape == (2, 3, 9, 64)


def test_a_head_that_no_kernel_takes_is_comfyuis(launches: Launches) -> None:
    assert call(head_dim=50) == "ComfyUI's"
    assert not launches.seen
    (why,) = left()
    assert "50" in why and why.startswith("attention: ")


def test_a_kernel_that_fails_its_self_test_is_comfyuis(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(op: Any, variant: Any, *words: Any) -> selftest.Check:
        return selftest.Check(0.0, 1.0, "wrong by far" if variant.ours else "")

    monkeypatch.setattr(selftest, "check", check)
    assert call() == "ComfyUI's"
    assert "self-test failed: wrong by far" in next(iter(left()))


def test_nothing_is_launched_that_no_child_has_tried(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(gate, "begin", lambda say: begun.append(True))
    call()
    assert begun == [True]
    monkeypatch.undo()


def test_no_gate_without_a_card(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "begin", lambda say: 1 // 0)
    assert call() == "ComfyUI's"
    assert left() == {"attention: no GPU: this is the CPU": 1}
