"""What the doctor says of trials, and how it has them made: nothing of ours is launched in its own
process that a child did not find right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import first_trials
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.verdicts import DANGEROUS, Verdict

if TYPE_CHECKING:
    from lib_rocm_sd.device import DeviceInfo
    from lib_rocm_sd.trials.conductor import Conductor
    from lib_rocm_sd.trials.place import Place
    from lib_rocm_sd.trials.subject import Subject

WAIT_S = 300.0
RISK = (
    "First each kernel is tried in a process of its own. One that is at fault may freeze the "
    "screen for some seconds, or until the machine is restarted: save your work."
)

Say = Callable[[str], None]


def kept(infos: Iterable[DeviceInfo]) -> list[dict[str, Any]]:
    """The latest verdict of each class on the cards that torch has."""
    names = {f"{info.name} ({info.gfx})" for info in infos}
    found: dict[tuple[str, str], Verdict] = {}
    for _, verdict in verdicts.every():
        if verdict.device in names:
            key = (verdict.device, verdict.subject)
            found[key] = max(found.get(key, verdict), verdict, key=lambda each: each.date)
    return [verdict.as_dict() for verdict in found.values()]


def again(
    here: Place,
    say: Say,
    told: Callable[[list[dict[str, Any]]], None],
    conductor: Callable[..., Conductor] | None = None,
    listed: Sequence[Subject] | None = None,
) -> list[Verdict]:
    """Try each class that is tried ahead, and what other levels launch, also after a fault; `told`
    gets all verdicts so far.

    `conductor` and `listed` are for tests.
    """
    from lib_rocm_sd.trials.conductor import Conductor, resume

    if listed is None:
        listed = [
            *first_trials.all_classes(here.arch),
            *first_trials.further_classes(here.arch),
        ]
    found: list[Verdict] = []

    def one(subject: Subject, verdict: Verdict) -> None:
        found.append(verdict)
        told([each.as_dict() for each in found])
        say(f"{len(found):4} of {len(listed)}  {line(verdict.as_dict())}")

    say(RISK)
    resume(here)
    (conductor or Conductor)(here).run(listed, force=True, told=one)
    return found


def dangerous(found: Iterable[Verdict]) -> bool:
    """Whether anything would be risked by launching more in this process."""
    return any(verdict.outcome in DANGEROUS for verdict in found)


def text(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For people: what went wrong first."""
    if not rows:
        yield "none was made on the devices above"
    for row in sorted(rows, key=lambda row: row["outcome"] == verdicts.PASSED):
        yield f"{row['device']}, {row['date'][:10]}: {line(row)}"


def line(row: dict[str, Any]) -> str:
    """One verdict."""
    if row["subject"] == "halt":
        return str(row["reason"])
    if row["outcome"] != verdicts.PASSED:
        return f"{row['outcome'].upper()}  {row['subject']}: {row['reason']}"
    notes = f" ({'; '.join(row['notes'])})" if row["notes"] else ""
    error = row["error"] or 0.0
    return f"passed  {row['subject']}: {error:.1e} of {row['tolerance']:.1e} allowed{notes}"
