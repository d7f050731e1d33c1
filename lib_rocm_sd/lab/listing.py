"""A kernel's machine code as text, and that as functions of instructions with resolved branches.

By libamd_comgr or, where that does not know the chip, as the assembly of the clang that made it. In
a disassembly a branch has a distance, in assembly a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, compilers, source
from lib_rocm_sd.runtime.clang import Clang
from lib_rocm_sd.runtime.library_compilers import LibraryCompiler


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
    functions: list[tuple[str, list[tuple[int, str]]]] = []
    for line in text.splitlines():
        instruction = _DISASSEMBLED.match(line)
        if instruction and functions:
            functions[-1][1].append((int(instruction[2], 16), instruction[1]))
        elif label := _LABEL.match(line):
            functions.append((label[1], []))
        elif not _NOT_CODE.match(line):
            raise ListingError(f"a line that is no instruction: {line.strip()!r}")
    if not any(rows for _, rows in functions):
        raise ListingError("no instructions")
    return [_resolved(name, rows) for name, rows in functions if rows]


def _resolved(name: str, rows: list[tuple[int, str]]) -> Function:
    index = {address: number for number, (address, _) in enumerate(rows)}
    code = []
    for address, text in rows:
        mnemonics = _mnemonics(text)
        target = None
        if _BRANCH.match(mnemonics[0]):
            target = index.get(address + 4 + 4 * _distance(text))
            if target is None:
                raise ListingError(f"{name}: {text!r} leads out of the function")
        code.append(Instruction(mnemonics, target))
    last = max(
        (at for at, row in enumerate(code) if row.mnemonic.startswith("s_endpgm")), default=0
    )
    if any(instruction.mnemonic.startswith((".", "<")) for instruction in code[:last]):
        raise ListingError(f"{name}: some words were not decoded")
    return Function(name, tuple(code))


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
    functions = list(_assembled(text, names))
    if not functions:
        raise ListingError("no functions in the assembly")
    return functions


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


class NoListingError(Exception):
    """Nothing here makes text of this code object; the message says what was tried."""


_Way = tuple[str, Path, Callable[[], list[Function]]]
_refused: dict[tuple[str, str], str] = {}


def listing(spec: KernelSpec, arch: Arch, kernel: build.CodeObject) -> tuple[Function, str]:
    """The function of a kernel, and what kind of tool read it out of its code object: the first
    that can. What failed for a chip is not tried again in this process. Raises NoListingError.
    """
    reasons: list[str] = []
    for name, path, lister in _ways(spec, arch, kernel):
        key = (f"{name} {path}", arch.gfx)
        if key not in _refused:
            try:
                return named(lister(), spec.entry), name
            except (ListingError, CompileError) as error:
                _refused[key] = f"{name} ({path}): {error}"
        reasons.append(_refused[key])
    raise NoListingError("; ".join(reasons) or "no libamd_comgr and no clang was found")


def named(functions: list[Function], name: str) -> Function:
    """Raises ListingError where there is none of this name."""
    for function in functions:
        if function.name == name:
            return function
    raise ListingError(f"there is no function {name}")


def _ways(spec: KernelSpec, arch: Arch, kernel: build.CodeObject) -> Iterator[_Way]:
    own: list[Clang] = []
    for compiler in compilers.in_order(arch):
        if isinstance(compiler, LibraryCompiler) and compiler.name == "comgr":
            yield "comgr", compiler.path, partial(_by_comgr, compiler, arch, kernel.code)
        elif isinstance(compiler, Clang) and compiler.name == kernel.compiler:
            own += [] if compiler.refusals(arch) else [compiler]
    for clang in own[:1]:  # another version's assembly is other code
        yield f"assembly of {clang.name}", clang.path, partial(_by_compiler, clang, spec, arch)


def _by_comgr(comgr: LibraryCompiler, arch: Arch, code: bytes) -> list[Function]:
    return from_disassembly(comgr.disassemble(code, arch))


def _by_compiler(clang: Clang, spec: KernelSpec, arch: Arch) -> list[Function]:
    defines = {**arch.defines(), **dict(spec.defines)}
    text = source.flatten(spec.source)
    return from_assembly(clang.assembly(text, arch, defines, spec.source))
