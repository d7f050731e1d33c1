"""The HTTP routes, on an app as the WebUI has it: status, the speed test. Who may: test_guard."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from api_help import (
    BENCH,
    CHECK,
    JSON,
    PATIENCE_S,
    SERVER_THREADS,
    STATUS,
    Bench,
    app_of,
    client_of,
    until,
)
from conftest import FakeGpu, Start, WebUI
from fastapi.testclient import TestClient
from gradio import routes


@pytest.fixture
def webui(start: Start, gpu: FakeGpu) -> WebUI:
    return start(gpu=gpu, args="--api")


@pytest.fixture
def bench(webui: WebUI) -> Iterator[Bench]:
    made = Bench(webui)
    yield made
    made.go.set()
    assert made.session.wait(PATIENCE_S)


# --- status


def test_status_says_what_runs(webui: WebUI) -> None:
    client = client_of(webui)
    webui.txt2img()
    answer = client.get(STATUS)
    assert answer.status_code == 200
    found = answer.json()
    assert found["device"]["gfx"] == "gfx1100"
    assert found["level"] == "Auto"
    assert found["attention"] == {
        "usable": True,
        "reasons": [],
        "in_use": True,
        "chosen": "ROCm SD",
    }
    assert found["background"] == {
        "running": False,
        "done": 0,
        "total": 0,
        "failure": "",
        "log": "",
    }
    assert found["speed_test"]["state"] == "idle"
    assert {row["variant"] for row in found["report"]["rows"]} == {"rocm_sd"}
    assert found["version"]
    assert found["versions"]["torch"]
    assert found["versions"]["gradio"].startswith(("3.", "4."))
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    found = client.get(STATUS).json()
    assert not found["attention"]["in_use"]
    assert found["attention"]["chosen"] == "sdp"


def test_status_of_a_device_that_is_not_ours(start: Start) -> None:
    found = client_of(start(gpu=FakeGpu(("an NVIDIA card",)))).get(STATUS).json()
    assert found["device"]["reasons"] == ["an NVIDIA card"]
    assert found["attention"] == {
        "usable": False,
        "reasons": ["an NVIDIA card"],
        "in_use": False,
        "chosen": "Doggettx",
    }
    assert found["vae"] == {"usable": False, "reasons": ["an NVIDIA card"]}


def test_status_without_paths_and_names(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    report = webui.library("report")
    log = webui.data / "cache" / "rocm_sd" / "compile.log"
    for text in (
        f"cannot write {log}: no space",
        f"{webui.data}: is read-only",
        "[Errno 2] No such file: '/mnt/my disk/john/lib.so'",
        "load C:\\Users\\John Doe\\lib\\amd.dll failed",
        "\\\\server\\share\\john\\x.dll",
        "of /home/john: /home/john/secret/thing.co, (/opt/john/rocm/lib/libamd.so.3)",
        "50 it/s at 4096x320/77, attention/vae, https://example.org/a/b",
    ):
        report.event(text)
    background = webui.library("runtime.background")
    state = background.BackgroundState(False, 3, 9, f"{log} is bad", str(log))
    background.background._state = state
    text = client_of(webui).get(STATUS).text
    for secret in ("john", "John", "Users", "/home", str(webui.data), webui.data.name, "secret"):
        assert secret not in text, secret
    found = json.loads(text)
    assert found["report"]["events"][-1].endswith("attention/vae, https://example.org/a/b")
    assert "cannot write compile.log: no space" in found["report"]["events"]
    assert "[Errno 2] No such file: 'lib.so'" in found["report"]["events"]
    assert "load amd.dll failed" in found["report"]["events"]
    assert found["background"]["log"] == "compile.log"
    assert found["background"]["failure"] == "compile.log is bad"


def test_status_waits_for_nothing_that_runs(webui: WebUI, bench: Bench) -> None:
    """A generation that measures holds the engine's lock, a test the queue's; and every thread of
    the server may be waiting for the queue."""
    app, held, done = app_of(webui), threading.Event(), threading.Event()
    waiting: list[int] = []
    left: list[int] = []

    @app.get("/waits")
    def waits() -> None:
        waiting.append(1)
        done.wait(PATIENCE_S)
        left.append(1)

    def generate() -> None:
        engine = webui.library("engine.engine").engine
        with webui.call_queue.queue_lock, engine._lock:
            held.set()
            done.wait(PATIENCE_S)
            left.append(1)

    with TestClient(app) as client:
        client.get(STATUS)
        threads = [threading.Thread(target=generate)]
        threads += [threading.Thread(target=lambda: client.get("/waits")) for _ in range(60)]
        for thread in threads:
            thread.start()
        try:
            assert held.wait(PATIENCE_S)
            end = time.monotonic() + PATIENCE_S
            while len(waiting) < SERVER_THREADS:
                assert time.monotonic() < end, len(waiting)
                time.sleep(0.01)
            answer = client.post(BENCH, json={})
            assert answer.status_code == 202
            for path in (STATUS, f"{BENCH}/{answer.json()['id']}"):
                assert client.get(path).status_code == 200
            assert client.get(STATUS).json()["speed_test"]["state"] == "running"
            assert not left, "an answer waited for a thread, or for a lock"
        finally:
            done.set()
            for thread in threads:
                thread.join(PATIENCE_S)


# --- the speed test


def test_a_test_from_its_start_to_its_end(webui: WebUI, bench: Bench) -> None:
    client = client_of(webui)
    answer = client.post(BENCH, json={"what": ["attention"], "preset": "custom", "sizes": [512]})
    assert answer.status_code == 202
    ident = answer.json()["id"]
    assert answer.json()["state"] == "running"
    found = until(client, ident, "running")
    assert found["result"]["request"] == {
        "what": ["attention"],
        "preset": "custom",
        "sizes": [512],
    }
    bench.go.set()
    found = until(client, ident, "done")
    assert found["fraction"] == 1.0
    assert found["result"]["complete"]
    assert found["result"]["rows"][0]["method"] == "rocm_sd"
    assert found["result"]["rows"][0]["median"] is None
    assert "somebody" not in json.dumps(found)
    later = client.post(BENCH, json={}).json()["id"]
    until(client, later, "done")
    assert client.get(f"{BENCH}/{ident}").json()["state"] == "done"


def test_one_test_at_a_time(webui: WebUI, bench: Bench) -> None:
    client = client_of(webui)
    assert client.post(BENCH, json={}).status_code == 202
    answer = client.post(BENCH, json={})
    assert answer.status_code == 409
    assert answer.json() == {"detail": "a speed test is running"}


def test_not_while_a_picture_is_made(webui: WebUI, bench: Bench) -> None:
    client = client_of(webui)
    bench.reason = "a picture is being made"
    answer = client.post(BENCH, json={})
    assert (answer.status_code, answer.json()["detail"]) == (409, "a picture is being made")


def test_cancelling(webui: WebUI, bench: Bench) -> None:
    client = client_of(webui)
    ident = client.post(BENCH, json={}).json()["id"]
    assert client.delete(f"{BENCH}/{ident}").status_code == 200
    until(client, ident, "cancelled")
    assert client.delete(f"{BENCH}/{ident}").json()["state"] == "cancelled"  # again: nothing
    bench.go.set()
    assert bench.session.wait(PATIENCE_S)
    other = client.post(BENCH, json={}).json()["id"]
    until(client, other, "done")
    assert client.get(f"{BENCH}/{ident}").json()["state"] == "cancelled"
    assert client.delete(f"{BENCH}/{ident}").json()["state"] == "cancelled"


def test_an_id_that_is_not_known(webui: WebUI) -> None:
    client = client_of(webui)
    for ident in ("nothing", "0" * 5000, "%00", "<script>", "..%2f..", "a b"):
        for ask in (client.get, client.delete):
            answer = ask(f"{BENCH}/{ident}")
            assert answer.status_code == 404
            assert "<script>" not in answer.text


BAD: list[tuple[bytes, int | None, str]] = [
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"\xff\xfe", 400, "not JSON"),
    (b"[" * 10000, 400, "not JSON"),
    (b'{"sizes": [NaN], "preset": "custom"}', 400, "not JSON"),
    (b'{"sizes": [' + b"9" * 9000 + b'], "preset": "custom"}', None, ""),
    (b" " * 20000, 413, "more than 16384 bytes"),
    (b"[]", 422, "an object"),
    (b"null", 422, "an object"),
    (b'{"hack": 1}', 422, "unknown: 'hack'"),
    (b'{"what": "everything"}', 422, "what"),
    (b'{"what": ["<script>alert(1)</script>"]}', 422, "what"),
    (b'{"preset": "slow"}', 422, "one of quick, standard, custom"),
    (b'{"preset": "custom", "sizes": [-64]}', 422, "size"),
    (b'{"preset": "custom", "sizes": [100000]}', 422, "size"),
    (b'{"preset": "custom", "sizes": [513]}', 422, "size"),
    (b'{"preset": "custom", "sizes": [1e400]}', 422, "size"),
    (b'{"preset": "custom", "sizes": ' + json.dumps([512] * 99).encode() + b"}", 422, "8"),
]


def test_bad_requests(webui: WebUI, bench: Bench) -> None:
    client = client_of(webui)
    for body, status, words in BAD:
        answer = client.post(BENCH, content=body, headers=JSON)
        assert answer.status_code == (status or answer.status_code), body[:80]
        assert 400 <= answer.status_code < 500, body[:80]
        assert answer.headers["content-type"] == "application/json"
        assert words in answer.json()["detail"]
        assert len(answer.json()["detail"]) < 300
        assert not bench.session.running


def test_only_json_is_taken(webui: WebUI, bench: Bench) -> None:
    """What a page of another origin can have a browser send is refused."""
    client = client_of(webui)
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"Content-Type": kind} if kind else {}
        answer = client.post(BENCH, content=b"{}", headers=headers)
        assert answer.status_code == 415
        assert not bench.session.running


def test_a_client_that_leaves_is_no_error(
    webui: WebUI, bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    app, sent = app_of(webui), []

    @app.middleware("http")
    async def as_the_webuis_own(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    messages = iter([{"type": "http.request", "body": b'{"what": [', "more_body": True}])

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": BENCH,
        "raw_path": BENCH.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"99")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 7860),
        "client": ("127.0.0.1", 50000),
        "root_path": "",
    }
    asyncio.run(app(scope, receive, send))
    assert [message.get("status") for message in sent[:1]] in ([400], [])
    assert not bench.session.running
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_large_body_is_not_kept(webui: WebUI, bench: Bench) -> None:
    answer = client_of(webui).post(BENCH, content=b" " * (1 << 24), headers=JSON)
    assert answer.status_code == 413


# --- the server


def ours_of(app: Any) -> list[tuple[str, str]]:
    return [
        (route.path, method)
        for route in app.router.routes
        if getattr(route, "path", "").startswith("/rocm-sd")
        for method in route.methods
    ]


EXPECTED = [
    (STATUS, "GET"),
    (CHECK, "POST"),
    (BENCH, "POST"),
    (f"{BENCH}/{{ident}}", "GET"),
    (f"{BENCH}/{{ident}}", "DELETE"),
]


def test_reloading_adds_no_second_route(webui: WebUI, bench: Bench) -> None:
    app = app_of(webui)
    client = TestClient(app)
    ident = client.post(BENCH, json={}).json()["id"]
    for _ in range(5):
        webui.initialize.reload_ui()
        webui.script_callbacks.app_started_callback(None, app)
    assert ours_of(app) == EXPECTED
    other = TestClient(app_of(webui))  # the server after "Reload UI"
    assert other.get(f"{BENCH}/{ident}").json()["state"] == "running"
    bench.go.set()
    until(other, ident, "done")
    assert not webui.errors_reported


def test_on_gradios_own_app(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, serve=True)
    app = routes.App.create_app(webui.shared.demo)
    webui.script_callbacks.app_started_callback(webui.shared.demo, app)
    assert ours_of(app) == EXPECTED
    client = TestClient(app)
    assert client.get(STATUS).json()["device"]["gfx"] == "gfx1100"
    assert client.get(f"{BENCH}/x").status_code == 404
    assert not webui.errors_reported


def test_in_a_webui_that_has_no_optimizers(start: Start, gpu: FakeGpu) -> None:
    def forget(webui: WebUI) -> None:
        del webui.sd_hijack.list_optimizers
        del webui.sd_hijack.apply_optimizations

    webui = start(gpu=gpu, before=forget, args="--skip-load-model-at-start")
    found = client_of(webui).get(STATUS).json()
    assert not found["attention"]["in_use"]
    for part in ("attention", "vae"):
        assert found[part]["usable"] is False
        assert found[part]["reasons"] == [
            "this WebUI has no place for ours: it has no sd_hijack.apply_optimizations"
        ]


def test_every_route_is_documented() -> None:
    from conftest import CHECKOUT

    text = (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8")
    for path, method in EXPECTED:
        assert f"`{method} {path.replace('{ident}', '{id}')}`" in text
