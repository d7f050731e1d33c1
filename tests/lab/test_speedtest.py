"""The speed test as a whole, on the CPU: sessions, cancel, failures, what is kept."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.commands.standalone import Standalone
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.lab import speed_job, speed_parts, speed_result, speed_vae
from lib_rocm_sd.lab.speed_result import Request, parse
from lib_rocm_sd.lab.speed_session import Busy, SpeedSession
from tests.lab.speedtest_doubles import Gate, Side
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.usefixtures("fresh_cache")
IMAGE = Request(("image",))
ATTENTION = Request(("attention",))


@pytest.fixture(autouse=True)
def _limits_are_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long because the machine has more to do is not given up."""
    monkeypatch.setattr(speed_job, "monotonic", time.process_time)


@pytest.fixture
def session() -> Iterator[SpeedSession]:
    found = SpeedSession()
    yield found
    found.cancel()
    assert found.wait(WAIT_S)


def run(session: SpeedSession, request: Request, side: Any) -> dict[str, Any]:
    ident = session.start(request, side)
    assert session.wait(WAIT_S)
    found = session.result(ident)
    assert found is not None
    return found


def test_everything_without_a_webui(session: SpeedSession, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is a dev extra")
    found = run(session, parse({}), Standalone(torch.device("cpu"), tmp_path))
    assert session.progress().state == "done", session.progress()
    assert session.progress().fraction == 1.0
    rows = {(row["test"], row["case"], row["method"], row["unit"]): row for row in found["rows"]}
    assert {test for test, *_ in rows} == {"attention", "vae", "step", "upscaler", "image"}
    for (test, case, method, _), row in rows.items():
        if test == "upscaler":
            assert row["reason"] == "there is no upscaler to run"
            continue
        if method in ("rocm_sd", "extension on, UNet"):
            assert row["reason"] == "no GPU: this is the CPU"
            continue
        assert not row["reason"] and 0 < row["p10"] <= row["median"] <= row["p90"], case
        if test != "image":
            assert 0 <= row["error"] < 1e-3 and row["runs"] >= 3
    assert found["complete"] is True and found["machine"]["card"] == "CPU"
    (pair,) = found["pictures"]
    assert pair["largest"] <= 2 and pair["mean"] < 1
    for name in ("off", "on", "difference"):
        assert (tmp_path / pair[name]).read_bytes().startswith(b"\x89PNG")
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text(encoding="utf-8")) == found


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "speed", "--device", "cpu", "--what", "attention", "--out", str(tmp_path)]
    assert __main__.main(words) == 0
    printed = capsys.readouterr()
    assert "| SD1.5 64x64 self | Doggettx-like |" in printed.out
    assert "bench speed: done in" in printed.err
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert __main__.main([*words, "--sizes", "-8"]) == 2
    assert __main__.main([*words[:3], "nonsense"]) == 2


def test_progress_goes_by_what_parts_are_planned_to_take(session: SpeedSession) -> None:
    """On a CPU attention is half a second of two and a half, not half of the test."""
    side = Side()
    side.image_may_end.clear()
    session.start(parse({"what": ["attention", "image"]}), side)
    assert wait_until(lambda: side.images)
    now = session.progress()
    assert now.fraction == 0.2 and now.left_s >= 0.8 * 2.5
    side.image_may_end.set()
    assert session.wait(WAIT_S)
    assert (session.progress().fraction, session.progress().left_s) == (1.0, 0.0)


def test_one_at_a_time_and_cancel_ends_it(session: SpeedSession) -> None:
    side = Side()
    side.image_may_end.clear()
    ident = session.start(IMAGE, side)
    assert (session.running, session.progress().state, side.held) == (True, "running", True)
    with pytest.raises(Busy, match="a speed test is running"):
        session.start(IMAGE, Side())
    session.cancel()
    assert session.wait(WAIT_S)
    assert (session.progress().state, side.held) == ("cancelled", False)
    found = session.result(ident)
    assert found is not None and found["complete"] is False and found["notes"] == ["cancelled"]
    side.image_may_end.set()
    assert run(session, IMAGE, side)["complete"] is True


def test_nothing_is_put_off_that_performance_measures(
    session: SpeedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[bool] = []

    def measured(*given: object) -> tuple[str, str]:
        at_once.append(engine._measurer.at_once)
        return "done", ""

    monkeypatch.setattr(session, "_measured", measured)
    session.start(IMAGE, Side())
    session.wait()
    assert at_once == [True] and not engine._measurer.at_once


def test_refused_while_the_host_is_busy(session: SpeedSession) -> None:
    side = Side()
    side.reason = "no model yet"
    with pytest.raises(Busy, match="no model yet"):
        session.start(IMAGE, side)
    side.reason, side.generating = "", True
    with pytest.raises(Busy, match="a picture is being made"):
        session.start(IMAGE, side)
    assert not session.running and session.progress().state == "idle"
    side.generating = False
    assert run(session, IMAGE, side)["complete"]


def test_two_starts_at_once_begin_one_test(session: SpeedSession) -> None:
    side, refused = Side(), []
    side.image_may_end.clear()

    def start() -> None:
        try:
            session.start(IMAGE, side)
        except Busy as busy:
            refused.append(str(busy))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["a speed test is running"] * 3


def test_the_hosts_method_is_verified_before_it_is_timed(session: SpeedSession) -> None:
    side = Side()
    calls: list[int] = []

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.zeros(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])

    def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise KeyError("hostile <b>")

    def short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("HIP out of memory. Tried to allocate 9 GiB")

    def no_number(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.full((q.shape[0], q.shape[1], q.shape[2] * q.shape[3]), float("nan"))

    side.methods = {"wrong": wrong, "broken": broken, "short": short, "NaN": no_number}
    found = run(session, ATTENTION, side)
    reasons = {r["method"]: r["reason"] for r in found["rows"] if r["case"] == "SD1.5 64x64 self"}
    assert reasons["WebUI's current (wrong)"] == "wrong: error 1.0e+00"
    assert "hostile" in reasons["WebUI's current (broken)"]
    assert reasons["WebUI's current (short)"] == "out of memory at 64x64"
    assert reasons["WebUI's current (NaN)"] == "wrong: error NaN or infinity"
    assert reasons["SDP"] == reasons["Doggettx-like"] == reasons["sub-quadratic-like"] == ""
    assert len(calls) == 2 * 3, "never timed, in none of three cases"
    assert found["complete"]


def test_slices_of_queries_give_the_same(
    monkeypatch: pytest.MonkeyPatch, session: SpeedSession
) -> None:
    monkeypatch.setitem(speed_parts.SLICE_FLOPS, "cpu", 4e6)
    found = run(session, Request(("attention",), "custom", (128,)), Side())
    sdp = [row for row in found["rows"] if row["method"] == "SDP"]
    assert [row["note"] for row in sdp[:1]] == ["in 37 slices of queries"]
    assert not any(row["reason"] for row in sdp)


def test_what_is_too_large_is_a_reason(session: SpeedSession) -> None:
    found = run(session, Request(("attention",), "custom", (8192,)), Side())
    reasons = {row["case"]: row["reason"] for row in found["rows"]}
    assert "TFLOP: not measured" in reasons["SD1.5 8192x8192 self"]
    assert "million values: not measured" in reasons["SD1.5 8192x8192 text"]
    assert all(reasons.values())


def test_cancel_between_calls(session: SpeedSession) -> None:
    side, gate = Side(), Gate()
    side.methods["slow"] = gate
    ident = session.start(ATTENTION, side)
    assert gate.entered.wait(WAIT_S)
    session.cancel()
    gate.open.set()
    assert session.wait(WAIT_S)
    found = session.result(ident)
    assert found is not None
    assert [row["method"] for row in found["rows"]] == ["rocm_sd", "WebUI's current (slow)"]


def test_images_off_and_on(session: SpeedSession, tmp_path: Path) -> None:
    side = Side(tmp_path)
    found = run(session, Request(("image",), "custom", (64, 72)), side)
    steps = speed_job.CPU_EFFORTS["custom"].steps
    methods = [(False, False), (True, False), (True, True)]
    assert side.images[:6] == [(n, 64, *method) for n in (2, steps) for method in methods]
    seconds = {r["method"]: r["median"] for r in found["rows"] if r["unit"] == "s"}
    assert seconds == {"extension off": 4.0, "extension on": 2.0, "extension on, UNet": 1.0}
    assert {r["median"] for r in found["rows"] if r["unit"] == "it/s"} == {5.0}
    assert [(p["largest"], p["mean"]) for p in found["pictures"]] == [(3, 1.0)] * 4
    shots = session.shots(found["id"])
    assert [shot.case for shot in shots] == [pair["case"] for pair in found["pictures"]]
    assert shots[0].difference.getpixel((0, 0)) == (0, 0, 48)
    assert session.shots("000000000000") == ()
    for png in tmp_path.glob("*.png"):
        assert b"secret" not in png.read_bytes()
    assert len(list(tmp_path.glob("*.png"))) == 12


def test_out_of_memory_with_the_extension_on(session: SpeedSession) -> None:
    side = Side()

    def fails(enabled: bool, size: int) -> None:
        if enabled and size == 128:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    side.fails = fails
    found = run(session, Request(("image",), "custom", (64, 128)), side)
    reasons = {(r["case"][:3], r["method"]): r["reason"] for r in found["rows"]}
    assert reasons["128", "extension on"] == "out of memory at 128x128"
    assert reasons["128", "extension off"] == reasons["64x", "extension on"] == ""
    assert len(found["pictures"]) == 2 and found["complete"]


def test_no_checkpoint(session: SpeedSession) -> None:
    side = Side()

    def fails(enabled: bool, size: int) -> None:
        raise ValueError("no checkpoint is loaded")

    side.fails = fails
    found = run(session, Request(("image", "vae")), side)
    assert {row["reason"] for row in found["rows"] if row["test"] == "image"} == {
        "no checkpoint is loaded"
    }
    assert [r["reason"] for r in found["rows"] if r["test"] == "vae"] == ["there is no VAE to run"]
    assert session.progress().state == "done"


def test_a_vae_that_no_host_would_run_is_not_timed(
    session: SpeedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(speed_vae.Program, "__call__", lambda *args, **options: calls.append(1))
    side = Side()
    side.module = torch.nn.ConvTranspose2d(4, 3, 8, 8)
    rows = run(session, Request(("vae",)), side)["rows"]
    reasons = {row["method"]: row["reason"] for row in rows}
    assert reasons == {speed_vae.EAGER: "", "rocm_sd": "no GPU: this is the CPU"}
    assert not calls


@pytest.fixture
def _convs_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where our convolutions can be used, though torch computes them here."""
    monkeypatch.setattr(speed_vae.engine, "usable", lambda *args: [])


@pytest.mark.usefixtures("_convs_of_ours")
def test_a_vae_of_unknown_kind(session: SpeedSession) -> None:
    side = Side()
    side.module = torch.nn.ConvTranspose2d(4, 3, 8, 8)
    found = run(session, Request(("vae",)), side)
    reasons = {row["method"]: row["reason"] for row in found["rows"]}
    assert reasons[speed_vae.EAGER] == ""
    assert "cannot be run" in reasons["rocm_sd"]
    assert not side.module._forward_pre_hooks


def test_a_vae_that_gives_nan(session: SpeedSession) -> None:
    side = Side()
    side.module = torch.nn.ConvTranspose2d(4, 3, 8, 8)
    torch.nn.init.constant_(side.module.weight, float("nan"))
    found = run(session, Request(("vae",)), side)
    assert found["rows"][0]["reason"] == "wrong: the output has NaN or infinity"


def test_a_slow_vae_is_cancelled_between_layers(session: SpeedSession) -> None:
    entered, leave, ran = threading.Event(), threading.Event(), list[int]()

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            entered.set()
            leave.wait(WAIT_S)
            return x

    side = Side()
    side.module = torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 3, 8, 8), Slow(), Slow())
    session.start(Request(("vae",)), side)
    assert entered.wait(WAIT_S)
    session.cancel()
    leave.set()
    assert session.wait(WAIT_S)
    assert session.progress().state == "cancelled"
    assert len(ran) == 1


def test_a_vae_too_large_for_float32_is_checked_at_less(
    session: SpeedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    exact = speed_vae._Decoder.exact

    def short(self: Any, size: int) -> torch.Tensor:
        tried.append(size)
        if size > 256:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return exact(self, size)

    monkeypatch.setattr(speed_vae._Decoder, "exact", short)
    side = Side()
    side.module = torch.nn.ConvTranspose2d(4, 3, 8, 8)
    found = run(session, Request(("vae",), "custom", (1032,)), side)
    rows = {row["method"]: row for row in found["rows"]}
    assert (
        rows[speed_vae.EAGER]["median"] > 0
        and rows[speed_vae.EAGER]["note"] == "checked at 256x256"
    )
    assert tried[:2] == [512, 256]
    assert rows[speed_vae.OVERLAP]["median"] > 0 and rows[speed_vae.PER_TILE]["median"] > 0


@pytest.mark.usefixtures("_convs_of_ours")
def test_a_vae_is_measured_from_beside_where_it_takes_long(
    session: SpeedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers", reason="diffusers is a dev extra")
    monkeypatch.setattr(speed_job, "LONG_S", 0.0)
    found = run(session, Request(("vae",)), Standalone(torch.device("cpu")))
    assert [row["reason"] for row in found["rows"]] == ["", ""]
    assert all(row["runs"] >= 3 for row in found["rows"])


def test_a_folder_that_cannot_be_written(session: SpeedSession, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = run(session, IMAGE, Side(blocked / "results"))
    assert session.progress().state == "done"
    (note,) = found["notes"]
    assert note.startswith("the result could not be saved: ") and "file" not in note.split(":")[0]
    assert str(tmp_path) not in json.dumps(found)
    assert found["pictures"][0]["off"] == ""


def test_a_host_that_breaks_ends_the_test_not_the_session(session: SpeedSession) -> None:
    class Broken(Side):
        def attention_methods(self) -> Any:
            raise AttributeError("the WebUI moved it")

    run(session, ATTENTION, Broken())
    assert session.progress().state == "failed"
    assert "the WebUI moved it" in session.progress().text
    assert run(session, IMAGE, Side())["complete"]


def test_a_queue_that_breaks_is_a_refusal(session: SpeedSession) -> None:
    class Broken(Side):
        def queue(self) -> Any:
            raise RuntimeError("no lock")

    with pytest.raises(Busy, match="no lock"):
        session.start(IMAGE, Broken())
    assert not session.running and session.progress().state == "idle"


def test_results_are_kept_for_a_while(
    session: SpeedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib_rocm_sd.lab.speed_session.RESULTS_KEPT", 2)
    idents = [run(session, IMAGE, Side())["id"] for _ in range(3)]
    assert [session.result(ident) is not None for ident in idents] == [False, True, True]
    assert session.result("../../etc/passwd") is None


def test_a_result_as_a_document(session: SpeedSession) -> None:
    found = run(session, IMAGE, Side())
    assert speed_result.of(found).as_dict() == found
