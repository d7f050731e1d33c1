"""A UNet's blocks recorded by the card that is there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.graphs.device import obstacle
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.unet import unet_models as models

pytestmark = pytest.mark.gpu
HALF = torch.float16


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def inputs(gpu: torch.device) -> dict[str, Any]:
    given = models.in_dtype(models.ldm_inputs(), HALF)
    return {name: value.to(gpu) for name, value in given.items()}


@pytest.fixture
def unet(gpu: torch.device) -> Any:
    why = obstacle(gpu)
    if why:
        pytest.skip(why)
    return models.ldm_unet(depth=2).to(gpu, HALF)


def steps(unet: Any, inputs: Any, count: int = 4) -> list[torch.Tensor]:
    with torch.no_grad():
        return [models.step(unet, {**inputs, "x": inputs["x"] * (1 + n / 8)}) for n in range(count)]


def launched(unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The same steps, launch by launch."""
    with monkeypatch.context() as patch:
        patch.setenv("ROCM_SD_GRAPHS", "0")
        taken = taken_over(unet)
        steps(unet, inputs)
        made = steps(unet, inputs)
        assert taken.graphs.known() == []
        taken.give_back()
    return made


def taken_over(unet: Any) -> UnetTakeover:
    return take_over(unet, Session.of("Auto", report=Report()))


def test_replays_give_what_launches_give(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = launched(unet, inputs, monkeypatch)
    taken = taken_over(unet)
    for _ in range(3):
        made = steps(unet, inputs)
    (graphs,) = taken.graphs.known()
    assert graphs.why == ""
    assert graphs.replays > 100
    assert all(map(torch.equal, made, expected))
    taken.give_back()


def test_other_threads_and_streams_do_not_disturb(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = launched(unet, inputs, monkeypatch)
    taken = taken_over(unet)
    steps(unet, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = steps(unet, inputs)
    stream.synchronize()
    assert all(map(torch.equal, elsewhere, expected))
    assert all(map(torch.equal, steps(unet, inputs), expected))
    taken.give_back()


def test_new_plans_and_an_emptied_cache_are_survived(unet: Any, inputs: Any) -> None:
    taken = taken_over(unet)
    expected = steps(unet, inputs)
    for _ in range(3):
        engine.renew()
        gc.collect()
        torch.cuda.empty_cache()
        assert all(map(torch.equal, steps(unet, inputs), expected))
    (graphs,) = taken.graphs.known()
    assert graphs.why == ""
    taken.give_back()


def test_memory_is_given_back(unet: Any, inputs: Any) -> None:
    taken = taken_over(unet)
    steps(unet, inputs)
    taken.give_back()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        taken = taken_over(unet)
        steps(unet, inputs)
        taken.give_back()
        gc.collect()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_a_capture_of_ones_own_reads_the_prompt_at_each_replay(unet: Any, inputs: Any) -> None:
    """It takes nothing from the steps before it, in which the same tensor was the prompt."""
    taken = taken_over(unet)
    prompts = [inputs["context"].clone(), inputs["context"] * 0.5]
    for prompt in prompts:
        inputs["context"].copy_(prompt)
        last = steps(unet, inputs, 1)[0].clone()
    steps(unet, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        made = models.step(unet, inputs)
    for prompt in (*prompts, prompts[0]):
        inputs["context"].copy_(prompt)
        graph.replay()
        expected = steps(unet, inputs, 1)[0]
        assert torch.allclose(made, expected, atol=2e-2 * float(expected.abs().max()))
        assert torch.equal(prompt, prompts[0]) != torch.allclose(made, last, atol=1e-3)
    taken.give_back()
