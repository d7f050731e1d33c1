"""Starts serve.py in an environment, and talks to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any

from tests.webui.environments import CHECKOUT, Environment

ANSWER = "@@ "
EXTENSION = "rocm-sd"
SELF_TEST = "self-test.json"
"""In the data folder: how the next self-test ends, and its file."""
ANSWER_LIMIT_S = 660.0
"""Longer than serve.py waits until nothing runs."""


class Served:
    """A WebUI's double at `address`, as long as the `with` lasts."""

    def __init__(self, environment: Environment, data: Path, device: str = "gpu") -> None:
        self.environment, self.data, self.device = environment, data, device
        self.address = ""
        self.said: deque[str] = deque(maxlen=200)
        self._answers: Queue[dict[str, Any]] = Queue()

    def __enter__(self) -> Served:
        folder = self.data / "extensions" / EXTENSION
        folder.parent.mkdir(parents=True)
        folder.symlink_to(CHECKOUT, target_is_directory=True)
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}/"
        double = CHECKOUT / "tests" / "webui" / "double"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.environment.folder), str(double)]),
            "ROCM_SD_DOUBLE_DATA": str(self.data),
            "ROCM_SD_DOUBLE_ARGS": "",
            "XDG_CACHE_HOME": str(self.data / "user-cache"),
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": str(self.data / "tmp"),
            "HF_HUB_OFFLINE": "1",
            "no_proxy": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        serve = Path(__file__).parent / "serve.py"
        self._process = subprocess.Popen(
            [sys.executable, str(serve), str(port), self.device],
            cwd=self.data,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.first = self._answer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(600)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(600)

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to "state", "idle" or "reload"."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def console(self) -> str:
        """The last lines that the WebUI wrote."""
        return "".join(self.said)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line[len(ANSWER) :]))
            else:
                self.said.append(line)
        self._process.stdout.close()
        self._answers.put({})

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=ANSWER_LIMIT_S)
        except Empty:
            answer = {}
        assert answer, f"the WebUI's double has ended or hangs:\n{self.console()[-4000:]}"
        return answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
