"""Every compiler that can turn a kernel's source into a code object, in the order in which they are
tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.runtime import clang, library_compilers
from lib_rocm_sd.runtime.compiler import Absent, Compiler

__all__ = ["Absent", "Compiler", "all_compilers", "in_order", "note", "serves", "survey"]

_FINDERS = (
    library_compilers.comgrs,
    library_compilers.hiprtcs,
    clang.sdk_clangs,
    clang.path_clangs,
    clang.zig_clangs,
    library_compilers.nvrtcs,
)


def all_compilers() -> list[Compiler]:
    """What was found, best first; a kind of which none was found is there once and refuses with the
    reason.

    A kind may occur more than once: torch's libamd_comgr and an older one of the system's, clang-19
    and clang-21.
    """
    return [compiler for find in _FINDERS for compiler in find()]


def serves(arch: Arch) -> bool:
    """Whether any can compile for `arch`. Those after the first that can are not asked."""
    return any(not compiler.refusals(arch) for compiler in all_compilers())


def in_order(arch: Arch) -> Iterator[Compiler]:
    """All compilers, first those whose code for `arch` was verified, else best first.

    None is started for its version before the ones ahead of it were taken.
    """
    others = []
    for compiler in all_compilers():
        if _is_verified(compiler, arch):
            yield compiler
        else:
            others.append(compiler)
    yield from others


def note(compiler: Compiler, arch: Arch) -> str:
    """What a user should know of code that it makes for `arch`; empty where it was verified.

    Without a self-test no kernel is used: see engine/selftest.py.
    """
    if _is_verified(compiler, arch):
        return ""
    return f"not verified for {arch.gfx}; used after its self-test"


def _is_verified(compiler: Compiler, arch: Arch) -> bool:
    if not arch.is_amd:
        return True  # the development row, whose kernels run on the card itself
    verified = _verified().get(arch.gfx, ())
    return bool(verified) and compiler.llvm_version().split(".")[0] in verified


@lru_cache(maxsize=1)
def _verified() -> dict[str, tuple[str, ...]]:
    """LLVM's major versions by gfx id."""
    text = (KERNELS_DIR / "compilers.json").read_text(encoding="utf-8")
    return {gfx: tuple(map(str, majors)) for gfx, majors in json.loads(text)["verified"].items()}


def survey(arch: Arch) -> dict[str, list[str]]:
    """For each kind of compiler why it cannot compile for `arch`; an empty list where at least one
    of the kind can.
    """
    reasons: dict[str, list[str]] = {}
    for compiler in all_compilers():
        refusals = compiler.refusals(arch)
        earlier = reasons.get(compiler.name)
        reasons[compiler.name] = (
            refusals if earlier is None else earlier and refusals and earlier + refusals
        )
    return reasons
