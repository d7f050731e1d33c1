"""`python -m lib_rocm_sd results DIR`: contributed results of the speed test as README's table.
And of the suite: `results merge FILE FILE..`, `results check FILE FILE`, `results page DIR`.

The files come from strangers: each is read as speed_result.py reads it, and what is not right is
refused with a reason. Nothing in them can become more than text in the table. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lib_rocm_sd.checks import UsageError, told
from lib_rocm_sd.lab.rows import Row, write_json
from lib_rocm_sd.lab.speed_result import OURS, Document, files, read, reason_of
from lib_rocm_sd.lab.speed_text import escaped, machine_line, printable
from lib_rocm_sd.lab.suite import document as suite
from lib_rocm_sd.lab.suite import page
from lib_rocm_sd.lab.svg import number

COLUMNS = {
    "attention": (
        "SD1.5 512x512 self",
        "SD1.5 1024x1024 self",
        "SDXL 1024x1024 self",
        "VAE 1024x1024 middle",
    ),
    "vae": ("decode 512x512", "decode 1024x1024"),
    "image": (
        "512x512, 8 steps",
        "512x512, 20 steps",
        "1024x1024, 20 steps",
    ),
}
"""The cases that the table has; of others a file may have as many as it likes."""
BESIDE = {"attention": "SDP", "vae": "eager (the module itself)", "image": "extension off"}
"""What our time is compared with within a file."""
TITLES = {
    "attention": "Attention, one call",
    "vae": "VAE, one decode",
    "image": "Whole image by the owner's own checkpoint",
}
BEGIN = "<!-- speed: written by `python -m lib_rocm_sd results DIR --write FILE` -->"
END = "<!-- end of speed -->"
NOTHING = "No owner of a card has contributed a result yet."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="a folder of JSON files; or, of results of the suite: merge, check, page",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of the suite")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of merge: what to write")
    parser.add_argument(
        "--published",
        type=Path,
        metavar="FILE",
        help="of page: figures that others have published, drawn apart",
    )
    parser.add_argument(
        "--reference",
        default="",
        metavar="CARD",
        help="a part of the name of the card that is 100 %% (default: the one with most figures)",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table between this file's markers"
    )


def main(args: argparse.Namespace) -> int:
    """Print or write the table. 1 when a file was refused."""
    if args.files:
        return _of_suite(str(args.directory), args)
    if not args.directory.is_dir():
        what = "is no folder" if args.directory.exists() else "does not exist"
        raise UsageError(f"{args.directory} {what}")
    documents, refused = gathered(args.directory)
    for name, reason in refused.items():
        print(f"results: {name!a} is refused: {printable(reason)}", file=sys.stderr)
    try:
        text = rendered(documents, args.reference)
        if args.write is None:
            print(text)
        else:
            _replace(args.write, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"--write {told(args.write or '', error)}") from error
    except ValueError as error:
        raise UsageError(reason_of(error)) from error
    return int(bool(refused))


def _of_suite(verb: str, args: argparse.Namespace) -> int:
    """Merge, check or show results of the suite. 1 where they do not compare."""
    if verb not in _VERBS:
        raise UsageError(f"one folder, or {', '.join(_VERBS)} and files, not {verb!r} and files")
    try:
        return _VERBS[verb](args)
    except (OSError, ValueError) as error:
        raise UsageError(f"{verb}: {reason_of(error)}") from error


def _merge(args: argparse.Namespace) -> int:
    if args.out is None:
        raise ValueError("--out names the file to write")
    write_json(args.out, suite.merged([suite.read(path) for path in args.files]))
    return 0


def _check(args: argparse.Namespace) -> int:
    if len(args.files) != 2:
        raise ValueError("it takes two files")
    one, other = map(suite.read, args.files)
    reasons = suite.differences(one, other)
    for reason in reasons:
        print(f"not to be compared: {printable(reason)}")
    if not reasons:
        print("these may be compared")
    return int(bool(reasons))


def _page(args: argparse.Namespace) -> int:
    (folder, *more) = args.files
    if more or not folder.is_dir():
        raise ValueError("it takes one folder")
    documents, refused = suite.gathered(folder)
    for name, reason in refused.items():
        print(f"results: {name!a} is refused: {printable(reason)}", file=sys.stderr)
    if not documents:
        raise ValueError(f"{folder} has no result of the suite")
    published = page.published_in(args.published) if args.published else []
    print(page.write(folder, documents, published))
    return int(bool(refused))


_VERBS = {"merge": _merge, "check": _check, "page": _page}


def gathered(directory: Path) -> tuple[list[Document], dict[str, str]]:
    """The newest document per machine, and why files were refused, by name."""
    documents: dict[tuple[object, ...], Document] = {}
    refused = {}
    for path in files(directory, "*.json"):
        try:
            document = _usable(path)
        except (OSError, ValueError) as error:
            refused[path.name] = reason_of(error)
            continue
        about = document.machine
        key = tuple(about.get(name) for name in ("card", "gfx", "os", "torch", "power_limit_w"))
        if key not in documents or documents[key].date < document.date:
            documents[key] = document
    ordered = sorted(documents.values(), key=lambda document: machine_line(document.machine))
    return ordered, refused


def _usable(path: Path) -> Document:
    if path.is_symlink():
        raise ValueError("a link, not a file")
    document = read(path)
    card = document.machine.get("card")
    if not isinstance(card, str) or not card.strip():
        raise ValueError("it does not name the card")
    if document.machine.get("backend") == "cpu":
        raise ValueError("measured on a CPU, which says nothing of a card")
    if not any(_figure(document, test, case) for test in COLUMNS for case in COLUMNS[test]):
        raise ValueError("it has no figure of ours for a case of the table")
    return document


def rendered(documents: Sequence[Document], reference: str = "") -> str:
    """A table per test with its cards, or a sentence where there are none.

    Raises ValueError where no card's name contains `reference`.
    """
    if not documents:
        return NOTHING
    best = _reference(documents, reference)
    name = escaped(machine_line(best.machine))
    blocks = [
        "Each cell: the time; how many times as long the usual way takes on the same card; but for "
        f"whole images, the speed in % of {name}'s. The usual way is torch's SDP for attention, "
        "the VAE's own module, and for images the WebUI without the extension."
    ]
    for test, title in TITLES.items():
        lines = _table(documents, test, best)
        if lines:
            blocks.append("\n".join([f"**{title}**", "", *lines]))
    return "\n\n".join(blocks)


def _reference(documents: Sequence[Document], name: str) -> Document:
    named = [d for d in documents if name.lower() in machine_line(d.machine).lower()]
    if not named:
        raise ValueError(f"--reference: no card's name contains {name!r}")
    return max(named, key=lambda document: sum(len(_cases([document], t)) for t in COLUMNS))


def _cases(documents: Sequence[Document], test: str) -> list[str]:
    """The columns for which anyone has a figure."""
    return [case for case in COLUMNS[test] if any(_figure(d, test, case) for d in documents)]


def _table(documents: Sequence[Document], test: str, reference: Document) -> list[str]:
    cases = _cases(documents, test)
    shown = [d for d in documents if any(_figure(d, test, case) for case in cases)]
    if not shown:
        return []
    heads = ["Card", "System", *cases]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'--:|' * len(cases)}"]
    for document in shown:
        cells = [escaped(machine_line(document.machine)), _system(document)]
        cells += [_cell(document, test, case, reference) for case in cases]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _system(document: Document) -> str:
    about = document.machine
    facts = [about.get("os"), about.get("torch") and f"torch {about.get('torch')}"]
    limit = about.get("power_limit_w")
    facts.append(f"{limit:g} W" if isinstance(limit, (int, float)) else None)
    return escaped(", ".join(str(fact) for fact in facts if fact))


def _figure(document: Document, test: str, case: str, method: str = "") -> Row | None:
    """Our row, or another method's; None where it has no figure."""
    method = method or OURS[test]
    for row in document.rows:
        fits = (row.test, row.case, row.way) == (test, case, method)
        if fits and row.unit != "it/s" and not row.reason:
            return row
    return None


def _cell(document: Document, test: str, case: str, reference: Document) -> str:
    row = _figure(document, test, case)
    if row is None:
        return ""
    parts = [f"{number(row.median)} {row.unit}"]
    usual = _figure(document, test, case, BESIDE[test])
    if usual is not None and usual.unit == row.unit:
        parts.append(f"{number(usual.median / row.median)}x")
    best = _figure(reference, test, case)
    if best is not None and best.unit == row.unit and test != "image":
        parts.append(f"{number(100 * best.median / row.median)} %")
    return ", ".join(parts)


def _replace(path: Path, text: str) -> None:
    """The table between the markers of a file."""
    content = path.read_text(encoding="utf-8")
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise ValueError(f"the markers are not in {path.name}, once each: {BEGIN} and {END}")
    before, rest = content.split(BEGIN)
    after = rest.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
