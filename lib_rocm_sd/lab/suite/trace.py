"""What a card's sensors told while pictures were made, drawn over time: a panel a quantity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lib_rocm_sd.lab import svg
from lib_rocm_sd.lab.rows import SECONDS, Row

PANELS = {"core_mhz": "core clock, MHz", "temperature_c": "temperature, C", "power_w": "power, W"}
LEFT, HEIGHT = 60, 70
"""Where the panels begin and how high each is, in pixels."""


def drawn(title: str, rows: Sequence[Row], first: str) -> str:
    """An SVG of rows with a trace each; a way whose clock fell says so by its name.

    `first`: the way that has the first colour.
    """
    colours = svg.colours_of([row.way for row in rows], first)
    parts, y = [svg.title_of(title, svg.WIDE)], 36.0
    for row in rows:
        name = f"{row.way}: {row.slowed}" if row.slowed else row.way
        parts.append(svg.polyline([(0, y - 4), (20, y - 4)], colours[row.way]))
        parts.append(svg.text_at(28, y, svg.cut(name, svg.WIDE.letters)))
        y += svg.BAR
    longest_s = max((row.trace or {})[SECONDS][-1] for row in rows) or 1.0
    for name, heading in PANELS.items():
        if any(name in (row.trace or {}) for row in rows):
            y += svg.LINE
            parts += _panel(heading, name, rows, colours, longest_s, y)
            y += HEIGHT
    y += svg.BAR
    parts.append(svg.text_at(LEFT, y, "0 s"))
    parts.append(svg.text_at(svg.WIDE.width, y, f"{svg.number(longest_s)} s", "end"))
    spoken = "; ".join(f"{row.way}: {row.slowed or 'the clock did not fall'}" for row in rows)
    return svg.drawing(svg.WIDE.width, y + 8, parts, f"{title}, over time. {spoken}")


def _panel(
    heading: str,
    name: str,
    rows: Sequence[Row],
    colours: Mapping[str, str],
    longest_s: float,
    top: float,
) -> Iterator[str]:
    traces = {row.way: row.trace or {} for row in rows}
    values = [value for each in traces.values() for value in each.get(name, ()) if value]
    most, bottom, room = max(values), top + HEIGHT, svg.WIDE.width - LEFT
    yield svg.text_at(LEFT, top - 6, heading)
    yield svg.text_at(LEFT - 8, top + 5, svg.number(most), "end")
    yield svg.text_at(LEFT - 8, bottom + 5, "0", "end")
    for edge in (top, bottom):
        yield svg.line(LEFT, edge, svg.WIDE.width, edge, opacity=0.25)
    for way, trace in traces.items():
        places = [
            (LEFT + room * at / longest_s, bottom - HEIGHT * value / most)
            for at, value in zip(trace[SECONDS], trace.get(name, ()), strict=False)
            if value is not None
        ]
        yield svg.polyline(places, colours[way])
