"""Plays commands/selftest.py's process without a card: its lines, its file, its end.

Arguments: the file; how it ends: a status, "waits", "dies", "refuses"; the document, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def document(failures: int = 0, complete: bool = True, **more: Any) -> dict[str, Any]:
    """A file of 60 checks."""
    verdict = {"subject": "attention, rocm_sd: N1 H2", "outcome": "passed", "reason": ""}
    row = {"op": "conv 3x3", "variant": "rocm_sd", "problem": "N1 8/16", "config": {"size": 16}}
    rows = [{**row, "passed": i >= failures, "reason": "wrong by 0.25"} for i in range(59)]
    return {
        **{"format": "rocm_sd self-test 1", "date": "2030-01-02T03:04:05Z", "rocm_sd": "1"},
        "machine": {"card": "Radeon RX 7900 XTX", "gfx": "gfx1100", "torch": "2.9", "cuda": None},
        **{"running": None, "complete": complete, "planned": 60, "verdicts": [verdict]},
        **{"rows": rows, "passed": 59 - failures, "failed": failures, **more},
    }


def step(text: str, done: int, total: int) -> None:
    """A line."""
    print(json.dumps({"text": text, "done": done, "total": total}), flush=True)


def main(path: Path, end: str, content: str) -> None:
    """Play it."""
    step("compiling kernels", 0, 4)
    if end == "refuses":
        sys.exit("The self-test was not run: the GPU is away.")
    path.write_text(content, encoding="utf-8")
    step("testing attention", 12, 60)
    if end == "waits":
        time.sleep(600)
    if end == "dies":
        print("Memory access fault by GPU node-1", file=sys.stderr, flush=True)
        os.abort()
    sys.exit(int(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
