"""First starts and planted faults in a real WebUI on a card: what becomes of its pictures.

python -m tools.webui_trials [--only PART,...] [--before CHECKOUT] [--side PIXELS] [--out FOLDER]
                             LAUNCHER [FLAG ...]

LAUNCHER starts AUTOMATIC1111's WebUI or its AMD fork with the Python of this command; FLAGs go to
it (--ckpt MODEL). Parts, each with a data folder and a cache folder of its own:

first    a first start, all being compiled, with pictures made without a pause: when ours takes over
idle     the same, nobody making a picture
before   the same with CHECKOUT, an older state of this extension
hook     the same after what install.py has tried: how long that takes
again    a start with all verdicts there: what the gate costs, what the first picture costs
planted  an access outside of memory, an endless loop, a wrong lane in attention; then none
parent   an access outside of memory that comes in the WebUI only: this start and the next one

Prints a table, at its end when each part of the model became ours, and writes
FOLDER/webui-trials.json with what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.trials.plants import PLANTS, START
from tests.verify import simt
from tools.webui_client import PATIENCE_S, PICTURE, ROOT, SCRIPT, Client, Pixels, serving

COMPILE = """
import torch
from lib_rocm_sd.device import identify
from lib_rocm_sd.runtime import build
from lib_rocm_sd.shipped import AT_START, shipped
arch = identify(torch.device("cuda", 0)).arch
build.build_all(shipped(arch, AT_START), arch)
"""
TRY = """
import torch
from lib_rocm_sd import first_trials
first_trials.main("", 120.0, [])
"""
"""What install.py does for an AMD card."""
OURS = "rocm_sd"
SIGNS = {
    "attention": f"attention: {OURS}",
    "UNet": r"[0-9]+ of [0-9]+ blocks(?!, others)",
    "VAE": f'ROCm SD VAE: "[^"]*conv: {OURS}',
}
"""In an infotext, of what is ours."""
WAITS = "being tried|being tested|compiling"
"""In a reason that passes."""
PARENT = "parent "
"""As in the probe."""


class Watched(Client):
    """Of one WebUI with the probe, with square pictures."""

    side = int(PICTURE["width"])  # type: ignore[call-overload]

    def picture(self, enable: bool = True, **changes: Any) -> tuple[Pixels, str, float]:
        """Pixels, what its infotext says of us, seconds."""
        scripts = {SCRIPT: {"args": [enable, "Auto", "Auto", 0]}}
        body = {**PICTURE, "width": self.side, "height": self.side, **changes}
        made = self.make({**body, "alwayson_scripts": scripts})
        return made.frames[0], made.ours, made.seconds

    def seen(self) -> dict[str, list[float]]:
        return self.ask("probe/seen")  # type: ignore[no-any-return]


class Bench:
    """Starts WebUIs and keeps what was found."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.plant = folder / "plant.txt"
        self.plant.write_text("", encoding="utf-8")
        self.rows: list[tuple[str, str, str]] = []
        self.ours: dict[str, dict[str, float]] = {}
        """By part, after how many seconds what was ours."""

    def tell(self, part: str, what: str, found: object) -> None:
        self.rows.append((part, what, str(found)))
        print(f"{part:8} {what:34} {found}", flush=True)

    def became_ours(self, part: str, name: str, client: Watched) -> None:
        seconds = self.ours.setdefault(part, {})[name] = client.since_start()
        what = "all is tried" if name == "all" else f"{name} is ours"
        self.tell(part, f"{what} after, s", f"{seconds:.1f}")

    def compiled(self, part: str, extension: Path = ROOT) -> None:
        _, seconds = self.alone(part, COMPILE, extension)
        self.tell(part, "compiling took, s", f"{seconds:.1f}")

    def alone(self, data: str, code: str, extension: Path = ROOT) -> tuple[str, float]:
        """Run `code` with a data folder's cache; what it printed, seconds."""
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=extension,
            env={**os.environ, "ROCM_SD_CACHE_DIR": str(self.folder / data / "rocm_sd")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout.strip(), time.monotonic() - begin

    def copy_code(self, data: str) -> None:
        """The machine code of `first`, without the verdicts on it."""
        made = self.folder / "first/rocm_sd"
        if made.exists():
            verdicts = shutil.ignore_patterns("verdicts", "tried")
            shutil.copytree(made, self.folder / data / "rocm_sd", ignore=verdicts)

    def barred(self, part: str, name: str, trials: Any) -> None:
        """The kernels that are not used, and why; those behind a halt by their number."""
        halted = trials["halted"]
        rows = [row for row in trials["refused"] if row["reason"] != halted]
        for row in rows:
            self.tell(part, f"{name}: {row['kernel'][:50]}", row["reason"])
        self.tell(part, f"{name}: barred", len(trials["refused"]))
        if halted:
            self.tell(part, f"{name}: halted", halted)

    @contextmanager
    def webui(self, data: str, extension: Path = ROOT) -> Iterator[Watched]:
        environment = {
            "ROCM_SD_CACHE_DIR": str(self.folder / data / "rocm_sd"),
            "ROCM_SD_PROBE_LIBRARY": str(extension),
            "ROCM_SD_PROBE_PLANT": str(self.plant),
        }
        extensions = {"a_probe": ROOT / "tools/webui_trials_probe.py", "rocm-sd": extension}
        begin = time.monotonic()
        with serving(
            self.asked.launcher,
            self.asked.flags,
            self.folder / data,
            extensions,
            environment,
            Path(self.asked.out) / f"console-{data}.txt",
        ) as running:
            client = Watched(running, begin)
            client.side = self.asked.side
            yield client

    def planting(self, how: str, parent: bool = False) -> None:
        """From now on; an empty `how` takes the plant away. `parent`: see the probe."""
        folder = simt.planted("attention.hip", START, PLANTS[how]) if how else ""
        self.plant.write_text(f"{PARENT * parent}{folder}" if how else "", encoding="utf-8")


def first(bench: Bench, part: str = "first", extension: Path = ROOT) -> None:
    """Pictures one after the other until attention, the UNet and the VAE are ours."""
    if part != "hook":
        bench.compiled(part, extension)
    with bench.webui(part, extension) as client:
        _begins(bench, part, client)
        off, _, _ = client.picture(False)
        bench.tell(part, "first picture (off) after, s", f"{client.since_start():.1f}")
        missing, count = dict(SIGNS), 0
        while missing and client.since_start() < PATIENCE_S:
            made, said, seconds = client.picture()
            count += 1
            for name, sign in list(missing.items()):
                if re.search(sign, said):
                    bench.became_ours(part, name, client)
                    bench.tell(part, "  with picture", f"{count}, which took {seconds:.2f} s")
                    missing.pop(name)
        bench.tell(part, "not ours", ", ".join(missing) or "nothing")
        bench.tell(part, "infotext", said)
        bench.tell(part, "largest difference from off", int(abs(made - off).max()))
        bench.tell(part, "picture now, s", f"{client.picture()[2]:.2f}")
        _ends(bench, part, client)


def idle(bench: Bench) -> None:
    """Nobody makes a picture until all is tried."""
    bench.copy_code("idle")
    if not (bench.folder / "idle").exists():
        bench.compiled("idle")
    with bench.webui("idle") as client:
        _begins(bench, "idle", client)
        missing = {"attention": "attention", "UNet": "unet", "VAE": "vae"}
        while missing and client.since_start() < PATIENCE_S:
            time.sleep(0.5)
            now = client.status()
            for name, row in list(missing.items()):
                if not any(re.search(WAITS, why) for why in now[row]["reasons"]):
                    bench.became_ours("idle", name, client)
                    missing.pop(name)
        _ends(bench, "idle", client)
        _, said, _ = client.picture()
        bench.tell("idle", "infotext", said)


def _begins(bench: Bench, part: str, client: Watched) -> None:
    bench.tell(part, "answers after, s", f"{client.since_start():.1f}")
    now = client.status()
    found = {"device": now["device"]["name"], **now["versions"], "ours": now["version"]}
    bench.tell(part, "with", ", ".join(f"{name} {found[name]}" for name in found))


def _ends(bench: Bench, part: str, client: Watched) -> None:
    now = client.settled()
    bench.became_ours(part, "all", client)
    if "trials" in now:
        bench.tell(part, "tried", f"{now['trials']['done']} of {now['trials']['total']}")
        bench.barred(part, "trials", now["trials"])
    _watched(bench, part, client)


def _watched(bench: Bench, part: str, client: Watched) -> None:
    for name, times in client.seen().items():
        longest = max(times, default=0.0)
        said = f"{len(times)} calls, {sum(times):.1f} ms in all, the longest {longest:.1f}"
        bench.tell(part, name, said)


def hook(bench: Bench) -> None:
    """As after install.py on an AMD card."""
    bench.copy_code("hook")
    said, seconds = bench.alone("hook", TRY)
    bench.tell("hook", "install.py's trials took, s", f"{seconds:.1f}")
    bench.tell("hook", "they said", said)
    first(bench, "hook")


def again(bench: Bench) -> None:
    """With the verdicts that `first` has left."""
    with bench.webui("first") as client:
        _watched(bench, "again", client)
        off, _, _ = client.picture(False)
        made, said, seconds = client.picture()
        bench.tell("again", "first picture with ours, s", f"{seconds:.2f}")
        bench.tell("again", "infotext", said)
        bench.tell("again", "largest difference from off", int(abs(made - off).max()))
        bench.tell("again", "second picture, s", f"{client.picture()[2]:.2f}")
        _watched(bench, "again", client)


def planted(bench: Bench) -> None:
    """Each fault in turn, in one WebUI that goes on, with machine code that is there already."""
    bench.planting("outside")
    bench.copy_code("planted")
    with bench.webui("planted") as client:
        off, _, _ = client.picture(False)
        for how in ("outside", "endless", "lane", ""):
            bench.planting(how)
            if how != "outside":
                bench.tell("planted", "Check this card", client.ask("rocm-sd/v1/check", {})["said"])
            client.picture()
            begin = time.monotonic()
            now = client.settled()
            time.sleep(1)  # what was decided holds from the next picture on
            made, said, seconds = client.picture()
            name = how or "none"
            bench.tell("planted", f"{name}: settled after, s", f"{time.monotonic() - begin:.1f}")
            bench.barred("planted", name, now["trials"])
            bench.tell("planted", f"{name}: infotext", said)
            bench.tell("planted", f"{name}: difference from off", int(abs(made - off).max()))
            bench.tell("planted", f"{name}: picture, s", f"{seconds:.2f}")
        alive = client.running.process.poll() is None
        bench.tell("planted", "the WebUI lives", alive)
        same = np.array_equal(client.picture(False)[0], off)
        bench.tell("planted", "off is what it was", same)


def parent(bench: Bench) -> None:
    """The fault comes in the WebUI, which is then started again without it."""
    bench.planting("outside", parent=True)
    with bench.webui("first") as client:
        try:
            client.picture()
            bench.tell("parent", "first start", "made a picture")
        except (OSError, RuntimeError) as error:
            bench.tell("parent", "first start", f"no picture: {str(error)[:160]}")
        bench.tell("parent", "its process", client.running.process.poll())
    bench.planting("")
    with bench.webui("first") as client:
        off, _, _ = client.picture(False)
        made, said, _ = client.picture()
        bench.barred("parent", "next start", client.status()["trials"])
        bench.tell("parent", "next start: infotext", said)
        bench.tell("parent", "next start: difference from off", int(abs(made - off).max()))
        bench.tell("parent", "Check this card", client.ask("rocm-sd/v1/check", {})["said"])
        client.settled()
        time.sleep(1)
        made, said, _ = client.picture()
        bench.tell("parent", "checked: infotext", said)
        bench.tell("parent", "checked: difference from off", int(abs(made - off).max()))
        bench.barred("parent", "checked", client.status()["trials"])


def main(argv: list[str]) -> int:
    """Go through the parts. Returns 1 if one of them broke off, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="first,idle,before,hook,again,planted,parent")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--out", default=".")
    parser.add_argument("launcher")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    parts: dict[str, Callable[[Bench], None]] = {
        "first": first,
        "idle": idle,
        "hook": hook,
        "again": again,
        "planted": planted,
        "parent": parent,
    }
    if asked.before:
        parts["before"] = lambda bench: first(bench, "before", asked.before.absolute())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(asked, Path(folder))
        for name in asked.only.split(","):
            if name not in parts:
                continue
            try:
                parts[name](bench)
            except Exception as error:
                failed = 1
                bench.tell(name, "broke off", f"{type(error).__name__}: {str(error)[-1500:]}")
            rows = json.dumps(bench.rows, indent=1, ensure_ascii=False)
            Path(asked.out, "webui-trials.json").write_text(rows + "\n", encoding="utf-8")
        for part, seconds in bench.ours.items():
            told = "  ".join(f"{name} {after:6.1f}" for name, after in seconds.items())
            print(f"ours after, s   {part:8} {told}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
