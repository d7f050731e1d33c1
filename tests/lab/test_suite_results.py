"""The suite's results: reading what strangers send, what compares, merging, and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import __main__
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import suite as command
from lib_rocm_sd.lab.rows import QUANTITIES, SECONDS, TRACE_POINTS, Row
from lib_rocm_sd.lab.speed_result import MOST_TEXT
from lib_rocm_sd.lab.suite import document
from lib_rocm_sd.lab.suite.document import SuiteDocument
from lib_rocm_sd.lab.suite.workloads import WORKLOADS
from tests.lab.speedtest_doubles import document as speedtest_document


def measured(workload: str, way: str, seconds: float, spread: float = 0.1, **more: Any) -> Row:
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return Row("picture", workload, way, "s", seconds, low, high, 9, **more)


TRACE = {"seconds": [0.0, 1.0, 2.5], "core_mhz": [2500, None, 2000], "power_w": [300.5, 310, 290]}


def result(name: str = "a.json", card: str = "A card", times: float = 1.0) -> SuiteDocument:
    settings = {workload.name: workload.settings() for workload in WORKLOADS[:2]}
    rows = [measured(each, way, times) for each in settings for way in ("sdp", "ours")]
    about = {"date": "2026-01-31T12:00:00Z", "preset": "standard", "model": "random weights"}
    machine = {"card": card, "gfx": "gfx1100", "driver": "6.1", "torch": "2.9", "idle_power_w": 9.0}
    return SuiteDocument(name, machine, {**about, "dtype": "float16"}, settings, rows, True)


def written(folder: Path, made: SuiteDocument) -> Path:
    path = folder / made.name
    path.write_text(json.dumps(made.as_dict()), encoding="utf-8")
    return path


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = result()
    made.rows[0] = replace(made.rows[0], trace=TRACE, ssim=-0.25)
    made.rows[2] = replace(made.rows[2], trace={"seconds": [0.0, 0.0], "power_w": [0.0, 9.5]})
    read = document.read(written(tmp_path, made))
    assert read.rows[0].trace == TRACE and read.rows[1].trace is None
    assert read.as_dict() == made.as_dict()


def test_a_speed_test_of_the_webui_is_read_too(tmp_path: Path) -> None:
    test = speedtest_document(power_w=21.0)
    test.rows.append(Row("image", "512x512", "extension on", "it/s", 5.0, 0.0, 8.0))
    made = document.read(test.write(tmp_path))
    assert made.rows[-1].test == "step" and made.rows[-1].median == 200.0
    assert [(row.case, row.way, row.median) for row in made.pictures()] == [
        ("Speed test tab: 512x512, 20 steps", "extension on", 2.0),
        ("Speed test tab: 512x512, 20 steps", "extension off", 3.0),
    ]
    assert made.complete and made.card == "Radeon RX 7900 XTX"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"format": "rocm_sd suite 0"}, "format is not"),
        ({"date": "yesterday"}, "date is not like"),
        ({"rows": [{"part": "picture"}]}, "a row has no"),
        ({"rows": [{"part": "x", "workload": "", "way": "", "unit": "s"}]}, "not known"),
        ({"machine": {"card": ["a"]}}, "machine's card is not a text"),
        ({"workloads": []}, "workloads is not an object"),
    ],
)
def test_what_is_no_result_is_refused(change: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**result().as_dict(), **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        document.read(path)
    item = result().as_dict()["rows"][0]
    traces: tuple[Any, ...] = (
        [],
        {},
        {"core_mhz": [1]},
        {**TRACE, "fan": [1, 1, 1]},
        {**TRACE, "power_w": [1]},
    )
    traces += ({**TRACE, "seconds": [0, None, 1]}, {**TRACE, "power_w": [1, "2", 3]})
    traces += ({name: [1.0] * 61 for name in TRACE}, {**TRACE, "power_w": [1, -1, True]})
    traces += ({"seconds": [1]}, {name: [] for name in TRACE}, {**TRACE, "seconds": [0, 2, 1]})
    traces += ({**TRACE, "power_w": [None] * 3}, {**TRACE, "power_w": [0, 0, 0.0]})
    wrong: tuple[Any, ...] = (("median", "1"), ("median", -1), ("median", 1e10), ("psnr", True))
    wrong += (("ssim", -2), ("note", 3))
    for name, value in (*wrong, *(("trace", each) for each in traces)):
        path.write_text(
            json.dumps({**result().as_dict(), "rows": [{**item, name: value}]}), encoding="utf-8"
        )
        with pytest.raises(ValueError, match=name):
            document.read(path)


def test_what_does_not_compare_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = result(), result("b.json", "Another card")
    other.machine["driver"] = "6.2"
    assert not document.differences(one, other)  # another card has a driver of its own
    paths = [str(written(tmp_path, each)) for each in (one, other)]
    assert __main__.main(["results", "check", *paths]) == 0
    other = result("b.json")
    other.machine["driver"], other.about["dtype"] = "6.2", "bfloat16"
    other.workloads["SD 1.5 512x512"]["steps"] = 30
    written(tmp_path, replace(other, complete=False))
    assert __main__.main(["results", "check", *paths]) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "not to be compared: dtype: float16 and bfloat16",
        "not to be compared: SD 1.5 512x512, steps: 20 and 30",
        "not to be compared: driver: 6.1 and 6.2",
        "not to be compared: b.json was not run to its end",
    ]


def test_results_of_one_machine_are_merged(tmp_path: Path) -> None:
    one, other = result(), result("b.json")
    other.rows[:] = [measured("SD 1.5 512x512", "another way", 2.0)]
    paths = [str(written(tmp_path, each)) for each in (one, other)]
    out = tmp_path / "whole.json"
    assert __main__.main(["results", "merge", *paths, "--out", str(out)]) == 0
    assert [row.way for row in document.read(out).rows] == ["sdp", "ours"] * 2 + ["another way"]
    with pytest.raises(ValueError, match="sdp is in a.json and in b.json"):
        document.merged([one, result("b.json")])
    assert document.merged([one])["complete"]
    assert not document.merged([replace(one, complete=False)])["complete"]
    with pytest.raises(ValueError, match="card: A card and Another card"):
        document.merged([one, result("b.json", "Another card")])


def test_the_largest_result_of_the_suite_is_read(tmp_path: Path) -> None:
    """Standard by all ways with traces as long as they become, merged of one for each way."""
    trace = {name: [12345.67] * TRACE_POINTS for name in (SECONDS, *QUANTITIES)}
    texts: dict[str, Any] = dict.fromkeys(("ran", "note", "slowed"), "x" * MOST_TEXT)
    paths, settings = [], {workload.name: workload.settings() for workload in WORKLOADS}
    for place, way in enumerate(command.WAYS):
        rows = [measured(each, way, 100 / 3, trace=trace, **texts) for each in settings]
        parts = [measured(each, way, 100 / 3) for each in settings]
        rows += [replace(row, test=part) for row in parts for part in document.PARTS[1:]]
        made = replace(result(f"{place}.json"), workloads=settings, rows=rows)
        paths.append(str(written(tmp_path, made)))
    out = tmp_path / "whole.json"
    assert __main__.main(["results", "merge", *paths, "--out", str(out)]) == 0
    assert len(document.read(out).rows) == len(WORKLOADS) * len(paths) * len(document.PARTS)


def test_slower_beyond_the_spread_of_both_fails(capsys: pytest.CaptureFixture[str]) -> None:
    before = result()
    assert not document.regressions(result(times=1.19), before)
    assert not document.regressions(result(times=0.5), before)
    gone = result()
    gone.rows[1:2] = [Row("picture", "SD 1.5 512x512", "ours", "s", reason="out of memory")]
    assert document.regressions(gone, before) == [
        "SD 1.5 512x512, ours: not measured: out of memory"
    ]
    del gone.rows[1]
    assert "this run has no such way" in document.regressions(gone, before)[0]
    del gone.workloads["SD 1.5 512x512"]  # was not asked for
    assert not document.regressions(gone, before)
    (line, *others) = document.regressions(result(times=1.5), before)
    assert line.startswith("SD 1.5 512x512, sdp: 1.5 s for 1 (+50 %;") and len(others) == 3
    assert command._compared(result(times=1.5), before) == 1
    assert command._compared(result(), before) == 0
    assert command._compared(result("b.json"), None) == 0
    theirs = [row for row in before.rows if row.way == "sdp"]
    failed = Row("picture", "SD 1.5 512x512", "ours", "s", reason="no kernel compiles")
    without = replace(before, rows=[*theirs, failed])
    assert command._compared(without, without) == 1  # nothing of ours is compared
    assert "neither this run nor a.json has a picture of ours" in capsys.readouterr().err
    assert command._compared(before, without) == 0
    other = result()
    other.about["dtype"] = "bfloat16"
    assert command._compared(other, before) == 1
    assert "not compared with a.json: dtype" in capsys.readouterr().err
    assert command._compared(result(card="Another card"), before) == 1
    assert "card: Another card and A card" in capsys.readouterr().err


def test_the_page_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = result(card="<b>A card</b>")
    made.rows[1] = replace(made.rows[1], energy_j=120.0, slowed="the core clock fell", trace=TRACE)
    made.rows.append(Row("server", "SD 1.5 512x512", "ours", "s", 2.0, p95=3.0, p99=4.0, within=1))
    made.rows.append(Row("offline", "SD 1.5 512x512", "ours", "pictures/s", 9.0, first=12.5))
    written(tmp_path, made)
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    published = tmp_path / "published.txt"
    figure = {"card": "X", "workload": "SDXL", "way": "theirs", "seconds": 1.5, "date": "2026"}
    published.write_text(json.dumps([{**figure, "source": "a page"}]), encoding="utf-8")
    words = ["results", "page", str(tmp_path), "--published", str(published)]
    assert __main__.main(words) == 1  # a file was refused
    assert "'other.json' is refused" in capsys.readouterr().err
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<b>A card" not in text and "&lt;b&gt;A card" in text
    assert text.count("<details open>") == 1 and "ours: the core clock fell</text>" in text
    assert "core clock, MHz" in text and "power, W" in text and "temperature, C" not in text
    assert "<td>9.00 pictures/s</td><td>12.5</td>" in text
    assert "SD 1.5 512x512, energy</text>" in text and "a page" in text
    published.write_text(json.dumps([figure]), encoding="utf-8")
    assert __main__.main(words) == 2
    assert "a figure without source" in capsys.readouterr().err
    assert __main__.main(words[:3]) == 1
    assert "theirs" in (tmp_path / "index.html").read_text(encoding="utf-8")  # as before
    with pytest.raises(UsageError, match="merge, check, page"):
        command_line("results", "split", str(tmp_path))


def command_line(*words: str) -> None:
    import argparse

    from lib_rocm_sd.commands import results

    parser = argparse.ArgumentParser()
    results.add_arguments(parser)
    results.main(parser.parse_args(list(words[1:])))
