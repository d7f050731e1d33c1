"""tools/tuned.py: what the cost model chooses, and that what is kept holds in machine code."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tinygrad", reason="no tinygrad, which decodes AMD's instructions")

from lib_rocm_sd.arch import table
from lib_rocm_sd.commands import tune
from lib_rocm_sd.lab import cycles, loops
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.runtime import source
from lib_rocm_sd.runtime.codeobject import KernelResources
from tests import executed, noted
from tests.verify.amdgpu import executor
from tests.verify.amdgpu.launch import missing
from tools import key_loop, pairs
from tools import tuned as model
from tools.pairs import PerPair
from tools.tuned import Candidate

SPACE = kernel.configs(table()["gfx1100"], 64)
NEEDS = KernelResources("attention_forward", 100, 0, 30, 0, 0, 4096, 0, 32)
PER_PAIR = PerPair(1, 1, 6, 5, 0.1, 1, 16, 2, 800, 0.6)


def candidate(place: int, cycles: float, waves: int = 4, **needs: Any) -> Candidate:
    per_pair = replace(PER_PAIR, estimated_cycles=cycles)
    return Candidate(SPACE[place], replace(NEEDS, **needs), waves, per_pair)


def test_the_fewest_cycles_of_what_fits() -> None:
    good = candidate(0, 900)
    assert model.best([candidate(1, 1000), good]) is good
    for needs in ({"vgpr_spills": 1}, {"sgpr_spills": 1}, {"scratch_bytes": 8}):
        assert model.best([candidate(1, 500, **needs), good]) is good
    assert model.best([candidate(1, 500, waves=0), good]) is good
    assert model.best([candidate(1, 500, waves=1), good]) is good  # nothing to overlap with
    alone = candidate(1, 500, waves=1)
    assert model.best([alone, candidate(2, 600, waves=1)]) is alone
    assert model.best([candidate(1, 500, vgpr_spills=1)]) is None
    assert model.best([]) is None


def test_more_waves_where_the_estimates_are_equal() -> None:
    many = candidate(1, 905, waves=8)
    assert model.best([candidate(0, 900), many]) is many
    assert model.best([candidate(0, 890), many]) is not many


def test_whose_machine_code_is_executed() -> None:
    leaders = {gfx: model.leader_of(row) for gfx, row in table().items()}
    named = {gfx: row.gfx if row else None for gfx, row in leaders.items()}
    assert named["gfx1100"] == named["gfx1101"] == named["gfx1103"] == "gfx1100"
    assert named["gfx1150"] == "gfx1151" and named["gfx1200"] == "gfx1201"
    assert named["gfx950"] == named["gfx942"] == "gfx942" and named["gfx90a"] == "gfx90a"
    assert named["gfx1030"] is named["gfx1036"] is None
    rows = [table()[gfx] for gfx in ("gfx1030", "gfx1100", "gfx1036", "gfx1101")]
    groups = [[row.gfx for row in group] for group in model.groups_of(rows)]
    assert groups == [["gfx1030", "gfx1036"], ["gfx1100", "gfx1101"]]
    assert "not executed" in model.counted_as(table()["gfx1030"])
    assert "for gfx1100, executed" in model.counted_as(table()["gfx1102"])


def form_parts(codes: noted.Codes, gfx: str) -> object:
    """What the model counts, and how."""
    row = table()[gfx]
    specs = [kernel.spec("bfloat16", 40, "none", each) for each in kernel.configs(row, 40)]
    how = executed.texts(model, key_loop, pairs, cycles, loops)
    return executor.VERSION, [codes.of(spec, row) for spec in specs], how


@executed.known(by="clang", parts=form_parts)
@pytest.mark.parametrize("gfx", ["gfx1201", "gfx1030"])
def test_a_form_from_source_to_table(
    gfx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = missing(gfx)
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    row = table()[gfx]
    found = model.candidates([row], "bfloat16", 40)[gfx]
    assert found and {each.config for each in found} <= set(kernel.configs(row, 40))
    cycles = [each.per_pair.estimated_cycles for each in found]
    assert cycles == sorted(cycles)
    chosen = model.best(found)
    assert chosen is not None
    entry = model.entry_of("bfloat16", 40, chosen, len(found))
    content = tune.with_section(gfx, model.section_of(row, [entry]))
    tune.write(tuned.path_of(gfx, "attention"), content)
    assert tune.problems(tuned.path_of(gfx, "attention").read_bytes(), gfx) == []
    assert kernel.ordered(row, "bfloat16", 40)[0] == chosen.config
    assert (entry["bound"] > 0) == (row.matrix != "dot2")  # RDNA2 has no products of bfloat16
    assert model.rows_of(gfx, [entry])[0][0] == gfx


def kept(gfx: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The modelled section that is kept for a GPU."""
    path = tuned.path_of(gfx, "attention")
    sections = json.loads(path.read_bytes())["sections"] if path.is_file() else []
    found = [section for section in sections if section["source"] == tuned.MODELLED]
    return (found[0], found[0]["entries"]) if found else ({}, [])


def kept_parts(codes: noted.Codes, gfx: str) -> object:
    """What is compiled, and the numbers that are kept of it."""
    row, (section, entries) = table()[gfx], kept(gfx)
    forms = [(each["form"], kernel.AttentionConfig(**each["config"])) for each in entries]
    specs = [kernel.spec(f["dtype"], f["head_dim"], "none", config) for f, config in forms]
    return section, [codes.of(spec, row) for spec in specs]


@executed.known(by="clang", parts=kept_parts)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_what_is_kept_spills_nothing_when_compiled(gfx: str) -> None:
    reason = missing(gfx)
    section, entries = kept(gfx)
    if reason or not entries:
        pytest.skip(reason or "nothing is kept")
    text = source.flatten(kernel.SOURCE)
    same = section["kernel"] == hashlib.sha256(text.encode()).hexdigest()[:16]
    same = same and section["compiler"] == key_loop.compiler_version()
    for entry in entries:
        form, config = entry["form"], kernel.AttentionConfig(**entry["config"])
        needs = key_loop.resources(table()[gfx], form["dtype"], form["head_dim"], config)
        spilled = (needs.vgpr_spills, needs.sgpr_spills, needs.scratch_bytes)
        assert spilled == (0, 0, 0), form
        if same:
            assert (needs.vgprs, needs.lds_bytes) == (entry["vgprs"], entry["lds_bytes"]), form
