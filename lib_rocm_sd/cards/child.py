"""The process of replicas: it reads lines of JSON from standard input until that ends, and ends
with it, also amid a call. Weights and latents are in memory that it shares with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, BinaryIO

from lib_rocm_sd import console
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.trials.child import quiet

STOP = "stop"
"""What is said amid a call, to those who wait for the others."""


def main() -> int:
    """Serve until the parent ends it."""
    quiet()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print goes to standard error
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console.escape()
    inbox = _inbox(sys.stdin.buffer)
    worker: Any = None

    def write(answer: dict[str, Any], number: Any) -> None:
        answers.write(json.dumps({**answer, "number": number}).encode() + b"\n")

    def look(waited_s: float) -> None:
        with suppress(queue.Empty):
            if inbox.get_nowait()["kind"] == STOP:
                raise RankError("the others have stopped")

    while True:
        message = inbox.get()
        if message["kind"] == STOP:  # of a call that has failed here
            continue
        try:
            if worker is None:
                from lib_rocm_sd.cards.worker import Worker

                worker = Worker(message, look)
            answer = worker.answer(message)
        except Exception as error:
            answer = _failed(error)
        write(answer, message.get("number"))


def _failed(error: Exception) -> dict[str, Any]:
    from lib_rocm_sd.engine.selftest import is_out_of_memory

    memory = is_out_of_memory(error)
    if not (memory or isinstance(error, RankError)):
        traceback.print_exc()
    text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return {"kind": "failed", "reason": text, "memory": memory}


def _inbox(stream: BinaryIO) -> queue.SimpleQueue[dict[str, Any]]:
    """Messages as they come; the process ends where they end."""
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        with suppress(ValueError, OSError):
            for line in stream:
                messages.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return messages
