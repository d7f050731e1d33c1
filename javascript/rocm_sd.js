// Keeps the accordion "ROCm SD Optimization" up to date: clicks its hidden button when the page is
// loaded, after each generation, and every two seconds while kernels are compiled.

(function() {
    "use strict";

    if (typeof onUiLoaded !== "function" || typeof onAfterUiUpdate !== "function") return;

    const POLL_MS = 2000;
    const STALE_MS = 500;
    const TABS = ["txt2img", "img2img"];
    let loaded = false;
    let seen = "";
    let timer = 0;
    let held = null;  // the accordion whose link has the keyboard's focus

    const all = (selector) => Array.from(gradioApp().querySelectorAll(selector));

    function refresh() {
        for (const found of all(".rocm-sd-refresh")) {
            (found.matches("button") ? found : found.querySelector("button")).click();
        }
    }

    // What changes when a generation has ended: the line with its time, and the progress bar.
    function lastGeneration() {
        return TABS.map((tab) => gradioApp().querySelector(`#html_log_${tab}`)?.textContent).join();
    }

    const isGenerating = () => TABS.some((tab) => all(`#tab_${tab} .progressDiv`).length > 0);

    function poll() {
        timer = 0;
        if (!document.hidden) refresh();
        watchCompiling();
    }

    // What the page came with is as old as the server. gradio hears no click until a while after it
    // has shown its buttons, so the first one is repeated until there was an answer.
    function refreshStale(wait) {
        if (!all(".rocm-sd-stale").length) return;
        refresh();
        setTimeout(refreshStale, wait, 2 * wait);
    }

    function watchCompiling() {
        if (!timer && all(".rocm-sd-progress").length) timer = setTimeout(poll, POLL_MS);
    }

    function openTab(label) {
        const tabs = all("#tabs > .tab-nav > button");
        tabs.find((button) => button.textContent.trim() === label)?.click();
    }

    function toggleByKey(event) {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.currentTarget.click();
    }

    // A renewed table has a new link: who is on the old one stays there.
    function keepFocus() {
        if (held && document.activeElement === document.body) {
            held.querySelector(".rocm-sd-link")?.focus({preventScroll: true});
        }
    }

    function watchFocus() {
        document.addEventListener("pointerdown", () => { held = null; }, true);
        document.addEventListener("focusin", (event) => {
            const link = event.composedPath()[0].closest?.(".rocm-sd-link");
            held = link ? link.closest(".rocm-sd") : null;
        });
    }

    // Once for each accordion: the link to the speed test, and the keyboard, which gradio 3 forgot.
    function setUp(accordion) {
        accordion.addEventListener("click", (event) => {
            const link = event.target.closest(".rocm-sd-link");
            if (link) openTab(link.dataset.tab);
        });
        const head = accordion.querySelector(".label-wrap");
        if (head && !head.matches("button")) {
            head.tabIndex = 0;
            head.setAttribute("role", "button");
            head.addEventListener("keydown", toggleByKey);
        }
    }

    // The title line may be cut in a narrow window: all of it is its tooltip.
    function describe(accordion) {
        const head = accordion.querySelector(".label-wrap");
        const text = head?.querySelector("span")?.textContent.trim();
        if (text && head.title !== text) head.title = text;
        if (head && !head.matches("button")) {
            head.setAttribute("aria-expanded", String(head.classList.contains("open")));
        }
    }

    onUiLoaded(() => {
        all(".rocm-sd").forEach(setUp);
        watchFocus();
        loaded = true;
        seen = lastGeneration();
        refreshStale(STALE_MS);
    });

    onAfterUiUpdate(() => {
        if (!loaded) return;
        all(".rocm-sd").forEach(describe);
        keepFocus();
        watchCompiling();
        const now = isGenerating() ? "generating" : lastGeneration();
        if (now !== seen && now !== "generating") refresh();
        seen = now;
    });
})();
