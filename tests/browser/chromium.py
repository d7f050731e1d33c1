"""The browser of the system; none is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu"),  # there is none, and to play one took a fifth more
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def launched() -> Iterator[Any]:
    """It, as playwright has it; skips the test where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (requirements/test.txt has it)"
    )
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        pytest.skip(f"none of {', '.join(BROWSERS)} is in PATH: `apt install chromium`")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found[0], args=list(ARGUMENTS))
        yield browser
        browser.close()
