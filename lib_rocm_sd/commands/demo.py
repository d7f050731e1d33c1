"""`python -m lib_rocm_sd demo`: the same prompts without and with the extension, side by side.

Loads models/tiny-sd through diffusers and writes demo.png, report.json and report.txt. `--ui`: the
Speed test tab alone, as a page of this machine, with the little model.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import demo_pictures
from lib_rocm_sd.commands.demo_pictures import Sides, comparison, difference, summary, versions
from lib_rocm_sd.commands.little_model import MODEL, ROOT, check_installed, load, picture
from lib_rocm_sd.commands.support import add_device, add_dtype, device_of, dtype_of
from lib_rocm_sd.console import say

PROMPTS = (
    "a red circle left of a blue square",
    "a big yellow star on a blue background",
    "a small white circle inside a red square on a green background",
    "an orange heart above a purple ring on a black background",
)
OUTPUTS = ("demo.png", "report.txt", "report.json")
TITLE = "ROCm SD: speed test"
ADDRESS = "127.0.0.1"
FIRST_PORT, LAST_PORT = 7870, 7899
"""Tried in this order where no port is asked for; the WebUI's own is 7860."""
STYLE = ROOT / "style.css"
FOLDER = "speedtest"
FONTS = ("system-ui", "sans-serif")
"""Fonts of the machine itself: gradio fetches its own from elsewhere."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "outputs" / "demo", metavar="DIR")
    add("--prompts", nargs="+", default=list(PROMPTS), metavar="TEXT")
    add("--steps", type=int, default=20, help="denoising steps (default: 20)")
    add("--seed", type=int, default=0)
    add_device(parser)
    add_dtype(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="how often each picture is timed (default: 3 on a GPU, 1 on the CPU)",
    )
    add("--model", type=Path, default=MODEL, metavar="DIR")
    page = parser.add_argument_group("the Speed test tab as a page, in place of the above")
    page.add_argument(
        "--ui", action="store_true", help="open it in a browser, of this machine only"
    )
    page.add_argument("--port", type=int, help="default: a free one")
    page.add_argument("--no-browser", action="store_true", help="print the address only")


def main(args: argparse.Namespace) -> int:
    """Run the demo. 0 if the pictures agree, 1 if not."""
    started = time.perf_counter()
    # Threads that spin while they wait are many times slower where another program wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    _check(args)
    if args.ui:
        return serve(args)
    sides, vae, findings = run(args)
    findings["seconds"] = round(time.perf_counter() - started, 1)
    text = summary(findings)
    shown = sides if vae is None else [*sides, vae]
    demo_pictures.draw(shown, findings).save(args.out / "demo.png", optimize=True)
    as_json = json.dumps(findings, indent=2, ensure_ascii=False)
    (args.out / "report.json").write_text(as_json + "\n", encoding="utf-8")
    (args.out / "report.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nWritten: {', '.join(str(args.out / name) for name in OUTPUTS)}")
    return 0 if findings["agree"] else 1


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError where the demo cannot run; makes its folder."""
    check_installed("torch", "diffusers", "transformers", "PIL")
    if args.ui:
        check_installed("gradio", by="demo --ui")
    if not (args.model / "model_index.json").is_file():
        raise UsageError(f"there is no model in {args.model}")
    for name in ("steps", "repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}, it has to be at least 1")
    if not -(1 << 63) <= args.seed < 1 << 63:
        raise UsageError(f"--seed is {args.seed}, it has to fit into 64 bits")
    device_of(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"--out {args.out} is a file, not a folder") from error
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be written: {error.strerror}") from error
    if not os.access(args.out, os.W_OK):
        raise UsageError(f"--out {args.out} cannot be written: permission denied")


def run(args: argparse.Namespace) -> tuple[list[Sides], Sides | None, dict[str, Any]]:
    """Generate every prompt both ways; the pictures, the VAE's, and what the report says of them.

    The VAE's are missing where it is left alone.
    """
    import torch

    from lib_rocm_sd import device as devices
    from lib_rocm_sd import report
    from lib_rocm_sd.engine.engine import engine
    from lib_rocm_sd.hosts.diffusers.pipeline import patched

    device = device_of(args)
    name = dtype_of(args, device)
    dtype = getattr(torch, name)
    info = devices.identify(device)
    say(f"device: {info.name} ({info.gfx or info.backend}), {name}")
    say(f"loading {args.model.name}")
    pipeline = load(args.model, dtype).to(device)
    generate = partial(timed_picture, pipeline, args.seed, steps=args.steps)
    say("warming up: the first use compiles and checks what is not ready yet")
    with patched(pipeline, wait=True, compare=False) as patch:
        generate(args.prompts[0], steps=1)
    generate(args.prompts[0], steps=1)
    report.begin()
    repeats = args.repeats or (1 if device.type == "cpu" else 3)
    sides = []
    for index, prompt in enumerate(args.prompts, 1):
        side = _both(generate, pipeline, prompt, repeats)
        sides.append(side)
        largest, _ = difference(side.without, side.with_)
        say(
            f"[{index}/{len(args.prompts)}] {prompt}\n      without {side.without_s:.2f} s, "
            f"with {side.with_s:.2f} s, largest difference {largest}/255"
        )
    ran = report.snapshot()
    say("the VAE alone: whole and in bands, in float32 and in half precision")
    vae_side, vae = demo_pictures.examine(pipeline, [side.without for side in sides], dtype)
    if dtype != torch.float32:
        say("once more in float32, to see what half precision itself changes")
        pipeline.to(torch.float32)
        sides = [replace(side, reference=generate(side.prompt)[0]) for side in sides]
    findings = {
        "device": {**asdict(info), "arch": info.arch.gfx if info.arch else None},
        "dtype": name,
        "status": engine.status_line(device, otherwise="torch's own attention is used"),
        "patched": {"replaced": patch.replaced, "left_alone": dict(patch.left_alone)},
        "ran": ran,
        "vae": vae,
        "versions": versions(),
        "settings": {"steps": args.steps, "seed": args.seed, "repeats": repeats},
        **comparison(sides, info.backend, ran, dtype == torch.float32),
    }
    findings["agree"] = findings["agree"] and vae["agree"]
    return sides, vae_side, findings


def timed_picture(pipeline: Any, seed: int, prompt: str, steps: int) -> tuple[Any, float]:
    """A picture, uint8 (height, width, 3), and the seconds that it took."""
    from lib_rocm_sd.lab.timing import wait

    started = time.perf_counter()
    image = picture(pipeline, prompt, steps, seed, "np")
    wait(pipeline.device)
    seconds = time.perf_counter() - started
    return (image * 255).round().clip(0, 255).astype("uint8"), seconds


def _both(
    generate: Callable[[str], tuple[Any, float]], pipeline: Any, prompt: str, repeats: int
) -> Sides:
    """One prompt without, then with, `repeats` times; the times are medians."""
    from lib_rocm_sd.hosts.diffusers.pipeline import patched

    pictures: dict[Any, Any] = {}
    times: dict[Any, list[float]] = {nullcontext: [], partial(patched, pipeline, wait=True): []}
    for _ in range(repeats):
        for context, seconds in times.items():
            with context():
                pictures[context], taken = generate(prompt)
            seconds.append(taken)
    without, with_ = pictures.values()
    without_s, with_s = map(statistics.median, times.values())
    return Sides(prompt, without, with_, without_s, with_s)


# -- the page -------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> int:
    """Serve the page until interrupted. Raises UsageError where it cannot be served."""
    try:
        port = free_port(args.port)
    except (OSError, OverflowError) as error:
        asked = args.port or f"{FIRST_PORT} to {LAST_PORT}"
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"port {asked} cannot be had: {why}") from error
    page, options = page_of(args.device, args.out / FOLDER)
    page.launch(
        server_name=ADDRESS,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        inbrowser=not args.no_browser,
        **options,
    )
    print(f"Speed test: http://{ADDRESS}:{port} (Ctrl+C ends it)", flush=True)
    try:
        page.block_thread()
    finally:
        from lib_rocm_sd.lab.speed_session import session

        session.cancel()
    return 0


def free_port(asked: int | None) -> int:
    """`asked`, or the first free of ours, or any. OSError where that cannot be had."""
    candidates = [asked] if asked is not None else [*range(FIRST_PORT, LAST_PORT + 1), 0]
    for port in candidates:
        try:
            with socket.socket() as probe:
                if os.name != "nt":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((ADDRESS, port))
                return int(probe.getsockname()[1])
        except OSError:
            if port == candidates[-1]:
                raise
    raise AssertionError("unreachable")


def page_of(device: str | None, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The page as a gr.Blocks, and what its launch takes beside address and port."""
    import gradio as gr
    import torch

    from lib_rocm_sd.commands.standalone import Standalone
    from lib_rocm_sd.hosts.ui import speed_tab
    from lib_rocm_sd.hosts.ui.speed_tab import View
    from lib_rocm_sd.lab.speed_session import session

    side = Standalone(torch.device(device) if device else None, folder)
    theme = gr.themes.Default(font=FONTS, font_mono=("monospace",))
    looks = {"theme": theme, "css": STYLE.read_text(encoding="utf-8")}
    newest = int(gr.__version__.split(".")[0]) >= 6
    with gr.Blocks(title=TITLE, analytics_enabled=False, **({} if newest else looks)) as page:
        gr.HTML(f"<h2>{TITLE}</h2>")
        speed_tab.content(gr, page, View(session, side))
    return page, looks if newest else {"show_api": False}
