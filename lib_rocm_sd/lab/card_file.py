"""The file that the self-test of a card writes, and what it says. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.trials.verdicts import PASSED

FORMAT = "rocm_sd self-test 1"
FILES = "rocm_sd-selftest-*.json"
MOST_BYTES = 4 << 20
"""A file larger than this is not one of ours."""
NAMED = 2
"""So many checks that went wrong are named in the sentence."""


@dataclass(frozen=True)
class Outcome:
    """One check of a file. `reason`: why it did not pass, empty where it did."""

    op: str
    name: str
    reason: str


def file_name(gfx: str, date: str) -> str:
    """The file's name."""
    return f"rocm_sd-selftest-{gfx}-{date}.json"


def read(path: Path) -> dict[str, Any]:
    """A file of the self-test. Raises OSError, and ValueError where it is none."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} is too large for a result of the self-test")
    document = json.loads(path.read_text(encoding="utf-8"))
    try:
        if document["format"] == FORMAT:
            outcomes(document)
            sentence(document)
            return dict(document)
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path.name} is no result of the self-test")


def by_op(verdict: Mapping[str, Any]) -> str:
    """The op of a verdict's class."""
    return str(verdict["subject"]).split(",")[0]


def outcomes(document: Mapping[str, Any]) -> list[Outcome]:
    """All checks of a file: kernels that were tried in a process of their own, and then cases."""
    trials = [
        Outcome(
            by_op(row),
            str(row["subject"]),
            "" if row["outcome"] == PASSED else f"{row['outcome']}: {row['reason']}",
        )
        for row in document["verdicts"]
    ]
    cases = [
        Outcome(
            str(row["op"]),
            f"{row['op']}, {row['variant']}: {row['problem']}",
            "" if row["passed"] else str(row["reason"] or "it is wrong"),
        )
        for row in document["rows"]
    ]
    return [*trials, *cases]


def sentence(document: Mapping[str, Any]) -> str:
    """What a file says, in one sentence."""
    every, gfx = outcomes(document), document["machine"]["gfx"]
    wrong = [each for each in every if each.reason]
    names = "; ".join(f"{each.name}: {each.reason}" for each in wrong[:NAMED])
    more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    bad = f"{len(wrong)} of {len(every)} checks did not pass on {gfx}: {names}{more}."
    if document["complete"]:
        return bad if wrong or not every else f"All {len(every)} checks passed on {gfx}."
    at = f" at {document['running']}" if document["running"] else ""
    how = f"{document['ended']}; " if document.get("ended") else ""
    begin = f"The check did not finish: {how}it stopped{at} after {len(every)} checks"
    planned = f" of {document['planned']}" if document.get("planned") else ""
    return f"{begin}{planned}. {bad if wrong else 'Those passed.' if every else ''}".strip()


def newest(folder: Path | None) -> Path | None:
    """The file that was written last in a folder."""
    try:
        files = [] if folder is None else list(folder.glob(FILES))
        return max(files, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None
