"""What ran, and why not the others."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from lib_rocm_sd import report as module
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.report import EVENTS_KEPT, ROWS_KEPT, Report
from tests.ops.toy_op import Doubler, Doubling, Tile, op_of


def used(report: Report, variant: str, calls: int, op: str = "attention", **more: Any) -> None:
    named = replace(op_of(Doubler(variant)), name=op)
    part, config = more.get("part", ""), more.get("config")
    row = report.row(part, named, Doubling(10, 8), variant, config, "why", more.get("reasons"))
    row.calls += calls


def test_a_snapshot_is_json_with_everything_that_ran() -> None:
    report = Report()
    report.describe("Fake (gfx1100)", "Auto")
    used(
        report,
        "rocm_sd",
        3,
        part="UNet",
        config=Tile(16),
        reasons={"sdpa": ["comes after rocm_sd"]},
    )
    used(report, "never", 0)
    report.event("something happened")
    assert json.loads(json.dumps(report.snapshot())) == {
        "device": "Fake (gfx1100)",
        "level": "Auto",
        "rows": [
            {
                "part": "UNet",
                "op": "attention",
                "family": "toy",
                "title": "Doubling",
                "problem": str(Doubling(10, 8)),
                "variant": "rocm_sd",
                "config": {"size": 16},
                "why": "why",
                "reasons": {"sdpa": ["comes after rocm_sd"]},
                "calls": 3,
            }
        ],
        "events": ["something happened"],
    }


def test_the_same_row_is_counted_on() -> None:
    report = Report()
    used(report, "rocm_sd", 3)
    used(report, "rocm_sd", 4)
    assert [row["calls"] for row in report.snapshot()["rows"]] == [7]


def test_begin_counts_anew_and_keeps_events() -> None:
    report = Report()
    used(report, "rocm_sd", 3)
    report.event("something happened")
    report.begin()
    assert report.snapshot()["rows"] == []
    assert report.summary() == ""
    used(report, "sdpa", 1)
    assert report.summary() == "attention: sdpa"
    assert report.snapshot()["events"] == ["something happened"]
    report.clear()
    assert report.snapshot()["events"] == []


def test_the_summary_names_variants_by_calls() -> None:
    report = Report()
    used(report, "sdpa", 2)
    used(report, "rocm_sd", 96)
    used(report, "torch", 1, op="conv")
    assert report.summary() == "attention: rocm_sd, sdpa; conv: torch"


def test_the_text_has_calls_reasons_and_events_once() -> None:
    report = Report()
    report.describe("CPU (cpu)", "Memory")
    why = {"rocm_sd": ["no GPU: this is the CPU"]}
    used(report, "sdpa", 2, reasons=why)
    used(report, "sliced", 1, reasons=why)
    report.event("sdpa is not used")
    text = report.text()
    assert "device CPU (cpu), level Memory" in text
    assert "2 x  attention sdpa" in text
    assert text.count("not rocm_sd: no GPU: this is the CPU") == 1
    assert text.endswith("event: sdpa is not used")


def test_an_event_is_told_once_also_by_several_threads(caplog: pytest.LogCaptureFixture) -> None:
    report = Report()
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        threads = [threading.Thread(target=report.event, args=("boom",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert report.snapshot()["events"] == ["boom"]
    assert [record.message for record in caplog.records] == ["boom"]


def test_events_do_not_grow_without_end() -> None:
    report = Report()
    logging.getLogger("rocm_sd").disabled = True
    try:
        for number in range(EVENTS_KEPT + 5):
            report.event(f"event {number}")
    finally:
        logging.getLogger("rocm_sd").disabled = False
    events = report.snapshot()["events"]
    assert (len(events), events[-1]) == (EVENTS_KEPT, f"event {EVENTS_KEPT + 4}")


def test_the_modules_functions_are_those_of_the_processs_report() -> None:
    assert module.begin.__self__ is module.report  # type: ignore[attr-defined]
    assert module.snapshot() == module.report.snapshot()


# Many shapes in one process


def rows_of(report: Report, calls: int, count: int, first: int = 0) -> None:
    for size in range(first, first + count):
        report.row("UNet", ATTENTION, Doubling(10, size), "rocm_sd", None).calls += calls


def test_rows_are_bounded_and_the_oldest_without_calls_goes_first() -> None:
    report = Report()
    rows_of(report, 0, 10)
    rows_of(report, 1, ROWS_KEPT - 5, first=10)
    assert len(report._rows) == ROWS_KEPT
    shot = report.snapshot()["rows"]
    assert len(shot) == ROWS_KEPT - 5
    rows_of(report, 1, 10, first=2000)
    shot = report.snapshot()["rows"]
    assert len(shot) == ROWS_KEPT
    assert shot[0]["problem"] == str(Doubling(10, 15))
    assert shot[-1]["problem"] == str(Doubling(10, 2009))


def test_a_row_that_is_still_counted_in_is_never_lost() -> None:
    """An engine keeps a row as long as the route that counts in it."""
    report = Report()
    held = report.row("UNet", ATTENTION, Doubling(10, 0), "rocm_sd", None)
    rows_of(report, 0, ROWS_KEPT + 1, first=1)
    held.calls += 7
    assert report.summary() == "attention: rocm_sd"
    assert report.row("UNet", ATTENTION, Doubling(10, 0), "rocm_sd", None) is held
    report.begin()
    assert held.calls == 0
