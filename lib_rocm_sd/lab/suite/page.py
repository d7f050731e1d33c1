"""Results of the suite as a static page: a table to sort, filter and compare, plots, pictures, and
links to the files. It loads nothing from elsewhere; what stands in a result is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lib_rocm_sd.lab import svg
from lib_rocm_sd.lab.rows import Row, write_json, write_whole
from lib_rocm_sd.lab.suite import trace
from lib_rocm_sd.lab.suite.document import SuiteDocument, differences
from lib_rocm_sd.lab.suite.workloads import CLIP_WINDOW, FID_WINDOW

HERE = Path(__file__).parent
OURS = "ours"
"""What the ways of ours begin with."""
BESIDE = svg.Layout(720, 320, 90, 90)
"""A plot of several cards, whose names stand beside the ways."""
PICTURES = "pictures"
"""The folder beside a page in which a run keeps its pictures."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src 'self'"
KEPT = f"{PICTURES}/published.json"
PUBLISHED = ("card", "workload", "way", "seconds", "source", "date")
"""What a figure that others have published has to say."""


@dataclass(frozen=True)
class _Line:
    """A row of a whole picture, with those of its parts. `place`: of its document among all."""

    document: SuiteDocument
    place: int
    row: Row

    def part(self, part: str) -> float:
        """The median of a part; NaN where it was not measured."""
        found = self.document.row(part, self.row.case, self.row.way)
        return math.nan if found is None else found.median

    @property
    def batch(self) -> int:
        batch = self.document.workloads.get(self.row.case, {}).get("batch", 1)
        return batch if isinstance(batch, int) and batch > 0 else 1

    def figures(self) -> dict[str, tuple[float, str]]:
        """Each column's number and how many digits it is shown with."""
        row, step_ms = self.row, self.part("step")
        return {
            "s": (row.median, ".3f"),
            "p10": (row.p10, ".3f"),
            "p90": (row.p90, ".3f"),
            "first s": (row.first, ".2f"),
            "pictures/s": (self.batch / row.median, ".3g"),
            "it/s": (1000 / step_ms, ".1f"),
            "decode ms": (self.part("decode"), ".1f"),
            "text ms": (self.part("text encoder"), ".1f"),
            "CPU ms a step": (row.cpu_ms, ".1f"),
            "peak MiB": (row.peak_mib, ".0f"),
            "W": (row.power_w, ".0f"),
            "J a picture": (row.energy_j, ".0f"),
            "MHz": (row.core_mhz, ".0f"),
            "C": (row.temperature_c, ".0f"),
            "largest of 255": (row.largest, ".0f"),
            "PSNR dB": (math.inf if row.largest == 0 else row.psnr, ".1f"),
            "SSIM": (row.ssim, ".4f"),
            "FLIP": (row.flip, ".4f"),
        }


def write(
    folder: Path, documents: Sequence[SuiteDocument], published: Sequence[dict[str, Any]] = ()
) -> Path:
    """Write `folder`/index.html, whole or not at all. Raises OSError.

    Figures that others have published stay in the folder, for the next time.
    """
    path, kept = folder / "index.html", folder / KEPT
    if published:
        kept.parent.mkdir(exist_ok=True)
        write_json(kept, list(published))
    elif kept.is_file():
        published = published_in(kept)
    write_whole(path, rendered(documents, published, folder))
    return path


def published_in(path: Path) -> list[dict[str, Any]]:
    """Figures that others have published. OSError, or ValueError with a reason."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ValueError(f"{path.name} is no list of figures")
    for item in content:
        missing = [name for name in PUBLISHED if not item.get(name)]
        if missing:
            raise ValueError(f"{path.name}: a figure without {', '.join(missing)}")
        if not isinstance(item["seconds"], (int, float)):
            raise ValueError(f"{path.name}: {item['seconds']!r} is no time in seconds")  # noqa: TRY004
    return content


def rendered(
    documents: Sequence[SuiteDocument], published: Sequence[dict[str, Any]], folder: Path
) -> str:
    """The page's text."""
    lines = [_Line(d, place, row) for place, d in enumerate(documents) for row in d.pictures()]
    alike = _alike(documents)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>Stable Diffusion on this card: results of the suite</title>",
        f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head><body>",
        "<h1>Results of the suite</h1>",
        *_about(documents),
        *_choices(lines),
        *_table(lines, alike),
        *_plots(lines, alike),
        *_traces(documents),
        *_others(documents),
        *_pictures(documents, folder),
        *_published(published),
        f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _alike(documents: Sequence[SuiteDocument]) -> list[set[int]]:
    """For each document the places of those that it may be compared with."""
    return [
        {n for n, other in enumerate(documents) if other is one or not differences(one, other)}
        for one in documents
    ]


def _link(name: str) -> str:
    """The address of a file in the page's folder, for an attribute."""
    return escape(f"./{quote(name)}")


def _about(documents: Sequence[SuiteDocument]) -> Iterator[str]:
    yield "<p>Seconds are medians of whole pictures, from prompt to image, p10 to p90 beside them. "
    yield "Distances are from the same picture computed in float32. An empty cell was not measured."
    yield " Speeds are compared where <code>results check</code> allows it."
    yield " These are no MLPerf results.</p><ul>"
    for document in documents:
        facts = document.machine
        idle = facts.get("idle_power_w")
        said = [f"{document.about.get('date', '')}"[:10], facts.get("gfx"), facts.get("os")]
        said += [f"{name} {facts[name]}" for name in ("torch", "rocm", "driver") if facts.get(name)]
        said += [document.about.get("dtype"), document.about.get("model")]
        said += [f"idle {idle} W"] if idle else []
        said += [] if document.complete else ["not run to its end"]
        text = ", ".join(escape(str(each)) for each in said if each)
        yield f'<li><a href="{_link(document.name)}">{escape(document.card)}</a>: {text}</li>'
    yield "</ul>"


def _choices(lines: Sequence[_Line]) -> Iterator[str]:
    every = {
        "card": [line.document.card for line in lines],
        "workload": [line.row.case for line in lines],
        "way": [line.row.way for line in lines],
    }
    yield '<div class="choices" hidden>'
    for name, values in every.items():
        options = "".join(f"<option>{escape(value)}</option>" for value in dict.fromkeys(values))
        yield f'<label>{name} <select id="{name}"><option value="">all</option>{options}'
        yield "</select></label>"
    yield '<label>100 % is <select id="base">'
    for place, line in enumerate(lines):
        text = f"{line.document.card}, {line.row.case}, {line.row.way}"
        yield f'<option value="{place}">{escape(text)}</option>'
    yield "</select></label></div>"


def _table(lines: Sequence[_Line], alike: Sequence[set[int]]) -> Iterator[str]:
    names = list(lines[0].figures()) if lines else []
    yield '<div class="wide"><table id="rows"><thead><tr>'
    for name in ("card", "workload", "way"):
        yield f'<th class="text"><button>{name}</button></th>'
    for name in ("speed", *names):
        yield f"<th><button>{name}</button></th>"
    yield "</tr></thead><tbody>"
    for line in lines:
        card, row = line.document.card, line.row
        data = {"card": card, "workload": row.case, "way": row.way, "seconds": f"{row.median}"}
        data |= {"run": str(line.place), "alike": " ".join(map(str, sorted(alike[line.place])))}
        marks = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
        is_ours = ' class="ours"' if row.way.startswith(OURS) else ""
        yield f"<tr{is_ours} {marks}>"
        for text in (card, row.case, row.way):
            yield f'<td class="text">{escape(text)}</td>'
        yield "<td></td>"
        for value, form in line.figures().values():
            shown = "equal" if value == math.inf else "" if math.isnan(value) else f"{value:{form}}"
            number = "" if math.isnan(value) else str(value).replace("inf", "Infinity")
            yield f'<td data-value="{number}">{shown}</td>'
        yield "</tr>"
    yield "</tbody></table></div>"


def _plots(lines: Sequence[_Line], alike: Sequence[set[int]]) -> Iterator[str]:
    """Seconds of each workload, and the energy where it is known: a plot for runs that may be
    compared.
    """
    yield "<h2>By workload: less is better</h2>"
    left = list(lines)
    while left:
        first, case = left[0], left[0].row.case
        own = [each for each in left if each.row.case == case and each.place in alike[first.place]]
        left = [line for line in left if line not in own]
        names = [line.row.way for line in own]
        colours = svg.colours_of(names, _ours_of([line.row for line in own]))
        layout = svg.WIDE
        if len({line.place for line in own}) > 1:
            names = [f"{line.row.way}, {line.document.card}" for line in own]
            layout = BESIDE
        by_name = {name: colours[line.row.way] for name, line in zip(names, own, strict=True)}
        times = [replace(line.row, case="", way=n) for n, line in zip(names, own, strict=True)]
        energies = [
            replace(bar, unit="J", median=bar.energy_j, p10=math.nan, p90=math.nan)
            for bar in times
            if bar.energy_j > 0
        ]
        for title, bars in ((case, times), (f"{case}, energy", energies)):
            for kind, each in (("broad", layout), ("slim", svg.SLIM)) if bars else ():
                drawn = svg.chart(title, bars, "", each, colours=by_name)
                yield f'<figure class="{kind}">{drawn}</figure>'


def _ours_of(rows: Sequence[Row]) -> str:
    """The way that has our colour: all of ours, where that is among them."""
    return max((row.way for row in rows if OURS in row.way), key=OURS.__eq__, default="")


def _traces(documents: Sequence[SuiteDocument]) -> Iterator[str]:
    """Clocks, temperature and power over time, of each card that tells them; open where a clock
    fell.
    """
    for document in documents:
        rows = [row for row in document.pictures() if row.trace]
        if not rows:
            continue
        opened = " open" if any(row.slowed for row in rows) else ""
        yield f"<details{opened}><summary>Clocks and temperature over time, "
        yield f"{escape(document.card)}</summary>"
        for case in dict.fromkeys(row.case for row in rows):
            own = [row for row in rows if row.case == case]
            yield f"<figure>{trace.drawn(case, own, _ours_of(own))}</figure>"
        yield "</details>"


def _others(documents: Sequence[SuiteDocument]) -> Iterator[str]:
    """Scenarios and scores, what was not measured and what was noticed."""
    rows = [(d, row) for d in documents for row in d.rows]
    scenarios = [(d, row) for d, row in rows if row.test in ("offline", "server", "CLIP score")]
    if scenarios:
        yield '<h2>Many pictures</h2><div class="wide"><table><thead><tr>'
        for name in ("card", "workload", "way", "what"):
            yield f'<th class="text">{name}</th>'
        yield "<th>median</th><th>first s</th><th>p95</th><th>p99</th><th>in time</th>"
        yield '<th class="text">note</th></tr></thead><tbody>'
        for document, row in scenarios:
            texts = (document.card, row.case, row.way, row.test)
            cells = "".join(f'<td class="text">{escape(text)}</td>' for text in texts)
            figures = [f"{svg.number(row.median)} {row.unit}" if not row.reason else ""]
            figures += [svg.number(value) for value in (row.first, row.p95, row.p99)]
            figures.append(f"{row.within:.0%}" if math.isfinite(row.within) else "")
            cells += "".join(f"<td>{escape(text)}</td>" for text in figures)
            yield f'<tr>{cells}<td class="text">{escape(row.reason or row.note)}</td></tr>'
        yield "</tbody></table></div>"
        if any(row.test == "CLIP score" for _, row in scenarios):
            clip, fid = (f"{low:.3f} to {high:.3f}" for low, high in (CLIP_WINDOW, FID_WINDOW))
            yield '<p class="faint">MLPerf asks of SDXL over 5,000 captions of COCO 2014: CLIP '
            yield f"{clip}, FID {fid}. Other captions, another CLIP, have other scores.</p>"
    told = [
        f"{document.card}, {row.case}, {row.way}: {text}"
        for document, row in rows
        for text in (row.reason, row.slowed, row.note if row.test == "picture" else "")
        if text
    ]
    if told:
        yield "<h2>Notes</h2><ul>"
        yield from (f"<li>{escape(text)}</li>" for text in dict.fromkeys(told))
        yield "</ul>"


def _pictures(documents: Sequence[SuiteDocument], folder: Path) -> Iterator[str]:
    """What a run left beside its result: PNGs and histograms, by workload."""
    for document in documents:
        place = folder / PICTURES / Path(document.name).stem
        every = sorted(place.glob("*.png")) if place.is_dir() else []
        if not every:
            continue
        yield f"<h2>Pictures, {escape(document.card)}</h2>"
        for group in dict.fromkeys(path.name.partition("--")[0] for path in every):
            yield f'<p>{escape(group)}</p><div class="pictures">'
            for path in (path for path in every if path.name.partition("--")[0] == group):
                name = path.relative_to(folder).as_posix()
                way = path.stem.partition("--")[2]
                yield f'<figure><img src="{_link(name)}" alt="{escape(path.stem)}">'
                yield f"<figcaption>{escape(way)}</figcaption></figure>"
            yield "</div>"
            drawing = place / f"{group}.svg"
            if drawing.is_file():
                name = drawing.relative_to(folder).as_posix()
                yield f'<figure><img src="{_link(name)}" alt="histogram of differences" '
                yield 'class="drawn"></figure>'


def _published(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not figures:
        return
    yield "<h2>Published by others</h2>"
    yield '<p class="faint">Not measured by the suite, and with other settings than its own.</p>'
    yield '<div class="wide"><table><thead><tr>'
    for name in PUBLISHED:
        yield f'<th class="text">{name}</th>'
    yield "</tr></thead><tbody>"
    for item in figures:
        cells = (f'<td class="text">{escape(str(item[name]))}</td>' for name in PUBLISHED)
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
