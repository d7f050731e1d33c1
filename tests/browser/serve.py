"""Serves the WebUI's double as webui.py serves the WebUI, until its standard input ends.

Runs in a process of its own, with the gradio of an environment. Commands are lines on standard
input; each is answered by a line of JSON that begins with ANSWER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ANSWER = "@@ "
IDLE_LIMIT_S = 600.0
HERE = Path(__file__).resolve().parent
DOUBLE = HERE.parent / "webui" / "double"
PLAYED = HERE.parent / "lab" / "played_selftest.py"
SELF_TEST = "self-test.json"
"""In the data folder: how the next self-test ends, and its file."""
sys.path[0] = str(HERE.parent / "webui" / "inside")

import gradio as gr
import torch
from conftest import FakeGpu  # type: ignore[import-not-found]


class Queue:
    """The WebUI's queue lock; `waiting` has an entry for each who waits for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.waiting: list[int] = []

    def acquire(self, *words: Any, **options: Any) -> Any:
        self.waiting.append(1)
        try:
            return self._lock.acquire(*words, **options)
        finally:
            self.waiting.pop()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Server:
    """One WebUI at a fixed port."""

    def __init__(self, port: int, with_gpu: bool) -> None:
        self.port = port
        self.data = os.environ["ROCM_SD_DOUBLE_DATA"]
        if with_gpu:
            torch.cuda.is_available = lambda: True  # the WebUI's priorities hang on it
            gpu = FakeGpu()
            gpu.convs = gpu.norms = True
            gpu.install(Path(self.data) / "extensions" / "rocm-sd")
        from modules import call_queue

        call_queue.queue_lock = self.queue = Queue(call_queue.queue_lock)
        from modules import (
            devices,
            initialize,
            script_callbacks,
            sd_models,
            shared,
            ui_gradio_extensions,
            ui_page,
        )

        self.shared, self.callbacks = shared, script_callbacks
        self.initialize, self.page = initialize, ui_page
        self.extensions = ui_gradio_extensions
        devices.dtype_unet = devices.dtype_vae = torch.float16  # what the VAE's kernels take
        sd_models.loaded["whole"] = True  # a UNet of all kinds of blocks
        initialize.initialize()
        self.play_self_tests()
        self.app: Any = None

    def start(self) -> None:
        """In the order of webui.py."""
        self.callbacks.before_ui_callback()
        self.shared.demo = self.page.create_ui()
        limit = {"concurrency_count": 64} if gr.__version__.startswith("3.") else {}
        self.shared.demo.queue(**limit)
        self.extensions.reload_javascript()
        self.app, _, _ = self.shared.demo.launch(
            server_name="127.0.0.1",
            server_port=self.port,
            prevent_thread_lock=True,
            quiet=True,
            inbrowser=False,
            share=False,
            allowed_paths=[str(DOUBLE), self.data],
        )
        self.callbacks.app_started_callback(self.shared.demo, self.app)

    def reload(self) -> dict[str, Any]:
        """What "Reload UI" does."""
        self.shared.demo.close()
        time.sleep(0.2)
        self.callbacks.app_reload_callback()
        self.callbacks.script_unloaded_callback()
        self.initialize.initialize_rest(reload_script_modules=True)
        self.start()
        return self.state()

    def play_self_tests(self) -> None:
        """A process without a card stands for the self-test."""
        from lib_rocm_sd.lab import card_check

        def command(path: Path, device: Any) -> list[str]:
            end, document = json.loads((Path(self.data) / SELF_TEST).read_text(encoding="utf-8"))
            return [sys.executable, "-I", str(PLAYED), str(path), end, json.dumps(document)]

        card_check.command = command

    def state(self) -> dict[str, Any]:
        """What a test wants to know of the process."""
        from modules import errors, scripts

        from lib_rocm_sd.lab.speed_session import session

        config = self.shared.demo.get_config_file()
        ids = [component["props"].get("elem_id") for component in config["components"]]
        listed = self.callbacks.callback_map.items()
        return {
            "callbacks": {name: [e.name for e in entries] for name, entries in listed if entries},
            "components": sorted(str(i) for i in ids if i and "rocm_sd" in str(i)),
            "events": len(config["dependencies"]),
            "routes": sorted(str(getattr(route, "path", "")) for route in self.app.routes),
            "settings": sorted(key for key in self.shared.opts.data_labels if "rocm" in key),
            "values": {k: v for k, v in self.shared.opts.data.items() if "rocm" in k},
            "arguments": len(scripts.scripts_txt2img.inputs),
            "errors": [str(error) for error in errors.records],
            "test": session.progress().state,
            "running": session.running,
            "waiting": len(self.queue.waiting),
        }

    def idle(self) -> dict[str, Any]:
        """`state`, when no speed test runs any more."""
        from lib_rocm_sd.lab.speed_session import session

        session.wait(IDLE_LIMIT_S)
        return self.state()


def main() -> None:
    """Arguments: the port; "gpu" or "cpu"."""
    server = Server(int(sys.argv[1]), sys.argv[2] == "gpu")
    server.start()
    print(ANSWER + json.dumps(server.state()), flush=True)
    commands = {"state": server.state, "idle": server.idle, "reload": server.reload}
    for line in sys.stdin:
        print(ANSWER + json.dumps(commands[line.strip()]()), flush=True)
    os._exit(0)  # gradio's threads would go on


if __name__ == "__main__":
    main()
