"""Features of a real ComfyUI and of custom nodes, without and with our nodes.

    python -m tools.comfyui_matrix CHECKOUT [--nodes FOLDER] [--only NAMES] [--out FOLDER]

CHECKOUT has ComfyUI's main.py, and FOLDER custom nodes, a folder for each. What differs between two
attentions of ComfyUI's own is the yardstick. Each workflow is made without our nodes, with them
before a feature's nodes, without, with them after these, and without. It is WRONG where a picture
without our nodes has other bytes than ComfyUI's own, or one with them is further from it than twice
the yardstick. Weights are random (tools/comfyui_probe). `--device cpu` has the CPU play a card.

Writes FOLDER/comfyui-matrix.json. Returns 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.comfyui_matrix.rows import FIRST, LAST, MOTION, ROWS, WITHOUT, Row, Way, workflow
from tools.comfyui_process import ROOT, FailedError, Made, Server, running
from tools.comfyui_speed import PLAN_LIMIT_S, PYTORCH, pixels

LEFT, BEFORE = "  ComfyUI's own, ", "Before it, "
"""How the status begins why calls were ComfyUI's, and what earlier workflows did."""
_COUNTS = re.compile(r"(\d+) of (\d+) are ours")
SPLIT = "--use-split-cross-attention"
PLAYED = ROOT / "tests" / "comfyui" / "inside" / "tiny_models"
TIMES, SLACK = 2.0, (2.0, 0.2)
"""So many times the yardstick is right, and so many of 255 more: of the largest and of the mean."""
ROUNDS = 4
"""So often a row's kernels are waited for at most."""
WAYS = (FIRST, WITHOUT, LAST, WITHOUT)
"""After a first picture without our nodes."""


@dataclass
class Verdict:
    """One row. Differences are the largest and the mean, of 255. `own` is ComfyUI's yardstick."""

    row: str
    kind: str
    own: tuple[float, float] = (0.0, 0.0)
    changed: float | None = None
    apart: dict[str, tuple[float, float]] = field(default_factory=dict)
    blocks: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        return "WRONG" if self.wrong else "right"

    def line(self) -> str:
        changed = "" if self.changed is None else f", changes {self.changed:.1f}"
        head = f"{self.word} {self.kind}, {self.row}: own {_said(self.own)}{changed}"
        ways = [f"{way} {_said(apart)}" for way, apart in self.apart.items()]
        return "; ".join([head, *ways, *self.wrong, *_alike(self.blocks)])

    def judge(self, way: Way, apart: tuple[float, float]) -> None:
        most = [TIMES * own + slack for own, slack in zip(self.own, SLACK, strict=True)]
        self.apart[way.name] = apart
        if any(found > allowed for found, allowed in zip(apart, most, strict=True)):
            self.wrong.append(f"ours {way.name} is {_said(apart)} apart")


def _said(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.0f} ({pair[1]:.2f})"


def _alike(blocks: dict[str, list[str]]) -> Iterator[str]:
    """What is said of blocks in each way; once where it is the same."""
    said = {way: ", ".join(lines) for way, lines in blocks.items()}
    if len(set(said.values())) == 1:
        yield next(iter(said.values()))
    else:
        yield from (f"{way}: {lines}" for way, lines in said.items())


def differences(one: Any, other: Any) -> tuple[float, float]:
    """The largest and the mean; infinite where sizes differ."""
    if one.shape != other.shape:
        return float("inf"), float("inf")
    apart = np.abs(one - other)
    return float(apart.max()), float(apart.mean())


class Tried:
    """The workflows of one ComfyUI."""

    def __init__(self, server: Server, asked: argparse.Namespace) -> None:
        self._server, self._asked = server, asked

    def made(self, row: Row, way: Way) -> Made:
        asked = self._asked
        return self._server.make(workflow(row, way, asked.kind, asked.side, asked.steps))

    def settle(self, row: Row) -> None:
        """Until nothing is compiled or tried for the row any more."""
        for _ in range(ROUNDS if self._asked.device != "cpu" else 0):
            self.made(row, FIRST)
            until, waited = time.monotonic() + PLAN_LIMIT_S, False
            while json.loads(self._server.ask("/probe/take"))["at_work"]:
                waited = True
                if time.monotonic() > until:
                    return
                time.sleep(0.2)
            if not waited:
                return
            self.made(row, WITHOUT)  # or the next one would be taken from ComfyUI's cache


@contextmanager
def started(asked: argparse.Namespace, folder: Path, name: str, ours: bool) -> Iterator[Tried]:
    nodes = {"comfyui_probe": ROOT / "tools" / "comfyui_probe", **_packs(asked)}
    moves = any(MOTION in str(row.nodes) for row in _rows(asked))
    more = {"ROCM_SD_MOTION": MOTION} if moves else {}
    is_cpu = asked.device == "cpu"
    if ours:
        nodes["rocm_sd"] = ROOT
        if is_cpu:
            nodes["played"] = PLAYED
            more["ROCM_SD_PLAY"] = "1"
    path = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    more["PYTHONPATH"] = os.pathsep.join(p for p in path if Path(p).resolve() != ROOT)
    more["ROCM_SD_CACHE_DIR"] = str(asked.cache or folder)
    flags = ["--cpu"] if is_cpu else ["--disable-cuda-malloc"]
    flags += [SPLIT if name == "split" else PYTORCH]
    where = (Path(asked.checkout), asked.python, folder / name, nodes)
    with running(*where, flags, more) as server:
        try:
            yield Tried(server, asked)
        finally:
            log = server.log.read_text(encoding="utf-8", errors="replace")
            (asked.out / f"console-{name}.txt").write_text(log[-200_000:], encoding="utf-8")


def _packs(asked: argparse.Namespace) -> dict[str, Path]:
    wanted = {row.needs for row in _rows(asked)} - {""}
    return {name: asked.nodes / name for name in sorted(wanted)}


def _rows(asked: argparse.Namespace) -> list[Row]:
    """Those that are asked for and can be had."""
    found = [row for row in ROWS if not row.kinds or asked.kind in row.kinds]
    found = [row for row in found if not row.needs or _has(asked, row.needs)]
    only = asked.only or [""]
    return [row for row in found if row is ROWS[0] or any(name in row.name for name in only)]


def _has(asked: argparse.Namespace, pack: str) -> bool:
    return asked.nodes is not None and (asked.nodes / pack).is_dir()


def own_pictures(asked: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Of each row by ComfyUI alone: its picture, or why it failed."""
    found: dict[str, Any] = {}
    with started(asked, folder, name, ours=False) as tried:
        for row in _rows(asked):
            try:
                found[row.name] = tried.made(row, WITHOUT).pictures
            except FailedError as error:
                found[row.name] = str(error)[:600]
    return found


def judged(tried: Tried, row: Row, asked: argparse.Namespace, own: Any, other: Any) -> Verdict:
    verdict = Verdict(row.name, asked.kind)
    if isinstance(own, str) or isinstance(other, str):
        verdict.wrong.append(f"ComfyUI alone failed: {own if isinstance(own, str) else other}")
        return verdict
    expected = pixels(Made("", own))
    verdict.own = differences(expected, pixels(Made("", other)))
    try:
        tried.settle(row)
        if tried.made(row, WITHOUT).pictures != own:
            verdict.wrong.append("installed, without our nodes, a picture has other bytes")
        for way in WAYS:
            made = tried.made(row, way)
            if not way.ours:
                if made.pictures != own:
                    verdict.wrong.append("after our nodes a picture without them has other bytes")
                continue
            verdict.judge(way, differences(expected, pixels(made)))
            verdict.blocks[way.name] = told(made.texts.get("12", ""))
    except FailedError as error:
        verdict.wrong.append(f"failed: {str(error)[:600]}")
    return verdict


def told(status: str) -> list[str]:
    """What a status says of blocks, and what of the last workflow was left to ComfyUI."""
    lines, left, part = of_blocks(status), [], ""
    for line in status.partition(BEFORE)[0].splitlines():
        if line.startswith(LEFT):
            left.append(f"{part}: {line.strip()}")
        elif not line.startswith(" "):
            part = line.partition(":")[0]
    counts = [tuple(map(int, found)) for line in lines for found in _COUNTS.findall(line)]
    if counts and all(ours == total for ours, total in counts):
        lines = [f"all {sum(ours for ours, _ in counts)} blocks are ours"]
    return [*lines, *left]


def of_blocks(status: str) -> list[str]:
    """What the status says of blocks, and why some are not ours."""
    found, within = [], False
    for line in status.splitlines():
        begins = line.startswith(("UNet, ", "ControlNet: "))
        within = begins or (within and line.startswith("  "))
        if within:
            found.append(line.removeprefix("UNet, ").strip())
    return found


def run(asked: argparse.Namespace, folder: Path) -> list[Verdict]:
    own = own_pictures(asked, folder, "own")
    other = own_pictures(asked, folder, "split")
    made: list[Verdict] = []
    with started(asked, folder, "ours", ours=True) as tried:
        for row in _rows(asked):
            verdict = judged(tried, row, asked, own[row.name], other[row.name])
            see_change(verdict, row, own[row.name], own[ROWS[0].name])
            made.append(verdict)
            print(verdict.line(), flush=True)
            keep(asked.out, made)
    return made


def see_change(verdict: Verdict, row: Row, own: Any, plain: Any) -> None:
    """By how much the feature changes the first picture, where that has a plain one's size."""
    if not row.changes or isinstance(own, str) or isinstance(plain, str):
        return
    one, other = (pixels(Made("", pictures[:1])) for pictures in (own, plain))
    if one.shape == other.shape:
        verdict.changed = differences(one, other)[1]
        if verdict.changed < TIMES * verdict.own[1] + SLACK[1]:
            verdict.wrong.append("the row cannot be judged: it changes too little")


def keep(out: Path, made: Sequence[Verdict]) -> None:
    rows = ",\n".join(json.dumps({**asdict(one), "verdict": one.word}) for one in made)
    text = f'{{"rows": [\n{rows}\n]}}\n'.replace("Infinity", "null")
    (out / "comfyui-matrix.json").write_text(text, encoding="utf-8")


def main() -> int:
    """Print a line for each row, and write all of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.comfyui_matrix")
    parser.add_argument("checkout")
    parser.add_argument("--nodes", type=Path, help="a folder with custom nodes")
    parser.add_argument("--only", nargs="+", help="parts of rows' names")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kind", default="SD 1.5", help="small, SD 1.5 or SDXL")
    parser.add_argument("--side", type=int, default=512, help="of pictures")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--python", default=sys.executable, help="has what ComfyUI needs")
    parser.add_argument("--cache", type=Path, help="a folder with kernels that are there already")
    asked = parser.parse_args()
    if asked.nodes is not None:
        asked.nodes = asked.nodes.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    for pack in dict.fromkeys(row.needs for row in ROWS if row.needs):
        if not _has(asked, pack):
            print(f"skipped: there is no {pack}")
    with tempfile.TemporaryDirectory() as folder:
        made = run(asked, Path(folder))
    wrong = sum(one.word == "WRONG" for one in made)
    print(f"{len(made)} rows, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
