"""What clangs in PATH make of the kernels that the other tests do not take, executed: some cases
of each GPU, with `--all` every one. kernels/compilers.json says for which it was done.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lib_rocm_sd.arch import table
from lib_rocm_sd.runtime import clang
from tests.verify.amdgpu import cases, launch
from tests.verify.amdgpu.judge import execute

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a")
STEP = 26
"""A case of so many is executed; of each GPU others."""


def others() -> list[clang.Clang]:
    found = [each for each in clang.path_clangs() if isinstance(each, clang.Clang) and each.linker]
    return [each for each in found if each != launch.compiler()]


@pytest.mark.parametrize("other", others() or [None], ids=lambda each: each and each.path.name)
@pytest.mark.parametrize("gfx", GPUS)
def test_code_of_another_clang_in_path_is_right(
    gfx: str,
    other: clang.Clang | None,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    if other is None:
        pytest.skip("no second clang in PATH")
    if reason := launch.missing(gfx) or "; ".join(other.refusals(table()[gfx])):
        pytest.skip(reason)
    monkeypatch.setattr(launch, "compiler", lambda name="clang": other)
    every = [case for make in cases.ALL.values() for case in make(gfx)]
    whole = pytestconfig.getoption("--all", default=False)
    taken = every if whole else every[GPUS.index(gfx) * (STEP // len(GPUS)) :: STEP]
    found = [execute(replace(case, compiled_by=other.path.name)) for case in taken]
    wrong = [f"{each.case}: {'; '.join(each.faults)}" for each in found if each.faults]
    assert found and not wrong, "\n".join(wrong)
