"""The machine code executes no more than the committed table says, and spills nothing."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tinygrad", reason="tinygrad, which decodes instructions, is not installed")

from lib_rocm_sd.arch import by_gfx
from tools import machine_code

MORE = 1.03
"""A change that makes a kernel execute more vector instructions than this commits a new table."""


@pytest.fixture(scope="module")
def rows() -> list[machine_code.Counted]:
    why = machine_code.refusals(machine_code.GPUS)
    if why:
        pytest.skip("; ".join(why))
    return machine_code.counted(machine_code.GPUS)


def test_no_kernel_executes_more_than_the_table_says(rows: list[machine_code.Counted]) -> None:
    path = machine_code.RESULTS / "amd-machine-code.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["compiler"] != machine_code.compiler_name():
        pytest.skip(f"the table is {document['compiler']}'s, not {machine_code.compiler_name()}'s")
    known = {row.key: row for row in (machine_code.Counted(**row) for row in document["rows"])}
    assert {row.key for row in rows} == set(known)
    worse = [
        f"{row.key}: {row.vector + row.transcendental}, was {was.vector + was.transcendental}"
        for row in rows
        if (was := known[row.key])
        and row.vector + row.transcendental > MORE * (was.vector + was.transcendental)
    ]
    assert not worse, "python -m tools.machine_code --write\n" + "\n".join(worse)


def test_no_kernel_spills_or_wants_more_lds_than_there_is(
    rows: list[machine_code.Counted],
) -> None:
    for row in rows:
        arch = by_gfx(row.arch)
        assert arch is not None
        assert row.spills == 0, row.key
        assert row.lds_bytes <= arch.lds_bytes, row.key


def test_the_page_is_that_of_the_table() -> None:
    document = json.loads(
        (machine_code.RESULTS / "amd-machine-code.json").read_text(encoding="utf-8")
    )
    rows = [machine_code.Counted(**row) for row in document["rows"]]
    page = (machine_code.RESULTS / "amd-machine-code.md").read_text(encoding="utf-8")
    assert page == machine_code.markdown(rows, document["compiler"])
