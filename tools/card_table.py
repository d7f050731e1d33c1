"""Prints the table of cards from kernels/arch.json and from what was executed where; `--write` puts
it into docs/cards.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib_rocm_sd.arch import Arch, amd_table
from lib_rocm_sd.commands.selftest import FORMAT

CARDS = Path(__file__).resolve().parent.parent / "docs" / "cards.md"
BEGIN = "<!-- cards: written by `python tools/card_table.py --write` -->"
END = "<!-- end of cards -->"
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
SELF_TESTS = CARDS.parent / "results" / "self-tests"
"""Result files of `doctor --self-test` that owners of cards sent."""


def table() -> str:
    """The rows that a user can own, as Markdown."""
    heads = ("gfx id", "Family", "Cards", "Matrix unit", "Machine code", "On a card")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for gfx, arch in amd_table().items():
        cards = ", ".join(arch.names) or "(by its gfx id only)"
        cells = (gfx, arch.family, cards, UNITS[arch.matrix], machine_code(arch), on_cards(gfx))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine_code(arch: Arch) -> str:
    """What was done with the machine code that is made for a GPU."""
    if arch.gfx in EXECUTED:
        return f"executed on a CPU: {EXECUTED[arch.gfx]}"
    return f"compiled only; same source as {LIKE[arch.matrix]}'s"


def on_cards(gfx: str, folder: Path = SELF_TESTS) -> str:
    """What the self-tests that were sent say. Raises ValueError for a file that is none."""
    found = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT:
            raise ValueError(f"{path.name} is no result of the self-test")
        if document["machine"]["gfx"] == gfx:
            found.append((int(document["passed"]), int(document["failed"]), document["complete"]))
    if not found:
        return "not yet"
    good = sum(complete and not failed for _, failed, complete in found)
    return f"{good} of {len(found)} self-tests passed"


def with_table(text: str) -> str:
    """A text with the table between its markers renewed. ValueError where a marker is missing."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        CARDS.write_text(with_table(CARDS.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table() + "\n")
