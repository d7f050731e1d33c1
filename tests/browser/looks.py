"""What is measured in the page: JavaScript functions, each of the selector of a root."""

from __future__ import annotations

LEAST_CONTRAST = 4.5

_SEEN = """
    const seen = (e) => e.getClientRects().length > 0
        && getComputedStyle(e).visibility !== "hidden";
"""

CONTRAST = (
    "root => {"
    + _SEEN
    + """
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
    const light = (c) => {
        const [r, g, b] = c.map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (e) => {
        const layers = [];
        for (let at = e; at; at = at.parentElement) {
            const layer = rgba(getComputedStyle(at).backgroundColor);
            if (layer[3] > 0) layers.push(layer);
            if (layer[3] === 1) break;
        }
        return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
    };
    const found = [];
    for (const e of document.querySelector(root).querySelectorAll("*")) {
        const text = [...e.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE)
            .map((n) => n.textContent.trim()).join("");
        if (!text || !seen(e) || e.closest("[disabled], style, script, title")) continue;
        if (e.closest(".rocm-sd-speed-unseen")) continue;
        const style = getComputedStyle(e);
        const own = e.closest("[class*='rocm-sd'] *, [class*='rocm-sd'], svg");
        if (!own || e.closest("button.lg, button.sm, .block:not(.padded) > label")) continue;
        const paint = e.closest("svg") ? style.fill : style.color;
        const under = behind(e.closest("svg")?.parentElement ?? e);
        const front = over(rgba(paint), under);
        const [high, low] = [light(front), light(under)].sort((a, b) => b - a);
        found.push({text: text.slice(0, 40), colour: paint, under: under.map(Math.round).join(),
            ratio: Math.round(100 * (high + 0.05) / (low + 0.05)) / 100});
    }
    return found;
}"""
)
"""Our texts that are seen: colour, what is behind, the ratio as WCAG 2 defines it. Controls and
their labels are gradio's."""

OVERFLOW = (
    "root => {"
    + _SEEN
    + """
    const width = document.documentElement.clientWidth;
    const scrolls = (e) => e.parentElement
        && (["auto", "scroll", "hidden"].includes(getComputedStyle(e.parentElement).overflowX)
            || scrolls(e.parentElement));
    const found = document.documentElement.scrollWidth > width ? ["the page scrolls"] : [];
    for (const e of document.querySelector(root).querySelectorAll("*")) {
        if (!seen(e) || scrolls(e)) continue;
        const box = e.getBoundingClientRect();
        if (box.right > width + 1 || box.left < -1) found.push(e.tagName + "." + e.className);
    }
    return found;
}"""
)
"""What reaches beyond the window, without a part around it that scrolls."""

UNNAMED = (
    "root => {"
    + _SEEN
    + """
    const GRADIOS = "[data-testid='number-input']";  // beside a slider, which has the name
    const named = (e) => e.getAttribute("aria-label") || e.title
        || [...(e.labels ?? [])].some((l) => l.textContent.trim())
        || document.getElementById(e.getAttribute("aria-labelledby"))
        || (e.matches("button, a, [role=button]") && e.textContent.trim());
    return [...document.querySelector(root)
        .querySelectorAll("input, textarea, select, button, a[href], [tabindex='0']")]
        .filter((e) => seen(e) && !e.disabled && !e.matches(GRADIOS) && !named(e))
        .map((e) => e.outerHTML.slice(0, 160));
}"""
)
"""Controls that are seen and have no name for a screen reader."""

FOCUS = """root => {
    const e = document.activeElement;
    if (!document.querySelector(root).contains(e)) return null;
    const label = e.labels?.[0]?.textContent ?? e.textContent ?? "";
    const name = (e.getAttribute("aria-label") || label).trim();
    return {name, bottom: e.getBoundingClientRect().bottom + scrollY};
}"""
"""The name of what has the focus, and how far down it ends; null outside of the root."""
