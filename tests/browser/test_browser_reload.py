"""Settings > Reload UI, twice."""

from __future__ import annotations

from collections import Counter

from tests.browser.conftest import Open
from tests.browser.served import Served

TIMES = 2


def test_nothing_is_doubled(visit: Open, webui: Served) -> None:
    before = webui.first
    assert len(before["components"]) == len(set(before["components"]))
    ours = [route for route in before["routes"] if "rocm-sd" in route]
    for _ in range(TIMES):
        after = webui.ask("reload")
        for what in ("callbacks", "components", "events", "settings", "arguments", "routes"):
            assert after[what] == before[what], what
    assert ours
    page = visit()
    found = page.page.evaluate(
        """() => [...document.querySelectorAll('[id*="rocm_sd"]')]
            .filter(e => e.matches('button, .block, .form, .column, .row'))
            .map(e => e.id)"""
    )
    doubled = [name for name, count in Counter(found).items() if count > 1]
    assert doubled == []
    page.open_accordion()
    page.choose("level", "Memory")
    page.wait_for_title("Memory")
    assert 'ROCm SD: "Memory, attention: rocm_sd"' in page.generate()
