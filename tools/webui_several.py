"""Several GPUs in a real WebUI, from the first picture on, beside one card.

python -m tools.webui_several [--cases CASE,...] [--cards NUMBERS;...] [--pictures N] [--alone N]
                              [--steps N] [--faults] [--limit-s N] [--cache FOLDER] [--out FOLDER]
                              LAUNCHER [FLAG ...]

LAUNCHER starts AUTOMATIC1111's WebUI or its AMD fork with the Python of this command; FLAGs go to
it (--ckpt MODEL). CASE: [CHECKPOINT:]SIDE[xBATCH], a checkpoint by the name that the WebUI lists,
pixels a side, pictures at once. Of each case one card makes some pictures, then *Several GPUs* is
chosen, and each picture counts; so again for all NUMBERS of other cards, none for all there are.
--faults: then what can go wrong with the other card is done to it.

A picture is slow if it takes a tenth and 0.3 s longer than one card's. Prints a table, and writes
FOLDER/webui-several.json with what is in it. Returns 1 if a picture was wrong: apart from one
card's by more than 2 of 255.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.webui_client import PICTURE, ROOT, SCRIPT, Client, Pixels, serving

ALONE: list[Any] = [True, "Auto", "Auto", 0, "Auto", "Off", ""]
SEVERAL: list[Any] = [*ALONE[:5], "Auto"]
MOST_APART = 2
LONGER, LONGER_S = 1.1, 0.3
AMID = 0.4
"""Part of a picture's time after which something is done to it."""
HEAD = (
    "case",
    "cards",
    "it/s, picture by picture",
    "picture, s",
    "decode, ms",
    "apart",
    "who, why",
)
FULL = """
import time, torch
held = []
size = torch.cuda.mem_get_info()[0]
while size > 1 << 20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("ready", flush=True)
time.sleep(600)
"""
BUSY = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
print("ready", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class Case:
    """Pictures of one kind."""

    name: str
    checkpoint: str
    side: int
    batch: int

    @classmethod
    def of(cls, text: str) -> Case:
        checkpoint, _, size = text.rpartition(":")
        side, _, batch = size.partition("x")
        return cls(text, checkpoint, int(side), int(batch or 1))


@dataclass(frozen=True)
class Shot:
    """What one request gave."""

    pixels: Pixels
    it_s: float
    picture_s: float
    decode_ms: float
    runs: str
    why: str
    is_divided: bool
    rows: tuple[int, ...]
    """Of the last step, by card."""

    def row(self) -> dict[str, Any]:
        """All but the pixels, for JSON."""
        return {key: value for key, value in vars(self).items() if key != "pixels"}


class Painter(Client):
    """Makes the pictures of one WebUI, and keeps what was found."""

    def __init__(self, running: Any, begun: float, asked: argparse.Namespace) -> None:
        super().__init__(running, begun)
        self.asked = asked
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.is_right = True

    def shot(self, case: Case, args: list[Any], steps: int = 0) -> Shot:
        """One request. `steps`: as asked for, where it is 0."""
        steps = steps or self.asked.steps
        body = {**PICTURE, "width": case.side, "height": case.side, "batch_size": case.batch}
        body |= {"steps": steps, "alwayson_scripts": {SCRIPT: {"args": args}}}
        self.ask("probe/take")
        made = self.make(body)
        times = self.ask("probe/take")
        told = self.status()["several"]
        sampled, decoded = (
            sum(each["s"] for each in times if each["kind"] == kind)
            for kind in ("sample", "decode")
        )
        why = "; ".join([*told["why"], *filter(None, [told["vae"]["why"]])])
        return Shot(
            *(np.stack(made.frames), steps / sampled, made.seconds, 1000 * decoded),
            *(told["runs"], why, sum(map(bool, told["rows"])) > 1, tuple(told["rows"])),
        )

    def prepare(self, case: Case) -> None:
        """Load its checkpoint, and wait until nothing is compiled or tried any more; nothing is
        while a picture is made.
        """
        if case.checkpoint:
            self.ask("sdapi/v1/options", {"sd_model_checkpoint": case.checkpoint})
        for _ in range(3):
            self.shot(case, ALONE, steps=2)
            self.settled()
        self.settle(partial(self.shot, case, ALONE, 2))

    def left_s(self) -> float:
        return float(self.asked.limit_s) - self.since_start()

    def add(self, case: str, cards: str, shots: list[Shot], expected: Pixels, **more: Any) -> None:
        """A row of the table: printed and kept."""
        apart = max(int(abs(shot.pixels - expected).max()) for shot in shots)
        self.is_right &= apart <= MOST_APART
        rates = ", ".join(f"{shot.it_s:.1f}" for shot in shots)
        seconds = statistics.median(shot.picture_s for shot in shots)
        decode = statistics.median(shot.decode_ms for shot in shots)
        last = shots[-1]
        said = f"{last.runs} {last.rows or ''}; {last.why}; {json.dumps(more) if more else ''}"
        shown = (case, cards, rates, f"{seconds:.2f}", f"{decode:.0f}", apart, said.strip("; "))
        print(*shown, sep=" | ", flush=True)
        found = {"case": case, "cards": cards, "shots": [shot.row() for shot in shots]}
        self.rows.append({**found, "apart": apart, **more})
        self.keep()

    def keep(self) -> None:
        text = json.dumps({**self.facts, "rows": self.rows}, indent=1, ensure_ascii=False)
        Path(self.asked.out, "webui-several.json").write_text(text + "\n", encoding="utf-8")

    def compared(self, case: Case, alone: list[Shot], numbers: str) -> None:
        """Several cards' pictures, from the first on, beside one card's."""
        shots: list[Shot] = []
        begin, first_s = time.monotonic(), 0.0
        while len(shots) < self.asked.pictures and self.left_s() > 0:
            shots.append(self.shot(case, [*SEVERAL, numbers]))
            if shots[-1].is_divided and not first_s:
                first_s = time.monotonic() - begin
        later = shots[len(shots) // 2 :]
        most_s = LONGER * statistics.median(s.picture_s for s in alone) + LONGER_S
        gain = {
            name: round(
                statistics.median(getattr(shot, name) for shot in later)
                / statistics.median(getattr(shot, name) for shot in alone),
                3,
            )
            for name in ("it_s", "picture_s", "decode_ms")
        }
        slow = [number for number, shot in enumerate(shots, 1) if shot.picture_s > most_s]
        more = {"divided after, s": round(first_s, 1), "of one card's": gain, "slow": slow}
        name = f"and {numbers}" if numbers else f"and all {len(self.cards())} others"
        self.add(case.name, name, shots, alone[0].pixels, **more)

    def cards(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self.status()["several"]["cards"]
        return told

    def faults(self, case: Case, alone: list[Shot], numbers: str) -> None:
        """What can go wrong with another card, one after the other."""
        expected, args = alone[0].pixels, [*SEVERAL, numbers]

        def amid(do: Callable[[], object]) -> Shot:
            timer = threading.Timer(AMID * alone[0].picture_s, do)
            timer.start()
            try:
                return self.shot(case, args)
            finally:
                timer.join()

        def after(name: str, first: list[Shot], count: int) -> None:
            shots = [*first, *(self.shot(case, args) for _ in range(count))]
            self.add(case.name, name, shots, expected)

        pid = self.cards()[0]["pid"]
        if pid is None:
            print("the other card is not there", self.cards(), sep=" | ")
            return
        after("killed", [amid(lambda: os.kill(pid, signal.SIGKILL))], 6)
        with suppress(RuntimeError):  # an interrupted picture is another one
            amid(lambda: self.ask("sdapi/v1/interrupt", {}))
        after("after an interrupt", [], 2)
        with Elsewhere(self.cards()[0]["device"], BUSY):
            after("the other is busy", [], 8)
        after("no longer busy", [], 3)
        wider = Case("", "", case.side + 192, case.batch)
        one = self.shot(wider, ALONE)
        after("back from one card", [], 7)
        with Elsewhere(self.cards()[0]["device"], FULL):
            shots = [self.shot(wider, args) for _ in range(4)]
            self.add(f"{case.name}, wider", "the other is full", shots, one.pixels)
        after("no longer full", [], 4)
        pid = self.cards()[0]["pid"]
        off = [self.shot(case, ALONE)]
        gone_s = until_gone(pid)
        self.add(case.name, "one, then", off, expected, gone_s=gone_s)


def until_gone(pid: int) -> float:
    """Seconds until this process has ended, ten at most."""
    begin = time.monotonic()
    while Path(f"/proc/{pid}").exists() and time.monotonic() - begin < 10:
        time.sleep(0.01)
    return round(time.monotonic() - begin, 2)


class Elsewhere:
    """A program of somebody else on a card, as long as the `with` lasts."""

    def __init__(self, device: str, program: str) -> None:
        number = device.partition(":")[2]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": number, "HIP_VISIBLE_DEVICES": number}
        command = [sys.executable, "-c", program]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run(asked: argparse.Namespace, folder: Path) -> bool:
    """All cases; whether all pictures were right."""
    extensions = {"a_probe": ROOT / "tools/webui_unet_probe.py", "rocm-sd": ROOT}
    environment = {"ROCM_SD_CACHE_DIR": str(asked.cache or folder)}
    console = Path(asked.out) / "console-several.txt"
    begin = time.monotonic()
    cases = [Case.of(text) for text in asked.cases.split(",")]
    with serving(asked.launcher, asked.flags, folder, extensions, environment, console) as running:
        painter = Painter(running, begin, asked)
        print(*HEAD, sep=" | ", flush=True)
        for case in cases:
            if painter.left_s() < 0:
                print(f"{case.name}: no time is left")
                continue
            painter.prepare(case)
            now = painter.status()
            painter.facts = {
                **{"device": now["device"]["name"], **now["versions"], "ours": now["version"]},
                "steps": asked.steps,
            }
            alone = [painter.shot(case, ALONE) for _ in range(1 + asked.alone)][1:]
            painter.add(case.name, "one", alone, alone[0].pixels)
            for numbers in asked.cards.split(";"):
                painter.compared(case, alone, numbers)
            if asked.faults and case is cases[-1]:
                painter.faults(case, alone, numbers)
        return painter.is_right


def main(argv: list[str]) -> int:
    """Measure. Returns 1 if a picture was wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="512x4,1024")
    parser.add_argument("--cards", default="", help="beside the first; several choices with ;")
    parser.add_argument("--pictures", type=int, default=12, help="by several cards")
    parser.add_argument("--alone", type=int, default=3, help="by one card, after a first one")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--faults", action="store_true", help="what can go wrong, with the last case"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin nothing after")
    parser.add_argument("--cache", type=Path, help="a folder with kernels that are there already")
    parser.add_argument("--out", default=".")
    parser.add_argument("launcher")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        right = run(asked, Path(folder))
    print("All pictures are one card's." if right else "A PICTURE IS NOT ONE CARD'S.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
