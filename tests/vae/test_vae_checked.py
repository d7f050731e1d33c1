"""Now and then a corner of an image is computed by the host's own decoder, and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.diffusers.vae import DiffusersStandIn
from lib_rocm_sd.hosts.vae import EVERY, LATENTS, VaeWish
from lib_rocm_sd.modules import compared
from lib_rocm_sd.report import Report
from tests.vae import vae_models

BF16 = torch.bfloat16


class Vae:
    """What diffusers' pipelines have."""

    def __init__(self) -> None:
        self.decoder = vae_models.coder("diffusers decoder").to(BF16)


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch, report: Report) -> DiffusersStandIn:
    monkeypatch.delenv(compared.VARIABLE)
    monkeypatch.setattr("lib_rocm_sd.hosts.diffusers.vae.unsuited", lambda *given: "")
    stand_in = DiffusersStandIn(Vae(), "decoder", VaeWish(), Session.of("Auto", report=report))
    stand_in.put_in()
    return stand_in


@pytest.fixture
def corners(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of what the host's own decoder was given."""
    seen: list[Any] = []
    own = DiffusersStandIn.theirs

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(args[0].shape))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(DiffusersStandIn, "theirs", theirs)
    return seen


def latent() -> torch.Tensor:
    return torch.randn(2, 4, 20, 24, generator=torch.Generator().manual_seed(0)).to(BF16)


def decoded(decoder: DiffusersStandIn, count: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return [decoder.module(latent()) for _ in range(count)][-1]


def test_one_image_of_some_is_compared_and_ours_is_used(
    decoder: DiffusersStandIn, corners: list[Any], report: Report
) -> None:
    ours = decoded(decoder)
    assert not corners
    assert torch.equal(decoded(decoder, EVERY + 1), ours)
    assert corners == [(1, 4, LATENTS, LATENTS)] * 2
    assert not report.snapshot()["events"]


def test_values_written_through_data_are_seen(
    decoder: DiffusersStandIn, corners: list[Any], report: Report
) -> None:
    """What is packed of weights is stale then. The image in which it is seen is the host's."""
    ours = decoded(decoder)
    for parameter in decoder.module.parameters():
        parameter.data.mul_(0.8)
    expected = type(decoder.module).forward(decoder.module, latent())
    made = decoded(decoder)
    assert torch.equal(made, expected) and not torch.equal(made, ours)
    (event,) = report.snapshot()["events"]
    assert "a corner of the image differed by" in event and "the host's own is used" in event
    count = len(corners)
    again = decoded(decoder)
    assert vae_models.error(again, expected) < 0.05 and not torch.equal(again, expected)
    assert len(corners) == count + 1  # compared, and right


def test_a_tiny_difference_has_digits_that_say_something() -> None:
    said = [compared.percent(share) for share in (1.0, 0.0123, 0.0011, 0.00034, 2.61e-6)]
    assert said == ["100.0%", "1.2%", "0.1%", "0.034%", "0.00026%"]


def test_nothing_is_compared_where_that_is_off(
    decoder: DiffusersStandIn, corners: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compared.VARIABLE, "0")
    decoded(decoder, EVERY)
    assert not corners


def test_a_decoder_that_cannot_be_compared_is_the_hosts(
    decoder: DiffusersStandIn, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded(decoder)
    monkeypatch.setattr(decoder, "again", lambda part: part[0])
    made = decoded(decoder)
    assert torch.equal(made, type(decoder.module).forward(decoder.module, latent()))
    (event,) = report.snapshot()["events"]
    assert "could not be compared (" in event


def test_without_memory_to_compare_ours_is_used(
    decoder: DiffusersStandIn, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = decoded(decoder)

    def fails(part: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(decoder, "again", fails)
    assert torch.equal(decoded(decoder), ours) and not report.snapshot()["events"]


def test_where_weights_leave_the_device_nothing_is_kept(decoder: DiffusersStandIn) -> None:
    decoder._vae._hf_hook = object()
    decoded(decoder, 3)
    assert not decoder.program._ready
