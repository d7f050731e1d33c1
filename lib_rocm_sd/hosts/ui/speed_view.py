"""What the Speed test tab does: starts, cancels and follows the session, for any number of pages.

A page names what it shows by a token; only what has changed since is made and sent again. So a page
that is closed and opened again, or a second one, shows the same as the first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.hosts.ui import speed_html, speed_pictures
from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.speed_job import HostSide
from lib_rocm_sd.lab.speed_result import FILES, Document, history, parse
from lib_rocm_sd.lab.speed_session import Busy, Progress, SpeedSession
from lib_rocm_sd.lab.speed_text import to_markdown

NOTHING_YET = "No test has run yet. Choose what to measure, then press Run."
MOST_FILES_TRIED = 5


@dataclass(frozen=True)
class Content:
    """What a page shows of a result, as HTML, and the result as Markdown."""

    results: str = ""
    bars: str = ""
    pictures: str = ""
    history: str = ""
    machine: str = ""
    exports: str = ""
    markdown: str = ""


@dataclass(frozen=True)
class State:
    """What a page shows. `content`: None where the page has it already."""

    status: str
    can_run: bool
    can_cancel: bool
    token: str
    content: Content | None


class View:
    """The tab of one process. Called in the web server's worker threads."""

    def __init__(self, session: SpeedSession, side: HostSide) -> None:
        self.session = session
        self.side = side
        self._cancelled = ""

    def state(self, token: str) -> State:
        """For a page that shows `token`; "" for one that shows nothing."""
        progress, running = self.session.progress(), self.session.running
        document = self._document(progress)
        now = self._token(progress, running, document)
        return State(
            speed_html.status(*self._line(progress, running, document), time.monotonic_ns()),
            can_run=not running,
            can_cancel=running and progress.state == "running" and progress.id != self._cancelled,
            token=now,
            content=None if now == token else self._content(progress, document),
        )

    def start(self, what: Sequence[str], preset: str, sizes: str) -> str:
        """Begin a test; why none began, or ""."""
        asked = {"what": list(what or ()), "preset": preset}
        try:
            if preset == "custom":
                asked["sizes"] = sizes_of(sizes)
            self.session.start(parse(asked), self.side)
        except (Busy, ValueError) as refusal:
            text = str(refusal)
            return f"Not started: {text}."
        return ""

    def cancel(self) -> None:
        """Cancel the test that runs, if one does."""
        self._cancelled = self.session.progress().id
        self.session.cancel()

    def _line(
        self, progress: Progress, running: bool, document: Document | None
    ) -> tuple[str, float, str]:
        """State, fraction and text for people."""
        if progress.state == "running":
            text = "cancelling" if progress.id == self._cancelled else progress.text
            return "running", progress.fraction, text
        if running:
            return "running", progress.fraction, "waiting for the device to finish"
        if progress.state == "idle":
            return "idle", 0.0, NOTHING_YET if document is None else "The last result is shown."
        return progress.state, progress.fraction, f"{progress.text[:1].upper()}{progress.text[1:]}."

    def _document(self, progress: Progress) -> Document | None:
        """Document of the running or the last test; the newest file where this process had none."""
        if progress.id:
            found = self.session.result(progress.id)
            return None if found is None else speed_result.of(found)
        return _newest(self._directory())

    def _directory(self) -> Path | None:
        return self.side.output_directory()

    def _token(self, progress: Progress, running: bool, document: Document | None) -> str:
        if document is None:
            return f"nothing {running}"
        counts = len(document.rows), len(document.pictures), len(document.machine)
        return f"{document.id} {progress.state} {running} {counts}"

    def _content(self, progress: Progress, document: Document | None) -> Content:
        if document is None:
            return Content()
        directory = self._directory()
        over = progress.state != "running"
        shots = self.session.shots(document.id)
        looks = speed_pictures.of_shots(shots)
        if not shots:
            looks = speed_pictures.of_files(document, directory)
        return Content(
            results=speed_html.results(document),
            bars=speed_html.bars(document),
            pictures=speed_html.pictures(looks, document.id),
            history=speed_html.history(history(directory, document.machine)) if over else "",
            machine=speed_html.machine(document.machine),
            exports=speed_html.exports(document, directory) if over else "",
            markdown=to_markdown(document) if over else "",
        )


def sizes_of(text: str) -> list[Any]:
    """The sizes that people write: numbers with spaces, commas or semicolons between.

    What is not a number stays as it is, for `request.parse` to complain of.
    """
    parts = [part for part in re.split(r"[\s,;]+", str(text or "")) if part]
    return [int(part) if re.fullmatch(r"[+-]?[0-9]{1,9}", part) else part for part in parts]


def _newest(directory: Path | None) -> Document | None:
    """The newest result in a folder, by the date in its name; None where none can be read."""
    for path in list(reversed(speed_result.files(directory, FILES)))[:MOST_FILES_TRIED]:
        try:
            return speed_result.read(path)
        except (OSError, ValueError):
            continue
    return None
