"""Narrow windows, both themes, contrast, labels, the keyboard; screenshots are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Open
from tests.browser.looks import CONTRAST, FOCUS, LEAST_CONTRAST, OVERFLOW, UNNAMED
from tests.browser.pages import TRANSITION_MS, Visit
from tests.browser.served import Served

THEMES = ("light", "dark")
ROOTS = {
    "accordion": "#script_txt2img_rocm_sd_optimization_accordion",
    "speed test": "#rocm_sd_speed_column",
    "settings": "#tab_settings",
}


ROW_PX = 30
"""Controls side by side end about as far down."""


def go(page: Visit, place: str) -> None:
    """Show one of the places, all of it open."""
    if place == "accordion":
        page.open_accordion()
    elif place == "speed test":
        page.show_tab("Speed test")
        page.wait_for_speed("idle", "cancelled", "done")
        if page.speed_state() != "done":
            page.ask_for("Quick")
            page.page.locator(page.speed("run")).click()
            page.wait_for_speed("done")
        for name in ("facts", "export"):
            page.unfold(name)
    else:
        page.show_tab("Settings")
        page.wait_for_text("#rocm_sd_cache_contents", "Size: ")
    page.page.wait_for_timeout(TRANSITION_MS)


@pytest.mark.parametrize("theme", THEMES)
def test_contrast_is_enough(visit: Open, artefact: Callable[[str], Path], theme: str) -> None:
    page = visit(theme=theme)
    for place in ROOTS:
        go(page, place)
        path = artefact(f"{place.replace(' ', '-')}-{theme}")
        page.page.screenshot(path=path, full_page=True, animations="disabled")
        found = page.page.evaluate(CONTRAST, ROOTS[place])
        assert len(found) >= 2, place
        assert [one for one in found if one["ratio"] < LEAST_CONTRAST] == [], place


WEBUIS_RULE = ".block.padded:not(.gradio-accordion) { padding: 0 !important; }"
"""The WebUI's own style sheet leaves no room around controls; the double has gradio's."""
LEFTS = """root => {
    const left = (text) => {
        const range = document.createRange();
        range.selectNodeContents(text);
        return range.getBoundingClientRect().left;
    };
    const texts = ["[data-testid=block-info]", ".rocm-sd-explanation", ".rocm-sd-status > p",
        ".rocm-sd-table tr > :first-child"];
    const accordion = document.querySelector(root);
    return texts.map((text) => left(accordion.querySelector(text)));
}"""


GAP = """root => {
    const box = (selector) => {
        const range = document.createRange();
        range.selectNodeContents(document.querySelector(`${root} ${selector}`));
        return range.getBoundingClientRect();
    };
    return box("[id$=vae] [data-testid=block-info]").top - box(".rocm-sd-explanation").bottom;
}"""
LEAST_GAP_PX = 8


def test_texts_begin_where_the_labels_do_and_a_levels_explanation_is_apart(visit: Open) -> None:
    page = visit()
    page.page.add_style_tag(content=WEBUIS_RULE)
    page.open_accordion()
    label, *texts = page.page.evaluate(LEFTS, ROOTS["accordion"])
    assert texts == [label] * 3
    assert page.page.evaluate(GAP, ROOTS["accordion"]) >= LEAST_GAP_PX


def test_a_phone_shows_it_whole_and_every_control_has_a_name(
    visit: Open, artefact: Callable[[str], Path]
) -> None:
    page = visit(width=390, height=844)
    for place in ROOTS:
        go(page, place)
        page.page.screenshot(path=artefact(f"{place.replace(' ', '-')}-narrow"), full_page=True)
        wide, unnamed = (page.page.evaluate(each, ROOTS[place]) for each in (OVERFLOW, UNNAMED))
        assert (wide, unnamed) == ([], []), place


def test_sizes_are_for_the_custom_preset(visit: Open) -> None:
    page = visit()
    page.show_tab("Speed test")
    sizes = page.page.locator(f"{page.speed('sizes')} :is(input, textarea)")
    for preset, state in (("Quick", "disabled"), ("Custom", "enabled"), ("Standard", "disabled")):
        page.page.locator(page.speed("preset")).get_by_label(preset).check()
        page.page.locator(f"{page.speed('sizes')} :is(input, textarea):{state}").wait_for()
    assert sizes.input_value() == "512, 1024"


def test_the_keyboard_goes_from_top_to_bottom(visit: Open, webui: Served) -> None:
    page = visit()
    head = page.part("accordion").locator(".label-wrap")
    head.focus()
    page.page.keyboard.press("Enter")
    page.wait_for_accordion()
    head.focus()
    places = []
    for _ in range(16):
        page.page.keyboard.press("Tab")
        place = page.page.evaluate(FOCUS, ROOTS["accordion"])
        if place is None:
            break
        places.append(place)
    names = [place["name"] for place in places]  # gradio 4 stops at each choice
    kept = [name for name in names if name not in ("Performance", "Memory", "Off", "Always banded")]
    assert [kept[0], *kept[-2:]] == ["Enable", "Cards (numbers, empty: all)", "Speed test"]
    assert set(kept[1:-2]) == {"Auto", "VAE memory budget (MiB, 0 = Auto)"}
    ends = [place["bottom"] for place in places]
    assert all(after > before - ROW_PX for before, after in zip(ends, ends[1:], strict=False))
