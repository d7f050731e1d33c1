"""A real ComfyUI as a process of its own on the CPU, asked over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).parent / "inside" / "tiny_models"
START_S = 180.0
PICTURE_S = 300.0


@dataclass(frozen=True)
class Made:
    """What a workflow gave: the picture's file, and texts by node."""

    picture: bytes
    texts: dict[str, str]


class Server:
    """One that answers at `port`; `log` is what it has written."""

    def __init__(self, port: int, log: Path) -> None:
        self.address, self.log = f"http://127.0.0.1:{port}", log

    def ask(self, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=60) as answer:
                return bytes(answer.read())
        except HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def make(self, workflow: dict[str, Any]) -> Made:
        """Run a workflow to its end, which must be a good one."""
        name = json.loads(self.ask("/prompt", {"prompt": workflow}))["prompt_id"]
        until = time.monotonic() + PICTURE_S
        while not (known := json.loads(self.ask(f"/history/{name}"))):
            assert time.monotonic() < until, self.log.read_text(encoding="utf-8")[-4000:]
            time.sleep(0.2)
        done = known[name]
        assert done["status"]["status_str"] == "success", done["status"]["messages"]
        texts = {key: "\n".join(o["text"]) for key, o in done["outputs"].items() if "text" in o}
        (image,) = [i for o in done["outputs"].values() for i in o.get("images", ())]
        return Made(self.ask(f"/view?filename={image['filename']}&type={image['type']}"), texts)


@contextmanager
def running(
    checkout: Path, python: str, folder: Path, *, ours: bool = True, **environment: str
) -> Iterator[Server]:
    """ComfyUI of `checkout`, all that it writes under `folder`; `ours`: with this custom node."""
    nodes = folder / "custom_nodes"
    nodes.mkdir(parents=True)
    (nodes / "tiny_models").symlink_to(TINY)
    if ours:
        (nodes / "rocm_sd").symlink_to(ROOT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = folder / "page"  # asked over HTTP alone, it needs none
    page.mkdir()
    words = [
        python,
        "main.py",
        "--front-end-root",
        str(page),
        "--cpu",
        "--port",
        str(port),
        "--base-directory",
        str(folder),
    ]
    words += ["--database-url", "sqlite:///:memory:", "--disable-metadata"]
    log = folder / "log.txt"
    known = {**os.environ, **environment}
    known.pop("PYTHONPATH", None)
    with log.open("w") as written:
        process = subprocess.Popen(
            words, cwd=checkout, env=known, stdout=written, stderr=subprocess.STDOUT
        )
        try:
            server = Server(port, log)
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(30)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            server.ask("/system_stats")
        except (URLError, ConnectionError):
            said = server.log.read_text(encoding="utf-8")[-4000:]
            assert process.poll() is None and time.monotonic() < until, said
            time.sleep(0.5)
        else:
            return
