"""The cache folder in the settings: where it is, its size, and buttons to empty and refill it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.hosts.ui.status import counted

ABOUT = (
    "Kernels are compiled once on this machine and kept in the cache folder. If you empty it, they "
    "are compiled again, and the level Performance measures again."
)
CLEAR, AGAIN = "Clear the cache", "Compile again"


class CachePanel:
    """Makes the panel where the WebUI makes a setting's component.

    `clear` and `again` do what the buttons say and return a sentence about it.
    """

    def __init__(self, clear: Callable[[], str], again: Callable[[], str]) -> None:
        self._clear = clear
        self._again = again

    def __call__(self, **setting: Any) -> Any:
        """The component that stands for the setting; `setting` as the WebUI's constructors get."""
        import gradio as gr

        about = gr.HTML(setting.get("value", ABOUT), elem_id=setting.get("elem_id"))
        where = gr.HTML(value=contents, elem_id="rocm_sd_cache_contents")
        with gr.Row():
            clear = gr.Button(CLEAR, elem_id="rocm_sd_cache_clear")
            again = gr.Button(AGAIN, elem_id="rocm_sd_cache_again")
        clear.click(fn=lambda: contents(self._clear()), outputs=[where], queue=False)
        again.click(fn=lambda: contents(self._again()), outputs=[where], queue=False)
        return about


def contents(said: str = "") -> str:
    """Folder and size as HTML, and what a button's action said."""
    folder = cache.directory()
    why = "; ".join(cache.reasons())
    lines = [
        f"Folder: <code>{escape(str(folder))}</code>" if folder else "There is no cache folder.",
        f"Size: {size(cache.size_bytes())}",
        escape(why),
        f'<span role="status">{escape(said)}</span>' if said else "",
    ]
    return f'<div class="rocm-sd-cache">{"<br>".join(line for line in lines if line)}</div>'


def size(number: int) -> str:
    """'0 bytes', '12 KiB', '3.4 MiB'."""
    if number < 1024:
        return counted(number, "byte")
    if number < 1 << 20:
        return f"{number / 1024:.0f} KiB"
    return f"{number / (1 << 20):.1f} MiB"
