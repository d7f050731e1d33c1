"""The self-test of a card for somebody without a terminal: `doctor --self-test` in a process of its
own, and how far it is. A card that hangs or crashes ends that process.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from lib_rocm_sd import cache
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import describe
from lib_rocm_sd.lab.card_file import file_name, read, sentence
from lib_rocm_sd.lab.rows import write_json
from lib_rocm_sd.lab.speed_job import FAILED, Busy, HostSide, InBackground
from lib_rocm_sd.runtime import process, zluda
from lib_rocm_sd.trials.conductor import ended
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.verdicts import clean

SILENT_S = 900.0
"""A process that says nothing for so long hangs: one compilation takes ten minutes at most."""
NOT_RUN = "The self-test was not run: "
_START = "from lib_rocm_sd.commands.selftest import serve; serve(json.loads(sys.argv[1]))"


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


class CardCheck(InBackground):
    """Starts the self-test, tells how far it is, stops it. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
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
            self._begin("rocm_sd check", self._run, side, over)

    def progress(self) -> Progress:
        """Progress of the check that runs, or ran last."""
        return self._progress

    def stop(self) -> None:
        """End the check that runs; what it found is kept."""
        self._stopped = True
        link = self._link
        if link is not None:
            link.kill()

    def _run(self, side: HostSide, over: Callable[[], None]) -> None:
        progress = Progress("failed", "The check ended unexpectedly.")
        try:
            with side.queue():
                progress = self._followed(side)
            over()
        except (Busy, *FAILED) as failure:
            why = str(failure) if isinstance(failure, Busy) else describe(failure)
            progress = Progress("failed", f"The check could not be run: {why}.")
        finally:
            self._link = None
            self._progress = progress

    def _followed(self, side: HostSide) -> Progress:
        """Start the process and listen until it ends; what came of it."""
        folder = side.output_directory() or Path(tempfile.mkdtemp(prefix="rocm_sd_check_"))
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d-%H%M%S")
        path = folder / file_name(str(identify(side.device).gfx), now)
        link = self._link = Link(command(path, side.device))
        outcome = ""
        try:
            if self._stopped:
                link.kill()
            try:
                while (step := link.receive(SILENT_S)) is not None:
                    self._progress = Progress("running", step["text"], step["done"], step["total"])
            except TimeoutError:
                outcome = f"its process said nothing for {SILENT_S / 60:.0f} minutes"
                link.kill()
            status, words = link.status(), link.words()
        finally:
            link.end()
        if not outcome and status not in (0, 1, 2):
            outcome = ended(status, words)[1]
        lines = [line for line in words.splitlines() if line.startswith(NOT_RUN)]
        return self._found(path, outcome, lines[0] if lines else "")

    def _found(self, path: Path, outcome: str, refused: str) -> Progress:
        """What came of a process that has ended. `outcome`: how, where not by itself."""
        if self._stopped and not path.exists():
            return Progress("stopped", "Stopped before the first check.")
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


def command(path: Path, device: torch.device) -> list[str]:
    """This interpreter with the packages, the cache and the ZLUDA of here. Raises LaunchError where
    there is a ZLUDA of which something is not known.
    """
    is_zluda = identify(device).backend == "zluda"
    job = {
        "out": str(path),
        "index": device.index or 0,
        "folder": str(cache.host_directory() or ""),
        "first": list(map(str, zluda.loaded().companions())) if is_zluda else [],
    }
    return process.with_packages(_START, json.dumps(job))


check = CardCheck()
"""The one of the process."""
