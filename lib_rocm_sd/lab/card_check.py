"""The self-test of a card for somebody without a terminal: `doctor --self-test` in a process of its
own, how far it is, and what its file says. A card that hangs or crashes ends that process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lib_rocm_sd import arch
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import describe
from lib_rocm_sd.lab.rows import write_json
from lib_rocm_sd.lab.speed_job import FAILED, Busy, HostSide
from lib_rocm_sd.trials.conductor import ended
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.verdicts import PASSED, clean

FORMAT = "rocm_sd self-test 1"
FILES = "rocm_sd-selftest-*.json"
MOST_BYTES = 4 << 20
"""A file larger than this is not one of ours."""
SILENT_S = 900.0
"""A process that says nothing for so long hangs: one compilation takes ten minutes at most."""
NOT_RUN = "The self-test was not run: "
NAMED = 2
"""So many checks that went wrong are named in the sentence."""
_START = (
    "import sys; root, out, index, *places = sys.argv[1:]; sys.path.insert(0, root); "
    "sys.path += places; from lib_rocm_sd.commands.selftest import child; "
    "raise SystemExit(child(out, int(index)))"
)


# -- the file


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
    tried = [
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
    return [*tried, *cases]


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


# -- a check on its way


@dataclass(frozen=True)
class Progress:
    """`state`: "idle", "running", "done", "stopped" or "failed". `text`: what is done now, or why
    it ended. `path`: the file, once there is one.
    """

    state: str = "idle"
    text: str = ""
    done: int = 0
    total: int = 0
    path: Path | None = None


class CardCheck:
    """Starts the self-test, tells how far it is, stops it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._link: Link | None = None
        self._stopped = False
        self._progress = Progress()

    def start(self, side: HostSide, over: Callable[[], None] = lambda: None) -> None:
        """Begin; `over` is called when it has ended. Raises Busy with the reason where it cannot
        begin now.
        """
        with self._lock:
            why = "it is running" if self.running else side.busy() or refusal(side)
            if why:
                raise Busy(why)
            self._stopped = False
            self._progress = Progress("running", "starting")
            work = (side, over)
            self._thread = threading.Thread(
                target=self._run, args=work, name="rocm_sd check", daemon=True
            )
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether a check is under way."""
        return self._thread is not None and self._thread.is_alive()

    def progress(self) -> Progress:
        """Progress of the check that runs, or ran last."""
        return self._progress

    def stop(self) -> None:
        """End the check that runs; what it found is kept."""
        self._stopped = True
        link = self._link
        if link is not None:
            link.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until no check runs; False where one still does after `timeout_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return not self.running

    def _run(self, side: HostSide, over: Callable[[], None]) -> None:
        found = Progress("failed", "The check ended unexpectedly.")
        try:
            with side.queue():
                found = self._followed(side)
            over()
        except (Busy, *FAILED) as failure:
            why = str(failure) if isinstance(failure, Busy) else describe(failure)
            found = Progress("failed", f"The check could not be run: {why}.")
        finally:
            self._link = None
            self._progress = found

    def _followed(self, side: HostSide) -> Progress:
        """Start the process and listen until it ends; what came of it."""
        folder = side.output_directory() or Path(tempfile.mkdtemp(prefix="rocm_sd_check_"))
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d-%H%M%S")
        path = folder / file_name(str(identify(side.device).gfx), now)
        link = self._link = Link(command(path, side.device.index or 0))
        outcome = ""
        try:
            if self._stopped:
                link.kill()
            while (step := link.receive(SILENT_S)) is not None:
                self._progress = Progress("running", step["text"], step["done"], step["total"])
        except TimeoutError:
            outcome = f"its process said nothing for {SILENT_S / 60:.0f} minutes"
            link.kill()
        status, words = link.status(), link.words()
        link.end()
        if not outcome and status not in (0, 1, 2):
            outcome = ended(status, words)[1]
        lines = [line for line in words.splitlines() if line.startswith(NOT_RUN)]
        return self._found(path, outcome, lines[0] if lines else "")

    def _found(self, path: Path, outcome: str, refused: str) -> Progress:
        """What came of a process that has ended. `outcome`: how, where not by itself."""
        if refused or not path.exists():
            return Progress("failed", refused or f"{NOT_RUN}{outcome or 'it wrote no file'}.")
        document = read(path)
        if outcome and not document["complete"]:
            document["ended"] = "stopped by the user" if self._stopped else clean(outcome)
            write_json(path, document)
        state = "stopped" if self._stopped else "failed" if outcome else "done"
        return Progress(state, sentence(document), path=path)


def refusal(side: HostSide) -> str:
    """Why this machine's GPU cannot be checked; empty where it can."""
    return "; ".join(identify(side.device).reasons)


def command(path: Path, index: int) -> list[str]:
    """This interpreter with the packages of here, on the GPU of torch's number `index`."""
    places = [place for place in sys.path if place]
    root = str(arch.PACKAGE.parent)
    return [sys.executable, "-I", "-c", _START, root, str(path), str(index), *places]


check = CardCheck()
"""The one of the process."""
