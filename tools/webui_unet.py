"""A real WebUI's speed with the UNet's blocks ours and not, and what Off leaves of it.

python -m tools.webui_unet [--cases CASE,...] [--steps N] [--pictures N] [--no-bare] [--checks N]
                           [--out FOLDER] LAUNCHER [FLAG ...]

LAUNCHER starts AUTOMATIC1111's WebUI or its AMD fork with the Python of this command; FLAGs go to
it (--ckpt MODEL). CASE: pixels a side, "x4" for a batch of four: 512,512x4,1024. First the WebUI
runs without this extension, then with it: Enable off, UNet Off and Auto, by each level that is
expected to be fast; Enable off last, once more. Each picture of Off has to be the first WebUI's.
--checks: what the spot check adds to a picture: so many pictures with it and without, in turns.

Prints a table, and writes FOLDER/webui-unet.json with what is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tools.webui_client import PICTURE, ROOT, SCRIPT, Client, Pixels, serving

BARE, OFF, OFF_AGAIN = "not installed", "Enable off", "Enable off again"
WAYS: dict[str, list[Any]] = {
    OFF: [False],
    "UNet Off": [True, "Auto", "Auto", 0, "Off"],
    "UNet Auto": [True, "Auto", "Auto", 0, "Auto"],
    "UNet Auto, Performance": [True, "Performance", "Auto", 0, "Auto"],
    OFF_AGAIN: [False],
}
"""The script's arguments of each."""
HEAD = ("case", "way", "it/s", "picture, s", "peak MiB", "from Enable off", "infotext")


class Painter(Client):
    """Makes the pictures of one WebUI."""

    def paint(
        self, case: str, steps: int, args: list[Any] | None, **more: Any
    ) -> tuple[Pixels, str, float]:
        """Pixels of all pictures, what the infotext says of us, seconds. `args`: None for none."""
        side, _, batch = case.partition("x")
        scripts = {} if args is None else {SCRIPT: {"args": args}}
        asked = {"width": int(side), "height": int(side), "batch_size": int(batch or 1), **more}
        made = self.make({**PICTURE, **asked, "steps": steps, "alwayson_scripts": scripts})
        return np.stack(made.frames), made.ours, made.seconds

    def measured(
        self, case: str, steps: int, pictures: int, args: list[Any] | None
    ) -> dict[str, Any]:
        """The fastest of several pictures; one more goes before them."""
        self.paint(case, steps, args)
        self.ask("probe/take")
        found: list[dict[str, Any]] = []
        for _ in range(pictures):
            pixels, said, seconds = self.paint(case, steps, args)
            (sampled,) = (each for each in self.ask("probe/take") if each["kind"] == "sample")
            found.append(
                {
                    "it_s": steps / sampled["s"],
                    "picture_s": seconds,
                    "peak_mib": sampled["peak_mib"],
                    "infotext": said,
                    "pixels": pixels,
                }
            )
        return max(found, key=lambda each: float(each["it_s"]))

    def checked(self, case: str, steps: int, pictures: int) -> dict[str, Any]:
        """Seconds of a picture with the spot check and without, the UNet ours, and by how much
        their lower quartiles differ: what else runs on a machine only adds time. Each seed is
        another turn of blocks and steps, and is made once before.
        """
        seconds: dict[str, list[float]] = {"compared": [], "not compared": []}
        for seed in range(2 * pictures):
            for word in sorted(seconds, reverse=bool(seed % 2)):
                self.ask("sdapi/v1/options", {"rocm_sd_spot_check": word == "compared"})
                _, _, took = self.paint(case, steps, WAYS["UNet Auto"], seed=seed % pictures)
                seconds[word] += [took] if seed >= pictures else []
        self.ask("sdapi/v1/options", {"rocm_sd_spot_check": True})
        quartiles = {word: statistics.quantiles(times) for word, times in seconds.items()}
        return {
            **{"case": case, "pictures": pictures, "seconds": seconds, "quartiles_s": quartiles},
            "adds": quartiles["compared"][0] / quartiles["not compared"][0] - 1,
        }


@contextmanager
def webui(asked: argparse.Namespace, folder: Path, ours: bool) -> Iterator[Painter]:
    """One that runs, with a data folder of its own, its console kept."""
    extensions = {"a_probe": ROOT / "tools/webui_unet_probe.py"}
    if ours:
        extensions["rocm-sd"] = ROOT
    environment = {"ROCM_SD_CACHE_DIR": str(asked.cache or folder)}
    console = Path(asked.out) / f"console-{folder.name}.txt"
    begin = time.monotonic()
    with serving(asked.launcher, asked.flags, folder, extensions, environment, console) as running:
        yield Painter(running, begin)


class Table:
    """What was found: printed as it comes, and kept."""

    def __init__(self, out: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.out = out
        print(*HEAD, sep=" | ", flush=True)

    def add(self, case: str, way: str, found: dict[str, Any], off: Pixels | None) -> None:
        pixels = found.pop("pixels")
        apart = None if off is None else int(abs(pixels - off).max())
        self.rows.append({"case": case, "way": way, **found, "apart": apart})
        shown = (found["it_s"], found["picture_s"], found["peak_mib"])
        figures = [f"{value:.2f}" for value in shown]
        print(case, way, *figures, apart, found["infotext"][:160], sep=" | ", flush=True)
        self.keep()

    def keep(self) -> None:
        text = json.dumps({**self.facts, "rows": self.rows}, indent=1, ensure_ascii=False)
        (self.out / "webui-unet.json").write_text(text + "\n", encoding="utf-8")


def run(asked: argparse.Namespace, folder: Path, table: Table) -> bool:
    """All cases; False if an Off was not what it is without this extension."""
    cases, size = asked.cases.split(","), (asked.steps, asked.pictures)
    bare: dict[str, Pixels] = {}
    if not asked.no_bare:
        with webui(asked, folder / "bare", ours=False) as painter:
            for case in cases:
                found = painter.measured(case, *size, None)
                bare[case] = found["pixels"]
                table.add(case, BARE, found, None)
    same = True
    with webui(asked, folder / "ours", ours=True) as painter:
        painter.settle(lambda: painter.paint(cases[0], 2, WAYS["UNet Auto"]))
        for case in cases:
            off = bare.get(case)
            for way in asked.ways.split(";"):
                args = WAYS[way]
                found = painter.measured(case, *size, args)
                off = found["pixels"] if off is None else off
                if args == [False]:
                    same &= np.array_equal(found["pixels"], off)
                table.add(case, way, found, off)
        checks = [
            painter.checked(case, asked.steps, asked.checks) for case in cases if asked.checks
        ]
        for each in checks:
            print(
                each["case"], "spot check", each["quartiles_s"], f"{each['adds']:+.2%}", sep=" | "
            )
        now = painter.status()
        table.facts = {
            **{"device": now["device"]["name"], **now["versions"]},
            **{"ours": now["version"], "blocks": now["unet"], "events": now["report"]["events"]},
            **{"steps": asked.steps, "off is as without us": bool(same), "spot check": checks},
        }
    table.keep()
    return same


def main(argv: list[str]) -> int:
    """Measure. Returns 1 if an Off was not the WebUI's picture, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="512,512x4,1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=3, help="of each way, after a first one")
    parser.add_argument("--no-bare", action="store_true", help="not without this extension")
    parser.add_argument("--checks", type=int, default=0, help="pictures with the spot check")
    parser.add_argument("--ways", default=";".join(WAYS), help="some of: %(default)s")
    parser.add_argument("--cache", type=Path, help="a folder with kernels that are there already")
    parser.add_argument("--out", default=".")
    parser.add_argument("launcher")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    table = Table(out)
    with tempfile.TemporaryDirectory() as folder:
        same = run(asked, Path(folder), table)
    print("Off is as without this extension." if same else "OFF IS NOT AS WITHOUT THIS EXTENSION.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
