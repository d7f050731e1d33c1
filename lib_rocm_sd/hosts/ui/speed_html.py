"""What the Speed test tab shows, as HTML, without gradio. What comes with a result is escaped;
pictures are made smaller, as data URIs.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from lib_rocm_sd.lab import speed_text, svg
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_parts import AMPLIFIED
from lib_rocm_sd.lab.speed_result import OURS, PICTURE, WHAT, Document, History, Pair
from lib_rocm_sd.lab.speed_text import MACHINE, METHODS_SAID, printable, to_csv, to_markdown

TITLES = {
    "attention": "Attention",
    "vae": "VAE decode",
    "step": "Denoising step",
    "upscaler": "Upscaling",
    "image": "Whole image",
}
HEAD = ("Median", "Times ours", "p10 to p90", "Runs", "Peak MiB", "Error")
MOST_SIDE = 768
"""Pixels; the full-size files lie beside the result."""
LOSSLESS_SIDE = 512
MOST_PIXELS = 8192 * 8192
MOST_LOOKS = 4
"""Pairs that a page shows."""
MOST_SKIPPED = 5
"""So many files that were left out of the history are named."""


def text_of(value: object) -> str:
    """`value` as HTML: escaped, without control characters."""
    return escape(printable(str(value)))


def status(state: str, fraction: float, text: str, tick: int, label: str = "Speed test") -> str:
    """The progress bar, of this label, and a line. The page's script reads `data-state` and
    `data-tick`.
    """
    percent = round(100 * min(max(fraction, 0.0), 1.0)) if math.isfinite(fraction) else 0
    bar = ""
    if state == "running":
        bar = (
            f'<div class="rocm-sd-speed-bar" role="progressbar" aria-label="{label}" '
            f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}">'
            f'<div style="width:{percent}%"></div></div>'
        )
        text = f"{percent} %: {text}"
    return (
        f'<div class="rocm-sd-speed-progress" data-state="{text_of(state)}" data-tick="{tick:d}">'
        f"{bar}<p>{text_of(text)}</p></div>"
    )


def notice(text: str) -> str:
    """Why a click did nothing; empty for nothing to say."""
    return f'<p class="rocm-sd-speed-notice" role="alert">{text_of(text)}</p>' if text else ""


def results(document: Document) -> str:
    """A table per test, then what else is to be known."""
    parts = [f'<p class="rocm-sd-speed-date">{_when(document)}</p>']
    for test in WHAT:
        rows = [row for row in document.rows if row.test == test]
        if rows:
            parts += [f"<h4>{TITLES[test]}</h4>", _table(rows, test)]
    if not document.rows:
        parts.append("<p>No figures yet.</p>")
    parts += [f"<p>Note: {text_of(note)}.</p>" for note in document.notes]
    parts.append(f'<p class="rocm-sd-speed-small">{escape(METHODS_SAID)}</p>')
    return "\n".join(parts)


def _when(document: Document) -> str:
    """The card, too: a picture of the page is passed on alone."""
    asked, card = document.request, document.machine.get("card")
    what = ", ".join(str(part) for part in asked.get("what", ()))
    sizes = " ".join(str(size) for size in asked.get("sizes", ()))
    when = document.date.replace("T", " ").replace("Z", " UTC")
    parts = (card, when, asked.get("preset"), sizes, what)
    return text_of(", ".join(str(part) for part in parts if part))


def _table(rows: Sequence[Row], test: str) -> str:
    """Scrolls inside itself where the window is narrow, by keyboard, too."""
    head = "".join(f'<th scope="col">{title}</th>' for title in ("Method", *HEAD))
    body = []
    for case in dict.fromkeys(row.case for row in rows):
        title = f'<tr><th scope="rowgroup" colspan="{len(HEAD) + 1}">{text_of(case)}</th></tr>'
        lines = [_line(row, rows, test) for row in rows if row.case == case]
        body.append("\n".join(["<tbody>", title, *lines, "</tbody>"]))
    return (
        f'<div class="rocm-sd-speed-scroll" tabindex="0" role="region" aria-label="{TITLES[test]}">'
        f"<table><thead><tr>{head}</tr></thead>{''.join(body)}</table></div>"
    )


def _line(row: Row, rows: Sequence[Row], test: str) -> str:
    kind = ' class="rocm-sd-speed-ours"' if row.way == OURS[test] else ""
    note = f' title="{text_of(row.note)}"' if row.note else ""
    start = f'<tr{kind}><th scope="row"{note}>{text_of(row.way)}</th>'
    if row.reason:
        reason = f'<td colspan="{len(HEAD)}" class="rocm-sd-speed-reason">'
        return f"{start}{reason}{text_of(row.reason)}</td></tr>"
    figures = speed_text.figures(row, rows, test)
    cells = "".join(f"<td>{text_of(figures[name])}</td>" for name in HEAD)
    return f"{start}{cells}</tr>"


def bars(document: Document) -> str:
    """The bar plots, one under the other."""
    wide, slim = (speed_text.drawn_bars(document, layout) for layout in (svg.WIDE, svg.SLIM))
    return "\n".join(_plot(wide[test], slim[test]) for test in wide)


def history(past: History) -> str:
    """The history plot, or why there is none; files that were left out, with reasons."""
    count = len(past.documents)
    wide, slim = (
        speed_text.drawn_history(past.documents, layout) for layout in (svg.WIDE, svg.SLIM)
    )
    parts = [_plot(wide, slim)] if wide else []
    if not wide:
        parts.append(
            f"<p>Kept results of this machine: {count}. "
            "A history needs two with a case in common.</p>"
        )
    skipped = [item for item in past.skipped.items() if item[1] != "of another machine"]
    parts += [
        f"<p>Left out: {text_of(n)}: {text_of(why)}.</p>" for n, why in skipped[:MOST_SKIPPED]
    ]
    return "\n".join(parts)


def _plot(wide: str, slim: str) -> str:
    """One of them is shown, by the room that there is."""
    both = "".join(
        f'<div class="rocm-sd-speed-{name}">{printable(svg)}</div>'
        for name, svg in (("wide", wide), ("slim", slim))
    )
    return f'<div class="rocm-sd-speed-plot">{both}</div>'


def machine(facts: Mapping[str, Any]) -> str:
    """The machine's description."""
    shown = [(title, facts[key]) for key, title in MACHINE if facts.get(key) not in (None, "")]
    lines = "".join(f"<dt>{escape(title)}</dt><dd>{text_of(value)}</dd>" for title, value in shown)
    return f'<dl class="rocm-sd-speed-machine">{lines}</dl>' if lines else "<p>Not known yet.</p>"


def exports(document: Document, directory: Path | None) -> str:
    """Links that save the result, made of nothing but themselves, and where it is kept."""
    as_json = json.dumps(document.as_dict(), indent=1, ensure_ascii=False) + "\n"
    links = " ".join(
        _link(document.stem, suffix, kind, content)
        for suffix, kind, content in (
            ("json", "application/json", as_json),
            ("csv", "text/csv", to_csv(document)),
            ("md", "text/markdown", to_markdown(document)),
        )
    )
    kept = (
        '<p class="rocm-sd-speed-kept">Results and full-size pictures are kept in '
        f"{text_of(directory)}</p>"
    )
    return f'<p class="rocm-sd-speed-exports">Save as {links}</p>' + (kept if directory else "")


def _link(stem: str, suffix: str, kind: str, content: str) -> str:
    data = base64.b64encode(content.encode("utf-8", "replace")).decode("ascii")
    name = {"json": "JSON", "csv": "CSV", "md": "Markdown"}[suffix]
    href = f"data:{kind};charset=utf-8;base64,{data}"
    return f'<a download="{text_of(stem)}.{suffix}" href="{href}">{name}</a>'


def pictures(looks: Sequence[Pair], ident: str) -> str:
    """Each pair side by side, under a slider, and as a difference; `ident` tells radios apart."""
    if not looks:
        return "<p>No pictures. Measure Whole image to get some.</p>"
    return "\n".join(_pair(look, f"rocm-sd-{text_of(ident)}-{i}") for i, look in enumerate(looks))


VIEWS = (("side", "Both"), ("slide", "Slider"), ("apart", "Difference"))


def _pair(look: Pair, name: str) -> str:
    radios = "".join(
        f'<input type="radio" name="{name}" id="{name}-{key}" class="rocm-sd-speed-pick-{key}"'
        f'{" checked" if key == "side" else ""}><label for="{name}-{key}">{label}</label>'
        for key, label in VIEWS
    )
    off, on = (
        f'src="{escape(src)}" alt="extension {t}"'
        for src, t in ((look.off, "off"), (look.on, "on"))
    )
    side = _figure(off, "extension off") + _figure(on, "extension on")
    move = "this.parentNode.style.setProperty('--rocm-sd-speed-at', this.value + '%')"
    slide = (
        f'<div class="rocm-sd-speed-over"><img {off}><img {on} class="rocm-sd-speed-top"></div>'
        '<input type="range" min="0" max="100" value="50" '
        f'aria-label="extension off to the left, on to the right" oninput="{move}">'
    )
    said = f"at most {look.largest} of 255 apart, {look.mean:.3g} on average"
    apart = _figure(
        f'src="{escape(look.difference)}" alt="difference"',
        f"difference, {AMPLIFIED} times",
    )
    return (
        '<fieldset class="rocm-sd-speed-pair">'
        f"<legend>{text_of(look.case)}: {said}</legend>{radios}"
        f'<div class="rocm-sd-speed-view-side">{side}</div>'
        f'<div class="rocm-sd-speed-view-slide">{slide}</div>'
        f'<div class="rocm-sd-speed-view-apart">{apart}</div></fieldset>'
    )


def _figure(image: str, caption: str) -> str:
    return f"<figure><img {image}><figcaption>{escape(caption)}</figcaption></figure>"


def of_shots(shots: Sequence[Pair]) -> list[Pair]:
    """The last MOST_LOOKS pairs of pictures in memory, for a page."""
    return [
        _look(each, each.off.image, each.on.image, each.difference) for each in shots[-MOST_LOOKS:]
    ]


def of_files(document: Document, directory: Path | None) -> list[Pair]:
    """The same of the files beside a document. A pair whose files are damaged is left out."""
    looks = []
    for pair in document.pictures[-MOST_LOOKS:] if directory is not None else ():
        assert directory is not None
        names = (pair.off, pair.on, pair.difference)
        try:
            looks.append(_look(pair, *(_open(directory, name) for name in names)))
        except (OSError, ValueError, SyntaxError):
            continue
    return looks


def _look(pair: Pair, off: Any, on: Any, difference: Any) -> Pair:
    apart = difference_uri(difference)
    return replace(pair, off=picture_uri(off), on=picture_uri(on), difference=apart)


def _open(directory: Path, name: str) -> Any:
    from PIL import Image

    if not PICTURE.fullmatch(name):
        raise ValueError("not the name of a picture of ours")
    with Image.open(directory / name, formats=("PNG",)) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError("the picture is too large")
        return image.convert("RGB")


def picture_uri(image: Any) -> str:
    """Made smaller by averaging; large ones with JPEG's least loss, to spare the page."""
    from PIL import Image

    image = image.convert("RGB")
    image.thumbnail((MOST_SIDE, MOST_SIDE), Image.Resampling.BOX)
    if max(image.size) <= LOSSLESS_SIDE:
        return _uri(image, "png")
    return _uri(image, "jpeg", quality=95, subsampling=0)


def difference_uri(image: Any) -> str:
    """Made smaller by the largest value, so that a single pixel that differs is still seen."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image.convert("RGB"))
    step = -(-max(values.shape[:2]) // MOST_SIDE)
    if step > 1:
        padded = np.pad(values, [(0, -n % step) for n in values.shape[:2]] + [(0, 0)])
        rows, columns = (n // step for n in padded.shape[:2])
        values = padded.reshape(rows, step, columns, step, 3).max((1, 3))
    return _uri(Image.fromarray(values), "png")


def _uri(image: Any, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.info = {}
    image.save(file, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
