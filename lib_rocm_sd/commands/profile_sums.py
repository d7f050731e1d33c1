"""What torch.profiler recorded, added up by part of the model, kind of work and who did it, as
tables and as SVG.

The parts of a pipeline are ranges: text encoders, the UNet's blocks, the VAE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import nn

from lib_rocm_sd.lab import svg
from lib_rocm_sd.modules import patches
from lib_rocm_sd.ranges import named, read_name

PREFIX = "part: "
TEXT = ("text_encoder", "text_encoder_2")
LISTS = (("down_blocks", "down"), ("up_blocks", "up"))


@contextmanager
def parts_named(pipeline: Any) -> Iterator[None]:
    """Within this, each part is a range. Only modules that are never ours get hooks."""
    with ExitStack() as stack:
        for module, name in _modules(pipeline):
            stack.enter_context(_hooked(module, PREFIX + name))
        vae = getattr(pipeline, "vae", None)
        if vae is not None:
            stack.enter_context(_wrapped(vae, "decode", f"{PREFIX}VAE decode"))
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
    opened: list[Any] = []

    def begin(module: nn.Module, given: Any) -> None:
        scope = named(name)
        scope.__enter__()
        opened.append(scope)

    def end(module: nn.Module, given: Any, made: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    hooks = (
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _wrapped(owner: Any, name: str, label: str) -> Iterator[None]:
    call = getattr(owner, name)

    def within(*args: Any, **kwargs: Any) -> Any:
        with named(label):
            return call(*args, **kwargs)

    patch = patches.put(owner, name, within)
    try:
        yield
    finally:
        patches.take(patch)


FAMILIES = {
    "attention": "attention",
    "attention_backward": "attention",
    "conv": "convolution",
    "linear": "linear",
    "group_norm": "norm",
    "layer_norm": "norm",
    "layer_norm_backward": "norm",
    "group_norm_backward": "norm",
}
"""Kinds of work, by the family of an op of ours."""
THEIRS = (
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "softmax")),
    ("convolution", ("conv",)),
    ("norm", ("group_norm", "layer_norm")),
    ("linear", ("linear", "addmm", "::mm", "bmm", "matmul")),
    ("copy", ("copy", "contiguous", "clone", "aten::to", "aten::cat")),
)
"""Kinds by what an operator of torch's has in its name, the first that fits."""
OTHER, PYTHON, ELSEWHERE = "other operators", "between operators", "outside of the parts"
TORCH = "torch"


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
        found = sums.setdefault((part, kind, by), [0, 0.0, 0.0])
        found[0] += own
        found[1] += event.self_cpu_time_total / 1000
        found[2] += sum(kernel.duration for kernel in event.kernels) / 1000
    rows = [WorkRow(*key, int(calls), cpu, gpu) for key, (calls, cpu, gpu) in sums.items()]
    return sorted(rows, key=lambda row: (-row.gpu_ms, -row.cpu_ms))


def _place(event: Any) -> tuple[str, str, str, bool]:
    """Part, kind, by whom, and whether the event is itself the call that is counted."""
    part, kind, by, caller = "", OTHER, TORCH, None
    for each in _upwards(event):
        name = str(each.name)
        if name.startswith(PREFIX):
            part = name.removeprefix(PREFIX)
            break
        found = _kind_of(name)
        if found is not None:  # the outermost counts
            kind, by, caller = *found, each
    if caller is None and not _is_operator(event):
        return part or ELSEWHERE, PYTHON, "", False
    if caller is None:
        caller = event
    return part or ELSEWHERE, kind, by, caller is event


def _upwards(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _is_operator(event: Any) -> bool:
    return "::" in event.name or read_name(event.name) is not None


def _kind_of(name: str) -> tuple[str, str] | None:
    ours = read_name(name)
    if ours is not None:
        return FAMILIES.get(ours[0], OTHER), ours[2]
    if "::" in name:
        for kind, words in THEIRS:
            if any(word in name for word in words):
                return kind, TORCH
    return None


def summed(
    rows: Iterable[WorkRow], *fields: str
) -> list[tuple[tuple[str, ...], int, float, float]]:
    """Rows of equal fields together: these, calls, CPU and GPU ms; longest first."""
    sums: dict[tuple[str, ...], tuple[int, float, float]] = {}
    for row in rows:
        key = tuple(getattr(row, field) for field in fields)
        calls, cpu, gpu = sums.get(key, (0, 0.0, 0.0))
        sums[key] = (calls + row.calls, cpu + row.cpu_ms, gpu + row.gpu_ms)
    found = [(key, *values) for key, values in sums.items()]
    return sorted(found, key=lambda item: (-item[3], -item[2]))


# -- as text and as a picture ----------------------------------------------------------------------


def render(heading: str, rows: Sequence[WorkRow]) -> str:
    """Tables by kind of work and by part of the model."""
    return "\n\n".join(
        (
            heading,
            _table("kind of work", "by", rows, ("kind", "by")),
            _table("part", "", rows, ("part",)),
        )
    )


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
