"""Our part of the page of a whole real Forge, reForge or Classic, in a browser. ROCM_SD_FORGE names
the checkout; the CPU plays a card of ours, or none.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import launched
from tests.browser.conftest import ARTEFACTS
from tests.browser.pages import Visit
from tests.webui.test_real_forge import checkout as checkout
from tests.webui.test_real_forge import environments as environments
from tests.webui.test_real_forge import started_by

START_LIMIT_S = 600
FIELDS = {"width": "64", "height": "64", "steps": "3", "seed": "1"}
PIXELS = """async () => {
    const image = document.querySelector("#txt2img_gallery img");
    await image.decode();
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    return [...context.getImageData(0, 0, canvas.width, canvas.height).data];
}"""


@contextmanager
def served(
    checkout: Path,  # noqa: F811
    environments: list[str],  # noqa: F811
    data: Path,
    *,
    ours: bool,
    card: bool = False,
) -> Iterator[str]:
    """The address of its page."""
    command, known = started_by("whole_page.py", checkout, environments, data, ours=ours, card=card)
    log, address = data / "log.txt", data / "address.txt"
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env=known, stdin=subprocess.PIPE, stdout=written, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + START_LIMIT_S
            while not (address.exists() and address.read_text(encoding="utf-8")):
                told = log.read_text(encoding="utf-8", errors="replace")[-4000:]
                assert process.poll() is None and time.monotonic() < end, told
                time.sleep(0.2)
            yield address.read_text(encoding="utf-8")
        finally:
            process.kill()
            process.communicate()


class Page(Visit):
    """One whose WebUI may be without this extension."""

    def __init__(self, browser: Any, address: str, ours: bool) -> None:
        self._ours = ours
        super().__init__(browser, address, "dark", {"width": 1280, "height": 900})

    def load(self) -> None:
        if self._ours:
            super().load()
        else:
            self.page.goto(self.address)
        self.page.locator("#txt2img_generate").wait_for(state="visible")

    def show_tab(self, label: str) -> None:
        """txt2img is shown; Forge writes it otherwise than A1111."""

    def picture(self) -> tuple[list[int], str]:
        """A small one's pixels and infotext."""
        self.page.locator("#txt2img_prompt textarea").fill("a red circle")
        for name, value in FIELDS.items():
            self.page.locator(f"#txt2img_{name} input[type=number]").fill(value)
        self.page.evaluate(
            "() => document.querySelector('#html_log_txt2img .performance')?.remove()"
        )
        said = self.generate()
        return self.page.evaluate(PIXELS), said


@pytest.mark.slow
def test_the_page_of_a_whole_one(checkout: Path, environments: list[str], tmp_path: Path) -> None:  # noqa: F811
    def opened(name: str, **options: bool) -> Any:
        return served(checkout, environments, tmp_path / name, **options)

    with launched() as browser:
        with opened("without", ours=False) as address:
            without, _ = Page(browser, address, ours=False).picture()
        with opened("on a CPU", ours=True) as address:
            page = Page(browser, address, ours=True)
            assert page.picture()[0] == without
            page.part("accordion").locator(".label-wrap").click()
            page.wait_for_text(page.ours("status"), r"no supported GPU \(this is the CPU\)")
        with opened("on a card", ours=True, card=True) as address:
            page = Page(browser, address, ours=True)
            pixels, said = page.picture()
            assert pixels != without and 'ROCm SD: "Auto, attention: rocm_sd"' in said
            page.open_accordion()
            ARTEFACTS.mkdir(parents=True, exist_ok=True)
            page.page.screenshot(path=ARTEFACTS / f"{checkout.name}-page.png")
            page.part("enable").get_by_role("checkbox").uncheck()
            pixels, said = page.picture()
            assert pixels == without and "ROCm SD: off" in said
            page.load()
            assert 'attention: rocm_sd"' in page.picture()[1]
