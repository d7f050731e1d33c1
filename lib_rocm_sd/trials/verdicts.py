"""What became of each kernel class's trial on this card, kept beside the code objects.

A verdict is one entry of the cache, readable JSON; its key has all that it depends on, so that what
changes (kernel, compiler, card, driver, torch) asks anew. Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.trials.journal import OpenLine

KIND = "verdicts"
PASSED, WRONG, FAULTED, HUNG, KILLED, REFUSED, INTERRUPTED = (
    *("passed", "wrong", "faulted", "hung", "killed", "refused", "interrupted"),
)
"""Interrupted: a process ended at that moment, and nothing says that the kernel was at fault."""
DANGEROUS = (FAULTED, HUNG)
"""After these nothing more is tried on the card by itself."""
MOST_DEATHS = 2
"""So many processes that ended at one class, for whatever reason, are no coincidence."""
MOST_TEXT = 300
FAULT_WORDS = (
    r"illegal (memory access|address|instruction)|misaligned|launch failure|device-side assert"
    r"|hsa_status|memory access fault|page fault|page not present"
)
"""How HIP, ROCm's runtime and torch name what a kernel did to the card, in small letters."""
_PATHS = re.compile(r"(?<![\w.])(~|[A-Za-z]:)?[/\\][\w.+~@-]+([/\\][\w.+~@ -]+)*")
_ASK = "Check this card tries it again"


def names_fault(reason: str) -> bool:
    """Whether an error's words say that a kernel faulted; the process can use the card no more."""
    return re.search(FAULT_WORDS, reason.lower()) is not None


@dataclass(frozen=True)
class Verdict:
    """`subject`: the class in words. `device`: the card and its driver, in words.

    `error`: the worst max |output - reference| / max |reference|, None without a usable output.
    `time_ms`: one launch of the usual problem. `deaths`: processes that ended in it without a word.
    `notes`: what was left out of the trial, such as a problem that did not fit the memory.
    """

    subject: str
    outcome: str
    reason: str = ""
    error: float | None = None
    tolerance: float = 0.0
    time_ms: float = 0.0
    notes: tuple[str, ...] = ()
    device: str = ""
    deaths: int = 0
    date: str = ""

    @property
    def passed(self) -> bool:
        """The class may be launched in a host's process."""
        return self.outcome == PASSED

    @property
    def asks_again(self) -> bool:
        """The next start tries it once more by itself."""
        return self.outcome in (INTERRUPTED, KILLED) and self.deaths < MOST_DEATHS

    @property
    def refusal(self) -> str:
        """Why the class is not launched, for people; empty where it may be."""
        if self.passed:
            return ""
        return f"tried in a process of its own: {self.outcome}: {self.reason}; {_ASK}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "notes": list(self.notes)}


def now() -> str:
    """The date of a verdict made now, UTC."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat().replace("+00:00", "Z")


def without_folders(text: str) -> str:
    """What a compiler, a driver or Python says may name them."""
    return _PATHS.sub("PATH", text)


def clean(text: str) -> str:
    """One line without folders, at most MOST_TEXT characters."""
    return " ".join(without_folders(text).split())[:MOST_TEXT]


def read(key: str) -> Verdict | None:
    """The verdict of this key; None where there is none, or one that cannot be read."""
    data = cache.read(KIND, key)
    return None if data is None else _parsed(data)


def write(key: str, verdict: Verdict) -> Verdict:
    """Keep it, dated now unless it has a date; what was written."""
    dated = replace(verdict, reason=clean(verdict.reason), date=verdict.date or now())
    cache.write(KIND, key, json.dumps(dated.as_dict(), indent=1).encode())
    return dated


def forget(key: str) -> None:
    """Ask anew."""
    cache.delete(KIND, key)


def every() -> Iterator[tuple[str, Verdict]]:
    """All that are kept, of all cards and drivers, by subject; `halt` entries are among them."""
    pairs = [(key, verdict) for key in cache.keys(KIND) if (verdict := read(key)) is not None]
    yield from sorted(pairs, key=lambda pair: (pair[1].subject, pair[1].date))


def interrupted(key: str, subject: str, device: str, reason: str, outcome: str) -> Verdict:
    """Note that a process ended in a class without a word; so once more, and it stays barred."""
    before = read(key)
    deaths = (before.deaths if before else 0) + 1
    if deaths >= MOST_DEATHS:
        reason = f"{reason}, {deaths} times"
    return write(key, Verdict(subject, outcome, reason, device=device, deaths=deaths))


def of_line(line: OpenLine) -> Verdict:
    """The verdict of a class whose launch a process did not come back from."""
    if line.evidence:
        reason = f"the program itself died in its first launch there: {line.evidence}"
        return write(line.key, Verdict(line.subject, FAULTED, reason, device=line.device))
    reason = "the program ended in its first launch there (a crash, a power cut, or it was closed)"
    return interrupted(line.key, line.subject, line.device, reason, INTERRUPTED)


def _parsed(data: bytes) -> Verdict | None:
    names = {field.name for field in fields(Verdict)}
    try:
        row = json.loads(data)
        values = {name: value for name, value in row.items() if name in names}
        return Verdict(**{**values, "notes": tuple(row.get("notes", ()))})
    except (ValueError, TypeError, AttributeError):
        return None
