"""Performance: a first picture of a size measures nothing; what it put off is measured between
pictures, and what won is used from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from accordion_help import refresh
from conftest import FakeGpu, Start, WebUI, join

LEVEL = "Performance"
MEASURING = "rocm_sd measuring"


class Timed:
    """In the place of timing a problem: what was timed, and whether a picture was made meanwhile.
    Ours is slow; of torch's variants the first is the fastest. Waits at `go`.
    """

    def __init__(self, webui: WebUI) -> None:
        self.webui, self.problems, self.begun, self.go = (
            webui,
            [],
            threading.Event(),
            threading.Event(),
        )
        self.go.set()
        self.error: Exception | None = None
        self.measure = webui.library("engine.measure")
        self.measure.measure = self

    def __call__(
        self, op: Any, problem: Any, device: Any, contenders: Any, budget_s: float, **more: Any
    ) -> Any:
        assert budget_s <= self.webui.library("engine.measurer").MOMENT_S
        self.problems.append((problem, self.webui._generating))
        self.begun.set()
        assert self.go.wait(600)
        if more["interrupt"]():
            raise self.measure.InterruptedMeasurement
        if self.error is not None:
            raise self.error
        for place, each in enumerate(contenders):
            time_us = 1000.0 if each.variant.ours else 1.0 + place
            more["times"][each.variant.name] = self.measure.Timing.of([(each.config, time_us)])
        return more["times"], []


@pytest.fixture
def timed(start: Start, gpu: FakeGpu) -> Timed:
    return Timed(start(gpu=gpu))


def engine(webui: WebUI) -> Any:
    return webui.library("engine.engine").engine


def attention(webui: WebUI, **fields: Any) -> str:
    """What computed attention in a picture at this level, by its infotext."""
    info = webui.txt2img(True, LEVEL, **fields).info
    return str(info.split('ROCm SD: "')[1].split('"')[0])


def test_the_first_picture_measures_nothing_and_the_next_uses_what_won(
    timed: Timed, gpu: FakeGpu
) -> None:
    webui = timed.webui
    timed.go.clear()
    assert attention(webui) == "Performance, attention: rocm_sd"
    waiting = engine(webui).unmeasured
    assert waiting > 0
    sentence = webui.library("hosts.ui.status").unmeasured(waiting, "between pictures")
    assert f"Performance: {waiting} sizes are still to be measured" in sentence
    assert sentence in refresh(webui, True, LEVEL)[2]
    assert sentence not in refresh(webui, True, "Auto")[2]
    timed.go.set()
    join(MEASURING)
    assert engine(webui).unmeasured == 0 and len(timed.problems) == waiting
    assert not any(busy for _, busy in timed.problems)
    assert "to be measured" not in refresh(webui, True, LEVEL)[2]
    used = len(gpu.seen)
    assert attention(webui).startswith("Performance, attention: ")
    assert "rocm_sd" not in attention(webui) and len(gpu.seen) == used
    assert len(timed.problems) == waiting and not webui.errors_reported


def test_a_new_size_goes_by_the_nearests_times_at_once(timed: Timed) -> None:
    webui = timed.webui
    attention(webui)
    join(MEASURING)
    before, timed.problems = attention(webui), []
    timed.go.clear()
    assert attention(webui, width=128, height=128) == before
    timed.go.set()
    join(MEASURING)
    assert timed.problems, "it is measured nevertheless"


def test_a_picture_that_begins_waits_for_one_measurement_at_most(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    webui = timed.webui
    asked, made = threading.Event(), threading.Event()

    class Asked(type(webui.call_queue.queue_lock)):  # type: ignore[misc]
        def acquire(self, blocking: bool = True) -> Any:
            if threading.current_thread() is picture:
                asked.set()
            return super().acquire(blocking)

        __enter__ = acquire

    def paint() -> None:
        attention(webui)
        measured.append(len(timed.problems))
        made.set()

    measured: list[int] = []
    picture = threading.Thread(target=paint)
    monkeypatch.setattr(webui.call_queue, "queue_lock", Asked())
    pause = SimpleNamespace(sleep=lambda seconds: made.wait(600))
    monkeypatch.setattr(webui.library("hosts.webui.session"), "time", pause)
    timed.go.clear()
    attention(webui)
    assert engine(webui).unmeasured > 1 and timed.begun.wait(600)
    picture.start()
    assert asked.wait(600)
    timed.go.set()
    picture.join(600)
    assert measured == [1]
    join(MEASURING)
    assert engine(webui).unmeasured == 0 and len(timed.problems) > 1


def test_interrupt_ends_it_until_the_next_picture(timed: Timed) -> None:
    webui = timed.webui
    timed.go.clear()
    attention(webui)
    waiting = engine(webui).unmeasured
    assert timed.begun.wait(600)
    webui.shared.state.interrupt()
    timed.go.set()
    join(MEASURING)
    assert engine(webui).unmeasured == waiting and len(timed.problems) == 1
    webui.shared.state.begin()  # as the next picture does
    attention(webui)
    join(MEASURING)
    assert engine(webui).unmeasured == 0


def test_after_an_interrupted_picture_it_goes_on(timed: Timed) -> None:
    webui = timed.webui
    with webui.generating():
        attention(webui)
        webui.shared.state.interrupt()
    join(MEASURING)
    assert engine(webui).unmeasured == 0 and timed.problems


@pytest.mark.parametrize("args", [(False, LEVEL), (True, "Auto")], ids=["off", "Auto"])
def test_who_does_not_want_it_is_not_kept_waiting(timed: Timed, args: tuple[Any, ...]) -> None:
    webui = timed.webui
    timed.error = RuntimeError("planted")
    attention(webui)
    join(MEASURING)  # ended by the error
    waiting, timed.error = engine(webui).unmeasured, None
    count = len(timed.problems)
    webui.txt2img(*args)
    join(MEASURING)
    assert waiting and engine(webui).unmeasured == waiting and len(timed.problems) == count
    attention(webui)
    join(MEASURING)
    assert engine(webui).unmeasured == 0


def test_an_error_is_told_once_and_pictures_go_on(
    timed: Timed, capsys: pytest.CaptureFixture[str]
) -> None:
    webui = timed.webui
    timed.error = RuntimeError("planted")
    for _ in range(2):
        attention(webui)
        join(MEASURING)
    assert capsys.readouterr().out.count("ROCm SD: measuring ended: RuntimeError: planted") == 1


def test_a_webui_without_a_queue_measures_at_once(timed: Timed, monkeypatch: Any) -> None:
    webui = timed.webui
    monkeypatch.delattr(webui.call_queue, "queue_lock")
    session: Callable[..., Any] = webui.library("hosts.webui.session").of
    assert not session(LEVEL, 0).later()


def test_the_speed_test_ends_it_and_measures_before_it_times(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(threading.Event):
        def set(self) -> None:
            super().set()
            timed.go.set()

    webui = timed.webui
    monkeypatch.setattr(webui.library("hosts.webui.session"), "_ending", Ending())
    timed.go.clear()
    attention(webui)
    assert timed.begun.wait(600)
    waiting = engine(webui).unmeasured
    with webui.library("hosts.webui.speedtest").side.queue():
        join(MEASURING)
        assert engine(webui).unmeasured == waiting
        assert not webui.call_queue.queue_lock.acquire(blocking=False)
        with engine(webui).measuring_at_once():
            assert engine(webui).unmeasured == 0
    assert timed.problems[0] == timed.problems[1], "it was begun anew"


def test_pressed_while_a_picture_is_made_nobody_waits(timed: Timed) -> None:
    webui = timed.webui
    speed = webui.library("lab.speed_job")
    with webui.generating():
        attention(webui)
        with pytest.raises(speed.Busy), webui.library("hosts.webui.speedtest").side.queue():
            pass
    join(MEASURING)
    assert engine(webui).unmeasured == 0
