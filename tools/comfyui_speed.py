"""A real ComfyUI's speed without and with our nodes, beside its own choices of attention.

python -m tools.comfyui_speed [--cases CASE,...] [--ways WAY,...] [--steps N] [--pictures N]
                              [--python PYTHON] [--cache FOLDER] [--out FOLDER] CHECKOUT [FLAG ...]

CHECKOUT has ComfyUI's main.py; FLAGs go to it, by default --disable-cuda-malloc, as on AMD. CASE:
a model and pixels a side, "x4" for a batch of four: "SD 1.5:512,SD 1.5:512x4,SDXL:1024";
"small:128" is for a CPU. Weights are random and have the models' true shapes
(tools/comfyui_probe). WAY: part of a way's name. On an NVIDIA card ROCM_SD_ALLOW_CUDA=1 is needed.

Prints a table, and writes FOLDER/comfyui-speed.json with what is in it. Returns 1 if a picture with
our nodes off was not ComfyUI's own, or a Cancel was not heeded.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.comfyui_process import ROOT, FailedError, Made, Server, Workflow, running

PYTORCH = "--use-pytorch-cross-attention"
PLAN_LIMIT_S = 300.0
HEAD = (
    *("case", "way", "it/s", "decode, ms", "upscale, ms", "peak MiB", "of decode"),
    "from ComfyUI's own",
)
COMFYUIS = "ComfyUI"


@dataclass(frozen=True)
class Way:
    """One row of a case. `model` and `vae`: the inputs of our nodes; None: without the node.
    `upscale`: the picture is enlarged by ESRGAN x4: COMFYUIS, or a level of ours.
    """

    name: str
    model: dict[str, Any] | None = None
    vae: dict[str, Any] | None = None
    upscale: str = ""


@dataclass(frozen=True)
class Start:
    """One ComfyUI: with our custom node or not, by its own flags, and what is made in it."""

    name: str
    ours: bool
    flags: tuple[str, ...]
    ways: tuple[Way, ...]
    environment: dict[str, str] = field(default_factory=dict)


def _model(level: str = "Auto", unet: str = "Off") -> dict[str, Any]:
    return {"level": level, "attention": True, "unet": unet}


def _vae(level: str = "Auto", mode: str = "Auto") -> dict[str, Any]:
    return {"level": level, "mode": mode, "budget_mib": 0, "decode": True, "encode": True}


OFF, ALL = "ours installed, no nodes", "ours: attention, VAE, UNet"
STARTS = (
    Start(
        "own",
        False,
        (PYTORCH,),
        (Way("ComfyUI, torch's attention"), Way("ComfyUI, upscaled", upscale=COMFYUIS)),
    ),
    Start("split", False, ("--use-split-cross-attention",), (Way("ComfyUI, split attention"),)),
    Start("quad", False, ("--use-quad-cross-attention",), (Way("ComfyUI, sub-quadratic"),)),
    Start(
        "ours",
        True,
        (PYTORCH,),
        (
            Way(OFF),
            Way("ours: attention", _model()),
            Way("ours: attention, VAE", _model(), _vae()),
            Way(ALL, _model(unet="Auto"), _vae()),
            Way("ours: all, VAE in bands", _model(unet="Auto"), _vae(mode="Always banded")),
            Way("ours: all, Performance", _model("Performance", "Auto"), _vae("Performance")),
            Way("ours: all, Memory", _model("Memory", "Auto"), _vae("Memory")),
            Way("ours: upscaled", upscale="Auto"),
            Way(f"{OFF}, again"),
        ),
    ),
    Start(
        "everywhere",
        True,
        (PYTORCH,),
        (Way("ours by ROCM_SD_COMFYUI_ALL"),),
        {"ROCM_SD_COMFYUI_ALL": "1"},
    ),
    Start(
        "novram",
        True,
        (PYTORCH, "--novram"),
        (Way("ComfyUI, --novram"), Way("ours: all, --novram", _model(unet="Auto"), _vae())),
    ),
)


def workflow(case: str, steps: int, way: Way, turn: int) -> Workflow:
    """A picture of a case. Another `turn` is another seed, so that nothing is kept of the last."""
    kind, _, size = case.partition(":")
    side, _, batch = size.partition("x")
    latent = {"width": int(side), "height": int(side), "batch_size": int(batch or 1)}
    sampler = {"seed": turn, "steps": steps, "cfg": 7.0, "denoise": 1.0}
    links = {"positive": ["1", 1], "negative": ["1", 2], "latent_image": ["2", 0]}
    named = {"sampler_name": "euler", "scheduler": "normal"}
    model, vae = (["10", 0] if way.model else ["1", 0]), (["11", 0] if way.vae else ["1", 3])
    made = {
        "1": _node("RandomModels", kind=kind, seed=0),
        "2": _node("EmptyLatentImage", **latent),
        "3": _node("KSampler", model=model, **links, **sampler, **named),
        "4": _node("VAEDecode", samples=["3", 0], vae=vae),
        "5": _node("SaveImage", images=["4", 0], filename_prefix="speed"),
    }
    if way.model:
        made["10"] = _node("RocmSdModel", model=["1", 0], **way.model)
    if way.vae:
        made["11"] = _node("RocmSdVae", vae=["1", 3], **way.vae)
    if way.upscale:
        given = {"upscale_model": ["6", 0], "image": ["4", 0]}
        made["6"] = _node("RandomUpscaler", blocks=1 if kind == "small" else 23)
        made["7"] = _node("ImageUpscaleWithModel", **given)
        if way.upscale != COMFYUIS:
            made["7"] = _node("RocmSdUpscale", **given, level=way.upscale)
        made["5"]["inputs"]["images"] = ["7", 0]
    return made


def _node(name: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": name, "inputs": inputs}


class Painter:
    """Makes the pictures of one ComfyUI."""

    def __init__(self, server: Server, steps: int, pictures: int) -> None:
        self.server, self._steps, self._pictures = server, steps, pictures

    def taken(self) -> dict[str, Any]:
        """What the probe has seen since the last time."""
        found: dict[str, Any] = json.loads(self.server.ask("/probe/take"))
        return found

    def measured(self, case: str, way: Way) -> tuple[dict[str, Any], Any]:
        """The least of each time of several pictures after a first one, the most memory of each
        part; and the last picture's pixels.
        """
        self.server.make(workflow(case, 3, way, 1000))
        self.taken()
        found, made = [], Made("")
        for turn in range(self._pictures):
            begin = time.monotonic()
            made = self.server.make(workflow(case, self._steps, way, turn))
            row = {"picture_s": time.monotonic() - begin}
            for each in self.taken()["seen"]:
                row |= {f"{each['what']}_s": each["s"], f"{each['what']}_mib": each["peak_mib"]}
            found.append(row)
        times = {name: min(row[name] for row in found) for name in found[0] if name[-2:] == "_s"}
        most = {name: max(row[name] for row in found) for name in found[0] if name not in times}
        return {"it_s": self._steps / times["sample_s"], **times, **most}, pixels(made)

    def settle(self, case: str, ways: Sequence[Way]) -> None:
        """Until nothing is compiled or tried any more for any of the ways."""
        until, quiet = time.monotonic() + PLAN_LIMIT_S, 0
        while quiet < 2 and time.monotonic() < until:
            for way in ways:
                self.server.make(workflow(case, 2, way, 2000 + quiet))
            while (busy := self.taken()["at_work"]) and time.monotonic() < until:
                time.sleep(0.5)
            quiet = 0 if busy else quiet + 1

    def cancelled(self, case: str, way: Way) -> float | None:
        """Seconds from a Cancel amid sampling to the workflow's end; None where it ended well."""
        name = self.server.begin(workflow(case, 1000, way, 3000))
        time.sleep(3.0)
        begin = time.monotonic()
        self.server.ask("/interrupt", {})
        made = self.server.ended(name)
        return None if made.end == "success" else time.monotonic() - begin

    def status(self) -> str:
        made = self.server.make({"12": _node("RocmSdStatus")})
        return made.texts["12"]


def pixels(made: Made) -> Any:
    """(pictures, H, W, 3), 0..255."""
    images = (Image.open(io.BytesIO(data)).convert("RGB") for data in made.pictures)
    return np.stack([np.asarray(image) for image in images]).astype(np.int16)


class Table:
    """What was found: printed as it comes, and kept."""

    def __init__(self, out: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._own: dict[Any, Any] = {}
        self._out = out
        print(*HEAD, sep=" | ", flush=True)

    def add(self, case: str, way: Way, found: dict[str, Any], made: Any) -> int:
        """How far the pictures are from the first way's, of 255."""
        apart = int(abs(made - self._own.setdefault((case, made.shape), made)).max())
        self.rows.append({"case": case, "way": way.name, **found, "apart": apart})
        times = (
            found["it_s"],
            *(1e3 * found.get(f"{n}_s", math.nan) for n in ("decode", "upscale")),
        )
        shown = (*times, found["sample_mib"], found["decode_mib"])
        print(case, way.name, *(f"{value:.2f}" for value in shown), apart, sep=" | ", flush=True)
        self.keep()
        return apart

    def keep(self) -> None:
        text = json.dumps({**self.facts, "rows": self.rows}, indent=1, ensure_ascii=False)
        (self._out / "comfyui-speed.json").write_text(text + "\n", encoding="utf-8")


def started(asked: argparse.Namespace, start: Start, folder: Path) -> Any:
    nodes = {"comfyui_probe": ROOT / "tools" / "comfyui_probe"}
    if start.ours:
        nodes["rocm_sd"] = ROOT
    flags = (*(asked.flags or ["--disable-cuda-malloc"]), *start.flags)
    if "--cpu" in flags:
        flags = tuple(flag for flag in flags if flag != "--disable-cuda-malloc")
    path = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    environment = {
        "PYTHONPATH": os.pathsep.join(place for place in path if Path(place).resolve() != ROOT),
        "ROCM_SD_CACHE_DIR": str(asked.cache or folder),
        **start.environment,
    }
    place = folder / start.name
    return running(Path(asked.checkout), asked.python, place, nodes, flags, environment)


def run(asked: argparse.Namespace, folder: Path, table: Table) -> list[str]:
    """All cases in all ways; what was not as it has to be."""
    wrong: list[str] = []
    cases = asked.cases.split(",")
    for start, ways in chosen(asked.ways):
        if "--cpu" in asked.flags and "--novram" in start.flags:
            continue
        try:
            with started(asked, start, folder) as server:
                painter = Painter(server, asked.steps, asked.pictures)
                try:
                    wrong += list(of_one(painter, start, cases, ways, table))
                finally:
                    shutil.copy(server.log, Path(asked.out) / f"console-{start.name}.txt")
        except FailedError as error:
            print(f"{start.name}: {error}", flush=True)
            wrong.append(f"{start.name}: {error}")
    table.facts |= {"steps": asked.steps, "wrong": wrong}
    table.keep()
    return wrong


def of_one(
    painter: Painter, start: Start, cases: Sequence[str], ways: Sequence[Way], table: Table
) -> Iterator[str]:
    """All that is made in one ComfyUI."""
    if start.ours:
        painter.settle(cases[0], ways)
    yield from measure(painter, cases, ways, table)
    table.facts |= {k: v for k, v in painter.taken().items() if k != "seen"}
    if start.ours:
        table.facts[f"status, {start.name}"] = painter.status().splitlines()


def measure(
    painter: Painter, cases: Sequence[str], ways: Sequence[Way], table: Table
) -> Iterator[str]:
    for case in cases:
        for way in ways:
            found, made = painter.measured(case, way)
            apart = table.add(case, way, found, made)
            if way.name.startswith(OFF) and apart:
                yield f"{case}: {way.name} is {apart} of 255 from ComfyUI's own picture"
    last = ways[-1] if ways[-1].model else next((w for w in ways if w.name == ALL), ways[-1])
    seconds = painter.cancelled(cases[0], last)
    print(f"Cancel, {last.name}: {seconds} s", flush=True)
    table.facts[f"cancel_s, {last.name}"] = seconds
    if seconds is None:
        yield f"{last.name}: Cancel was not heeded"


def chosen(names: str) -> Iterator[tuple[Start, list[Way]]]:
    """Those whose name has one of `names` in it; all, if none is given."""
    wanted = [name for name in names.split(",") if name]
    for start in STARTS:
        ways = [w for w in start.ways if not wanted or any(name in w.name for name in wanted)]
        if ways:
            yield start, ways


def main(argv: list[str]) -> int:
    """Measure."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="SD 1.5:512,SD 1.5:512x4,SD 1.5:1024,SDXL:1024")
    parser.add_argument("--ways", default="", help="parts of ways' names")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=3, help="of each way, after a first one")
    parser.add_argument("--python", default=sys.executable, help="has what ComfyUI needs")
    parser.add_argument("--cache", type=Path, help="a folder with kernels that are there already")
    parser.add_argument("--out", default=".")
    parser.add_argument("checkout")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    table = Table(Path(asked.out))
    with tempfile.TemporaryDirectory() as folder:
        wrong = run(asked, Path(folder), table)
    print(*(wrong or ["Off is ComfyUI's own picture, and Cancel is heeded."]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
