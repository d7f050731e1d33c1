"""What a test would execute, noted without executing it: that is its key.

`Notes` are told what would be compiled and launched. A test runs on meanwhile: its outputs hold
what nobody wrote, its assertions are evaluated and don't count. Code objects are known by a hash of
what a GPU reads of them. Which one a source gives is in tests/executed.json, so nothing need be
compiled while the sources stay the same. A kernel under the shim, one of an edited folder, and one
that is only compiled are known by their text without comments, and how it is compiled.
"""

from __future__ import annotations
import __future__ as future

import ast
import ctypes
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, codeobject
from lib_rocm_sd.runtime.compiler import LANGUAGE_OPTIONS, OPTIONS_VERSION, defines_options
from tests import compiled
from tests.compiled import hash_of, text_of
from tests.executed import Code, version_of
from tests.verify import simt
from tests.verify.amdgpu import executor, launch

PROGRAM, NOTE, LOADED = 1, 7, 2
"""Types of ELF sections, and the flag of what is loaded."""


class Codes:
    """What sources give: what was known before, and what was `used` of it or compiled since."""

    def __init__(self, known: Iterable[Code]) -> None:
        self._known = {each.source: each.code for each in known}
        self.used: set[Code] = set()

    def taken(self) -> set[Code]:
        """What was used since this was asked last."""
        used, self.used = self.used, set()
        return used

    def of(
        self, spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR, by: str = "clang"
    ) -> str:
        """The code object of a kernel; compiled only if the source is new."""
        compiler = f"{by} {version_of(by)}"
        source = hash_of(*_compilation(spec, arch, kernels_dir), compiler)[:12]
        if source not in self._known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiled, "noting", None)
                code = launch.built(spec, arch, kernels_dir, by)
            self._known[source] = hash_of(*_read(code))[:12]
        code_hash = self._known[source]
        self.used.add(Code(compiler, f"{arch.gfx} {spec.entry}", source, code_hash))
        return code_hash


def _compilation(spec: KernelSpec, arch: Arch, kernels_dir: Path) -> tuple[object, ...]:
    """The text of a kernel and all that is asked of its compiler."""
    options = defines_options({**arch.defines(), **dict(spec.defines)})
    how = (spec.entry, arch.gfx, OPTIONS_VERSION, *LANGUAGE_OPTIONS, *options)
    return text_of(kernels_dir / spec.source), *how


def _read(code: bytes) -> Iterator[bytes]:
    """What a GPU and its driver read of a code object: instructions, descriptor, metadata."""
    (at,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    for section in range(at, at + size * count, size):
        _, kind, flags, _, first, length = struct.unpack_from("<IIQQQQ", code, section)
        if kind == NOTE or (kind == PROGRAM and flags & LOADED):
            yield code[first : first + length]


class Notes:
    """What one test would compile and launch, in order. `once`: it ends with its first launches,
    so what it does with their results need not be computed.
    """

    def __init__(self, codes: Codes, once: bool = False) -> None:
        self.codes, self.once = codes, once
        self.steps: list[object] = []
        self._tensors: dict[int, int] = {}

    def begin(self) -> None:
        """Tensors are numbered as they come; those of another `knows` may lie where these did."""
        self._tensors = {}

    def end(self) -> None:
        if self.once:
            raise compiled.Noted

    def compile(self, spec: KernelSpec, arch: Arch, kernels_dir: Path = KERNELS_DIR) -> bytes:
        """In the place of a code object something that `_no_resources` reads."""
        self.steps.append(hash_of(*_compilation(spec, arch, kernels_dir)))
        return f"{spec.entry} {arch.wave_size}".encode()

    def launch_code(
        self,
        run: launch.CodeLaunch,
        spec: KernelSpec,
        params: ctypes.Structure,
        regions: Sequence[tuple[int, int]],
        *how: object,
    ) -> None:
        if run.kernels_dir == KERNELS_DIR:
            code = self.codes.of(spec, run.arch, run.kernels_dir, run.compiled_by)
        else:
            code = hash_of(*_compilation(spec, run.arch, run.kernels_dir))
        self.steps.append((code, spec.entry, self._packed(params, regions), *how))

    def launch_shim(
        self,
        program: str,
        params: ctypes.Structure,
        regions: Sequence[tuple[int, int]],
        *how: object,
    ) -> None:
        self.steps.append((program, self._packed(params, regions), *how))

    def _packed(self, value: Any, regions: Sequence[tuple[int, int]]) -> Any:
        """Arguments: numbers and lists of them; of an address the tensor's number, its bytes and
        the place in it.
        """
        if isinstance(value, ctypes.Array):
            return [self._packed(each, regions) for each in value]
        if isinstance(value, ctypes.Structure):
            return [self._packed(getattr(value, name), regions) for name, *_ in value._fields_]
        for first, size in regions if isinstance(value, int) else ():
            if first <= value < first + size:
                return self._tensors.setdefault(first, len(self._tensors)), size, value - first
        return value


@contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Nothing is compiled or launched within."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "noting", notes)
        patch.setattr(build, "build", lambda spec, arch: _Built(notes.compile(spec, arch)))
        patch.setattr(codeobject, "resources", _no_resources)
        patch.setattr(codeobject, "refusals", lambda *_: [])
        patch.setattr(torch.testing, "assert_close", lambda *_, **__: None)
        yield


class _Built:
    def __init__(self, code: bytes) -> None:
        self.code = code


def _no_resources(code: bytes) -> list[codeobject.KernelResources]:
    entry, wave_size = code.decode().split()
    return [codeobject.KernelResources(entry, *(1, 0, 1), *(0, 0, 0, 0), int(wave_size))]


def steps_of(codes: Codes, test: Callable[[], object], once: bool = True) -> list[object]:
    """What `test` would compile and launch."""
    notes = Notes(codes, once)
    with noting(notes), suppress(compiled.Noted, Exception, pytest.skip.Exception):
        test()  # an exception comes again when it is executed
    return notes.steps


def key_of(codes: Codes, name: object, test: Callable[[], object], once: bool = True) -> str:
    """Key of a test of this name; empty where it would execute nothing."""
    steps = steps_of(codes, test, once)
    return hash_of(name, executor.VERSION, simt.version(), *steps)[:12] if steps else ""


def plain(value: Any) -> Any:
    """A parameter by its values, whatever its fields are called. Of a dataclass without the last
    fields that are None: what is known of a problem stays known when problems may have more.
    """
    if is_dataclass(value) and not isinstance(value, type):
        values = [getattr(value, field.name) for field in fields(value)]
        while values and values[-1] is None:
            values.pop()
        return [plain(each) for each in values]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return [[key, plain(each)] for key, each in value.items()]
    if callable(value):
        return value.__name__
    text = repr(value)
    assert " at 0x" not in text, f"not the same in each run: {text}"
    return text


# -- a test whose assertions don't count -----------------------------------------------------------


class _Unasserted(ast.NodeTransformer):
    """What is asserted is evaluated."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:  # noqa: N802 - as ast has it
        return ast.copy_location(ast.Expr(node.test), node)


class _Pytest:
    """pytest, where nothing has to be raised and nothing fails."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pytest, name)

    def raises(self, *_: object, **__: object) -> Any:
        return suppress(Exception)

    def fail(self, *_: object) -> None:
        pass


def _all_right(verdict: Callable[..., str]) -> Callable[..., str]:
    """So that a test goes on to the next case, wherever a mistake shows."""

    def right(*arguments: Any, **named: Any) -> str:
        verdict(*arguments, **named)
        return "right"

    return right


def unasserted_test(item: pytest.Function) -> Callable[..., object]:
    """A test that no assertion ends."""
    names = unasserted(item.module.__name__)
    if item.cls is None:
        return names[item.originalname]
    return getattr(names[item.cls.__name__](), item.originalname)


def _is_run(node: ast.stmt) -> bool:
    """Functions, and classes of tests. Marks of tests say nothing here."""
    if isinstance(node, ast.FunctionDef):
        if node.name.startswith("test_"):
            node.decorator_list = []
        return True
    return isinstance(node, ast.ClassDef) and node.name.startswith("Test")


@cache
def unasserted(module: str) -> dict[str, Any]:
    """The names of a module of tests, with its functions' assertions only evaluated."""
    names = {**vars(sys.modules[module]), "pytest": _Pytest()}
    tree = ast.parse(Path(names["__file__"]).read_text(encoding="utf-8"))
    tree.body = [each for each in tree.body if _is_run(each)]
    tree = ast.fix_missing_locations(_Unasserted().visit(tree))
    for name, value in names.items():
        other = value.__module__ if isinstance(value, FunctionType) else module
        if other != module and other.rpartition(".")[2].startswith("test_"):
            names[name] = unasserted(other)[value.__name__]
    exec(compile(tree, names["__file__"], "exec", future.annotations.compiler_flag, True), names)
    if "verdict" in names:
        names["verdict"] = _all_right(names["verdict"])
    return names
