"""The result file: what is taken back, what is refused; exports, plots, the machine."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from lib_rocm_sd.lab import sensors, speed_result, speed_text
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import Document
from tests.lab.speedtest_doubles import document

EVIL = "|`<script>alert(1)</script>`[x](http://e.example) www.e.example @all #1\n=1+1 \u202e_y_"


def test_a_document_survives_its_file(tmp_path: Path) -> None:
    made = document(vram_mib=24560, power_w=12.5, driver=None)
    path = made.write(tmp_path / "new" / "folder")
    assert speed_result.read(path).as_dict() == made.as_dict()
    assert [file.name for file in path.parent.iterdir()] == [f"{made.stem}.json"]
    assert re.fullmatch(r"rocm_sd-speedtest-\d{8}T\d{6}Z-[0-9a-f]{12}", made.stem)


def test_what_was_not_measured_is_null() -> None:
    made = Row("vae", "decode", "rocm_sd", reason="out of memory at 2048x2048")
    row = speed_result.COLUMNS.as_json(made)
    assert row["median"] is None and row["peak_mib"] is None
    assert json.dumps(row, allow_nan=False)


def test_a_long_reason_can_be_read_again() -> None:
    made = document()
    made.rows[0] = replace(made.rows[0], reason="x" * 501)
    assert speed_result.of(made.as_dict()).rows[0].reason == "x" * 500


def changed(**changes: Any) -> bytes:
    return json.dumps({**document().as_dict(), **changes}).encode()


def row(**changes: Any) -> bytes:
    return changed(rows=[{**speed_result.COLUMNS.as_json(document().rows[0]), **changes}])


def pair(**changes: Any) -> bytes:
    return changed(pictures=[{**document().as_dict()["pictures"][0], **changes}])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "no result of this speed test"),
        (b'{"rows": []}', "no result of this speed test"),
        (changed(format="rocm_sd speed test 2"), "no result of this speed test"),
        (changed(format=EVIL), "no result of this speed test"),
        (changed(id="../../x"), "id is not"),
        (changed(id=7), "id is not a text"),
        (changed(date="yesterday"), "date is not like"),
        (changed(complete="yes"), "neither true nor false"),
        (changed(machine=[]), "machine is not an object"),
        (changed(machine={"card": {"x": 1}}), "machine's card is not a text"),
        (changed(machine={"card": "x" * 501}), "longer than 500"),
        (changed(machine={str(n): n for n in range(51)}), "at most 50"),
        (changed(request=None), "request is not an object"),
        (changed(rows={}), "rows is not a list"),
        (changed(rows=[0]), "a row is not an object"),
        (changed(rows=[{}] * 2001), "2001 rows"),
        (changed(notes=[1]), "a note is not a text"),
        (row(test="gpu"), "not known"),
        (row(unit="GB"), "not known"),
        (row(case=None), "case is not a text"),
        (row(median="1"), "median is not a number"),
        (row(median=True), "median is not a number"),
        (row(median=-1), "median is not from 0"),
        (row(median=1e300), "median is not from 0"),
        (row(median=None), "neither a figure"),
        (row(median=0), "neither a figure"),
        (row(p10=3.0), "not between"),
        (row(runs=[]), "runs is not a number"),
        (row().replace(b'"median": 2.0', b'"median": NaN'), "no number of JSON"),
        (row().replace(b'"median": 2.0', b'"median": Infinity'), "no number of JSON"),
        (row().replace(b'"median": 2.0', b'"median": 1e999'), "median is not from 0"),
        (row().replace(b'"median": 2.0', b'"median": ' + b"9" * 5000), "too many digits"),
        (changed(machine={"vram_mib": 0}).replace(b": 0}", b": 1e999}"), "no number"),
        (pair(off="../../x.png"), "not the name of a PNG"),
        (pair(off="C:\\x.png"), "not the name of a PNG"),
        (pair(on="x.html"), "not the name of a PNG"),
        (pair(largest=256), "largest is not from 0 to 255"),
        (pair(mean="much"), "mean is not a number"),
    ],
)  # fmt: skip
def test_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        speed_result.parse_document(data)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 700


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.write_bytes(b" " * (speed_result.MOST_BYTES + 1))
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        speed_result.read(path)


def test_history_is_of_this_machine_alone(tmp_path: Path) -> None:
    dates = ("2026-03-01T00:00:00Z", "2026-01-01T00:00:00Z")
    for date in dates:
        made = document()
        made.date = date
        made.write(tmp_path)
    other = document("Radeon RX 6800")
    other.write(tmp_path)
    damaged = tmp_path / "rocm_sd-speedtest-damaged.json"
    damaged.write_text('{"format": "rocm_sd speed test 1"')
    (tmp_path / "foreign.json").write_text("{}")
    found = speed_result.history(tmp_path, document().machine)
    assert [d.date for d in found.documents] == sorted(dates)
    assert found.skipped[f"{other.stem}.json"] == "of another machine"
    assert found.skipped[damaged.name].startswith("not JSON")
    assert len(found.skipped) == 2
    assert speed_result.history(tmp_path / "none", {}).documents == ()
    assert speed_result.history(None, {}).documents == ()


def test_csv() -> None:
    made = document(card=EVIL)
    made.rows.append(Row("vae", "=cmd()", "-x", reason="+y\n@z"))
    rows = list(csv.DictReader(io.StringIO(speed_text.to_csv(made))))
    assert len(rows) == len(made.rows)
    assert rows[0]["median"] == "2.0" and rows[0]["case"] == "SD1.5 512x512 self"
    assert rows[-1]["case"] == "'=cmd()" and rows[-1]["method"] == "'-x"
    assert rows[-1]["reason"] == "'+y @z" and rows[-1]["median"] == ""


def test_markdown() -> None:
    text = speed_text.to_markdown(document(power_limit_w=355.0))
    assert "Card Radeon RX 7900 XTX; gfx id gfx1100;" in text and "Power limit, W 355.0" in text
    assert "| SD1.5 512x512 self | rocm_sd | 2.00 ms | 2.00 to 2.00 | 5 | 100 |" in text
    assert (
        "| SD1.5 512x512 self | SDP | 3.00 ms | 3.00 to 3.00 | 5 | 100 | 1.0e-04 |  | 1.50x |"
        in text
    )
    assert "differ by at most 3 of 255, 0.1 on the mean" in text
    assert "are our own re-implementations" in text and "not run to its end" not in text


def test_markdown_of_hostile_texts() -> None:
    made = Document({"card": EVIL, "os": EVIL}, {}, [Row("vae", EVIL, EVIL, reason=EVIL)])
    made.notes.append(EVIL)
    text = speed_text.to_markdown(made)
    for piece in ("<script", "`", "](", "http:", "www.", "@", " #1", "\u202e", "_y_", "\n="):
        assert piece not in text.replace("### Speed test", ""), piece
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [10, 10, 10]


def test_plots_are_svg_and_escaped() -> None:
    made = document()
    made.rows.append(Row("vae", EVIL.replace("\n", " "), EVIL, reason=EVIL))
    found = speed_text.drawn_bars(made)
    assert set(found) == {"attention", "vae", "step", "upscaler", "image"}
    for svg in (*found.values(), speed_text.drawn_history([made, document(times=0.5)])):
        ElementTree.fromstring(svg)
        assert "<script" not in svg and "currentColor" in svg
    assert "2.00 ms" in found["vae"] and "it/s" not in found["image"]


def test_history_is_in_percent_of_the_first() -> None:
    svg = speed_text.drawn_history([document(), document(times=0.5), document(times=3.0)])
    assert "vae, decode 512x512: 300 % now" in svg
    assert speed_text.drawn_history([document()]) == speed_text.drawn_history([]) == ""
    assert svg.count("<circle") == 15


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.0, "1.00"), (99.96, "100.0"), (1234.5, "1234"), (math.nan, "")],
)
def test_numbers(value: float, text: str) -> None:
    assert speed_text.number(value) == text


def test_the_machine_tells_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import platform

    monkeypatch.setattr(platform, "release", lambda: "6.8.0-alices-laptop")
    found = sensors.machine(torch.device("cpu"))
    assert found["card"] == "CPU" and found["torch"] == torch.__version__
    assert found["kernel"] == "6.8.0"
    text = json.dumps(found)
    assert platform.node() not in text and str(Path.home()) not in text and "alice" not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
    assert speed_result.parse_document(changed(machine=found)).machine == found


def test_the_address_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    told = [
        SimpleNamespace(total_memory=1),
        SimpleNamespace(pci_domain_id=0, pci_bus_id=10, pci_device_id=0),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told[device.index])
    first, second = (sensors._address(torch.device("cuda", index)) for index in (0, 1))
    assert first == "" and second == "0000:0a:00.0"
