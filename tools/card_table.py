"""The table of cards, from kernels/arch.json and from what was executed where, and the table of
self-tests that owners sent.

python tools/card_table.py [--write] [FILE ...]

Each FILE, as an owner sent it, is looked at and put into docs/results/self-tests. Prints both
tables; `--write` puts them into docs/cards.md.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib_rocm_sd.arch import Arch, amd_table
from lib_rocm_sd.lab import card_file
from lib_rocm_sd.lab.speed_result import DATE
from lib_rocm_sd.trials.verdicts import without_folders

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "docs" / "cards.md"
MARKS = "<!-- {0}: written by `python tools/card_table.py --write` -->", "<!-- end of {0} -->"
UNITS = {
    "dot2": "none; packed dot products",
    "wmma_gfx11": "WMMA of RDNA3",
    "wmma_gfx12": "WMMA of RDNA4",
    "mfma": "MFMA",
}
EXECUTED = {
    "gfx1030": "every kernel and config",
    "gfx1100": "every kernel and config",
    "gfx1151": "a third of the cases",
    "gfx1201": "every kernel and config",
    "gfx90a": "every kernel and config",
    "gfx942": "every kernel and config",
    "gfx950": "every kernel and config",
}
"""How much of a GPU's machine code tests/verify/amdgpu/test_amdgpu_kernels.py executes on a CPU."""
LIKE = {"dot2": "gfx1030", "wmma_gfx11": "gfx1100", "wmma_gfx12": "gfx1201", "mfma": "gfx942"}
"""By matrix unit: the GPU that is executed and whose code is made from the same source."""
SELF_TESTS = ROOT / "docs" / "results" / "self-tests"
"""Files of the self-test that owners of cards sent."""
FACTS = ("card", "gfx", "os", "rocm", "torch", "rocm_sd")
"""Facts of a machine that the table of self-tests has."""
NONE_YET = "Nobody has sent a self-test yet."


def markdown(heads: tuple[str, ...], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def table() -> str:
    """The rows that a user can own, as Markdown."""
    heads = ("gfx id", "Family", "Cards", "Matrix unit", "Machine code", "On a card")
    rows = []
    for gfx, arch in amd_table().items():
        cards = ", ".join(arch.names) or "(by its gfx id only)"
        unit = UNITS[arch.matrix]
        rows.append((gfx, arch.family, cards, unit, machine_code(arch), on_cards(gfx)))
    return markdown(heads, rows)


def machine_code(arch: Arch) -> str:
    """What was done with the machine code that is made for a GPU."""
    if arch.gfx in EXECUTED:
        return f"executed on a CPU: {EXECUTED[arch.gfx]}"
    return f"compiled only; same source as {LIKE[arch.matrix]}'s"


def sent(folder: Path = SELF_TESTS) -> dict[str, dict[str, Any]]:
    """The self-tests that were sent, by name. Raises ValueError for a file that is none."""
    return {path.name: card_file.read(path) for path in sorted(folder.glob("*.json"))}


def on_cards(gfx: str, folder: Path = SELF_TESTS) -> str:
    """How many of the self-tests that were sent for a GPU passed."""
    mine = [each for each in sent(folder).values() if each["machine"]["gfx"] == gfx]
    if not mine:
        return "not yet"
    return f"{sum(map(_passed, mine))} of {len(mine)} self-tests passed"


def self_tests(folder: Path = SELF_TESTS) -> str:
    """What each of them says, as Markdown."""
    heads = ("Card", "gfx id", "System", "ROCm", "torch", "This extension", "Date", "Result")
    rows = []
    for name, each in sent(folder).items():
        every = card_file.outcomes(each)
        wrong = sum(bool(one.reason) for one in every)
        said = f"all {len(every)} passed" if _passed(each) else f"{wrong} of {len(every)} wrong"
        said = said if each["complete"] else f"did not finish; {said}"
        facts = [_cell(each["machine"].get(fact)) for fact in FACTS]
        date, link = _cell(each["date"][:10]), f"[{said}](results/self-tests/{name})"
        rows.append((*facts, date, link))
    return markdown(heads, rows) if rows else NONE_YET


def _passed(document: dict[str, Any]) -> bool:
    return bool(document["complete"]) and not any(
        each.reason for each in card_file.outcomes(document)
    )


def _cell(value: object) -> str:
    """What a stranger's file says, as a cell may have it."""
    return re.sub(r"[^\w .,:()+-]", "", str("" if value is None else value))[:60]


def take(path: Path, folder: Path = SELF_TESTS) -> Path:
    """Put a file that an owner sent into `folder`; its place. Raises OSError, and ValueError where
    it is no self-test of a card that is known, or names a folder.
    """
    document = card_file.read(path)
    gfx, date = str(document["machine"]["gfx"]), str(document.get("date"))
    if gfx not in amd_table() or not DATE.fullmatch(date):
        raise ValueError(f"{path.name}: {gfx} at {date} is no known card and date")
    named = [text for text in _texts(document) if without_folders(text) != text]
    if named:
        raise ValueError(f"{path.name} names a folder: {named[0]}")
    content = path.read_bytes()
    stem = card_file.file_name(gfx, date[:10]).removesuffix(".json")
    place = folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:8]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return place


def _texts(value: object) -> Iterator[str]:
    """Every text in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def with_tables(text: str) -> str:
    """A text with what stands between the markers renewed. ValueError where one is missing."""
    for name, new in (("cards", table()), ("self-tests", self_tests())):
        begin, end = (mark.format(name) for mark in MARKS)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{new}\n{end}{after}"
    return text


def main(argv: list[str]) -> int:
    """Take the files, and print or write both tables. Returns 0; 2 where a file is refused."""
    parser = argparse.ArgumentParser(description=__doc__, usage=__doc__.splitlines()[3])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    asked = parser.parse_args(argv)
    try:
        for file in asked.files:
            print(take(file))
        text = f"{table()}\n\n{self_tests()}\n"
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if asked.write:
        CARDS.write_text(with_tables(CARDS.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
