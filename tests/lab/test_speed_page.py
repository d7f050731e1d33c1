"""What the Speed test tab shows and does, without gradio."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

image = pytest.importorskip("PIL.Image")

from lib_rocm_sd.hosts.ui import speed_html
from lib_rocm_sd.hosts.ui.speed_tab import State, View, sizes_of
from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import Document, Pair, Request
from lib_rocm_sd.lab.speed_session import SpeedSession
from tests.lab.speedtest_doubles import Gate, Side, document
from tests.waiting import WAIT_S

HOSTILE = "<img src=x onerror=alert(1)>\"'</script>\x1b\u202e&"
VOID = ("img", "input", "br")


class Reader(HTMLParser):
    """Checks that tags are closed in order; keeps tags with attributes, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def hostile() -> Document:
    made = document(HOSTILE, driver=HOSTILE)
    row = Row("attention", HOSTILE, HOSTILE, reason=HOSTILE, note=HOSTILE)
    made.rows += [row, Row("vae", HOSTILE, HOSTILE, "ms", 1.0, 1.0, 1.0, 1, note=HOSTILE)]
    made.notes = [HOSTILE]
    made.request = {"what": [HOSTILE], "preset": HOSTILE, "sizes": []}
    return made


def pages(made: Document) -> dict[str, str]:
    look = Pair(HOSTILE, "data:,", "data:,", "data:,", 1, 0.5)
    found = speed_result.History((made,), {HOSTILE: HOSTILE})
    return {
        "results": speed_html.results(made),
        "bars": speed_html.bars(made),
        "pictures": speed_html.pictures([look], HOSTILE),
        "history": speed_html.history(found),
        "machine": speed_html.machine(made.machine),
        "exports": speed_html.exports(made, Path(HOSTILE)),
        "status": speed_html.status("running", 0.5, HOSTILE, 1),
        "notice": speed_html.notice(HOSTILE),
    }


@pytest.mark.parametrize("name", pages(document()))
def test_hostile_texts_stay_texts(name: str) -> None:
    page = pages(hostile())[name]
    found = Reader(page)
    assert not found.of("script")
    assert all("onerror" not in attributes for _, attributes in found.tags)
    assert all(str(attributes.get("src")).startswith("data:") for attributes in found.of("img"))
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_the_table_has_each_row_and_marks_ours() -> None:
    made = document()
    made.rows.append(Row("vae", "decode 2048x2048", "rocm_sd", reason="out of memory"))
    found = Reader(speed_html.results(made))
    ours = [tag for tag in found.of("tr") if tag.get("class") == "rocm-sd-speed-ours"]
    assert len(ours) == 6
    assert found.texts.count("1.50x") == 5
    assert "out of memory" in found.texts
    assert "a note" in " ".join(found.texts)
    assert {attributes.get("aria-label") for attributes in found.of("div")} == set(
        speed_html.TITLES.values()
    )


def test_a_result_names_its_card() -> None:
    found = Reader(speed_html.results(document("Radeon RX 7600")))
    assert any(text.startswith("Radeon RX 7600, ") and "UTC" in text for text in found.texts)


def test_more_steps_a_second_are_better() -> None:
    rows = [
        Row("image", "64x64", "extension off", "it/s", 5.0, 5.0, 5.0, 1),
        Row("image", "64x64", "extension on", "it/s", 10.0, 10.0, 10.0, 1),
    ]
    found = Reader(speed_html.results(Document({}, {}, rows)))
    assert "2.00x" in found.texts


@pytest.mark.parametrize(
    ("fraction", "percent"), [(0.0, 0), (0.426, 43), (7.0, 100), (-1.0, 0), (math.nan, 0)]
)
def test_progress_is_a_progress_bar(fraction: float, percent: int) -> None:
    found = Reader(speed_html.status("running", fraction, "attention", 7))
    bar = next(tag for tag in found.of("div") if tag.get("role") == "progressbar")
    assert bar["aria-valuenow"] == str(percent)
    assert found.of("div")[0]["data-tick"] == "7"
    assert f"{percent} %: attention" in found.texts
    assert not Reader(speed_html.status("done", 1.0, "done", 1)).of("progress")


def test_the_links_save_the_result() -> None:
    made = document()
    found = Reader(speed_html.exports(made, None)).of("a")
    assert [str(link["download"]).rsplit(".", 1)[1] for link in found] == ["json", "csv", "md"]
    contents = [base64.b64decode(str(link["href"]).partition(",")[2]).decode() for link in found]
    assert speed_result.parse_document(contents[0].encode()).as_dict() == made.as_dict()
    assert contents[1].count("\n") == len(made.rows) + 1
    assert contents[2].startswith("### Speed test")


def test_two_results_make_a_history() -> None:
    first, second = document(), document(times=0.5)
    second.date = "2030-01-01T00:00:00Z"
    found = speed_html.history(speed_result.History((first, second), {"a.json": "damaged"}))
    assert "<svg" in found
    assert "a.json" in found
    assert "<svg" not in speed_html.history(speed_result.History((first,), {}))


# --- pictures


def decoded(uri: str) -> np.ndarray:
    kind, _, data = uri.partition(",")
    assert re.fullmatch(r"data:image/(png|jpeg);base64", kind)
    with image.open(io.BytesIO(base64.b64decode(data))) as found:
        assert not found.info.get("parameters")
        return np.asarray(found.convert("RGB"))


@pytest.mark.parametrize(("size", "shown"), [((64, 32), (64, 32)), ((2048, 1000), (768, 375))])
def test_pictures_are_made_to_fit(size: tuple[int, int], shown: tuple[int, int]) -> None:
    picture = image.new("RGB", size, (10, 200, 30))
    picture.info["parameters"] = "a secret"
    found = decoded(speed_html.picture_uri(picture))
    assert found.shape == (shown[1], shown[0], 3)
    assert abs(found.astype(int) - (10, 200, 30)).max() <= 3
    assert picture.size == size


def test_one_pixel_that_differs_is_still_seen() -> None:
    values = np.zeros((2000, 1801, 3), np.uint8)
    values[1999, 1800] = 160
    found = decoded(speed_html.difference_uri(image.fromarray(values)))
    assert max(found.shape) <= speed_html.MOST_SIDE
    assert found.max() == 160


def test_pictures_of_files(tmp_path: Path) -> None:
    for name in ("off", "on", "difference"):
        image.new("RGB", (8, 8)).save(tmp_path / f"a-{name}.png")
    (tmp_path / "b-off.png").write_bytes(b"no picture")
    names = ("a-off.png", "a-on.png", "a-difference.png")
    made = document()
    made.pictures = [
        Pair("good", *names),
        Pair("damaged", "b-off.png", *names[1:]),
        Pair("missing", "c-off.png", *names[1:]),
        Pair("elsewhere", "../a-off.png", *names[1:]),
        Pair("none", "", "", ""),
    ]
    assert not speed_html.of_files(made, None)
    made.pictures = made.pictures[:4]
    assert [look.case for look in speed_html.of_files(made, tmp_path)] == ["good"]
    made.pictures = made.pictures[:1] + [Pair("none", "", "", "")]
    assert [look.case for look in speed_html.of_files(made, tmp_path)] == ["good"]


# --- what the tab does


def view(side: Side | None = None) -> View:
    return View(SpeedSession(), side or Side())


def words(state: State) -> str:
    return " ".join(text for text in Reader(state.status).texts if text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512", [512]),
        (" 512, 768;1024\n64 ", [512, 768, 1024, 64]),
        ("-8 1e3 ٣", [-8, "1e3", "٣"]),
        ("", []),
        ("9" * 4000, ["9" * 4000]),
    ],
)
def test_sizes_as_people_write_them(text: str, sizes: list[object]) -> None:
    assert sizes_of(text) == sizes


@pytest.mark.parametrize(
    ("what", "preset", "sizes", "said"),
    [
        ([], "quick", "", "what is empty"),
        (["attention"], "custom", "", "at least one"),
        (["attention"], "custom", "-64", "64 to 8192"),
        (["attention"], "custom", "100", "multiple of 8"),
        (["attention"], "custom", "99999999999999999999", "whole number"),
        (["attention", "<b>"], "quick", "", "made of"),
        (["attention"], "fast", "", "has to be one of"),
    ],
)
def test_a_bad_request_is_refused_in_words(
    what: list[str], preset: str, sizes: str, said: str
) -> None:
    shown = view()
    text = shown.start(what, preset, sizes)
    assert text.startswith("Not started: ")
    assert said in text
    assert not shown.session.running


def test_sizes_count_with_custom_only() -> None:
    shown = view(Side())
    assert shown.start(["image"], "quick", "nonsense") == ""
    assert shown.session.wait(WAIT_S)


def test_a_page_follows_a_test_to_its_end(tmp_path: Path) -> None:
    side, gate = Side(tmp_path), Gate()
    side.methods = {"waits": gate}
    shown = view(side)
    before = shown.state("")
    assert "No test has run yet" in words(before)
    assert before.can_run
    assert not before.can_cancel
    assert shown.state(before.token).content is None

    assert shown.start(["attention", "image"], "quick", "") == ""
    assert gate.entered.wait(WAIT_S)
    during = shown.state(before.token)
    assert not during.can_run
    assert during.can_cancel
    assert re.search(r"\d %: attention, .*; about \d+ (s|min) left", words(during))
    assert during.content is not None
    assert during.content.exports == ""
    assert "a speed test is running" in shown.start(["image"], "quick", "")

    gate.open.set()
    assert shown.session.wait(WAIT_S)
    after = shown.state(during.token)
    assert "Done in" in words(after)
    assert after.can_run
    assert after.content is not None
    assert "waits" in after.content.results
    assert after.content.pictures.count("<img") == 10
    assert after.content.markdown.startswith("### Speed test")
    assert shown.state(after.token).content is None


def test_a_cancelled_test_keeps_its_rows() -> None:
    side, gate = Side(), Gate()
    side.methods = {"waits": gate}
    shown = view(side)
    assert shown.start(["attention"], "quick", "") == ""
    assert gate.entered.wait(WAIT_S)
    shown.cancel()
    asked = shown.state("")
    assert not asked.can_cancel
    assert "cancelling" in words(asked) or "finishes" in words(asked)
    gate.open.set()
    assert shown.session.wait(WAIT_S)
    over = shown.state(asked.token)
    assert "Cancelled" in words(over)
    assert over.content is not None
    assert "rocm_sd" in over.content.results


def test_cancel_without_a_test_is_nothing() -> None:
    shown = view()
    shown.cancel()
    assert shown.state("").can_run


def test_the_newest_readable_file_is_shown(tmp_path: Path) -> None:
    for year, card in ((2028, "older"), (2029, "newer")):
        made = document(card)
        made.date = f"{year}-01-01T00:00:00Z"
        made.write(tmp_path)
    (tmp_path / "rocm_sd-speedtest-20300101T000000Z-aaaaaaaaaaaa.json").write_text("{}")
    state = view(Side(tmp_path)).state("")
    assert "The last result is shown" in words(state)
    assert state.content is not None
    assert "newer" in state.content.machine


def test_a_document_of_the_session_is_one_of_the_page() -> None:
    side = Side()
    session = SpeedSession()
    ident = session.start(Request(("image",)), side)
    assert session.wait(WAIT_S)
    found = speed_result.of(json.loads(json.dumps(session.result(ident))))
    state = View(session, side).state("")
    assert state.content is not None
    assert state.content.results == speed_html.results(found)


def test_plots_come_for_a_window_and_for_a_telephone() -> None:
    made = document()
    for page in (
        speed_html.bars(made),
        speed_html.history(speed_result.History((made, document(times=2.0)), {})),
    ):
        found = Reader(page)
        widths = {str(svg["viewbox"]).split()[2] for svg in found.of("svg")}
        assert widths == {"640", "330"}
        for svg in found.of("svg"):
            width = float(str(svg["viewbox"]).split()[2])
            assert svg["style"] == f"width:100%;max-width:{width:.0f}px;height:auto"
    for name, plots in (("rocm_sd", 4), ("SDP", 1), ("extension on", 1)):
        assert Reader(speed_html.bars(made)).texts.count(name) == 2 * plots
    for rectangle in Reader(speed_html.bars(made)).of("rect"):
        assert float(str(rectangle["x"])) + float(str(rectangle["width"])) <= 531
