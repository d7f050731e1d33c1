"""Machine code in text form, as functions of instructions with resolved branches.

Two forms are read: a disassembly (llvm-objdump, libamd_comgr), where a branch has a distance, and
a compiler's assembly, where it has a label.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


class ListingError(ValueError):
    """Text that is no listing, or not of the form expected."""


@dataclass(frozen=True)
class Instruction:
    """`mnemonics`: one, or both halves of a dual-issue pair. `target`: where a branch leads, as an
    index into the function's instructions.
    """

    mnemonics: tuple[str, ...]
    target: int | None = None

    @property
    def mnemonic(self) -> str:
        return self.mnemonics[0]


@dataclass(frozen=True)
class Function:
    """A kernel, its instructions in the order of their addresses."""

    name: str
    instructions: tuple[Instruction, ...]


_BRANCH = re.compile(r"s_(branch|cbranch_\w+)$")
_LABEL = re.compile(r"(?:[0-9A-Fa-f]+ )?<?([\w.$]+)>?:\s*(?:;.*)?$")
_DISASSEMBLED = re.compile(r"\s+(\S.*?)\s*//\s*([0-9A-Fa-f]+):((?: [0-9A-Fa-f]{8})+)")
_NOT_CODE = re.compile(r"\s*$|\s*\.\.\.\s*$|.*file format |Disassembly of section ")


def from_disassembly(text: str) -> list[Function]:
    """The functions of a disassembled code object. Raises ListingError."""
    found: list[tuple[str, list[tuple[int, str]]]] = []
    for line in text.splitlines():
        instruction = _DISASSEMBLED.match(line)
        if instruction and found:
            found[-1][1].append((int(instruction[2], 16), instruction[1]))
        elif label := _LABEL.match(line):
            found.append((label[1], []))
        elif not _NOT_CODE.match(line):
            raise ListingError(f"a line that is no instruction: {line.strip()!r}")
    if not any(rows for _, rows in found):
        raise ListingError("no instructions")
    return [_resolved(name, rows) for name, rows in found if rows]


def _resolved(name: str, rows: list[tuple[int, str]]) -> Function:
    index = {address: number for number, (address, _) in enumerate(rows)}
    made = []
    for address, text in rows:
        mnemonics = _mnemonics(text)
        target = None
        if _BRANCH.match(mnemonics[0]):
            target = index.get(address + 4 + 4 * _distance(text))
            if target is None:
                raise ListingError(f"{name}: {text!r} leads out of the function")
        made.append(Instruction(mnemonics, target))
    last = max(
        (at for at, row in enumerate(made) if row.mnemonic.startswith("s_endpgm")), default=0
    )
    if any(instruction.mnemonic.startswith((".", "<")) for instruction in made[:last]):
        raise ListingError(f"{name}: some words were not decoded")
    return Function(name, tuple(made))


def _distance(text: str) -> int:
    """Distance of a branch, in words of 4 bytes from the next instruction on."""
    operand = text.split()[-1]
    try:
        value = int(operand, 0)
    except ValueError as error:
        raise ListingError(f"{text!r} has no distance") from error
    return value - 0x10000 if value >= 0x8000 else value


def _mnemonics(text: str) -> tuple[str, ...]:
    return tuple(half.split()[0] for half in text.split(" :: "))


def from_assembly(text: str) -> list[Function]:
    """The functions in a compiler's assembly. Raises ListingError."""
    names = set(re.findall(r"^\s*\.type\s+([\w.$]+),@function", text, re.MULTILINE))
    found = list(_assembled(text, names))
    if not found:
        raise ListingError("no functions in the assembly")
    return found


def _assembled(text: str, names: set[str]) -> Iterator[Function]:
    name = ""
    rows: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label and label[1] in names:
            name, rows, labels = label[1], [], {}
        elif label and label[1].startswith(".Lfunc_end") and name:
            yield Function(name, tuple(_jumped(row, labels) for row in rows))
            name = ""
        elif label:
            labels[label[1]] = len(rows)
        elif name and re.match(r"\s+[a-z]", line):
            rows.append(line.split(";")[0].strip())


def _jumped(text: str, labels: dict[str, int]) -> Instruction:
    mnemonics = _mnemonics(text)
    if not _BRANCH.match(mnemonics[0]):
        return Instruction(mnemonics)
    label = text.split()[-1]
    if label not in labels:
        raise ListingError(f"{text!r} leads to a label that is not there")
    return Instruction(mnemonics, labels[label])
