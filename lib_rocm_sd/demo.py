"""python -m lib_rocm_sd demo: the same prompts without and with the extension, side by side.

Loads models/tiny-sd through diffusers and writes demo.png, report.json and report.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "tiny-sd"
PROMPTS = (
    "a red circle left of a blue square",
    "a big yellow star on a blue background",
    "a small white circle inside a red square on a green background",
    "an orange heart above a purple ring on a black background",
)
GUIDANCE = 3.0
AGREE_FLOAT32 = 2
"""Most that a pixel may differ in float32, of 255."""
INVISIBLE = 0.5
"""A mean difference, of 255, that is never held against anyone in half precision."""
NO_GPU = (
    "The speed means nothing here: there is no GPU, and both sides run the same torch on the CPU."
)
NOT_OURS = "The speed says nothing of our kernels: they did not run here."
MISSING = "this needs {}: use `python3 install.py demo`, which installs it"


@dataclass(frozen=True)
class Sides:
    """One prompt's pictures, uint8 (height, width, 3), and how long each took in seconds."""

    prompt: str
    without: Any
    with_: Any
    without_s: float
    with_s: float
    reference: Any = None
    """The picture without the extension in float32, where the others are in half precision."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "demo", metavar="DIR")
    parser.add_argument("--prompts", nargs="+", default=list(PROMPTS), metavar="TEXT")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", help="such as cpu or cuda:1 (default: the GPU, if there is one)"
    )
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR")


def main(args: argparse.Namespace) -> int:
    """Run the demo. 0 if the pictures agree, 1 if not, 2 if it cannot run."""
    started = time.perf_counter()
    # Threads that spin while they wait are many times slower where another program wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    problem = _problem(args)
    if problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 2
    sides, findings = run(args)
    findings["seconds"] = round(time.perf_counter() - started, 1)
    args.out.mkdir(parents=True, exist_ok=True)
    from lib_rocm_sd import demo_sheet

    text = summary(findings)
    demo_sheet.draw(sides, findings).save(args.out / "demo.png", optimize=True)
    as_json = json.dumps(findings, indent=2, ensure_ascii=False)
    (args.out / "report.json").write_text(as_json + "\n", encoding="utf-8")
    (args.out / "report.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nWritten: {', '.join(str(args.out / name) for name in OUTPUTS)}")
    return 0 if findings["agree"] else 1


OUTPUTS = ("demo.png", "report.txt", "report.json")


def _problem(args: argparse.Namespace) -> str:
    """Why the demo cannot run; empty if it can."""
    for module in ("torch", "diffusers", "transformers", "PIL"):
        try:
            __import__(module)
        except ImportError as error:
            return f"{MISSING.format(error.name or module)} ({error})"
    if not (args.model / "model_index.json").is_file():
        return f"there is no model in {args.model}"
    if args.steps < 1:
        return f"--steps is {args.steps}, it has to be at least 1"
    return ""


def run(args: argparse.Namespace) -> tuple[list[Sides], dict[str, Any]]:
    """Generate every prompt both ways; the pictures, and all that the report says of them."""
    import torch

    from lib_rocm_sd import device as devices
    from lib_rocm_sd import report
    from lib_rocm_sd.engine import engine
    from lib_rocm_sd.hosts.diffusers import patched

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    info = devices.identify(device)
    say(f"device: {info.name} ({info.gfx or info.backend}), {_short(dtype)}")
    say(f"loading {args.model.name}")
    pipeline = load(args.model, dtype).to(device)
    generate = Generator(pipeline, args.steps, args.seed, device)
    say("warming up: the first use compiles and checks what is not ready yet")
    with patched(pipeline) as patch:
        generate(args.prompts[0], steps=1)
    generate(args.prompts[0], steps=1)
    report.begin()
    sides = [
        _both(generate, lambda: patched(pipeline), prompt, f"[{index}/{len(args.prompts)}]")
        for index, prompt in enumerate(args.prompts, 1)
    ]
    ran = report.snapshot()
    if dtype != torch.float32:
        sides = _with_references(sides, pipeline.to(torch.float32), generate)
    findings = {
        "device": {**asdict(info), "arch": info.arch.gfx if info.arch else None},
        "dtype": _short(dtype),
        "status": engine.status_line(device, otherwise="torch's own attention is used"),
        "patched": {"replaced": patch.replaced, "left_alone": dict(patch.left_alone)},
        "ran": ran,
        "versions": versions(),
        "settings": {"steps": args.steps, "seed": args.seed, "guidance": GUIDANCE},
        **comparison(sides, info.backend, ran, dtype == torch.float32),
    }
    return sides, findings


def load(model: Path, dtype: Any) -> Any:
    """The StableDiffusionPipeline in `model`, from local files only, quiet."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.disable_progress_bar()
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        str(model), local_files_only=True, safety_checker=None, low_cpu_mem_usage=False
    ).to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Generator:
    """Makes a picture from a prompt; the same latents for the same seed on every device."""

    def __init__(self, pipeline: Any, steps: int, seed: int, device: Any) -> None:
        self.pipeline = pipeline
        self.steps = steps
        self.seed = seed
        self.device = device

    def __call__(self, prompt: str, steps: int | None = None) -> tuple[Any, float]:
        """The picture, uint8 (height, width, 3), and the seconds that it took."""
        import torch

        started = time.perf_counter()
        image = self.pipeline(
            prompt,
            num_inference_steps=steps or self.steps,
            guidance_scale=GUIDANCE,
            generator=torch.Generator("cpu").manual_seed(self.seed),
            output_type="np",
        ).images[0]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        return (image * 255).round().clip(0, 255).astype("uint8"), seconds


def _both(
    generate: Generator,
    patched: Callable[[], AbstractContextManager[Any]],
    prompt: str,
    label: str,
) -> Sides:
    """One prompt without, then with."""
    pictures = []
    for context in (nullcontext(), patched()):
        with context:
            pictures.append(generate(prompt))
    (without, without_s), (with_, with_s) = pictures
    sides = Sides(prompt, without, with_, without_s, with_s)
    largest, _ = difference(without, with_)
    say(
        f"{label} {prompt}\n      without {without_s:.2f} s, with {with_s:.2f} s, "
        f"largest difference {largest}/255"
    )
    return sides


def _with_references(sides: list[Sides], pipeline: Any, generate: Generator) -> list[Sides]:
    """The same with the float32 picture of each prompt, to see what half precision itself costs."""
    say("once more in float32, to see what half precision itself changes")
    return [
        Sides(s.prompt, s.without, s.with_, s.without_s, s.with_s, generate(s.prompt)[0])
        for s in sides
    ]


def difference(a: Any, b: Any) -> tuple[int, float]:
    """The largest and the mean absolute difference of two uint8 pictures, of 255."""
    gap = abs(a.astype("int16") - b.astype("int16"))
    return int(gap.max()), float(gap.mean())


def comparison(
    sides: Sequence[Sides], backend: str, ran: dict[str, Any], exact: bool
) -> dict[str, Any]:
    """Times, differences, and what they mean."""
    rows = []
    for side in sides:
        largest, mean = difference(side.without, side.with_)
        row: dict[str, Any] = {
            "prompt": side.prompt,
            "without_s": round(side.without_s, 4),
            "with_s": round(side.with_s, 4),
            "largest_difference": largest,
            "mean_difference": round(mean, 4),
        }
        if side.reference is not None:
            row["half_vs_float32_mean"] = round(difference(side.without, side.reference)[1], 4)
        rows.append(row)
    without_s = statistics.median(row["without_s"] for row in rows)
    with_s = statistics.median(row["with_s"] for row in rows)
    ours = any(row["variant"] == "rocm_sd" for row in ran["rows"])
    speed = NO_GPU if backend == "cpu" else "" if ours else NOT_OURS
    return {
        "pictures": rows,
        "median_without_s": without_s,
        "median_with_s": with_s,
        "ratio": round(without_s / with_s, 3),
        "speed": speed,
        "largest_difference": max(row["largest_difference"] for row in rows),
        "agree": _agree(rows, exact),
    }


def _agree(rows: Sequence[dict[str, Any]], exact: bool) -> bool:
    """Float32: no pixel differs much. Half: the mean differs no more than half from float32."""
    if exact:
        return all(row["largest_difference"] <= AGREE_FLOAT32 for row in rows)
    of_half = statistics.mean(row["half_vs_float32_mean"] for row in rows)
    return statistics.mean(row["mean_difference"] for row in rows) <= max(of_half, INVISIBLE)


def versions() -> dict[str, str | None]:
    """What is installed."""
    import diffusers
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "hip": getattr(torch.version, "hip", None),
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def summary(findings: dict[str, Any]) -> str:
    """The report for people."""
    device, found = findings["device"], findings["versions"]
    hip = f", HIP {found['hip']}" if found["hip"] else ""
    count = len(findings["pictures"])
    lines = [
        f"Device     {device['name']} ({device['gfx'] or device['backend']}), {findings['dtype']}",
        f"Versions   Python {found['python']}, torch {found['torch']}{hip}, "
        f"diffusers {found['diffusers']}, transformers {found['transformers']}",
        f"Extension  {findings['status']}",
        *_ran(findings),
        f"Time       median of {count} pictures, {findings['settings']['steps']} steps each: "
        f"{findings['median_without_s']:.2f} s without, {findings['median_with_s']:.2f} s with",
    ]
    if findings["speed"]:
        lines.append(f"           {findings['speed']}")
    largest = f"largest difference of any pixel {findings['largest_difference']}/255"
    verdict = "they agree" if findings["agree"] else "THEY DO NOT AGREE: please report this"
    lines.append(f"Pictures   {largest}: {verdict}")
    half = "half_vs_float32_mean"
    halves = [row[half] for row in findings["pictures"] if half in row]
    if halves:
        ours = statistics.mean(row["mean_difference"] for row in findings["pictures"])
        lines.append(
            f"           mean difference {ours:.3f}/255; "
            f"half precision itself, against float32: {statistics.mean(halves):.3f}/255"
        )
    return "\n".join(lines)


def _ran(findings: dict[str, Any]) -> list[str]:
    """What ran, most often first, and what was left alone."""
    rows = sorted(findings["ran"]["rows"], key=lambda row: -row["calls"])
    lines = [
        f"{row['calls']:6d} x {row['op']} by {row['variant']}: {row['problem']}" for row in rows
    ]
    left = findings["patched"]["left_alone"]
    if left:
        lines.append(
            "left alone: " + ", ".join(f"{count} x {kind}" for kind, count in left.items())
        )
    modules = findings["patched"]["replaced"]
    lines.insert(0, f"{modules} attention modules go through the engine")
    return [f"{'Ran' if not index else '':10s} {line}" for index, line in enumerate(lines)]


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def say(line: str) -> None:
    """One line of progress, shown at once."""
    print(line, flush=True)
