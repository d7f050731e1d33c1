"""What the tests of the speed test share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import WebUI

WAIT_S = 600


class Test:
    """The speed test of a WebUI, as the tab starts it."""

    __test__ = False

    def __init__(self, webui: WebUI) -> None:
        self.webui = webui
        self.session = webui.library("lab.speed_session").session
        self.side = webui.library("hosts.webui.speedtest").side
        self.view = webui.library("hosts.ui.speed_tab").View(self.session, self.side)

    def start(self, *what: str) -> str:
        return self.view.start(list(what), "quick", "")

    def run(self, *what: str) -> dict[str, Any]:
        """The finished document."""
        assert self.start(*what) == ""
        assert self.session.wait(WAIT_S)
        progress = self.session.progress()
        assert progress.state == "done", progress
        return self.session.result(progress.id)

    @property
    def folder(self) -> Path:
        return self.webui.data / "outputs" / "rocm-sd-speed-test"


def method(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["method"] == name]


def reasons(document: dict[str, Any]) -> list[str]:
    return [row["reason"] for row in document["rows"]]
