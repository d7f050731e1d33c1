"""A speed test on its way, in a thread of its own: one at a time per process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import describe
from lib_rocm_sd.lab import speed_parts, speed_vae
from lib_rocm_sd.lab.sensors import machine
from lib_rocm_sd.lab.speed_job import (
    FAILED,
    Busy,
    Cancelled,
    HostSide,
    InBackground,
    Job,
    Part,
    effort_of,
)
from lib_rocm_sd.lab.speed_result import WHAT, Document, Pair, Request
from lib_rocm_sd.lab.timing import clean

RESULTS_KEPT = 20
RUNNING = "a speed test is running"

PARTS: dict[str, Part] = {
    "attention": speed_parts.attention_rows,
    "vae": speed_vae.rows,
    "step": speed_parts.step_rows,
    "upscaler": speed_parts.upscaler_rows,
    "image": speed_parts.image_rows,
}


@dataclass(frozen=True)
class Progress:
    """`state`: idle, running, done, cancelled or failed. `fraction`: 0 to 1. `text`: what is done
    now, or why it ended. `left_s`: about how long it goes on.
    """

    id: str = ""
    state: str = "idle"
    fraction: float = 0.0
    text: str = ""
    left_s: float = 0.0


class SpeedSession(InBackground):
    """Starts tests, tells how far they are, keeps their results. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._cancel = threading.Event()
        self._entered = threading.Event()
        self._refusals: list[Busy] = []
        self._progress = Progress()
        self._directory: Path | None = None
        self._results: dict[str, dict[str, Any]] = {}
        self._shots: tuple[str, tuple[Pair, ...]] = ("", ())

    def start(self, request: Request, side: HostSide) -> str:
        """Begin; the test's id. Raises Busy with the reason where none may start now."""
        with self._lock:
            if self.running:
                raise Busy(RUNNING)
            reason = side.busy()
            if reason:
                raise Busy(reason)
            self._cancel, self._entered, self._refusals = threading.Event(), threading.Event(), []
            document = Document({}, request.as_dict())
            before = self._progress
            self._progress = Progress(document.id, "running", 0.0, "getting ready")
            self._keep(document)
            work = (request, side, document, self._cancel.is_set)
            self._begin("rocm_sd speed test", self._run, *work)
            self._entered.wait()
            if self._refusals:
                self.wait()
                self._progress = before
                del self._results[document.id]
                raise self._refusals[0]
        return document.id

    def progress(self) -> Progress:
        """Progress of the test that runs, or ran last."""
        return self._progress

    def cancel(self) -> None:
        """Stop the test that runs; nothing where none does.

        Its state is soon "cancelled", as a rule within a second; `running` may stay true for as
        long as the device needs for what it was given already.
        """
        self._cancel.set()

    def result(self, ident: str) -> dict[str, Any] | None:
        """The document (result.py) of a test, also of one that runs or was cancelled, with the
        rows so far. None for an id that is not known. The last RESULTS_KEPT are.
        """
        return self._results.get(ident)

    def shots(self, ident: str) -> tuple[Pair, ...]:
        """The pictures of the test that ran last; none for another id."""
        newest, shots = self._shots
        return shots if newest == ident else ()

    def _run(
        self, request: Request, side: HostSide, document: Document, cancelled: Callable[[], bool]
    ) -> None:
        state, text = "failed", "it ended unexpectedly"
        try:
            with side.queue(), torch.no_grad():
                self._entered.set()
                with engine.measuring_at_once(cancelled):
                    state, text = self._measured(request, side, document, cancelled)
        except Busy as busy:
            self._refusals.append(busy)
        except FAILED as failure:
            text = describe(failure)
        finally:
            if self._entered.is_set():
                fraction = 1.0 if state == "done" else self._progress.fraction
                self._progress = Progress(document.id, state, fraction, text)
            elif not self._refusals:
                self._refusals.append(Busy(f"the queue cannot be had: {text}"))
            self._entered.set()

    def _measured(
        self, request: Request, side: HostSide, document: Document, cancelled: Callable[[], bool]
    ) -> tuple[str, str]:
        """The state in which the test ends, and a sentence."""
        begin, self._directory = time.monotonic(), side.output_directory()
        parts = [part for part in WHAT if part in request.what]
        planned = effort_of(request, side.device).parts_s
        planned_s = sum(planned[part] for part in parts)

        def told(before_s: float, part_s: float, fraction: float, text: str) -> None:
            whole = (before_s + part_s * min(max(fraction, 0.0), 1.0)) / planned_s
            left_s = (1 - whole) * max(planned_s, time.monotonic() - begin)
            self._progress = Progress(document.id, "running", whole, text, left_s)

        try:
            document.machine = machine(side.device)
            for place, part in enumerate(parts):
                before_s = sum(planned[each] for each in parts[:place])
                job = Job(request, side, cancelled, partial(told, before_s, planned[part]))
                for row in PARTS[part](job):
                    document.rows.append(row)
                    self._shots = (document.id, tuple(job.shots))
                    self._save(document, job.shots)
                    job.guard().check()
            document.complete = True
            state, text = "done", f"done in {time.monotonic() - begin:.0f} s"
        except Cancelled:
            state, text = "cancelled", "cancelled; what was measured is kept"
            document.notes.append("cancelled")
            self._save(document)
            self._progress = Progress(document.id, state, self._progress.fraction, text)
        except FAILED as failure:
            state, text = "failed", describe(failure)
            document.notes.append(f"failed: {text}"[:200])
        self._save(document)
        clean(side.device)
        return state, text

    def _save(self, document: Document, shots: Sequence[Pair] = ()) -> None:
        """Keep the document as it has grown, in a file, too. A folder that cannot be written is a
        note, told once.
        """
        try:
            for shot in shots[len(document.pictures) :]:
                document.pictures.append(_written(shot, document, self._directory))
            if self._directory is not None:
                document.write(self._directory)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            document.notes.append(f"the result could not be saved: {reason}")
            self._directory = None
        self._keep(document)

    def _keep(self, document: Document) -> None:
        self._results[document.id] = document.as_dict()
        while len(self._results) > RESULTS_KEPT:
            del self._results[next(iter(self._results))]


def _written(shot: Pair, document: Document, directory: Path | None) -> Pair:
    """The pair's files, written beside the document; without a folder its figures alone."""
    names: dict[str, Any] = dict.fromkeys(("off", "on", "difference"), "")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        images = (shot.off.image, shot.on.image, shot.difference)
        place = len(document.pictures) + 1
        for name, image in zip(names, images, strict=True):
            names[name] = f"{document.stem}-{place}-{name}.png"
            speed_parts.plain(image).save(directory / names[name])
    return replace(shot, **names)


session = SpeedSession()
"""The session of the process."""
