"""A matrix of pictures in a real WebUI on a card, with its own features and real extensions.

python -m tools.webui_matrix [--extensions FOLDER] [--only NAME,...] [--versions FILE]
                             [--side N] [--steps N] [--several] [--limit-s N] [--out FOLDER]
                             LAUNCHER [FLAG ...]

LAUNCHER starts AUTOMATIC1111's WebUI, its AMD fork or Forge with the Python of this command; FLAGs
go to it (--ckpt MODEL, and where its models are). FOLDER has a checkout of each extension: the
WebUI runs once with all of them and once with none, for its own features and what Forge has built
in. NAME is a scenario's name, the part before its colon, or a pattern. FILE has lines "extension
commit", for folders without .git.

Each scenario is made with ours off and on, in turns. Off must have the same bytes each time. On may
differ from off by twice what two of the WebUI's own optimizers differ by; Forge takes one when it
starts, so a second Forge runs beside it, without ours. The plain pictures must still be the same
afterwards. A scenario that changes nothing is no check, and counts as wrong.

--several: on is with *Several GPUs*, and pictures are made until other cards have computed some of
them, or for a while. The table says who computed, or why one card did.

Prints a table, and writes FOLDER/webui-matrix.json with what is in it. Returns 1 if something is
wrong, or nothing was compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tools.webui_client import ROOT, Client, serving
from tools.webui_matrix import judge
from tools.webui_matrix.bench import Bench
from tools.webui_matrix.scenarios import EXTENSIONS, FORGE, NATIVE, Scenario
from tools.webui_matrix.values import World
from tools.webui_process import Running

HEAD = ("scenario", "verdict", "on-off", "yardstick", "effect", "ours", "why")
MOST_STARTS = 3
"""Of one kind of WebUI, when it ends by itself."""
OTHER_ATTENTION = "--attention-split"
"""Of Forge: another one of its own than it takes by itself."""


def chosen(scenarios: Sequence[Scenario], only: str) -> list[Scenario]:
    """Those that `only` names; all if it is empty."""
    names = [name for name in only.split(",") if name]
    return [
        each
        for each in scenarios
        if not names
        or any(fnmatch(each.name, name) or each.name.split(":")[0] == name for name in names)
    ]


def folders(extensions: Path | None) -> list[Path]:
    """One of each extension."""
    every = sorted(extensions.iterdir()) if extensions else []
    return [each for each in every if each.is_dir() and not each.name.startswith(".")]


def is_forge(launcher: str) -> bool:
    return (Path(launcher).parent / "modules_forge").is_dir()


def versions(extensions: Path | None, file: Path | None) -> dict[str, str]:
    """The commit of each extension's folder, from `file` or its own .git."""
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    known = dict(line.split()[:2] for line in lines if len(line.split()) > 1)
    for folder in folders(extensions):
        if folder.name not in known:
            command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
            own = (folder / ".git").exists() and asked.returncode == 0
            known[folder.name] = asked.stdout.strip() if own else "not known"
    return known


class Table:
    """What was found: printed as it comes, and kept."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows, self.facts = out, list[dict[str, Any]](), dict[str, Any]()
        print(*HEAD, sep=" | ", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        apart = {
            name: judge.Apart(**row[name])
            for name in ("on_off", "yardstick", "effect")
            if name in row
        }
        shown = [str(apart.get(name, "")) for name in ("on_off", "yardstick", "effect")]
        why = "; ".join(row["why"])[:400]
        ours = str(row.get("several") or row.get("infotext", "")[:120])
        print(row["scenario"], row["verdict"], *shown, ours, why, sep=" | ", flush=True)
        self.keep()

    def skip(self, scenario: Scenario, why: str) -> None:
        self.add({"scenario": scenario.name, "verdict": judge.SKIPPED, "why": [why]})

    def keep(self) -> None:
        text = json.dumps({**self.facts, "rows": self.rows}, indent=1, ensure_ascii=False)
        (self.out / "webui-matrix.json").write_text(text + "\n", encoding="utf-8")


class Matrix:
    """Starts WebUIs and goes through the scenarios."""

    def __init__(self, asked: argparse.Namespace, folder: Path, table: Table) -> None:
        self.asked, self.folder, self.table = asked, folder, table
        self.end = time.monotonic() + asked.limit_s

    @contextmanager
    def bench(self, name: str) -> Iterator[Bench]:
        """One WebUI, with all extensions or with ours alone."""
        begin = time.monotonic()
        folder = self.asked.extensions if name == "extensions" else None
        theirs = {each.name: each for each in folders(folder)}
        with ExitStack() as stack:
            started = self._serving(name, {**theirs, "rocm-sd": ROOT})
            client, other = Client(stack.enter_context(started), begin), None
            if is_forge(self.asked.launcher):
                started = self._serving(f"{name}-other", theirs, [OTHER_ATTENTION])
                other = Client(stack.enter_context(started), begin)
            world = World(client, folder or self.folder, self.asked.side, self.asked.steps)
            yield Bench(client, world, other, self.asked.several)

    def _serving(
        self, name: str, extensions: Mapping[str, Path], flags: Sequence[str] = ()
    ) -> AbstractContextManager[Running]:
        data = self.folder / name
        data.mkdir(exist_ok=True)
        # As after a first start with a page: some extensions read it when they are imported.
        (data / "ui-config.json").write_text("{}", encoding="utf-8")
        environment = {
            "ROCM_SD_CACHE_DIR": str(self.asked.cache or self.folder / "rocm_sd"),
            "IGNORE_CMD_ARGS_ERRORS": "1",  # an extension's flag, where it is not installed
        }
        return serving(
            self.asked.launcher,
            [*self.asked.flags, *flags],
            data,
            extensions,
            environment,
            self.table.out / f"console-{name}.txt",
        )

    def go(self, name: str, scenarios: Sequence[Scenario]) -> None:
        """All of `scenarios`; a WebUI that ends by itself is started again for the rest."""
        rest = list(scenarios)
        for _ in range(MOST_STARTS):
            if not rest or time.monotonic() > self.end:
                break
            try:
                self._in_one(name, rest)
            except (OSError, RuntimeError) as error:
                why = [f"the WebUI with {name} does not start: {str(error)[-1500:]}"]
                row = {"scenario": rest.pop(0).name, "verdict": judge.FAILED, "why": why}
                self.table.add(row)
        for scenario in rest:
            self.table.skip(scenario, "no time is left, or the WebUI ended too often")

    def _in_one(self, name: str, rest: list[Scenario]) -> None:
        """From the first of `rest` on, until the WebUI ends; what was done is gone from it."""
        with self.bench(name) as bench:
            facts = bench.begin()
            now = bench.client.status()
            self.table.facts |= {
                **{"device": now["device"]["name"], **now["versions"], "ours": now["version"]},
                **{name: {**facts, "ready after, s": round(bench.client.since_start(), 1)}},
            }
            print(f"--- {name}: {json.dumps(self.table.facts[name])}", flush=True)
            while rest and time.monotonic() < self.end:
                self.table.add(bench.measure(rest.pop(0), self.table.out))
                if bench.client.running.process.poll() is not None:
                    return


def present(
    scenarios: Sequence[Scenario],
    asked: argparse.Namespace,
    place: Path | None,
    where: str,
    table: Table,
) -> list[Scenario]:
    """Those that were asked for whose extension is in `place`; the others are skipped."""
    there = []
    for scenario in chosen(scenarios, asked.only):
        if place and (place / scenario.needs).is_dir():
            there.append(scenario)
        else:
            table.skip(scenario, f"there is no folder {scenario.needs} {where}")
    return there


def run(asked: argparse.Namespace, folder: Path, table: Table) -> bool:
    """All that was asked for; whether something was compared and nothing was wrong."""
    table.facts["extensions' versions"] = versions(asked.extensions, asked.versions)
    matrix = Matrix(asked, folder, table)
    builtin = Path(asked.launcher).parent / "extensions-builtin"
    there = present(EXTENSIONS, asked, asked.extensions, "in --extensions", table)
    own = present(FORGE, asked, builtin, "among the WebUI's own", table)
    matrix.go("extensions", there)
    matrix.go("none", [*own, *chosen(NATIVE, asked.only)])
    verdicts = [row["verdict"] for row in table.rows]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    print(*(f"{verdict}: {count}" for verdict, count in counts.items()), sep=", ")
    compared = any(verdict != judge.SKIPPED for verdict in verdicts)
    return compared and not any(verdict in judge.BAD for verdict in verdicts)


def main(argv: list[str]) -> int:
    """Compare. Returns 1 if something is wrong, or nothing was compared, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extensions", type=Path, help="a folder with their checkouts")
    parser.add_argument("--only", default="", help="names of scenarios, or patterns")
    parser.add_argument(
        "--several", action="store_true", help="on with Several GPUs, until divided"
    )
    parser.add_argument("--versions", type=Path, help='lines "extension commit"')
    parser.add_argument("--side", type=int, default=512, help="pixels of a plain picture's side")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--cache", type=Path, help="a folder with kernels that are there already")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("launcher")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(asked, Path(folder), Table(asked.out)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
