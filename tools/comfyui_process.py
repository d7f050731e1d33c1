"""A real ComfyUI as a process of its own, asked over HTTP, for tests and tools."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "tools" / "comfyui_start.py"
START_S = 180.0
PICTURE_S = 300.0
Workflow = dict[str, Any]


class FailedError(Exception):
    """ComfyUI did not start, refused a question, or a workflow did not end well."""


@dataclass(frozen=True)
class Made:
    """What a workflow gave: its end, the pictures' files, texts by node, what it said meanwhile."""

    end: str
    pictures: tuple[bytes, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    messages: tuple[Any, ...] = ()

    @property
    def picture(self) -> bytes:
        """The only one."""
        (picture,) = self.pictures
        return picture


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
            raise FailedError(error.read().decode()) from error

    def begin(self, workflow: Workflow) -> str:
        """Give it a workflow to do; its name."""
        return str(json.loads(self.ask("/prompt", {"prompt": workflow}))["prompt_id"])

    def ended(self, name: str) -> Made:
        """Wait for a workflow's end, whichever it is."""
        until = time.monotonic() + PICTURE_S
        while not (known := json.loads(self.ask(f"/history/{name}"))):
            if time.monotonic() > until:
                raise FailedError(f"a workflow does not end:\n{self.said}")
            time.sleep(0.05)
        done, outputs = known[name]["status"], known[name]["outputs"]
        texts = {key: "\n".join(o["text"]) for key, o in outputs.items() if "text" in o}
        images = [image for o in outputs.values() for image in o.get("images", ())]
        end = done["status_str"]
        pictures = [self._file(image) for image in images] if end == "success" else []
        return Made(end, tuple(pictures), texts, tuple(done["messages"]))

    def make(self, workflow: Workflow) -> Made:
        """Run a workflow to its end, which must be a good one."""
        made = self.ended(self.begin(workflow))
        if made.end != "success":
            raise FailedError(f"a workflow failed: {made.messages}\n{self.said}")
        return made

    def _file(self, image: Mapping[str, str]) -> bytes:
        return self.ask(f"/view?filename={image['filename']}&type={image['type']}")

    @property
    def said(self) -> str:
        """The end of its console."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]


@contextmanager
def running(
    checkout: Path,
    python: str,
    folder: Path,
    nodes: Mapping[str, Path],
    flags: Sequence[str] = ("--cpu",),
    environment: Mapping[str, str] | None = None,
    page: Path | None = None,
) -> Iterator[Server]:
    """ComfyUI of `checkout`, all that it writes under `folder`. `nodes`: custom nodes by name.
    `page`: the folder of its page; over HTTP alone it needs none.
    """
    place, none = folder / "custom_nodes", folder / "page"
    for made in (place, none):
        made.mkdir(parents=True)
    for name, source in nodes.items():
        (place / name).symlink_to(source)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [python, str(START), str(checkout), *flags, "--port", str(port)]
    words += ["--base-directory", str(folder), "--front-end-root", str(page or none)]
    words += ["--database-url", "sqlite:///:memory:", "--disable-metadata"]
    log = folder / "log.txt"
    known = {"ROCM_SD_COMPARE_SPEED": "0", **os.environ, **(environment or {})}
    with log.open("w") as written:
        process = subprocess.Popen(words, env=known, stdout=written, stderr=subprocess.STDOUT)
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
            if process.poll() is not None or time.monotonic() > until:
                raise FailedError(f"ComfyUI did not start:\n{server.said}") from None
            time.sleep(0.5)
        else:
            return
