"""The part of the Speed test tab that checks the card: starts, stops and follows the self-test, and
shows its file and what is in it.
"""

from __future__ import annotations

import base64
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd import arch
from lib_rocm_sd.hosts.ui.following import asking, follow, on
from lib_rocm_sd.hosts.ui.speed_html import notice, status, text_of
from lib_rocm_sd.hosts.ui.status import CHECK
from lib_rocm_sd.lab import card_check, card_file
from lib_rocm_sd.lab.card_check import CardCheck
from lib_rocm_sd.lab.speed_job import Busy, HostSide
from lib_rocm_sd.lab.speed_text import MACHINE

PREFIX = "rocm_sd_check"
ABOUT = (
    "Runs every kernel of this extension on your card, with small made-up numbers, and compares "
    "each result with an exact one. It takes some minutes, and longer the first time, when the "
    "kernels are compiled. Pictures wait meanwhile. A kernel that is at fault may freeze the "
    "screen for some seconds, or until you restart the machine: save your work first."
)
IDLE = "This card has not been checked yet."
LAST = "What the last check found:"
SEND = (
    "Please send this file, whether everything passed or not: nobody who works on this extension "
    "has an AMD card."
)
CONTENTS = (
    "The file has the list below and, for each check, the sizes, the compiler, the error, the "
    "error that is allowed, the seconds it took and why it failed. It has no prompts, no pictures, "
    "no folders and no name of you or your computer. You can open it in any text editor."
)
REASONS_SHOWN = 20
_ORIGIN = re.compile(r"^\s*url\s*=\s*(https://github\.com/[\w.-]+/[\w.-]+?)(?:\.git)?/?\s*$", re.M)


@dataclass(frozen=True)
class CheckState:
    """What a page shows. `result`: HTML; None where the page has it already."""

    status: str
    can_run: bool
    can_stop: bool
    token: str
    result: str | None


class CheckView:
    """The part of one process. Called in the web server's worker threads. `over` is called when a
    check has ended.
    """

    def __init__(self, check: CardCheck, side: HostSide, over: Callable[[], None]) -> None:
        self.check = check
        self.side = side
        self.over = over

    def state(self, token: str) -> CheckState:
        """For a page that shows `token`; "" for one that shows nothing."""
        progress, running = self.check.progress(), self.check.running
        refused = card_check.refusal(self.side)
        path = progress.path or card_file.newest(self.side.output_directory())
        fraction = 0.0
        if progress.state == "running" and progress.total:
            fraction = progress.done / progress.total
            text = f"{progress.text}, {progress.done} of {progress.total}"
        elif progress.state == "running" or (progress.text and not progress.path):
            text = progress.text
        elif refused:
            text = f"This machine's card cannot be checked: {refused}."
        else:
            text = LAST if path else IDLE
        now = f"{progress.state} {path}"
        return CheckState(
            status("running" if running else "over", fraction, text, time.monotonic_ns(), CHECK),
            can_run=not running and not refused,
            can_stop=running,
            token=now,
            result=None if now == token else "" if running or path is None else result(path),
        )

    def start(self) -> str:
        """Begin a check; why none began, or ""."""
        try:
            self.check.start(self.side, self.over)
        except Busy as busy:
            return f"Not started: {busy}."
        return ""


def result(path: Path) -> str:
    """What a file says, a link that saves it, where to send it, and what is in it."""
    try:
        document = card_file.read(path)
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except (OSError, ValueError) as error:
        return f"<p>{text_of(path.name)} cannot be shown: {text_of(error)}</p>"
    link = f'<a download="{text_of(path.name)}" href="data:application/json;base64,{data}">'
    parts = "\n".join(
        (
            f"<p><strong>{text_of(card_file.sentence(document))}</strong></p>",
            f"<p>{link}Save {text_of(path.name)}</a></p>",
            f'<p>{SEND} {_where()}</p><p class="rocm-sd-speed-kept">It is kept in '
            f"{text_of(path.parent)}</p>",
            f"<h4>What is in the file</h4><p>{CONTENTS}</p>",
            _facts(document),
            _counts(document),
            _failures(document),
        )
    )
    return f'<div class="rocm-sd-check">{parts}</div>'


def _where() -> str:
    """How to send it: a link where this extension was cloned from GitHub."""
    try:
        config = (arch.PACKAGE.parent / ".git" / "config").read_text(encoding="utf-8")
    except OSError:
        config = ""
    origin = _ORIGIN.search(config)
    if origin is None:
        return (
            "Open this extension's page on GitHub (the address from which you installed it), then "
            "<em>Issues > New issue > Result from a card</em>, and drag the file into the form."
        )
    form = f"{text_of(origin.group(1))}/issues/new?template=card.yml"
    return (
        f'<a href="{form}" target="_blank" rel="noopener">Open the form</a> (it needs a GitHub '
        "account) and drag the file into it."
    )


def _facts(document: Mapping[str, Any]) -> str:
    """All that the file says of the machine."""
    titles = dict(MACHINE)
    facts = {"date": document.get("date"), **document["machine"]}
    lines = "".join(
        f"<dt>{text_of(titles.get(key, key.replace('_', ' ').capitalize()))}</dt>"
        f"<dd>{text_of(value)}</dd>"
        for key, value in facts.items()
        if value not in (None, "")
    )
    return f'<dl class="rocm-sd-speed-machine">{lines}</dl>'


def _counts(document: Mapping[str, Any]) -> str:
    """How many checks of each op passed."""
    every = card_file.outcomes(document)
    passed = Counter(each.op for each in every if not each.reason)
    rows = "".join(
        f'<tr><th scope="row">{text_of(op)}</th><td>{passed[op]} of {count}</td></tr>'
        for op, count in Counter(each.op for each in every).items()
    )
    head = '<thead><tr><th scope="col">Operation</th><th scope="col">Passed</th></tr></thead>'
    return f'<table class="rocm-sd-table">{head}<tbody>{rows}</tbody></table>' if rows else ""


def _failures(document: Mapping[str, Any]) -> str:
    wrong = [each for each in card_file.outcomes(document) if each.reason]
    items = [f"<li>{text_of(f'{each.name}: {each.reason}')}</li>" for each in wrong[:REASONS_SHOWN]]
    more = len(wrong) - REASONS_SHOWN
    if more > 0:
        items.append(f"<li>and {more} more</li>")
    return f"<h4>What did not pass</h4><ul>{''.join(items)}</ul>" if items else ""


def content(gr: Any, blocks: Any, view: CheckView) -> None:
    """Put the part's components into gradio's current context, which is within `blocks`."""
    with gr.Accordion(CHECK, open=False, elem_id=PREFIX):
        gr.HTML(f"<p>{ABOUT}</p>")
        with gr.Row(elem_id=f"{PREFIX}_buttons"):
            run = gr.Button(CHECK, variant="primary", elem_id=f"{PREFIX}_run")
            stop = gr.Button("Stop", interactive=False, elem_id=f"{PREFIX}_stop")
        said = gr.HTML(visible=False, elem_id=f"{PREFIX}_notice")
        line = gr.HTML(elem_id=f"{PREFIX}_status")
        shown = gr.HTML(elem_id=f"{PREFIX}_result")
        poll, token = asking(gr, PREFIX)

    def asked(token: str) -> list[Any]:
        state = view.state(token)
        buttons = [gr.update(interactive=each) for each in (state.can_run, state.can_stop)]
        new = gr.update() if state.result is None else state.result
        return [state.status, *buttons, state.token, new]

    def started(token: str) -> list[Any]:
        why = notice(view.start())
        return [gr.update(value=why, visible=bool(why)), *asked(token)]

    def stopped(token: str) -> list[Any]:
        view.check.stop()
        return asked(token)

    page = [line, run, stop, token, shown]
    on(poll.click, asked, [token], page)
    on(run.click, started, [token], [said, *page])
    on(stop.click, stopped, [token], page)
    follow(gr, blocks, PREFIX)
