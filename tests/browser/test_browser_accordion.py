"""The accordion and the settings, used as a person uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.browser.conftest import Open
from tests.browser.pages import Visit

INFOTEXT = (
    "a red circle\nSteps: 3, CFG scale: 5, Seed: 1, Size: 64x64, "
    'ROCm SD: "Memory, attention: rocm_sd", ROCm SD VAE: "Always banded, 512 MiB, bands"'
)
HOSTILE = "<img src=x onerror='window.hostile = 1'><script>window.hostile = 1</script>"


def values(page: Visit) -> tuple[bool, str, str, str]:
    """Enable, level, VAE, budget, as the page shows them."""
    checked = "input => input.checked"
    level = [
        r for r in page.part("level").locator("label").all() if r.evaluate("l => l.control.checked")
    ]
    vae = [
        r for r in page.part("vae").locator("label").all() if r.evaluate("l => l.control.checked")
    ]
    return (
        page.part("enable").locator("input").evaluate(checked),
        level[0].inner_text().strip(),
        vae[0].inner_text().strip(),
        page.part("vae_budget").locator("input").input_value(),
    )


def test_it_is_closed_and_tells_the_state_in_its_title(visit: Open) -> None:
    page = visit()
    for tab in ("txt2img", "img2img"):
        page.show_tab(tab)
        page.part("accordion", tab).wait_for(state="visible")
        assert not page.part("level", tab).is_visible()
        page.wait_for_title("^ROCm SD Optimization: Auto · attention on gfx1100", tab)
        page.open_accordion(tab)
        assert page.part("status", tab).first.locator("table").is_visible()


def test_each_control_changes_what_is_said(visit: Open) -> None:
    page = visit()
    page.open_accordion()
    assert values(page) == (True, "Auto", "Auto", "0")
    page.part("enable").locator("input").uncheck()
    page.wait_for_title("Optimization: off$")
    page.part("enable").locator("input").check()
    for level, words in (
        ("Memory", "as little memory"),
        ("Performance", "Measures"),
        ("Auto", "Likely"),
    ):
        page.choose("level", level)
        page.wait_for_title(f"Optimization: {level} ·")
        page.wait_for_text(page.ours("explanation"), words)
    page.choose("vae", "Off")
    page.wait_for_title("VAE off$")
    page.wait_for_text(page.ours("status"), "VAE decode\\s+the WebUI's own code\\s+VAE is Off")
    page.choose("vae", "Always banded")
    page.wait_for_title("VAE in bands$")
    page.part("vae_budget").locator("input").fill("512")
    page.part("vae_budget").locator("input").blur()
    assert values(page) == (True, "Auto", "Always banded", "512")


def test_a_generation_takes_the_values_and_renews_the_table(visit: Open) -> None:
    page = visit()
    page.open_accordion()
    page.choose("level", "Memory")
    assert 'ROCm SD: "Memory, attention: rocm_sd"' in page.generate()
    page.wait_for_text(page.ours("status"), "Attention\\s+our kernel, \\d+ calls")
    page.part("enable").locator("input").uncheck()
    assert "attention: rocm_sd" not in page.generate()


def test_the_unets_blocks_are_counted(visit: Open, artefact: Callable[[str], Path]) -> None:
    page = visit()
    page.open_accordion()
    page.choose("unet", "Auto")
    page.wait_for_title("UNet")
    assert 'ROCm SD UNet: "Auto, 17 of 17 blocks' in page.generate()
    status = page.ours("status")
    page.wait_for_text(status, "UNet, residual blocks\\s+7 of 7 are ours")
    page.page.screenshot(path=artefact("accordion-unet"), full_page=True, animations="disabled")
    page.choose("unet", "Off")
    page.wait_for_text(status, "UNet blocks\\s+the WebUI's own code\\s+UNet is Off")
    prompt = page.page.locator("#txt2img_prompt textarea")
    prompt.fill('a red circle\nSteps: 3, ROCm SD: "Auto", ROCm SD UNet: "Auto, 3 of 3 blocks"')
    page.page.locator("#txt2img_paste").click()
    page.wait_for_text(status, "UNet, residual blocks")


def test_an_infotext_is_pasted(visit: Open) -> None:
    page = visit()
    page.open_accordion()
    page.page.locator("#txt2img_prompt textarea").fill(INFOTEXT)
    page.page.locator("#txt2img_paste").click()
    page.wait_for_title("Memory · .*VAE in bands$")
    assert values(page) == (True, "Memory", "Always banded", "512")
    page.page.locator("#txt2img_prompt textarea").fill("a red circle\nSteps: 3, ROCm SD: off")
    page.page.locator("#txt2img_paste").click()
    page.wait_for_title("off$")
    assert values(page)[0] is False


def test_hostile_words_are_only_words(visit: Open) -> None:
    page = visit()
    page.open_accordion()
    prompt = page.page.locator("#txt2img_prompt textarea")
    prompt.fill(f'{HOSTILE}\nSteps: 3, ROCm SD: "{HOSTILE}", ROCm SD VAE: "Auto, {HOSTILE}"')
    page.page.locator("#txt2img_paste").click()
    page.wait_for_value("#txt2img_prompt textarea", r"^(?![\s\S]*Steps:)[\s\S]*onerror")
    page.generate()
    assert page.page.evaluate("window.hostile") is None
    assert values(page)[1:3] == ("Auto", "Auto")


def test_the_link_opens_the_speed_test(visit: Open) -> None:
    page = visit()
    page.open_accordion()
    page.part("status").first.get_by_role("button", name="Speed test").click()
    page.page.locator(page.speed("run")).wait_for(state="visible")


def test_the_keyboard_stays_on_the_link_when_the_table_is_renewed(visit: Open) -> None:
    """As every two seconds while kernels are compiled."""
    page = visit()
    page.open_accordion()
    link = page.page.locator(f"{page.ours('status')} .rocm-sd-link")
    vae = page.part("vae")
    link.focus()
    link.evaluate("link => { link.dataset.old = 'yes'; }")
    vae.get_by_label("Off", exact=True).evaluate(
        "input => input.click()"
    )  # moves no focus, and makes another table
    page.wait_for_title("VAE off$")
    page.page.locator(f"{page.ours('status')} .rocm-sd-link:not([data-old])").wait_for()
    page.wait_for("document.activeElement.matches('.rocm-sd-link:not([data-old])')")
    link.evaluate("link => { link.dataset.old = 'yes'; }")
    page.page.locator(f"{page.ours('enable')} input").focus()
    vae.get_by_label("Auto", exact=True).evaluate("input => input.click()")
    page.wait_for_title("Auto · (?!.*VAE off)")
    page.page.locator(f"{page.ours('status')} .rocm-sd-link:not([data-old])").wait_for()
    page.wait_for_accordion()
    assert page.page.evaluate("document.activeElement.type") == "checkbox"


def test_the_settings_hold_at_once(visit: Open) -> None:
    page = visit()
    page.show_tab("Settings")
    box = page.page.locator("#setting_rocm_sd_operations").get_by_label("Attention")
    for allowed, words in ((False, "excludes attention"), (True, "our kernel")):
        page.show_tab("Settings")
        box.set_checked(allowed)
        page.page.locator("#settings_submit").click()
        page.wait_for_text("#settings_result", "1 settings changed: rocm_sd_operations")
        page.load()
        page.open_accordion()
        page.wait_for_text(page.ours("status"), words)
        box = page.page.locator("#setting_rocm_sd_operations").get_by_label("Attention")


def test_the_cache_can_be_cleared(visit: Open) -> None:
    page = visit()
    page.show_tab("Settings")
    page.wait_for_text("#rocm_sd_cache_contents", "Size: \\d")
    page.page.locator("#rocm_sd_cache_clear").click()
    page.wait_for_text("#rocm_sd_cache_contents", "Removed \\d.*\\. What is loaded stays in use")
