"""A profile as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lib_rocm_sd.lab import svg
from lib_rocm_sd.profile.sums import Row, summed


def render(heading: str, rows: Sequence[Row]) -> str:
    """Tables by kind of work and by part of the model."""
    return "\n\n".join(
        (
            heading,
            _table("kind of work", "by", rows, ("kind", "by")),
            _table("part", "", rows, ("part",)),
        )
    )


def _table(title: str, second: str, rows: Sequence[Row], fields: tuple[str, ...]) -> str:
    on_gpu = any(row.gpu_ms for row in rows)
    whole = sum(row.gpu_ms if on_gpu else row.cpu_ms for row in rows) or 1.0
    lines = [f"{title:<24} {second:<20} {'calls':>7} {'CPU ms':>9} {'GPU ms':>9} {'share':>6}"]
    for key, calls, cpu, gpu in summed(rows, *fields):
        names = [*key, ""][:2]
        share = (gpu if on_gpu else cpu) / whole
        told = f"{gpu:>9.2f}" if on_gpu else f"{'':>9}"
        lines.append(f"{names[0]:<24} {names[1]:<20} {calls:>7} {cpu:>9.2f} {told} {share:>6.1%}")
    return "\n".join(lines)


def drawn(title: str, rows: Sequence[Row]) -> str:
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
