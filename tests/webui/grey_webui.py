"""A WebUI that paints one grey, for the tests of what asks a real one for pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from PIL import Image

from tools.webui_client import SCRIPT, Client
from tools.webui_matrix import bench
from tools.webui_matrix.values import LISTS

KNOWN = [
    {"label": "Active", "value": False},
    {"label": "Scale", "value": 1},
    {"label": "Active", "value": True},
]


def png(value: int, side: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


class Painter(Client):
    """A WebUI that paints one grey. `shade` has it by the request; a text of it is an error."""

    def __init__(self, shade: Callable[[dict[str, Any], bool], int]) -> None:
        process = SimpleNamespace(poll=lambda: None)
        super().__init__(cast("Any", SimpleNamespace(said="", process=process)), 0.0)
        self.shade = shade
        self.set: dict[str, Any] = {bench.OPTIMIZER: "Automatic", "sd_vae": "none"}
        self.asked: list[tuple[str, bool, str]] = []

    def ask(self, route: str, body: Any = None) -> Any:
        if route == "sdapi/v1/script-info":
            ours = {"label": "Enable", "value": True}
            scripts = {SCRIPT: [ours], "theirs": KNOWN}
            return [
                {"name": name, "is_img2img": img2img, "is_alwayson": True, "args": args}
                for name, args in scripts.items()
                for img2img in (False, True)
            ]
        if route == "sdapi/v1/options":
            self.set |= body or {}
            return dict(self.set)
        if route == "rocm-sd/v1/status":
            return STATUS
        if route in {where for where, _ in LISTS.values()}:
            return []
        return self._painted(route, body)

    def _painted(self, route: str, body: Any) -> Any:
        on = body["alwayson_scripts"][SCRIPT]["args"][0]
        self.asked.append((route.split("/")[-1], on, self.set[bench.OPTIMIZER]))
        shade = self.shade(body, on)
        if shade < 0:
            raise RuntimeError("out of memory")
        text = "x\nSteps: 8, ROCm SD: attention" if on else "x\nSteps: 8"
        image = base64.b64encode(png(shade)).decode()
        return {
            "images": [image] * body.get("n_iter", 1),
            "info": json.dumps({"infotexts": [text]}),
        }


STATUS: dict[str, Any] = {
    "attention": {"reasons": []},
    "unet": {"blocks": [{"kind": "one", "ours": 3, "total": 4}], "trouble": ""},
    "report": {"rows": [{"op": "attention", "variant": "ours"}], "events": ["a", "b", "c", "d"]},
    "background": {"running": False},
    "trials": {"running": False},
}


class Everything(Painter):
    """A WebUI that has a model of each kind."""

    def ask(self, route: str, body: Any = None) -> Any:
        name = (
            "a plain locon loconcp dora loha lokr glora oft boft full norm ia3 canny-b t2iadapter"
        )
        names = [*name.split(), "ip-adapter"]
        if route.endswith("model_list"):
            return {"model_list": names}
        if route.endswith("embeddings"):
            return {"loaded": dict.fromkeys(names)}
        if route in {where for where, _ in LISTS.values()}:
            return [{key: name for key in ("name", "title", "model_name")} for name in names]
        return super().ask(route, body)
