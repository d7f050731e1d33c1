"""What our kernels' machine code never asks of memory, since it would wait for it."""

from __future__ import annotations

import re

import pytest

from lib_rocm_sd import shipped
from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.lab import listing
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build
from tests import executed, noted
from tests.machine.test_machine_real import ONE_OF_EACH, compiled_here

NEVER = re.compile(r"flat_|buffer_gl[01]_inv|(global|buffer)_inv$|buffer_wbinvl1")
"""FLAT accesses count as those of LDS, too. A barrier that orders global memory empties the caches
of both CUs where they share a work-group.
"""
FORMS = ("MANY", "SPLIT", "GATE", "SHORTCUT", "STATISTICS", "WEIGHTS_IN_ROWS", "LEAVES_LSE", "PASS")


def _first_of_each(arch: Arch) -> list[KernelSpec]:
    """Of each kernel in each form."""
    found: dict[tuple[object, ...], KernelSpec] = {}
    for spec in shipped.shipped(arch):
        values = dict(spec.defines)
        found.setdefault((spec.entry, *map(values.get, FORMS)), spec)
    return list(found.values())


def _parts(codes: noted.Codes, gfx: str) -> object:
    arch = table()[gfx]
    return NEVER.pattern, [codes.of(spec, arch) for spec in _first_of_each(arch)]


@executed.known(by="clang", parts=_parts)
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_nothing_is_read_by_flat_instructions_and_no_barrier_empties_a_cache(gfx: str) -> None:
    arch = compiled_here(gfx)
    specs = _first_of_each(arch)
    assert len(specs) > 12
    for spec in specs:
        function, _ = listing.listing(spec, arch, build.build(spec, arch))
        names = {name for each in function.instructions for name in each.mnemonics}
        assert not sorted(filter(NEVER.match, names)), spec
        assert any(name.startswith("global_") for name in names), spec
