"""The Speed test tab, used as a person uses it: run, cancel, look, two windows, none."""

from __future__ import annotations

import json
from base64 import b64decode

from tests.browser.conftest import Open
from tests.browser.pages import Visit
from tests.browser.served import Served
from tests.waiting import wait_until

LONG = "128, 192, 256, 320, 384"


def run(page: Visit) -> None:
    """Press Run, and wait until the page shows that it runs."""
    page.page.locator(page.speed("run")).click()
    page.wait_for_speed("running")


def wait_until_idle(webui: Served) -> None:
    """Nothing of an earlier test runs any more."""
    assert not webui.ask("idle")["running"]


def test_quick_runs_to_the_end(visit: Open, webui: Served) -> None:
    page = visit()
    page.show_tab("Speed test")
    run(page)
    page.wait_for_button("run", "disabled")
    page.page.get_by_role("progressbar", name="Speed test").wait_for()
    page.wait_for_speed("done", "failed", "cancelled")
    assert page.speed_state() == "done"
    page.wait_for_text(page.speed("results"), "Attention[\\s\\S]*VAE decode[\\s\\S]*Whole image")
    page.wait_for_button("run", "enabled")
    for method in ("rocm_sd", "Doggettx-like", "sub-quadratic-like", "SDP", "WebUI's current"):
        page.wait_for_text(page.speed("results"), method)
    page.page.locator(f"{page.speed('pictures')} img").first.wait_for()
    kept = list((webui.data / "outputs").rglob("rocm_sd-speedtest-*.json"))
    assert len(kept) == 1
    assert json.loads(kept[0].read_text(encoding="utf-8"))["complete"] is True


def test_plots_and_pictures_can_be_looked_at_and_exported(visit: Open) -> None:
    page = visit()
    page.show_tab("Speed test")
    found = page.page.locator(f"{page.speed('bars')} .rocm-sd-speed-plot svg:visible")
    found.nth(3).wait_for()
    plots = found.all()
    assert len(plots) == 4
    for plot in plots:
        box = plot.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 50
        assert plot.get_attribute("aria-label") or plot.locator("title").count()
    pictures = f"{page.speed('pictures')} img"
    page.wait_for_pictures(3)
    seen = page.page.evaluate(
        "s => [...document.querySelectorAll(s)].map(i => i.naturalWidth)", pictures
    )
    assert all(width == 64 for width in seen)
    pair = page.page.locator(f"{page.speed('pictures')} .rocm-sd-speed-pair").first
    for view in ("Slider", "Difference"):
        pair.get_by_label(view, exact=True).check()
        shown = pair.locator("img:visible").count()
        assert shown == {"Slider": 2, "Difference": 1}[view]

    page.unfold("export")
    links = page.page.locator(f"{page.speed('exports')} a[download]")
    links.first.wait_for()
    assert [link.inner_text() for link in links.all()] == ["JSON", "CSV", "Markdown"]
    data = links.first.get_attribute("href").split("base64,")[1]
    assert json.loads(b64decode(data))["format"].startswith("rocm_sd speed test")
    page.wait_for_value(f"{page.speed('markdown')} textarea", r"\| rocm_sd \|")


def test_nothing_fades_while_the_page_asks(visit: Open) -> None:
    """gradio gives what waits for an answer this class."""
    page = visit()
    page.show_tab("Speed test")
    faded = """selector => {
        const shown = document.querySelector(selector + " .prose").parentElement;
        shown.style.transition = "none";
        shown.classList.add("pending");
        return getComputedStyle(shown).opacity;
    }"""
    for name in ("status", "results"):
        assert page.page.evaluate(faded, page.speed(name)) == "1"


def test_sizes_that_cannot_be_are_refused(visit: Open) -> None:
    page = visit()
    page.show_tab("Speed test")
    for sizes, reason in (
        ("-64", "Not started: .*-64"),
        ("<img src=x onerror=alert(1)>", "Not started: .*'<img'"),
        ("1000000", "Not started: .*1000000"),
        (" ", "Not started: .*at least one"),
    ):
        page.ask_for("Custom sizes", sizes)
        page.page.locator(page.speed("run")).click()
        page.wait_for_text(page.speed("notice"), reason)
        assert page.page.locator(f"{page.speed('notice')} img").count() == 0


def test_cancel_ends_it(visit: Open, webui: Served) -> None:
    wait_until_idle(webui)
    page = visit()
    page.show_tab("Speed test")
    page.ask_for("Custom sizes", LONG)
    run(page)
    page.wait_for_text(page.speed("status"), "[1-9]\\d? %")
    page.wait_for_button("cancel", "enabled")
    page.page.locator(page.speed("cancel")).click()
    page.wait_for_speed("done", "failed", "cancelled")
    assert page.speed_state() == "cancelled"
    page.wait_for_button("run", "enabled")


def test_two_windows_show_the_same(visit: Open, webui: Served) -> None:
    wait_until_idle(webui)
    first, second = visit(), visit()
    for page in (first, second):
        page.show_tab("Speed test")
    first.ask_for("Custom sizes", LONG)
    run(first)
    second.wait_for_speed("running")
    second.wait_for_button("run", "disabled")
    second.page.locator(second.speed("cancel")).click()
    for page in (first, second):
        page.wait_for_speed("cancelled")


def test_a_generation_waits_for_the_test_and_the_other_way_round(
    visit: Open, webui: Served
) -> None:
    wait_until_idle(webui)
    first, second = visit(), visit()
    first.show_tab("Speed test")
    first.ask_for("Custom sizes", LONG)
    run(first)
    second.page.locator("#txt2img_generate").click()
    assert wait_until(lambda: webui.ask("state")["waiting"])
    assert webui.ask("state")["running"]
    assert second.page.locator("#html_log_txt2img .performance").count() == 0
    first.page.locator(first.speed("cancel")).click()
    first.wait_for_speed("cancelled")
    second.wait_for_text("#html_log_txt2img", "Time taken")


def test_a_window_that_is_closed_ends_nothing(visit: Open, webui: Served) -> None:
    wait_until_idle(webui)
    page = visit()
    page.show_tab("Speed test")
    page.ask_for("Custom sizes", "128", ("Attention",))
    run(page)
    page.close()
    assert webui.ask("state")["test"] in ("running", "done")
    again = visit()
    again.show_tab("Speed test")
    again.wait_for_speed("done")
    again.wait_for_text(again.speed("results"), "128x128")
