"""Every compiler that can turn a kernel's source into a code object, in the order in which they are
tried.
"""

from __future__ import annotations

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.runtime import clang, library_compilers
from lib_rocm_sd.runtime.compiler import Absent, Compiler

__all__ = ["Absent", "Compiler", "all_compilers", "serves", "survey"]

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


def survey(arch: Arch) -> dict[str, list[str]]:
    """For each kind of compiler why it cannot compile for `arch`; an empty list where at least one
    of the kind can.
    """
    reasons: dict[str, list[str]] = {}
    for compiler in all_compilers():
        refusals = compiler.refusals(arch)
        known = reasons.get(compiler.name)
        reasons[compiler.name] = (
            refusals if known is None else known and refusals and known + refusals
        )
    return reasons
