"""From a kernel spec to a code object, through the cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import codeobject, compilers, process, source
from lib_rocm_sd.runtime.compiler import (
    LANGUAGE_OPTIONS,
    OPTIONS_VERSION,
    Compiler,
    defines_options,
    still_the_same,
)
from lib_rocm_sd.runtime.compiler import forget_failures as forget_compilers


@dataclass(frozen=True)
class CodeObject:
    """Machine code for one spec on one arch.

    `seconds` is what the compilation took, also when it was an earlier one; `failures` is what
    compilers said that were tried first and failed; `note` is `compilers.note`.
    """

    code: bytes
    compiler: str
    cached: bool
    seconds: float
    failures: tuple[str, ...] = ()
    note: str = ""


_failures: dict[str, CompileError] = {}


def build(spec: KernelSpec, arch: Arch) -> CodeObject:
    """The code object of `spec` for `arch`: from the cache, else from the first compiler that
    succeeds.

    Raises CompileError with what every compiler said; the same again, without starting any, until
    `forget_failures`.
    """
    text = source.flatten(spec.source)
    key = _source_key(text, spec, arch)
    cached = _lookup(key)
    if cached is not None:
        return cached
    if key in _failures:
        raise _failures[key]
    with cache.lock(key, limit_s=process.time_limit_s()):
        return _lookup(key) or _compile(text, key, spec, arch)


def build_all(specs: Iterable[KernelSpec], arch: Arch) -> None:
    """`build` of each, as many at a time as there are cores.

    A failure is not raised here: `build` says it again.
    """

    def attempt(spec: KernelSpec) -> None:
        with suppress(CompileError):
            build(spec, arch)

    unique = list(dict.fromkeys(specs))
    if not unique:
        return
    with ThreadPoolExecutor(min(len(unique), os.cpu_count() or 1)) as pool:
        list(pool.map(attempt, unique))


def cached(spec: KernelSpec, arch: Arch) -> CodeObject | None:
    """What `build` would give without starting a compiler; None where it would start one."""
    return _lookup(_source_key(source.flatten(spec.source), spec, arch))


def is_cached(spec: KernelSpec, arch: Arch) -> bool:
    """True when `build` would start no compiler. Starts none itself."""
    return cached(spec, arch) is not None


def forget_failures() -> None:
    """Let `build` try again what failed in this process, because a compiler may have appeared."""
    _failures.clear()
    forget_compilers()


def _source_key(text: str, spec: KernelSpec, arch: Arch) -> str:
    options = (*LANGUAGE_OPTIONS, *defines_options(_defines(spec, arch)))
    return cache.key_of(OPTIONS_VERSION, source.bare(text), spec.entry, arch.gfx, *options)


def _defines(spec: KernelSpec, arch: Arch) -> dict[str, int]:
    return {**arch.defines(), **dict(spec.defines)}


def _lookup(key: str) -> CodeObject | None:
    """The code object made earlier for this source, target and options, by whichever compiler.

    It serves also when that compiler is gone, not when it is there and has changed.
    """
    entry = cache.read("index", key)
    if entry is None:
        return None
    try:
        row = json.loads(entry)
        name, identity, seconds = str(row["compiler"]), str(row["identity"]), float(row["seconds"])
        failures = tuple(str(failure) for failure in row["failures"])
        note = str(row.get("note", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    code = cache.read("code", _code_key(key, identity)) if still_the_same(identity) else None
    return None if code is None else CodeObject(code, name, True, seconds, failures, note)


def _code_key(key: str, identity: str) -> str:
    return cache.key_of(key, identity)


def _compile(text: str, key: str, spec: KernelSpec, arch: Arch) -> CodeObject:
    refused: list[str] = []
    failures: list[str] = []
    logs: list[str] = []
    for compiler in compilers.in_order(arch):
        refusals = compiler.refusals(arch)
        if refusals:
            refused.append(f"{compiler.name}: {'; '.join(refusals)}")
            continue
        start = time.monotonic()
        try:
            code = _checked(compiler, text, spec, arch)
        except CompileError as error:
            failures.append(str(error))
            logs.append(f"{compiler.name}:\n{error.log}")
            continue
        seconds, note = time.monotonic() - start, compilers.note(compiler, arch)
        code_object = CodeObject(code, compiler.name, False, seconds, tuple(failures), note)
        _store(key, compiler.identity(), code_object)
        return code_object
    title = f"no compiler made {spec.entry} of {spec.source} for {arch.gfx}"
    _failures[key] = CompileError(title, " | ".join([*failures, *refused]), "\n".join(logs), text)
    raise _failures[key]


def _checked(compiler: Compiler, text: str, spec: KernelSpec, arch: Arch) -> bytes:
    try:
        code = compiler.compile(text, spec.entry, arch, _defines(spec, arch), spec.source)
    except OSError as error:  # it left no output, or there is no room for its files
        message = f"{spec.source} for {arch.gfx}: {error}"
        raise CompileError(compiler.name, message, "", text) from error
    try:
        code = codeobject.unbundled(code, arch.gfx)
        wrong = codeobject.refusals(code, spec.entry, arch)
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        raise CompileError(compiler.name, f"the code object {'; '.join(wrong)}", "", text)
    return code


def _store(key: str, identity: str, made: CodeObject) -> None:
    row = {
        "compiler": made.compiler,
        "identity": identity,
        "seconds": made.seconds,
        "failures": made.failures,
        "note": made.note,
    }
    cache.write("code", _code_key(key, identity), made.code)
    cache.write("index", key, json.dumps(row).encode())
