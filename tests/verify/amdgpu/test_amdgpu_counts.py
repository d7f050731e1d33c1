"""The machine code executes no more than the committed table says, and spills nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("tinygrad", reason="tinygrad, which decodes instructions, is not installed")

from lib_rocm_sd.arch import by_gfx
from tests import executed, noted
from tests.verify.amdgpu import executor, judge
from tools import machine_code

TABLE = machine_code.RESULTS / "amd-machine-code.json"
DOCUMENT = json.loads(TABLE.read_text(encoding="utf-8"))
ROWS = [machine_code.Counted(**row) for row in DOCUMENT["rows"]]
WANTED = [each for gfx in machine_code.GPUS for each in machine_code.typical(gfx)]
MORE = 1.03
"""A change that makes a kernel execute more vector instructions than this commits a new table."""


def parts(codes: noted.Codes, wanted: Any) -> object:
    """What is launched, and what the table says of it."""
    case = wanted[0]
    steps = noted.steps_of(codes, lambda: judge.execute(case))
    rows = [row for row in ROWS if (row.arch, row.case) == (case.gfx, str(case.problem))]
    return executor.VERSION, steps, noted.plain(rows), MORE


@executed.known(by="clang", parts=parts)
@pytest.mark.parametrize("wanted", WANTED, ids=lambda each: f"{each[0].gfx} {each[0].problem}")
def test_no_kernel_executes_more_than_the_table_says_or_spills(wanted: Any) -> None:
    gfx = wanted[0].gfx
    arch, why = by_gfx(gfx), machine_code.refusals([gfx])
    if why:
        pytest.skip("; ".join(why))
    assert arch is not None
    rows = {row.key: row for row in machine_code.count(wanted)}
    for row in rows.values():
        assert row.spills == 0 and row.lds_bytes <= arch.lds_bytes, row.key
    if DOCUMENT["compiler"] != machine_code.compiler_name():
        pytest.skip(f"the table is {DOCUMENT['compiler']}'s, not {machine_code.compiler_name()}'s")
    known = {row.key: row for row in ROWS if (row.arch, row.case) == (gfx, str(wanted[0].problem))}
    assert set(rows) == set(known)
    for key, row in rows.items():
        now, was = (each.vector + each.transcendental for each in (row, known[key]))
        assert now <= MORE * was, f"{key}: {now}, was {was}; python -m tools.machine_code --write"


def test_the_table_has_the_typical_cases() -> None:
    assert {(row.arch, row.case) for row in ROWS} == {
        (case.gfx, str(case.problem)) for case, _, _ in WANTED
    }


def test_the_page_is_that_of_the_table() -> None:
    page = (machine_code.RESULTS / "amd-machine-code.md").read_text(encoding="utf-8")
    assert page == machine_code.markdown(ROWS, DOCUMENT["compiler"])
