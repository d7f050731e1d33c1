"""What the page shows of the state: the title line, the status table, progress and failures; and
the report's rows as that table shows them.

Facts in, text and HTML out; no gradio, no WebUI. Everything is escaped here and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.hosts.ui.options import TITLE
from lib_rocm_sd.ops.registry import FAMILIES, op_named

if TYPE_CHECKING:
    from lib_rocm_sd.unet.takeover import KindReport

TITLE_LENGTH = 90
"""Longer title lines are cut; the accordion says the whole of it inside."""
COMPILING = "Compiling kernels"
TRYING = "Trying kernels in a separate process"
CHECK = "Check this card"
"""What the button says that has something tried again."""
HEADINGS = ("Operation", "Runs now", "Why not faster")
ADVICE = (
    "The WebUI's own code computes what our kernels cannot. If no compiler supports the card, run "
    "'pip install ziglang' in the WebUI's environment, the smallest download that does, and then "
    "press 'Compile again' in Settings > ROCm SD. For details, run 'python -m lib_rocm_sd doctor' "
    "in the extension's folder."
)
UNET = "UNet"
"""The part whose rows go by the op's title alone, as the settings call them."""
CONTROLNET = "ControlNet"
"""The part of ControlNets, and their row."""
NAMES = {
    "rocm_sd": "our kernel",
    "torch + rocm_sd": "torch with one of our kernels",
    "torch NCHW + rocm_sd": "torch in NCHW with one of our kernels",
    "sdpa": "torch's SDPA",
    "sliced": "torch, in slices",
    "torch": "torch",
    "zeros": "nothing to compute",
}
REASONS_SHOWN = 3
BLOCKS = {
    "residual block": "residual blocks",
    "transformer": "transformers",
    "transformer block": "transformer blocks",
    "joint transformer block": "joint transformer blocks",
    "single transformer block": "single transformer blocks",
}
"""The kinds of a UNet's blocks that have a plural."""


@dataclass(frozen=True)
class StatusRow:
    """One line of the table. `why`: what keeps each faster way from being used; mostly nothing."""

    operation: str
    runs: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A compilation that failed. `log_path` is '' where nothing was written."""

    reason: str
    log_path: str = ""


@dataclass(frozen=True)
class Status:
    """All that the accordion says. `headline` follows the extension's name in the title line.

    `progress`: kernels that are compiled, or tried, and how many there are to be; None when none
    is. `work`: which of the two. `risk`: where the owner may have something tried again, what that
    may do. `speed_tab`: the label of the tab that the link opens, '' for no link.
    """

    headline: str
    lines: tuple[str, ...] = ()
    rows: tuple[StatusRow, ...] = ()
    notes: tuple[str, ...] = ()
    progress: tuple[int, int] | None = None
    work: str = COMPILING
    risk: str = ""
    failure: Failure | None = None
    speed_tab: str = ""


def title(status: Status) -> str:
    """The title line, for instance 'ROCm SD Optimization: Auto · attention on gfx1100'."""
    text = " ".join(f"{TITLE}: {status.headline}".split())
    return text if len(text) <= TITLE_LENGTH else f"{text[: TITLE_LENGTH - 1].rstrip()}…"


def html(status: Status) -> str:
    """The status as HTML: progress, failure, sentences, table, notes, the link."""
    parts = [
        _progress(status.progress, status.work),
        _failure(status.failure),
        *(f"<p>{escape(line)}</p>" for line in status.lines),
        _table(status.rows),
        _notes(status.notes),
        f'<p class="rocm-sd-risk">{escape(status.risk)}</p>' if status.risk else "",
        _link(status.speed_tab),
    ]
    return f'<div class="rocm-sd-status">{"".join(parts)}</div>'


def _progress(progress: tuple[int, int] | None, work: str) -> str:
    if progress is None:
        return ""
    done, total = progress
    known = f" max='{max(total, 1)}' value='{min(done, total)}'" if total > 0 else ""
    count = f": {done} of {total}" if total > 0 else ""
    return (
        '<div class="rocm-sd-progress" role="status">'
        f"<progress aria-label='{escape(work)}'{known}></progress>"
        f"<span>{escape(work)}{count}. Until they are ready, the WebUI's own code makes the "
        "pictures.</span></div>"
    )


def _failure(failure: Failure | None) -> str:
    if failure is None:
        return ""
    log = f"<br>The log: <code>{escape(failure.log_path)}</code>" if failure.log_path else ""
    return (
        f'<div class="rocm-sd-trouble" role="alert"><strong>Compiling failed:</strong> '
        f"{escape(failure.reason)}{log}<br>{escape(ADVICE)}</div>"
    )


def _table(rows: Iterable[StatusRow]) -> str:
    lines = [_line(row) for row in rows]
    if not lines:
        return ""
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    return (
        '<table class="rocm-sd-table" aria-label="What runs">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _line(row: StatusRow) -> str:
    why = "<br>".join(escape(text) for text in row.why) or '<span aria-label="nothing">–</span>'
    cells = zip(HEADINGS[1:], (escape(row.runs), why), strict=True)
    rest = "".join(f'<td data-heading="{heading}">{cell}</td>' for heading, cell in cells)
    return f'<tr><th scope="row">{escape(row.operation)}</th>{rest}</tr>'


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="rocm-sd-notes">{items}</ul>' if items else ""


def _link(label: str) -> str:
    if not label:
        return ""
    return (
        f'<p><button type="button" class="rocm-sd-link" data-tab="{escape(label)}">'
        f"{escape(label)}</button>: what you gain on this machine</p>"
    )


# --- what ran, and what kept faster ways out


def rows_of(snapshot: Mapping[str, Any]) -> dict[tuple[str, str], list[StatusRow]]:
    """The rows of `report.snapshot()` by part and family, those with the most calls first."""
    calls: dict[tuple[str, str, str], int] = {}
    why: dict[tuple[str, str, str], dict[str, dict[str, None]]] = {}
    for row in snapshot["rows"]:
        key = (str(row["part"]), str(row["family"]), str(row["variant"]))
        calls[key] = calls.get(key, 0) + int(row["calls"])
        for name, text in _why(row):
            why.setdefault(key, {}).setdefault(name, {})[text] = None
    found: dict[tuple[str, str], list[StatusRow]] = {}
    for key in sorted(calls, key=lambda key: -calls[key]):
        part, family, variant = key
        runs = f"{name_of(variant)}, {counted(calls[key], 'call')}"
        others = tuple(
            f"{name_of(name)}: {'; '.join(shortened(list(texts), 1))}"
            for name, texts in why.get(key, {}).items()
        )
        found.setdefault((part, family), []).append(StatusRow(label_of(part, family), runs, others))
    return found


def of_blocks(kind: str, total: int, ours: int, why: Mapping[str, int]) -> StatusRow:
    """A kind of a UNet's blocks. `why`: what is the host's, or why a block is, and of how many."""
    said = [f"{count} of {total}: {text}" for text, count in why.items()]
    name = f"{UNET}, {BLOCKS.get(kind, kind)}"
    return StatusRow(name, f"{ours} of {total} are ours", shortened(said))


def of_controlnets(rows: Sequence[KindReport]) -> list[StatusRow]:
    """One for the blocks of all ControlNets; none where there are none."""
    why: Counter[str] = Counter()
    for row in rows:
        why.update({**row.left, **row.partly})
    ours, total = (sum(getattr(row, name) for row in rows) for name in ("ours", "total"))
    return [replace(of_blocks("", total, ours, why), operation=CONTROLNET)] if total else []


def label_of(part: str, family: str) -> str:
    """How people call a family's ops in a part of the model."""
    title = FAMILIES[family].title if family in FAMILIES else family
    return title if part in ("", UNET) else f"{part}, {title.lower()}"


def name_of(variant: str) -> str:
    """A variant's name for people."""
    return NAMES.get(variant, variant)


def counted(number: int, thing: str) -> str:
    """'1 call', '2 calls'."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def unmeasured(number: int, when: str) -> str:
    """How many sizes Performance has still to measure, and when."""
    verb = "is" if number == 1 else "are"
    return f"Performance: {counted(number, 'size')} {verb} still to be measured, {when}."


def shortened(texts: Sequence[str], most: int = REASONS_SHOWN) -> tuple[str, ...]:
    """The first few of them, and how many more there are."""
    more = len(texts) - most
    return (*texts[:most], *((f"and {more} more",) if more > 0 else ()))


def _why(row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What keeps out each variant that is expected to be faster than the one that ran."""
    op = op_named(str(row["op"]))
    preferences = {} if op is None else {each.name: each.preference for each in op.every}
    mine = preferences.get(str(row["variant"]))
    for name, texts in row["reasons"].items():
        faster = mine is None or preferences.get(name, mine) > mine
        said = [text for text in texts if not text.startswith("comes after ")]
        if faster and said:
            yield name, "; ".join(said)
