"""Ours or the host's: whose a call of attention is, how it is counted, what the report is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.followed import NotFollowedError
from lib_rocm_sd.hosts import a1111
from lib_rocm_sd.hosts.attention import served
from lib_rocm_sd.hosts.comfyui.attention import Override
from lib_rocm_sd.hosts.ours import NotOursError, Tally
from lib_rocm_sd.hosts.webui import register
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import kinds
from lib_rocm_sd.vae import steps
from tests.following import Card, card, session
from tests.test_frames import noted

__all__ = ["card", "session"]

OUTPUT = torch.ones(1)


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def tally(report: Report) -> Tally:
    return Tally("left: {what}: {why}", report)


def raising(error: Exception) -> Any:
    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise error

    return compute


def test_what_ours_computes_is_counted(tally: Tally, report: Report) -> None:
    assert tally.attention(lambda *args, scale: OUTPUT, (1, 2), {"scale": 3.0}) is OUTPUT
    assert dict(tally.ours) == {"attention": 1} and not tally.left
    assert not report.snapshot()["events"]


@pytest.mark.parametrize("kind", [NotOursError, NotFollowedError])
def test_a_refusal_is_the_hosts_with_the_reason(
    tally: Tally, report: Report, kind: type[Exception]
) -> None:
    for _ in range(2):
        assert tally.attention(raising(kind("a mask")), (), {}) is None
    assert dict(tally.left) == {("attention", "a mask"): 2} and not tally.ours
    assert report.snapshot()["events"] == ["left: attention: a mask"]


def test_an_error_of_ours_is_the_hosts(tally: Tally) -> None:
    assert tally.attention(raising(KeyError("planted")), (), {}) is None
    ((_, why),) = tally.left
    assert why.startswith("ours failed: KeyError")


def test_who_is_not_spared_sees_out_of_memory(tally: Tally) -> None:
    short = raising(MemoryError("out of memory"))
    assert tally.attention(short, (), {}) is None
    with pytest.raises(MemoryError):
        tally.attention(short, (), {}, spares=False)
    assert tally.left.total() == 1
    tally.clear()
    assert not tally.left


def test_without_a_reader_nothing_is_taken_for_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that forgot to import hosts/read must not run on the host's code in silence."""
    monkeypatch.setattr(kinds, "_finds", [])
    monkeypatch.setattr(steps, "_readers", [])
    for read in (kinds.found_in, steps.read):
        with pytest.raises(RuntimeError, match=r"lib_rocm_sd\.hosts\.read was not imported"):
            read(torch.nn.Module())


def test_the_scripts_name_for_the_webuis_room() -> None:
    assert a1111.register is register


SIDE_BY_SIDE, APART = torch.ones(1, 4, 32), torch.ones(1, 2, 4, 16)


def comfyuis(session: Session) -> torch.Tensor:
    made: torch.Tensor = Override(session)(None, *(SIDE_BY_SIDE,) * 3, 2)  # type: ignore[arg-type]
    return made


def torchs(session: Session) -> torch.Tensor:
    with served(session):
        return attend(*(APART,) * 3)


CALLS = {"ComfyUI's": (comfyuis, 12), "torch's": (torchs, 16)}
"""With the most frames of ours before the kernel."""


@pytest.mark.parametrize("name", CALLS)
def test_few_frames_stand_between_a_hosts_call_and_its_kernel(
    card: Card, session: Session, name: str
) -> None:
    call, most = CALLS[name]
    names: list[str] = []
    with torch.no_grad():
        call(session)
        with noted(names):
            call(session)
    before = names[names.index("attention") : names.index("reference")]
    assert len(before) <= most, before
