"""Pictures from a running WebUI over HTTP, for the tools that compare them."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from tools.webui_process import Running, started

ROOT = Path(__file__).resolve().parent.parent
READY = ("Uvicorn running on",)
SCRIPT = "rocm sd optimization"
PICTURE = {
    "prompt": "a photo of an astronaut riding a horse",
    "seed": 1234,
    "sampler_name": "Euler",
    "steps": 20,
    "width": 512,
    "height": 512,
    "override_settings": {"live_previews_enable": False},
}
PATIENCE_S = 150.0
PLAN_LIMIT_S = 300.0
ANSWER_S = 120.0

Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Made:
    """One answer: the pictures' files, the first one's last line of infotext, seconds."""

    files: tuple[bytes, ...]
    infotext: str
    seconds: float

    @cached_property
    def frames(self) -> tuple[Pixels, ...]:
        """Each picture's pixels; a film is several pictures."""
        opened = (Image.open(io.BytesIO(file)) for file in self.files)
        frames = (frame for image in opened for frame in ImageSequence.Iterator(image))
        return tuple(np.asarray(frame.convert("RGB")).astype(np.int16) for frame in frames)

    @property
    def ours(self) -> str:
        """What the infotext says of us."""
        return self.infotext[self.infotext.find("ROCm SD") :] if "ROCm SD" in self.infotext else ""


class Client:
    """Of one running WebUI."""

    answer_s = ANSWER_S

    def __init__(self, running: Running, begun: float) -> None:
        self.running, self.begun = running, begun

    def ask(self, route: str, body: Any = None) -> Any:
        """The answer to a GET, or to a POST of `body`. Raises RuntimeError with an error's text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.running.address + route, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.answer_s) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            said = error.read()[:300].decode(errors="replace")
            raise RuntimeError(f"{route}: {error.code} {said}") from None

    def make(self, body: Mapping[str, Any], route: str = "txt2img") -> Made:
        begin = time.monotonic()
        answer = self.ask(f"sdapi/v1/{route}", dict(body))
        seconds = time.monotonic() - begin
        text = json.loads(answer["info"])["infotexts"][0].split("\n")[-1]
        return Made(tuple(map(base64.b64decode, answer["images"])), text, seconds)

    def status(self) -> Any:
        return self.ask("rocm-sd/v1/status")

    def since_start(self) -> float:
        return time.monotonic() - self.begun

    def settled(self) -> Any:
        """The status once nothing is tried any more."""
        end = time.monotonic() + PATIENCE_S
        while (now := self.status()).get("trials", {}).get("running") and time.monotonic() < end:
            time.sleep(0.25)
        return now

    def settle(self, make: Callable[[], object]) -> None:
        """Make pictures until nothing is compiled or tried any more."""
        end = time.monotonic() + PLAN_LIMIT_S
        while time.monotonic() < end:
            make()
            now = self.status()
            if not now["background"]["running"] and not now["trials"]["running"]:
                return
            time.sleep(1)


@contextmanager
def serving(
    launcher: str,
    flags: list[str],
    data: Path,
    extensions: Mapping[str, Path],
    environment: Mapping[str, str],
    console: Path,
) -> Iterator[Running]:
    """A WebUI with its data in `data`, without its page. Its console is added to a file.

    `extensions` are folders by the name that the WebUI sees; a file is an extension's only script.
    """
    for name, source in extensions.items():
        place = data / "extensions" / name
        if place.exists():
            continue
        if source.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(source.absolute(), target_is_directory=True)
        else:
            (place / "scripts").mkdir(parents=True)
            shutil.copy(source, place / "scripts")
    flags = ["--api", "--nowebui", *flags]
    environment = {"SD_WEBUI_RESTARTING": "1", **environment}
    with started(sys.executable, Path(launcher), data, flags, environment, READY) as running:
        try:
            yield running
        finally:
            with console.open("a", encoding="utf-8") as file:
                file.write(running.said + "\n=====\n")
