"""A replica's process that fails as a file says: `<kind of message> <what happens>`, or nothing."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import cache
from lib_rocm_sd.cards import child, memory, worker

PLAN = Path(sys.argv[-1])


class Faulty(worker.Worker):
    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        kind, _, fault = PLAN.read_text().partition(" ")
        if kind != message["kind"]:
            return super().answer(message)
        if fault.startswith("amid "):
            self._fail_amid(fault.removeprefix("amid "))
            return super().answer(message)
        _fail(fault)
        if fault == "unusable":
            return {"kind": "unusable", "reason": "a planted reason"}
        answer = super().answer(message)
        if fault == "wrong":
            dtype = getattr(torch, answer["dtype"])
            self._shared.tensor(message["out"], answer["shape"], dtype).mul_(1.5)
        if fault == "shape":
            answer["shape"] = answer["shape"][:-1]
        if fault == "cache":
            raise ValueError(f"its cache is {cache.directory()}")
        if fault == "poor":
            answer["free"] = 1000
        if fault == "number":
            message["number"] = -1
        return answer

    def _fail_amid(self, fault: str) -> None:
        """At the fifth exchange from now on."""
        whole, numbers = memory.Board._meet, count(1)

        def meet(board: memory.Board) -> None:
            if next(numbers) == 5:
                memory.Board._meet = whole  # type: ignore[method-assign]
                _fail(fault)
            whole(board)

        memory.Board._meet = meet  # type: ignore[assignment, method-assign]


def _fail(fault: str) -> None:
    if fault == "die":
        os._exit(7)
    if fault == "hang":
        time.sleep(60)
    if fault == "words":
        print("a word of its own")
    if fault == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
    if fault == "error":
        raise ValueError("a planted error")


def main() -> int:
    worker.Worker = Faulty  # type: ignore[misc]
    return child.main()
