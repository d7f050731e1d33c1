"""A denoising step by the speed test: what is compared, timed and told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.lab.speed_job import HostCall
from lib_rocm_sd.lab.speed_result import Request
from lib_rocm_sd.lab.speed_session import SpeedSession
from tests.lab.speedtest_doubles import Side
from tests.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("fresh_cache")
STEP = Request(("step",), "custom", (64, 128))


class Unet:
    """A UNet whose steps are its input plus `error`, of 1, while it is ours."""

    def __init__(self, error: float = 0.0, why: str = "", dtype: str = "float16") -> None:
        self.error, self.why = error, why
        self.inside: list[str] = []
        self.seen: list[tuple[str, int]] = []
        self.denoiser = HostCall(
            self.call, self.arguments, self.in_("off"), self.in_("on"), dtype, "a note"
        )
        self.fails: Callable[[], None] = lambda: None

    def in_(self, name: str) -> Any:
        @contextmanager
        def inside() -> Iterator[None]:
            if name == "on" and self.why:
                raise ValueError(self.why)
            self.inside.append(name)
            try:
                yield
            finally:
                self.inside.pop()

        return inside

    def arguments(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.linspace(-1, 1, size),), {"more": size}

    def call(self, x: torch.Tensor, more: int) -> torch.Tensor:
        self.seen.append((self.inside[-1], more))
        self.fails()
        return x + self.error * (self.inside[-1] == "on")


UPSCALER = Request(("upscaler",), "custom", (64, 128))


def rows(unet: Unet | None, request: Request = STEP) -> list[dict[str, Any]]:
    session, side = SpeedSession(), Side()
    side.denoiser = side.upscaling = None if unet is None else unet.denoiser
    ident = session.start(request, side)
    assert session.wait(WAIT_S)
    found = session.result(ident)
    assert found is not None and found["complete"]
    return list(found["rows"])


def test_both_are_compared_and_timed() -> None:
    unet = Unet(0.01)
    found = rows(unet)
    assert [(row["case"], row["method"]) for row in found] == [
        (f"a step, {size}x{size}, batch 2", method)
        for size in (64, 128)
        for method in ("extension off", "rocm_sd")
    ]
    for row in found:
        assert not row["reason"] and row["runs"] >= 3 and row["note"] == "a note"
        assert 0 < row["p10"] <= row["median"] <= row["p90"] and row["unit"] == "ms"
        assert row["error"] == pytest.approx(0.01 * (row["method"] == "rocm_sd"), rel=1e-3)
    assert {inside for inside, _ in unet.seen} == {"off", "on"} and not unet.inside


@pytest.mark.parametrize(("error", "dtype"), [(0.06, "float16"), (2e-3, "float32")])
def test_a_wrong_step_is_not_timed(error: float, dtype: str) -> None:
    unet = Unet(error, dtype=dtype)
    found = [row for row in rows(unet) if row["method"] == "rocm_sd"]
    assert [row["reason"] for row in found] == [f"wrong: error {error:.1e}"] * 2
    assert unet.seen.count(("on", 64)) == 1


def test_upscaled_pictures_are_compared_where_they_are_one_tile() -> None:
    upscaler = Unet(1 / 255, dtype="uint8")
    upscaler.denoiser = replace(upscaler.denoiser, compared_at=96)
    found = rows(upscaler, UPSCALER)
    assert [(row["test"], row["case"], row["note"]) for row in found[1::2]] == [
        ("upscaler", "64x64 upscaled", "a note; checked at 96x96"),
        ("upscaler", "128x128 upscaled", "a note; checked at 96x96"),
    ]
    assert all(row["runs"] >= 3 and not row["reason"] for row in found)
    assert upscaler.seen.count(("on", 128)) >= 3 and ("on", 96) in upscaler.seen
    wrong = [row["reason"] for row in rows(Unet(3 / 255, dtype="uint8"), UPSCALER)[1::2]]
    assert wrong == ["wrong: error 1.2e-02"] * 2
    assert rows(None, UPSCALER)[0]["reason"] == "there is no upscaler to run"


def test_nan_is_wrong() -> None:
    found = [row for row in rows(Unet(float("nan"))) if row["method"] == "rocm_sd"]
    assert {row["reason"] for row in found} == {"wrong: error nan"}


def test_reasons() -> None:
    assert {row["reason"] for row in rows(None)} == {"there is no UNet to run"}
    found = rows(Unet(why="its weights are float32"))
    assert {row["reason"] for row in found if row["method"] == "rocm_sd"} == {
        "its weights are float32"
    }
    assert {row["reason"] for row in found if row["method"] == "extension off"} == {""}
    unet = Unet()

    def fails() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    unet.fails = fails
    assert {row["reason"] for row in rows(unet)} == {
        f"out of memory at {size}x{size}" for size in (64, 128)
    }


def test_a_host_that_cannot_give_one() -> None:
    class Without(Side):
        def unet(self) -> HostCall | None:
            raise ValueError("no checkpoint is loaded")

    session = SpeedSession()
    ident = session.start(STEP, Without())
    assert session.wait(WAIT_S)
    found = session.result(ident)
    assert found is not None
    assert {row["reason"] for row in found["rows"]} == {"no checkpoint is loaded"}


def test_cancel_ends_it_between_two_steps() -> None:
    unet, entered, go_on = Unet(), threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        go_on.wait(WAIT_S)

    unet.fails = wait
    session, side = SpeedSession(), Side()
    side.denoiser = unet.denoiser
    session.start(STEP, side)
    assert entered.wait(WAIT_S)
    session.cancel()
    go_on.set()
    assert session.wait(WAIT_S)
    assert session.progress().state == "cancelled"
    assert not unet.inside
