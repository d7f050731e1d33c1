"""attention.hip under NVIDIA's compute-sanitizer, on a development card:

python3 -m tools.sanitize

memcheck looks for accesses outside of a tensor, racecheck for data shared between threads without a
barrier, initcheck for reads of memory that nothing was written to. Each tool runs twice beside the
others: over every config with small odd problems (tools/sanitize_worker.py), and over a planted
fault, since a tool that finds nothing has shown nothing until it finds that. Exit status: 0 all
clean, 1 a fault, or one not found, 2 there is no compute-sanitizer or no card.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck")
NAME = "compute-sanitizer"
ENTRY = "attention_forward"
FOUND_STATUS = 86
"""What compute-sanitizer ends with where it found something."""
SECONDS = 240.0
"""For one process, starting included; racecheck was not done in 150 where memcheck took 134."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
FINDING = re.compile(
    r"^=+ ((?:Invalid|Error:|Warning:|Uninitialized|Barrier|Program hit|Misaligned).*)", re.M
)
WORKER = re.compile(r"^rocm_sd sanitize: (\d+) launches, (\d+) wrong", re.M)


@dataclass(frozen=True)
class Run:
    """One process and what it said. `status` is None where it was stopped."""

    tool: str
    planted: bool
    status: int | None
    seconds: float
    text: str

    @property
    def found(self) -> int | None:
        """What the tool counted, or None: it did not get to count."""
        counts = [int(a or b) for a, b in SUMMARY.findall(self.text)]
        return sum(counts) if counts else None

    @property
    def launches(self) -> int | None:
        """How many kernels the worker launched, or None: it did not come to its end."""
        ends = WORKER.search(self.text)
        return int(ends[1]) if ends else None

    @property
    def faults(self) -> list[str]:
        """Why this run is not as it should be."""
        if self.status is None:
            return [f"stopped after {self.seconds:.0f} s"]
        if self.found is None:
            return [f"no summary, status {self.status}: {last_line(self.text)}"]
        if self.planted:
            return [] if self.found else ["the planted fault was not found"]
        reasons = [] if not self.found else [f"{self.found} found", *self.findings[:3]]
        if not self.launches:
            reasons.append(f"the worker did not come to its end: {last_line(self.text)}")
        elif self.status != 0 and not self.found:
            reasons.append(f"status {self.status}: {last_line(self.text)}")
        return reasons

    @property
    def findings(self) -> list[str]:
        """The first line of each report, each once."""
        return list(dict.fromkeys(FINDING.findall(self.text)))


def last_line(text: str) -> str:
    """The last line that is not the tool's empty frame."""
    lines = [line.strip("= ") for line in text.splitlines() if line.strip("= ")]
    return lines[-1] if lines else "it said nothing"


def places(environ: Mapping[str, str]) -> list[Path]:
    """Where compute-sanitizer may lie, in this order."""
    homes = [environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home) / part for home in homes if home for part in ("bin", NAME)]
    folders += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    cuda = Path("/usr/local/cuda")
    return list(dict.fromkeys([*folders, cuda / "bin", cuda / NAME]))


def find(environ: Mapping[str, str]) -> str | None:
    """The path of compute-sanitizer, or None."""
    for folder in places(environ):
        path = shutil.which(NAME, path=str(folder))
        if path:
            return path
    return None


def options(tool: str, words: str) -> list[str]:
    """Arguments for compute-sanitizer, of those that its help, `words`, has."""
    chosen = ["--tool", tool, "--error-exitcode", str(FOUND_STATUS)]
    optional = (
        ("--target-processes", "application-only"),
        ("--report-api-errors", "no"),  # our driver checks each status itself
        ("--print-limit", "20"),
        *([("--padding", "4096")] if tool == "memcheck" else []),  # else a neighbour may lie there
    )
    chosen += [word for pair in optional if pair[0] in words for word in pair]
    for name in ("--kernel-name", "--kernel-regex"):
        if re.search(rf"{name}\b(?!-)", words):
            return [*chosen, name, f"kns={ENTRY}"]
    return chosen


def worker(*arguments: str) -> list[str]:
    """The command that runs the worker."""
    return [sys.executable, "-m", "tools.sanitize_worker", *arguments]


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Status (None where it took longer) and output of a command in this repository."""
    environ = {**os.environ, "ROCM_SD_ALLOW_CUDA": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            cwd=ROOT,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def sanitize(path: str, words: str, tool: str, planted: bool) -> Run:
    """One tool over all, or over its planted fault."""
    start = time.monotonic()
    arguments = ("--plant", tool) if planted else ("--seconds", f"{SECONDS - 20:.0f}")
    status, text = run([path, *options(tool, words), *worker(*arguments)], SECONDS)
    return Run(tool, planted, status, time.monotonic() - start, text)


def table(runs: Sequence[Run]) -> str:
    """A line for each run."""
    lines = [f"{'tool':<20} {'launches':>8} {'found':>6} {'seconds':>8}  verdict"]
    for each in runs:
        name = each.tool + (", planted" if each.planted else "")
        right = "found, as it must be" if each.planted else "clean"
        verdict = "; ".join(each.faults) or right
        launches, found = (
            "-" if count is None else str(count) for count in (each.launches, each.found)
        )
        lines.append(f"{name:<20} {launches:>8} {found:>6} {each.seconds:>8.1f}  {verdict}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--logs", type=Path, help="a folder for what the tools said")
    args = parser.parse_args(arguments)
    path = find(os.environ)
    if path is None:
        print(f"no {NAME} in " + ", ".join(str(place) for place in places(os.environ)))
        return 2
    status, text = run(worker("--prepare"), SECONDS)
    if status != 0:
        print(f"the kernels could not be prepared: {text.strip() or 'it took too long'}")
        return 2
    words = run([path, "--help"], SECONDS)[1]
    jobs = [(tool, planted) for tool in args.tool or TOOLS for planted in (False, True)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        runs = list(pool.map(lambda job: sanitize(path, words, *job), jobs))
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
        for each in runs:
            name = each.tool + ("-planted" if each.planted else "") + ".log"
            (args.logs / name).write_text(each.text, encoding="utf-8")
    print(table(runs))
    return 1 if any(each.faults for each in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
