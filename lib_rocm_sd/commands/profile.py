"""`python -m lib_rocm_sd profile`: a picture, and where its time goes, as tables and as SVG."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib_rocm_sd import __version__, checks
from lib_rocm_sd.commands.little_model import GUIDANCE, MODEL, kind_problem, latents, load
from lib_rocm_sd.commands.support import add_device, add_dtype, device_of, dtype_of
from lib_rocm_sd.lab.rows import say, write_json

PROMPT = "a red circle left of a blue square"
STEPS = 4
FILES = ("json", "trace", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        metavar="DIR",
        help="a folder of diffusers with a UNet (default: the little model of this project)",
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    add_device(parser)
    add_dtype(parser)
    parser.add_argument("--unet", action="store_true", help="the blocks of the UNet too")
    parser.add_argument("--without", action="store_true", help="without this extension")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace here")
    parser.add_argument("--plot", metavar="FILE", help="draw it as SVG")


def main(args: argparse.Namespace) -> int:
    """Profile a picture, print tables, write what is asked for. 2 on bad options."""
    problem = _problem(args)
    if problem:
        print(f"profile: {problem}", file=sys.stderr)
        return 2
    import torch

    from lib_rocm_sd.commands.profile_sums import drawn, render, rows_of
    from lib_rocm_sd.device import identify
    from lib_rocm_sd.lab.sensors import Watch, of_device

    device = device_of(args)
    dtype = dtype_of(args, device)
    pipeline = load(args.model, getattr(torch, dtype)).to(device)
    info = identify(device)
    watch = Watch(of_device(device, info))
    with _patched(pipeline, args):
        _picture(pipeline, args, device, 1)
        with watch.looking():
            found = _profiled(pipeline, args, device)
    rows, told = rows_of(found.events()), watch.summary()
    machine = {"device": info.name, "gfx": info.gfx, "backend": info.backend}
    machine |= {"torch": torch.__version__, "rocm_sd": __version__}
    machine |= {"model": args.model.name, "dtype": dtype, "steps": args.steps}
    machine |= {"unet": args.unet, "without": args.without}
    print(render(_heading(machine), rows), told, sep="\n\n")
    if args.json:
        document = {"machine": machine, "rows": [asdict(row) for row in rows]}
        document["sensors"] = asdict(told)
        write_json(args.json, document)
    if args.trace:
        found.export_chrome_trace(args.trace)
    if args.plot:
        Path(args.plot).write_text(drawn(_heading(machine), rows), encoding="utf-8")
    return 0


def _problem(args: argparse.Namespace) -> str:
    """Why this cannot be done; empty if it can."""
    for module in ("diffusers", "transformers"):
        try:
            __import__(module)
        except ImportError as error:
            return f"this needs {error.name or module}, which is not installed"
    unfit = kind_problem(args.model)
    if unfit:
        return unfit
    if args.steps < 1:
        return "--steps must be at least 1"
    for name in FILES:
        why = checks.unwritable(getattr(args, name)) if getattr(args, name) else ""
        if why:
            return f"--{name}: {why}"
    return checks.device_problem(args.device)


@contextmanager
def _patched(pipeline: Any, args: argparse.Namespace) -> Iterator[None]:
    if args.without:
        yield
        return
    from lib_rocm_sd.engine.session import Session
    from lib_rocm_sd.hosts.diffusers import patched

    with patched(pipeline, unet=args.unet, session=Session(progress=_told()), wait=True):
        yield


def _told() -> Callable[[str], None]:
    """Says on standard error what a first picture waits for, once."""
    said: set[str] = set()

    def tell(message: str) -> None:
        if message not in said:
            said.add(message)
            say(f"profile: {message}")

    return tell


def _profiled(pipeline: Any, args: argparse.Namespace, device: Any) -> Any:
    """A picture under torch.profiler, with our ranges and those of the model's parts."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lib_rocm_sd.commands.profile_sums import parts_named
    from lib_rocm_sd.ranges import ranges

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with parts_named(pipeline), ranges(), profile(activities=activities) as found:
        _picture(pipeline, args, device, args.steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return found


def _picture(pipeline: Any, args: argparse.Namespace, device: Any, steps: int) -> None:
    pipeline(
        args.prompt,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        latents=latents(pipeline, 0),
        output_type="pt",
    )


def _heading(machine: dict[str, Any]) -> str:
    how = "without this extension" if machine["without"] else "with this extension"
    how += ", UNet's blocks too" if machine["unet"] else ""
    return (
        f"{machine['model']}, {machine['steps']} steps, {machine['dtype']}, {how}; "
        f"{machine['device']} ({machine['gfx'] or machine['backend']}), torch {machine['torch']}"
    )
