"""Prints README's table of cards from kernels/arch.json; `--write` puts it into README.md."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib_rocm_sd.arch import amd_table

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- cards: written by `python tools/card_table.py --write` -->"
END = "<!-- end of cards -->"
UNITS = {
    "dot2": "none; packed dot products",
    "wmma_gfx11": "WMMA of RDNA3",
    "wmma_gfx12": "WMMA of RDNA4",
    "mfma": "MFMA",
}


def table() -> str:
    """The rows that a user can own, as Markdown."""
    lines = ["| gfx id | Family | Cards | Matrix unit |", "|---|---|---|---|"]
    for gfx, arch in amd_table().items():
        cards = ", ".join(arch.names) or "(by its gfx id only)"
        lines.append(f"| {gfx} | {arch.family} | {cards} | {UNITS[arch.matrix]} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """The text of README.md with its table renewed. Raises ValueError where a marker is missing."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table() + "\n")
