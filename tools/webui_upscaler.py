"""A real WebUI's hires fix with its upscaler ours and not, and what Off leaves of it.

python -m tools.webui_upscaler [--side N] [--steps N] [--pictures N] [--small] [--out FOLDER]
                               LAUNCHER [FLAG ...]

LAUNCHER starts AUTOMATIC1111's WebUI or its AMD fork with the Python of this command; FLAGs go to
it (--ckpt MODEL). Its upscalers are files with random weights of the usual shapes: ESRGAN's
(RRDBNet, x4, 23 blocks) and SwinIR's (M, x4). Pictures of N pixels a side are enlarged to twice
that by each: with Enable off, Upscaler Off and Auto, and with Enable off once more, whose pictures
have to be the first ones.

Prints a table, and writes FOLDER/webui-upscaler.json with what is in it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.lab.upscaler_models import SWINIR_M, RRDBNet, level, settle
from tools.webui_client import PICTURE, ROOT, SCRIPT, Client, Pixels, serving

SMALL_SWINIR = {**SWINIR_M, "embed_dim": 60, "depths": [2], "num_heads": [6]}
OFF, AUTO, OFF_AGAIN = "Enable off", "Upscaler Auto", "Enable off again"
_UNET: list[Any] = [True, "Auto", "Auto", 0, "Auto", "Off", ""]
WAYS: dict[str, list[Any]] = {
    OFF: [False],
    "Upscaler Off": [*_UNET, "Off"],
    AUTO: [*_UNET, "Auto"],
    OFF_AGAIN: [False],
}
"""The script's arguments of each."""
TIMES = ("upscaling_s", "picture_s")
HEAD = ("upscaler", "way", "upscaling, s", "picture, s", "peak MiB", "of 255", "infotext")


def write_models(folder: Path, small: bool) -> list[str]:
    """The upscalers' files where the WebUI looks for them; the names that it gives them."""
    swinir = importlib.import_module("spandrel.architectures.SwinIR.arch.SwinIR").SwinIR
    models = {
        ("ESRGAN", "random-esrgan"): RRDBNet(blocks=1 if small else 23),
        ("SwinIR", "random-swinir"): swinir(**(SMALL_SWINIR if small else SWINIR_M)),
    }
    for (kind, name), module in models.items():
        place = folder / "models" / kind
        place.mkdir(parents=True)
        file = place / f"{name}.pth"
        # The WebUI refuses the names of what newer versions put into the archive.
        state = level(settle(module)).state_dict()
        torch.save(state, file, _use_new_zipfile_serialization=False)
    return [name for _, name in models]


class Enlarging(Client):
    """Makes hires fixes in one WebUI."""

    answer_s = 600.0

    def enlarge(self, upscaler: str, args: list[Any], asked: argparse.Namespace) -> dict[str, Any]:
        """One picture: its pixels, seconds, and what of it was upscaling."""
        self.ask("probe/take")
        made = self.make(
            {
                **PICTURE,
                **{"width": asked.side, "height": asked.side, "steps": asked.steps},
                **{"enable_hr": True, "hr_scale": 2, "hr_upscaler": upscaler},
                **{"denoising_strength": 0.5, "alwayson_scripts": {SCRIPT: {"args": args}}},
            }
        )
        (resized,) = (each for each in self.ask("probe/take") if each["kind"] == "resize")
        return {
            **{"upscaling_s": resized["s"], "peak_mib": resized["peak_mib"]},
            **{"picture_s": made.seconds, "infotext": made.ours, "pixels": made.frames[0]},
        }


def measured(
    webui: Enlarging, upscaler: str, way: str, off: Pixels | None, asked: argparse.Namespace
) -> dict[str, Any]:
    """A row: medians of several pictures after a first one, which is told apart. RuntimeError where
    Auto was not ours.
    """
    args = WAYS[way]
    first = webui.enlarge(upscaler, args, asked)
    each = [webui.enlarge(upscaler, args, asked) for _ in range(asked.pictures)]
    pixels, said = each[-1].pop("pixels"), each[-1]["infotext"]
    if way == AUTO and 'ROCm SD Upscaler: "Auto' not in said:
        raise RuntimeError(f"{upscaler} was not ours: {said}; see the console")
    return {
        **{"upscaler": upscaler, "way": way, **each[-1]},
        **{name: statistics.median(one[name] for one in each) for name in TIMES},
        **{f"{name}_each": [one[name] for one in each] for name in TIMES},
        "first_picture_s": first["picture_s"],
        "apart": None if off is None else int(abs(pixels - off).max()),
        "pixels": pixels,
    }


def main(argv: list[str]) -> int:
    """Measure. Returns 1 if the last Off was not the first one's picture, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=512, help="of the first pass, in pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=3, help="of each way, after a first one")
    parser.add_argument("--small", action="store_true", help="networks of a block or two")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("launcher")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(*HEAD, sep=" | ", flush=True)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        upscalers = write_models(data, asked.small)
        extensions = {"a_probe": ROOT / "tools/webui_unet_probe.py", "rocm-sd": ROOT}
        environment = {"ROCM_SD_CACHE_DIR": str(data / "cache")}
        console, begin = asked.out / "console-upscaler.txt", time.monotonic()
        with serving(
            asked.launcher, asked.flags, data, extensions, environment, console
        ) as running:
            webui = Enlarging(running, begin)
            for upscaler in upscalers:
                webui.settle(partial(webui.enlarge, upscaler, WAYS[AUTO], asked))
                off: Pixels | None = None
                for way in WAYS:
                    row = measured(webui, upscaler, way, off, asked)
                    pixels = row.pop("pixels")
                    off = pixels if off is None else off
                    rows.append(row)
                    shown = (f"{row[key]:.3f}" for key in TIMES)
                    peak, said = f"{row['peak_mib']:.0f}", row["infotext"][:200]
                    print(upscaler, way, *shown, peak, row["apart"], said, sep=" | ", flush=True)
            now = webui.status()
    same = all(row["apart"] == 0 for row in rows if row["way"] == OFF_AGAIN)
    facts = {
        **{"device": now["device"]["name"], **now["versions"], "ours": now["version"]},
        **{"side": asked.side, "steps": asked.steps, "off is the same again": same},
        "events": now["report"]["events"],
    }
    text = json.dumps({**facts, "rows": rows}, indent=1, ensure_ascii=False)
    (asked.out / "webui-upscaler.json").write_text(text + "\n", encoding="utf-8")
    print("Off is the same again." if same else "OFF IS NOT THE SAME AGAIN.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
