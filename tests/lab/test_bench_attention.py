"""`bench attention`: what is compared, that nothing wrong is timed, its table, JSON and plot."""

from __future__ import annotations

import json
import math
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.lab import attention, methods, rows, timing
from lib_rocm_sd.lab.attention import COLUMNS, FLASH, SDPA, AttentionEffort
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.methods import AmdLoops, DoggettxLike
from lib_rocm_sd.lab.rows import OURS, Result, Row
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import CASES, ODD, USUAL, AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Call, Variant

CPU = torch.device("cpu")
SMALL = AttentionProblem(2, 3, 17, 15, 40, "float32")
INFO = DeviceInfo(0, "a card", "hip", "gfx1100", table()["gfx1100"])
EFFORT = AttentionEffort(Setting(CPU, INFO, lambda *words: None, 4), row_s=0.01)


class Ours(SdpaAttention):
    """Stands for our kernel: two configs, a launcher needed."""

    name = OURS
    ours = True

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[Any]:
        return attention_kernel.configs(table()["gfx1100"], problem.head_dim)[:2]


class Broken(SdpaAttention):
    """Fails in the way that it is told."""

    name = "broken"

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        if self.how == "raises":
            warnings.warn("the heads are too odd (Triggered internally at x.cpp:1)", stacklevel=1)
            raise RuntimeError("No available kernel.\nmore")
        if self.how == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        out = super().run(call)
        if self.how == "shape":
            return out[:, :1]
        out[-1, -1, -1] = math.nan if self.how == "nan" else 9.0
        return out


def rows_of(
    *variants: Variant[AttentionProblem, AttentionInputs],
    problem: AttentionProblem = SMALL,
    effort: AttentionEffort = EFFORT,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Row]:
    monkeypatch.setattr(attention, "ALL", variants)
    monkeypatch.setattr(timing, "MOST_SETS", 3)
    monkeypatch.setattr(timing, "WARM_S", 0.001)
    return {row.way: row for row in attention.measure("small", problem, effort)}


def test_the_cases_are_those_of_the_users() -> None:
    shapes = {(p.seq_q, p.seq_k, p.head_dim, p.heads) for p in (case.problem for case in CASES)}
    for side, head_dim in ((4096, 40), (1024, 80), (256, 160)):
        for times in (1, 4):
            assert (side * times, side * times, head_dim, 8) in shapes
            assert (side * times, 77, head_dim, 8) in shapes
    assert {(4096, 4096, 64, 10), (1024, 1024, 64, 20), (4096, 77, 64, 10)} <= shapes
    assert {(4096, 4096, 512, 1), (16384, 16384, 512, 1), (4250, 4250, 128, 24)} <= shapes
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(head_dim in attention_kernel.SHIPPED_HEAD_DIMS for _, _, head_dim, _ in shapes)


def test_one_list_serves_all() -> None:
    named = {case.name: case.problem for case in CASES}
    assert ATTENTION.usual == USUAL and all(named[name] == problem for name, problem in USUAL)
    assert ATTENTION.cases == (*named.values(), *ODD)
    assert all(max(problem.seq_q, problem.seq_k) <= 4096 for _, problem in USUAL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_runs_here_when_it_is_small(case: Any) -> None:
    problem = replace(case.problem, seq_q=5, seq_k=min(case.problem.seq_k, 7), dtype="float32")
    inputs = ATTENTION.make_inputs(problem, CPU, 1)
    right = methods.expected(inputs, problem)
    for variant in (DoggettxLike(), SdpaAttention()):
        assert right.error(variant.run(Call(problem, inputs))) <= ATTENTION.tolerance(problem)


def test_every_competitor_is_there_or_says_why() -> None:
    effort = replace(EFFORT, setting=Setting(CPU, identify(CPU), None, 4))
    rows = attention.measure("odd", replace(SMALL, dtype="float16"), effort)
    found = {row.way: row for row in rows}
    backends = {f"sdpa {name}" for name in ("flash", "efficient", "cudnn", "math")}
    others = {"sdpa", "sliced", "Doggettx-like", "sub-quadratic-like", "xformers"}
    others |= {"flash-attention", "flash-attention triton", "triton"}
    ours = {OURS, AmdLoops.name, "torch + rocm_sd"}
    assert set(found) == {*ours, *backends, *others}
    assert found[OURS].reason == "no supported GPU"
    for row in rows:
        assert row.reason or (row.p10 <= row.median <= row.p90 and row.runs >= 3)
        assert row.reason or (row.error < 8e-3 and row.checked_rows == 34)
    assert {found[name].reason for name in backends} == {"no supported GPU"}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "RuntimeError: No available kernel.; the heads are too odd"),
        ("memory", f"out of memory ({SMALL})"),
        ("shape", "ValueError: the output is (2, 1, 120), expected (2, 17, 120)"),
        ("nan", "wrong: error inf"),
        ("last value", "wrong: error "),
    ],
)
def test_what_is_not_right_is_not_timed(
    how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(Ours(), Broken(how), SdpaAttention(), monkeypatch=monkeypatch)
    assert rows["broken"].reason.startswith(said)
    assert math.isnan(rows["broken"].median) and rows["broken"].runs == 0
    assert rows["sdpa"].median > 0 and rows[OURS].median > 0


def test_of_ours_only_what_auto_takes_unless_all_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = attention_kernel.configs(table()["gfx1100"], 40)[0]
    rows = rows_of(Ours(), monkeypatch=monkeypatch)
    assert (rows[OURS].config or {})["waves_q"] == first.waves_q
    every = replace(EFFORT, every_config=True)
    configs = [row.config for row in attention.measure("small", SMALL, every)]
    assert len(configs) == 2 and configs[0] != configs[1]
    without = replace(EFFORT, setting=Setting(CPU, INFO, None, 4))
    assert attention.measure("small", SMALL, without)[0].reason == "there is no launcher"


def test_of_a_competitors_configs_the_fastest_counts() -> None:
    def row(variant: str, median: float, reason: str = "") -> Row:
        return Row(case="x", way=variant, config={"n": 1}, median=median, reason=reason)

    slow, fast, failed = row("t", 3.0), row("t", 2.0), row("t", math.nan, "too large")
    assert attention.fastest([row(OURS, 5.0), row(OURS, 4.0), failed, slow, fast]) == [
        row(OURS, 5.0),
        row(OURS, 4.0),
        fast,
    ]
    assert attention.fastest([failed])[0].reason == "too large"


def test_memory_short_for_the_inputs_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*words: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(attention, "input_sets", short)
    rows = rows_of(Ours(), SdpaAttention(), monkeypatch=monkeypatch)
    assert {row.reason for row in rows.values()} == {
        f"inputs and reference: out of memory ({SMALL})"
    }


def test_of_a_large_problem_rows_of_all_heads_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(SMALL, seq_q=1500, seq_k=20)
    inputs = ATTENTION.make_inputs(problem, CPU, 1)
    whole = methods.expected(inputs, problem)
    assert whole.rows == 3000
    monkeypatch.setattr(methods, "WHOLE_FLOPS", {"cpu": 1.0, "cuda": 1.0})
    some = methods.expected(inputs, problem)
    places = some.places.tolist()
    assert len(set(places)) == len(places) >= 512 and {0, 1499} <= set(places)
    assert len({place % 16 for place in places}) == 16
    assert torch.allclose(some.values, whole.values[:, some.places], rtol=0, atol=1e-13)
    out = SdpaAttention().run(Call(problem, inputs))
    assert some.error(out) < 1e-5
    for head in range(3):
        spoiled = out.clone()
        spoiled[1, places[7], head * 40] += 1.0
        assert some.error(spoiled) > 0.1


def test_inputs_rotate_through_more_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 20)
    size = 2 * 3 * 4 * 40 * (17 + 15 + 15)
    count = timing.sets_needed(size, CPU)
    assert count * size > 2 << 20
    sets = input_sets(ATTENTION, SMALL, CPU, partial(timing.sets_needed, device=CPU))
    assert len(sets) == count and len({inputs[0].data_ptr() for inputs in sets}) == count
    assert all(torch.equal(inputs[2], sets[0][2]) for inputs in sets)
    q = sets[-1][0]
    assert q.shape == (2, 17, 3, 40) and q.flatten(2).data_ptr() == q.data_ptr()


def some_rows() -> list[Row]:
    made = []
    for case in CASES[:2]:
        problem = {**vars(case.problem)}
        for name, time in ((OURS, 10.0), (SDPA, 20.0), (FLASH, 40.0), ("Doggettx-like", 900.0)):
            spread: dict[str, Any] = {
                "median": time,
                "p10": time * 0.9,
                "p90": time * 1.1,
                "runs": 50,
            }
            row = Row(case=case.name, problem=problem, way=name, tflops=1.0, **spread)
            made.append(replace(row, error=1e-4, checked_rows=512, extra_bytes=0))
        reason = "xformers is not installed"
        made.append(Row(case=case.name, problem=problem, way="xformers", reason=reason))
    return made


def test_the_tables() -> None:
    lines = attention.render("head", some_rows()).splitlines()
    flash = next(line for line in lines if line.startswith("  sdpa flash"))
    assert flash.split()[2:6] == ["40.0", "36.0..44.0", "-", "0.25"]
    assert "  xformers             not timed: xformers is not installed" in lines
    last = lines[-1].split()
    assert last[-8:] == ["10.0", "20.0", "40.0", "900.0", "0.50", "0.25", "0.50", "sdpa"]
    assert lines[-3].split()[:2] == ["case", "dtype"] and lines[-1].startswith(CASES[1].name)


def test_the_tables_can_do_without_ours() -> None:
    rows = [replace(row, reason="no supported GPU", median=math.nan) for row in some_rows()]
    assert attention.render("head", rows).splitlines()[-1].split()[-7:] == ["-"] * 7
    assert attention.render("head", []).splitlines()[0] == "head"


def test_the_plot_has_a_bar_per_row_and_ends_long_ones() -> None:
    tree = ElementTree.fromstring(attention.draw(some_rows(), "a <card> & more"))
    space = "{http://www.w3.org/2000/svg}"
    white = [each for each in tree.iter(f"{space}rect") if each.attrib["style"] == "fill:white"]
    bars = [each for each in tree.iter(f"{space}rect") if each not in white]
    assert len(white) == 3 and len(bars) == 8  # the background, and where a bar is cut
    assert len({bar.attrib["style"] for bar in bars}) == 4
    lengths = [float(bar.attrib["width"]) for bar in bars[:4]]
    assert lengths[1] == pytest.approx(2 * lengths[0], rel=0.01)
    assert lengths[3] < 6 * lengths[0]
    words = [node.text or "" for node in tree.findall(f"{space}text")]
    assert "Attention on a <card> & more, µs a call: less is better" in words
    assert "900 µs" in words and not any("xformers" in word for word in words)
    assert ElementTree.fromstring(attention.draw([], "CPU")).tag.endswith("svg")


def test_a_document_comes_back(tmp_path: Path) -> None:
    document = Result(COLUMNS, {"device": "x"}, tmp_path / "a.json")
    document.rows = some_rows()
    document.write(complete=False)
    again = rows.read(tmp_path / "a.json", COLUMNS, "no result: {error}")
    assert not json.loads((tmp_path / "a.json").read_text())["complete"]
    assert again.machine == {"device": "x"}
    assert str(again.rows) == str(document.rows)
    for damaged in ("[]", '{"rows": 1, "machine": {}}', '{"rows": [{}], "machine": {}}', "{"):
        (tmp_path / "b.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(ValueError, match="no result|Expecting"):
            rows.read(tmp_path / "b.json", COLUMNS, "no result: {error}")
