"""The Speed test tab: starts, cancels and follows the session, for any number of pages, as gradio
shows it, from 3.41 on. Above it is the part that checks the card, where there is one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.hosts.ui import check_part, speed_html
from lib_rocm_sd.hosts.ui.check_part import CheckView
from lib_rocm_sd.hosts.ui.following import asking, follow, major, on
from lib_rocm_sd.hosts.ui.speed_html import TITLES, notice
from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.rows import duration
from lib_rocm_sd.lab.speed_job import HostSide
from lib_rocm_sd.lab.speed_result import (
    FILES,
    LEAST_SIZE,
    MOST_SIZE,
    MOST_SIZES,
    STEP,
    WHAT,
    Document,
    history,
    parse,
)
from lib_rocm_sd.lab.speed_session import Busy, Progress, SpeedSession
from lib_rocm_sd.lab.speed_text import to_markdown

TITLE = "Speed test"
TAB_ID = "rocm_sd_speed_test"
PREFIX = "rocm_sd_speed"
"""Begins the ids of the tab's elements."""
PRESET_LABELS = (
    ("Quick, about 30 s", "quick"),
    ("Standard, about 3 min", "standard"),
    ("Custom sizes", "custom"),
)
ABOUT = (
    "Measures what you gain from this extension on this machine. Times are medians of several "
    "runs, and each result is compared with an exact one before it is timed. Generations wait "
    "while a test runs. Nothing leaves this machine."
)
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
            left = f"; {duration(progress.left_s)} left" if progress.left_s else ""
            text = "cancelling" if progress.id == self._cancelled else progress.text + left
            return "running", progress.fraction, text
        if running:
            return "running", progress.fraction, "waiting for the device to finish"
        if progress.state == "idle":
            return "idle", 0.0, NOTHING_YET if document is None else "The last result is shown."
        return progress.state, progress.fraction, f"{progress.text[:1].upper()}{progress.text[1:]}."

    def _document(self, progress: Progress) -> Document | None:
        """Document of the running or the last test; the newest file where this process had none."""
        if progress.id:
            content = self.session.result(progress.id)
            return None if content is None else speed_result.of(content)
        return _newest(self.side.output_directory())

    def _token(self, progress: Progress, running: bool, document: Document | None) -> str:
        if document is None:
            return f"nothing {running}"
        counts = len(document.rows), len(document.pictures), len(document.machine)
        return f"{document.id} {progress.state} {running} {counts}"

    def _content(self, progress: Progress, document: Document | None) -> Content:
        if document is None:
            return Content()
        directory = self.side.output_directory()
        over = progress.state != "running"
        shots = self.session.shots(document.id)
        looks = speed_html.of_shots(shots) or speed_html.of_files(document, directory)
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


# -- by gradio ------------------------------------------------------------------------------------


def build(session: SpeedSession, side: HostSide, checked: CheckView) -> Any:
    """The tab as a gr.Blocks, made outside of another."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as blocks:
        content(gr, blocks, View(session, side), checked)
    return blocks


def content(gr: Any, blocks: Any, view: View, checked: CheckView | None = None) -> None:
    """Put the tab's components into gradio's current context, which is `blocks`."""
    with gr.Column(elem_id=_id("column")):
        if checked is not None:
            check_part.content(gr, blocks, checked)
        gr.HTML(f"<p>{ABOUT}</p>")
        asked = _controls(gr)
        with gr.Row(elem_id=_id("buttons")):
            run = gr.Button("Run", variant="primary", elem_id=_id("run"))
            cancel = gr.Button("Cancel", interactive=False, elem_id=_id("cancel"))
        said = gr.HTML(visible=False, elem_id=_id("notice"))
        status = gr.HTML(elem_id=_id("status"))
        shown, parts = _shown(gr)
    poll, token = asking(gr, PREFIX)
    page = [status, run, cancel, token, *shown, *parts]
    states = _States(gr, view)
    on(poll.click, states.poll, [token], page)
    on(run.click, states.start, [*asked, token], [said, *page])
    on(cancel.click, states.cancel, [token], [said, *page])
    _, preset, sizes = asked
    for event in (preset.change, blocks.load):  # the WebUI may have another default for it
        on(event, states.sizes, [preset], [sizes])
    follow(gr, blocks, PREFIX)


def _id(name: str) -> str:
    return f"{PREFIX}_{name}"


def _controls(gr: Any) -> list[Any]:
    """What, preset, sizes."""
    with gr.Row():
        what = gr.CheckboxGroup(
            [(TITLES[part], part) for part in WHAT],
            value=list(WHAT),
            label="Measure",
            elem_id=_id("what"),
        )
        preset = gr.Radio(list(PRESET_LABELS), value="quick", label="Preset", elem_id=_id("preset"))
    sizes = gr.Textbox(
        "512, 1024",
        label=f"Sizes for Custom, pixels a side: {LEAST_SIZE} to {MOST_SIZE}, multiples of {STEP}, "
        f"at most {MOST_SIZES}",
        max_lines=1,
        interactive=False,
        elem_id=_id("sizes"),
    )
    return [what, preset, sizes]


def _shown(gr: Any) -> tuple[list[Any], list[Any]]:
    """The components of a result, in the order of Content, and the parts that some are in.

    What is empty is not shown.
    """
    results = gr.HTML(visible=False, elem_id=_id("results"))
    bars = gr.HTML(visible=False, elem_id=_id("bars"))

    def part(label: str, name: str, open_: bool) -> Any:
        return gr.Accordion(label, open=open_, visible=False, elem_id=_id(name))

    with part("Pictures, off and on", "looks", True) as looks:
        pictures = gr.HTML(elem_id=_id("pictures"))
    with part("Earlier runs of this machine", "past", True) as earlier:
        past = gr.HTML(elem_id=_id("history"))
    with part("Machine", "facts", False) as facts:
        machine = gr.HTML(elem_id=_id("machine"))
    with part("Export", "export", False) as export:
        exports = gr.HTML(elem_id=_id("exports"))
        markdown = gr.Textbox(
            label="Markdown, for posting",
            lines=8,
            max_lines=16,
            interactive=False,
            elem_id=_id("markdown"),
            **({"show_copy_button": True} if major(gr) < 6 else {"buttons": ["copy"]}),
        )
        markdown.do_not_save_to_config = True
    shown = [results, bars, pictures, past, machine, exports, markdown]
    return shown, [looks, earlier, facts, export]


class _States:
    """The view's answers as gradio takes them."""

    def __init__(self, gr: Any, view: View) -> None:
        self.gr = gr
        self.view = view

    def poll(self, token: str) -> list[Any]:
        state = self.view.state(token)
        return [
            state.status,
            self.gr.update(interactive=state.can_run),
            self.gr.update(interactive=state.can_cancel),
            state.token,
            *self._content(state.content),
        ]

    def start(self, what: list[str], preset: str, sizes: str, token: str) -> list[Any]:
        said = self.view.start(what, preset, sizes)
        return [self._seen(notice(said)), *self.poll(token)]

    def cancel(self, token: str) -> list[Any]:
        self.view.cancel()
        return [self._seen(""), *self.poll(token)]

    def sizes(self, preset: str) -> Any:
        """Only one preset has sizes of its own."""
        return self.gr.update(interactive=preset == "custom")

    def _content(self, content: Content | None) -> list[Any]:
        if content is None:
            return [self.gr.update() for _ in range(11)]
        there = self.gr.update(visible=content != Content())
        return [
            self._seen(content.results),
            self._seen(content.bars),
            *astuple(content)[2:],
            *[there] * 4,
        ]

    def _seen(self, text: str) -> Any:
        return self.gr.update(value=text, visible=bool(text))
