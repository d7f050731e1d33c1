"""A client of our HTTP routes, and a speed test that goes on until it is told to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conftest import WebUI
from fastapi import FastAPI
from fastapi.testclient import TestClient

STATUS, BENCH, CHECK = (f"/rocm-sd/v1/{name}" for name in ("status", "bench", "check"))
JSON = {"Content-Type": "application/json"}
PATIENCE_S = 600.0
"""Only stops a test that hangs."""
SERVER_THREADS = 40
"""Of starlette's, for functions that are not async."""


class Bench:
    """A side of the speed test, and a part of it that goes on until it is told to end."""

    def __init__(self, webui: WebUI) -> None:
        self.go = threading.Event()
        self.reason = ""
        self.sides: list[Any] = []
        module = webui.library("lab.speed_session")
        module.PARTS = dict.fromkeys(module.PARTS, self.rows)
        module.machine = lambda device: {"card": "a card", "os": "Linux"}
        self.session = module.session
        self.row = webui.library("lab.rows").Row
        self.busy_error = module.Busy
        webui.library("hosts.webui.speedtest").side = self
        self.device = webui.devices.device

    def busy(self) -> str:
        return self.reason

    @contextmanager
    def queue(self) -> Iterator[None]:
        yield

    def output_directory(self) -> None:
        return None

    def rows(self, job: Any) -> Iterator[Any]:
        while not self.go.wait(0.01):
            job.told(0.5, "measuring")
            job.guard().check()
        reason = "cannot open /home/somebody/lib/libx.so"
        yield self.row("attention", "1024x1024", "rocm_sd", "ms", float("nan"), reason=reason)


def app_of(webui: WebUI) -> FastAPI:
    """A server's app that has heard of the WebUI's callbacks."""
    app = FastAPI()
    webui.script_callbacks.app_started_callback(None, app)
    assert not webui.errors_reported
    return app


def client_of(webui: WebUI) -> TestClient:
    return TestClient(app_of(webui))


def until(client: TestClient, ident: str, state: str) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = client.get(f"{BENCH}/{ident}").json()
        if answer["state"] == state:
            return dict(answer)
        assert time.monotonic() < end, answer
        time.sleep(0.01)
