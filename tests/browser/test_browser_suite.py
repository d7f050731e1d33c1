"""The suite's page in a real browser: sorting, filters, any row as 100 %, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lib_rocm_sd.lab.suite import page
from tests.lab.test_suite_results import TRACE, result

SLOW = "Slow, with a name of many letters"


@pytest.fixture(scope="module")
def opened(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("suite")
    fast, slow = result("fast #1.json", "Fast", 1.0), result("slow.json", SLOW, 4.0)
    other = result("other.json", "Other", 2.0)
    other.about["dtype"] = "bfloat16"
    fast.rows[0] = replace(fast.rows[0], largest=0.0)
    fell: dict[str, Any] = {"trace": TRACE, "slowed": "the core clock fell"}
    fast.rows[1] = replace(fast.rows[1], largest=9.0, psnr=40.0, energy_j=9.0, **fell)
    slow.rows[1] = replace(slow.rows[1], energy_j=19.0, trace=TRACE)
    place = folder / page.PICTURES / "fast #1"
    place.mkdir(parents=True)
    Image.new("RGB", (64, 64), "red").save(place / "SD--float32.png")
    page.write(folder, [slow, fast, other])
    opened = chromium.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.goto((Path(folder) / "index.html").as_uri())
    yield opened
    assert not said
    opened.close()


def column(opened: Any, place: int) -> list[str]:
    """The texts of a column's visible cells."""
    cells = opened.query_selector_all(f"#rows tbody tr:not([hidden]) td:nth-child({place})")
    return [cell.inner_text() for cell in cells]


def test_rows_are_sorted(opened: Any) -> None:
    head = opened.query_selector("#rows th:nth-child(5) button")
    assert head.inner_text() == "s" and column(opened, 1)[::4] == [SLOW, "Fast", "Other"]
    head.click()
    assert column(opened, 5) == ["1.000"] * 4 + ["2.000"] * 4 + ["4.000"] * 4
    head.click()
    assert column(opened, 5) == ["4.000"] * 4 + ["2.000"] * 4 + ["1.000"] * 4


def test_rows_are_filtered(opened: Any) -> None:
    opened.select_option("#card", "Fast")
    opened.select_option("#way", "ours")
    assert column(opened, 1) == ["Fast"] * 2 and set(column(opened, 3)) == {"ours"}
    for name in ("#card", "#way"):
        opened.select_option(name, "")
    assert len(column(opened, 1)) == 12


def test_any_row_is_the_base(opened: Any) -> None:
    opened.select_option("#base", label="Fast, SD 1.5 512x512, sdp")
    rows = zip(column(opened, 1), column(opened, 2), column(opened, 4), strict=True)
    shares = {(card, workload): share for card, workload, share in rows}
    assert shares[SLOW, "SD 1.5 512x512"] == "25 %"
    assert shares["Fast", "SD 1.5 512x512"] == "100 %"
    assert shares["Fast", "SD 1.5 512x512, 4 at once"] == ""  # another workload
    assert shares["Other", "SD 1.5 512x512"] == ""  # another dtype
    titles = [each.text_content() for each in opened.query_selector_all("figure[class] svg text")]
    assert titles.count("SD 1.5 512x512") == 2 * 2  # for narrow windows, too


def test_it_is_light_and_dark(opened: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for scheme in ("light", "dark"):
        opened.emulate_media(color_scheme=scheme)
        seen.append(opened.evaluate(paper))
    assert seen == ["rgb(255, 255, 255)", "rgb(23, 24, 26)"]


def test_bars_of_two_cards_are_told_apart(opened: Any) -> None:
    """Ours has its colour on each, also where it is the energy."""
    bars = (
        "[...document.querySelectorAll('figure svg')].filter(e => e.ariaLabel.includes('energy'))"
    )
    rects = f"[...{bars}[0].querySelectorAll('rect')].map(e => getComputedStyle(e).fill)"
    assert opened.evaluate(rects) == ["rgb(209, 73, 91)"] * 2
    named = opened.evaluate(f"{bars}[0].textContent")
    assert f"ours, {SLOW}" in named and "ours, Fast" in named


def test_a_clock_that_fell_is_drawn_and_named(opened: Any) -> None:
    shown = [each.is_visible() for each in opened.query_selector_all("details svg")]
    assert shown == [False, True]  # Slow's, whose clock did not fall, is folded
    text = opened.inner_text("details[open]")
    assert "ours: the core clock fell" in text and "core clock, MHz" in text
    assert opened.evaluate("document.querySelectorAll('details polyline').length") == 2 * 3


@pytest.mark.parametrize("width", [390, 700, 1300])
def test_no_window_is_too_narrow(opened: Any, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    bars = [each for each in opened.query_selector_all("figure[class] svg") if each.is_visible()]
    assert len(bars) == 5  # two workloads of two groups, an energy
    assert all(each.bounding_box()["x"] + each.bounding_box()["width"] <= width for each in bars)
    cut = """[...document.querySelectorAll('figure svg text')].filter(e => {
        const box = e.getBBox(), most = e.ownerSVGElement.viewBox.baseVal.width + 1;
        return box.x < 0 || box.x + box.width > most;
    }).length"""
    assert opened.evaluate(cut) == 0


def test_pictures_are_shown_and_files_linked(opened: Any) -> None:
    assert opened.evaluate("document.images[0].naturalWidth") == 64
    links = [link.get_attribute("href") for link in opened.query_selector_all("ul a")]
    assert links == ["./slow.json", "./fast%20%231.json", "./other.json"]


def test_equal_pictures_are_sorted_as_the_nearest(opened: Any) -> None:
    place = 1 + opened.evaluate(
        "[...document.querySelectorAll('#rows th')].findIndex(e => e.innerText == 'PSNR dB')"
    )
    head = opened.query_selector(f"#rows th:nth-child({place}) button")
    head.click()
    assert [text for text in column(opened, place) if text] == ["40.0", "equal"]
    head.click()
    assert [text for text in column(opened, place) if text] == ["equal", "40.0"]
