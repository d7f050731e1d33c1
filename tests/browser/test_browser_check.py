"""Check this card in the Speed test tab, used as a person uses it; a process without a card stands
for the self-test.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.browser.conftest import Open
from tests.browser.pages import Visit
from tests.browser.served import SELF_TEST, Served
from tests.lab.played_selftest import document

PART = "#rocm_sd_check"


def opened(visit: Open, webui: Served, end: str, content: dict[str, Any]) -> Visit:
    """The part, unfolded; the next self-test ends so and writes this."""
    (webui.data / SELF_TEST).write_text(json.dumps([end, content]), encoding="utf-8")
    page = visit()
    page.show_tab("Speed test")
    page.page.locator(f"{PART} > .label-wrap").click()
    page.page.locator(f"{PART}_run:enabled").wait_for()
    return page


def test_a_card_is_checked_and_its_file_is_saved(
    visit: Open, webui: Served, artefact: Callable[[str], Path]
) -> None:
    content = document(failures=3)
    page = opened(visit, webui, "1", content)
    page.page.locator(f"{PART}_run").click()
    page.wait_for_text(f"{PART}_result", "3 of 60 checks did not pass on gfx1100: conv 3x3")
    link = page.page.locator(f"{PART}_result a[download^=rocm_sd-selftest-gfx1100-]")
    data = str(link.get_attribute("href")).split("base64,")[1]
    assert json.loads(b64decode(data)) == content
    page.wait_for_text(f"{PART}_result", "What is in the file[\\s\\S]*Radeon RX 7900 XTX")
    page.page.locator(f"{PART}_run:enabled").wait_for()
    page.page.locator(PART).screenshot(path=artefact("check"))


def test_it_is_followed_and_stopped(
    visit: Open, webui: Served, artefact: Callable[[str], Path]
) -> None:
    page = opened(visit, webui, "waits", document(complete=False))
    page.page.locator(f"{PART}_run").click()
    page.wait_for_text(f"{PART}_status", "20 %: testing attention, 12 of 60")
    page.page.get_by_role("progressbar", name="Check this card").wait_for()
    page.page.locator(f"{PART}_run:disabled").wait_for()
    page.page.locator(PART).screenshot(path=artefact("check-running"))
    page.page.locator(f"{PART}_stop").click()
    page.wait_for_text(f"{PART}_result", "did not finish: stopped by the user")
    page.page.locator(f"{PART}_run:enabled").wait_for()
