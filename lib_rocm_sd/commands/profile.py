"""`python -m lib_rocm_sd profile`: a picture, and where its time goes, as tables and as SVG: what
torch.profiler recorded, added up by part of the model, kind of work and who did it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from lib_rocm_sd import __version__
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands.little_model import MODEL, check_installed, kind_problem, load, picture
from lib_rocm_sd.commands.support import add_device, add_dtype, check_writable, device_of, dtype_of
from lib_rocm_sd.lab import svg
from lib_rocm_sd.lab.rows import say, write_json
from lib_rocm_sd.modules import patches
from lib_rocm_sd.ranges import named, ranges, read_name

PROMPT = "a red circle left of a blue square"
STEPS = 4
FILES = ("json", "trace", "plot")
PREFIX = "part: "
TEXT = ("text_encoder", "text_encoder_2")
LISTS = (("down_blocks", "down"), ("up_blocks", "up"))
KINDS = (
    ("attention", ("attention", "softmax")),
    ("convolution", ("conv",)),
    ("norm", ("_norm",)),
    ("linear", ("linear", "addmm", "::mm", "bmm", "matmul")),
    ("copy", ("copy", "contiguous", "clone", "aten::to", "aten::cat")),
)
"""Kinds of work by what an op of ours, or an operator of torch's, has in its name: the first that
fits.
"""
OTHER, PYTHON, ELSEWHERE = "other operators", "between operators", "outside of the parts"
TORCH = "torch"


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
    """Profile a picture, print tables, write what is asked for."""
    _check(args)
    import torch

    from lib_rocm_sd.device import identify
    from lib_rocm_sd.lab.sensors import Watch, of_device

    device = device_of(args)
    dtype = dtype_of(args, device)
    pipeline = load(args.model, getattr(torch, dtype)).to(device)
    info = identify(device)
    watch = Watch(of_device(device, info))
    with _patched(pipeline, args):
        picture(pipeline, args.prompt, 1, 0, "pt")
        with watch.looking():
            recorded = _profiled(pipeline, args, device)
    rows, sensors = rows_of(recorded.events()), watch.summary()
    machine = {"device": info.name, "gfx": info.gfx, "backend": info.backend}
    machine |= {"torch": torch.__version__, "rocm_sd": __version__}
    machine |= {"model": args.model.name, "dtype": dtype, "steps": args.steps}
    machine |= {"unet": args.unet, "without": args.without}
    heading = _heading(machine)
    print(render(heading, rows), sensors, sep="\n\n")
    if args.json:
        table = [asdict(row) for row in rows]
        write_json(args.json, {"machine": machine, "rows": table, "sensors": asdict(sensors)})
    if args.trace:
        recorded.export_chrome_trace(args.trace)
    if args.plot:
        Path(args.plot).write_text(drawn(heading, rows), encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError where this cannot be done."""
    check_installed("diffusers", "transformers")
    unfit = kind_problem(args.model)
    if unfit:
        raise UsageError(unfit)
    if args.steps < 1:
        raise UsageError("--steps must be at least 1")
    check_writable(args, *FILES)
    device_of(args)


def _patched(pipeline: Any, args: argparse.Namespace) -> AbstractContextManager[Any]:
    if args.without:
        return nullcontext()
    from lib_rocm_sd.engine.session import Session
    from lib_rocm_sd.hosts.diffusers import patched

    session = Session(progress=_told())
    return patched(pipeline, unet=args.unet, session=session, wait=True, compare=False)


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
    from torch.profiler import ProfilerActivity, profile

    from lib_rocm_sd.lab.timing import wait

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with parts_named(pipeline), ranges(), profile(activities=activities) as recorded:
        picture(pipeline, args.prompt, args.steps, 0, "pt")
        wait(device)
    return recorded


def _heading(machine: dict[str, Any]) -> str:
    how = "without this extension" if machine["without"] else "with this extension"
    how += ", UNet's blocks too" if machine["unet"] else ""
    return (
        f"{machine['model']}, {machine['steps']} steps, {machine['dtype']}, {how}; "
        f"{machine['device']} ({machine['gfx'] or machine['backend']}), torch {machine['torch']}"
    )


# -- the parts of a model -------------------------------------------------------------------------


@contextmanager
def parts_named(pipeline: Any) -> Iterator[None]:
    """Within this, each part is a range: text encoders, the UNet's blocks, the VAE. Only modules
    that are never ours get hooks.
    """
    with ExitStack() as stack:
        for module, name in _modules(pipeline):
            stack.enter_context(_hooked(module, PREFIX + name))
        vae = getattr(pipeline, "vae", None)
        if vae is not None:
            call = vae.decode

            def decode(*args: Any, **kwargs: Any) -> Any:
                with named(f"{PREFIX}VAE decode"):
                    return call(*args, **kwargs)

            stack.callback(patches.take, patches.put(vae, "decode", decode))
        yield


def _modules(pipeline: Any) -> Iterator[tuple[nn.Module, str]]:
    for name in TEXT:
        module = getattr(pipeline, name, None)
        if isinstance(module, nn.Module):
            yield module, name.replace("_", " ")
    unet = getattr(pipeline, "unet", None)
    if isinstance(unet, nn.Module):
        yield unet, "UNet, the rest"
        for attribute, word in LISTS:
            for place, block in enumerate(getattr(unet, attribute, ())):
                yield block, f"UNet {word} {place}"
        middle = getattr(unet, "mid_block", None)
        if isinstance(middle, nn.Module):
            yield middle, "UNet middle"


@contextmanager
def _hooked(module: nn.Module, name: str) -> Iterator[None]:
    scopes: list[Any] = []

    def begin(module: nn.Module, inputs: Any) -> None:
        scope = named(name)
        scope.__enter__()
        scopes.append(scope)

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        if scopes:
            scopes.pop().__exit__(None, None, None)

    with (
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end, always_call=True),
    ):
        yield


# -- what was recorded, added up ------------------------------------------------------------------


@dataclass(frozen=True)
class WorkRow:
    """`part` of the model, `kind` of work, `by` which variant or torch; times in ms. `calls`: of
    operators or ranges, not counting those within them.
    """

    part: str
    kind: str
    by: str
    calls: int
    cpu_ms: float
    gpu_ms: float


def rows_of(events: Iterable[Any]) -> list[WorkRow]:
    """Rows from a profile's CPU events, with the GPU work each of them started; longest first."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for event in events:
        if not str(event.device_type).endswith("CPU") or event.is_async:
            continue
        part, kind, by, own = _place(event)
        row = sums.setdefault((part, kind, by), [0, 0.0, 0.0])
        row[0] += own
        row[1] += event.self_cpu_time_total / 1000
        row[2] += sum(kernel.duration for kernel in event.kernels) / 1000
    rows = [WorkRow(*key, int(calls), cpu, gpu) for key, (calls, cpu, gpu) in sums.items()]
    return sorted(rows, key=lambda row: (-row.gpu_ms, -row.cpu_ms))


def _place(event: Any) -> tuple[str, str, str, bool]:
    """Part, kind, by whom, and whether the event is itself the call that is counted."""
    part, kind, by, caller, each = ELSEWHERE, OTHER, TORCH, None, event
    while each is not None:
        name = str(each.name)
        if name.startswith(PREFIX):
            part = name.removeprefix(PREFIX)
            break
        work = _kind_of(name)
        if work is not None:  # the outermost counts
            kind, by, caller = *work, each
        each = each.cpu_parent
    if caller is not None:
        return part, kind, by, caller is event
    if "::" in event.name or read_name(event.name) is not None:
        return part, kind, by, True
    return part, PYTHON, "", False


def _kind_of(name: str) -> tuple[str, str] | None:
    ours = read_name(name)
    if ours is None and "::" not in name:
        return None
    op = name if ours is None else ours[0]
    kind = next((kind for kind, words in KINDS if any(word in op for word in words)), None)
    if ours is not None:
        return kind or OTHER, ours[2]
    return (kind, TORCH) if kind else None


def summed(
    rows: Iterable[WorkRow], *fields: str
) -> list[tuple[tuple[str, ...], int, float, float]]:
    """Rows of equal fields together: these, calls, CPU and GPU ms; longest first."""
    sums: dict[tuple[str, ...], tuple[int, float, float]] = {}
    for row in rows:
        key = tuple(getattr(row, field) for field in fields)
        calls, cpu, gpu = sums.get(key, (0, 0.0, 0.0))
        sums[key] = (calls + row.calls, cpu + row.cpu_ms, gpu + row.gpu_ms)
    items = [(key, *values) for key, values in sums.items()]
    return sorted(items, key=lambda item: (-item[3], -item[2]))


# -- as text and as a picture ----------------------------------------------------------------------


def render(heading: str, rows: Sequence[WorkRow]) -> str:
    """Tables by kind of work and by part of the model."""
    kinds = _table("kind of work", "by", rows, ("kind", "by"))
    return "\n\n".join((heading, kinds, _table("part", "", rows, ("part",))))


def _table(title: str, second: str, rows: Sequence[WorkRow], fields: tuple[str, ...]) -> str:
    on_gpu = any(row.gpu_ms for row in rows)
    whole = sum(row.gpu_ms if on_gpu else row.cpu_ms for row in rows) or 1.0
    lines = [f"{title:<24} {second:<20} {'calls':>7} {'CPU ms':>9} {'GPU ms':>9} {'share':>6}"]
    for key, calls, cpu, gpu in summed(rows, *fields):
        names = [*key, ""][:2]
        share = (gpu if on_gpu else cpu) / whole
        told = f"{gpu:>9.2f}" if on_gpu else f"{'':>9}"
        lines.append(f"{names[0]:<24} {names[1]:<20} {calls:>7} {cpu:>9.2f} {told} {share:>6.1%}")
    return "\n".join(lines)


def drawn(title: str, rows: Sequence[WorkRow]) -> str:
    """An SVG: for each part of the model a bar, made of its kinds of work, all at one scale."""
    on_gpu = any(row.gpu_ms for row in rows)
    times = {
        (part, kind): gpu if on_gpu else cpu
        for (part, kind), _, cpu, gpu in summed(rows, "part", "kind")
    }
    parts = [part for (part,), *_ in summed(rows, "part")]
    shown = {kind for (_, kind), time in times.items() if round(time, 3)}
    kinds = [kind for (kind,), *_ in summed(rows, "kind") if kind in shown]
    totals = {part: sum(times.get((part, kind), 0.0) for kind in kinds) for part in parts}
    longest = max(totals.values(), default=0.0) or 1.0
    layout, (what, *where) = svg.WIDE, title.split("; ")
    room = layout.width - layout.left - layout.right
    shapes = [svg.title_of(what, layout)]
    shapes += [svg.text_at(0, 36 + 18 * place, text) for place, text in enumerate(where)]
    y = 34.0 + 18 * len(where)
    for part in parts:
        x = float(layout.left)
        shapes.append(svg.text_at(x - 8, y + 13, svg.cut(part, 34), "end"))
        for place, kind in enumerate(kinds):
            time = times.get((part, kind), 0.0)
            width = time / longest * room
            shapes.append(_piece(x, y, width, place, f"{part}, {kind}: {svg.number(time)} ms"))
            x += width
        shapes.append(svg.text_at(x + 6, y + 13, f"{svg.number(totals[part])} ms"))
        y += svg.BAR + svg.GAP
    for place, kind in enumerate(kinds):
        y += svg.GAP if place == 0 else 0
        shapes.append(_piece(layout.left, y, svg.BAR, place, kind))
        shapes.append(svg.text_at(layout.left + svg.BAR + 8, y + 13, kind))
        y += svg.BAR + svg.GAP
    white = f'<rect width="{layout.width}" height="{y:.0f}" style="fill:white"/>'
    spoken = "; ".join(f"{part}: {svg.number(totals[part])} ms" for part in parts)
    return svg.drawing(layout.width, y, [white, *shapes], f"{title}. {spoken}")


def _piece(x: float, y: float, width: float, place: int, told: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{svg.BAR}"'
    colour = svg.colour_of(place)
    return f'<rect {size} style="fill:{colour}"><title>{escape(told)}</title></rect>'
