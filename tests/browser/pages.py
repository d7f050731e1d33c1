"""The WebUI's page in a browser, and where our parts are in it."""

from __future__ import annotations

import re
import time
from typing import Any

ACCORDION = "#script_{tab}_rocm_sd_optimization_{name}"
SPEED = "#rocm_sd_speed_{name}"
PATIENCE_MS = 600_000
"""Only stops a test that hangs."""
POLLING_MS = 50
CALL = "/run/"
"""In the address that gradio asks for what a control or our hidden button gives."""
TRANSITION_MS = 400
"""gradio's own, of colour and height."""
PARTS = ("enable", "level", "unet", "vae", "vae_budget", "several", "several_cards")
"""What the accordion has above its table."""
LOADED = """
([s, least]) => {
    const found = [...document.querySelectorAll(s)];
    return found.length >= least && found.every((image) => image.complete);
}
"""
"""Whether there are so many pictures, and none is still on its way."""


class Visit:
    """One browser window with a profile of its own. `errors`: of scripts, and of the console.

    The browser finds no other machine: gradio asks for a script that is of use in frames only.
    """

    def __init__(self, browser: Any, address: str, theme: str, viewport: dict[str, int]) -> None:
        self.errors: list[str] = []
        self._asked: set[Any] = set()
        self.address = f"{address}?__theme={theme}"
        self._context = browser.new_context(viewport=viewport, color_scheme=theme)
        self._context.set_default_timeout(PATIENCE_MS)
        self.page = self._context.new_page()
        self._watch(self.page)
        self.load()

    def _watch(self, page: Any) -> None:
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)
        page.on("request", self._request)
        for end in ("requestfinished", "requestfailed"):
            page.on(end, self._answered)

    def _request(self, request: Any) -> None:
        if CALL in request.url:
            self._asked.add(request)

    def _answered(self, request: Any) -> None:
        self._asked.discard(request)

    def _console(self, message: Any) -> None:
        if message.type == "error" and "ERR_NAME_NOT_RESOLVED" not in message.text:
            self.errors.append(message.text)

    def load(self) -> None:
        """Load the page, or load it again, and wait until it hears clicks.

        gradio shows buttons a while before: our script clicks until an answer has renewed the table
        that the page came with.
        """
        self.page.goto(self.address)
        self.page.wait_for_selector(self.ours("accordion"))
        self.wait_for(
            "s => document.querySelector(s)?.title.includes(':')",
            f"{self.ours('accordion')} .label-wrap",
        )
        self.wait_for("() => !document.querySelector('.rocm-sd-stale')")

    def close(self) -> None:
        """As a person closes the window."""
        self._context.close()

    @staticmethod
    def ours(name: str, tab: str = "txt2img") -> str:
        """The selector of a part of the accordion."""
        return ACCORDION.format(tab=tab, name=name)

    @staticmethod
    def speed(name: str) -> str:
        """The selector of a part of the Speed test tab."""
        return SPEED.format(name=name)

    def part(self, name: str, tab: str = "txt2img") -> Any:
        """A part of the accordion."""
        return self.page.locator(self.ours(name, tab))

    def show_tab(self, label: str) -> None:
        """Open one of the WebUI's tabs."""
        exact = re.compile(f"^\\s*{re.escape(label)}\\s*$")
        self.page.locator("#tabs > .tab-nav > button", has_text=exact).click()

    def open_accordion(self, tab: str = "txt2img") -> None:
        """Open it, and wait for all of it."""
        self.show_tab(tab)
        self.part("accordion", tab).locator(".label-wrap").click()
        self.wait_for_accordion(tab)

    def wait_for_accordion(self, tab: str = "txt2img") -> None:
        """Until all that is in the opened accordion is shown, and nothing is about to renew it.

        Our script asks for a new table until there is one: several answers may be under way, and
        each takes the place of what had the focus.
        """
        for name in PARTS:
            self.part(name, tab).wait_for(state="visible")
        status = self.part("status", tab).first
        status.get_by_role("button", name="Speed test").wait_for(state="visible")
        end = time.monotonic() + PATIENCE_MS / 1000
        while self._asked:
            assert time.monotonic() < end, f"no answer: {[each.url for each in self._asked]}"
            self.page.wait_for_timeout(50)
        self.page.wait_for_timeout(TRANSITION_MS)

    def choose(self, name: str, label: str) -> None:
        """A choice of a radio of the accordion."""
        self.part(name).get_by_label(label, exact=True).check()

    def wait_for_text(self, selector: str, pattern: str) -> None:
        """Until the text of an element matches."""
        self._wait_for("innerText", selector, pattern)

    def wait_for_value(self, selector: str, pattern: str) -> None:
        """Until what a field holds matches."""
        self._wait_for("value", selector, pattern)

    def _wait_for(self, name: str, selector: str, pattern: str) -> None:
        found = "([n, s, p]) => new RegExp(p).test(document.querySelector(s)?.[n] ?? '')"
        self.wait_for(found, [name, selector, pattern])

    def wait_for(self, expression: str, arg: Any = None) -> None:
        """Until a JavaScript function gives true.

        It is asked at intervals: playwright's own way, before each frame, has the page painted
        sixty times a second meanwhile.
        """
        self.page.wait_for_function(expression, arg=arg, polling=POLLING_MS)

    def wait_for_title(self, pattern: str, tab: str = "txt2img") -> None:
        """Until the accordion's title line matches."""
        self.wait_for_text(f"{self.ours('accordion', tab)} .label-wrap > span", pattern)

    def generate(self) -> str:
        """Press Generate in txt2img and wait; the infotext, which the page shows before the log."""
        timed = "document.querySelector('#html_log_txt2img .performance')?.innerText"
        before = self.page.evaluate(timed)
        self.page.locator("#txt2img_generate").click()
        self.wait_for(f"before => ({timed} ?? null) !== before", before)
        return str(self.page.locator("#html_info_txt2img").first.inner_text())

    def speed_state(self) -> str:
        """The state of the speed test, as this page shows it."""
        return str(
            self.page.locator(f"{self.speed('status')} [data-state]").get_attribute("data-state")
        )

    def wait_for_speed(self, *states: str) -> None:
        """Until this page shows one of them."""
        self.wait_for(
            "([s, states]) => states.includes(document.querySelector(s)?.dataset.state)",
            [f"{self.speed('status')} [data-state]", states],
        )

    def wait_for_button(self, name: str, state: str) -> None:
        """Until one of the speed test's buttons is "enabled" or "disabled".

        gradio 4 shows what one answer changes component by component.
        """
        self.page.locator(f"{self.speed(name)}:{state}").wait_for()

    def wait_for_results(self) -> None:
        """Until all of a result is shown, and nothing of it is still about to move what is below.

        A press whose release finds another part of the page under the mouse is no click.
        """
        self.page.locator(f"{self.speed('results')} table").first.wait_for()
        self.wait_for_value(f"{self.speed('markdown')} textarea", r"\S")  # gradio's last output
        self.wait_for_pictures(0)

    def wait_for_pictures(self, least: int) -> None:
        """Until the speed test shows so many, all of them whole."""
        self.wait_for(LOADED, [f"{self.speed('pictures')} img", least])

    def unfold(self, name: str) -> None:
        """Open one of the parts of a result that come closed."""
        self.wait_for_results()
        head = f"{self.speed(name)} .label-wrap"
        self.page.locator(head).click()
        self.page.locator(f"{head}.open").wait_for()

    def ask_for(self, preset: str, sizes: str = "", what: tuple[str, ...] = ()) -> None:
        """Fill in the form of the speed test. `what`: labels; none leaves all."""
        self.page.locator(self.speed("preset")).get_by_label(preset).check()
        if sizes:
            self.page.locator(f"{self.speed('sizes')} :is(input, textarea)").fill(sizes)
        for box in self.page.locator(f"{self.speed('what')} label").all():
            box.set_checked(not what or box.inner_text().strip() in what)
