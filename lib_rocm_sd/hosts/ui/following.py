"""A part of a page that follows something on the server, as gradio shows it, from 3.41 on.

A page names what it shows by a token; only what has changed since is made and sent again. So a page
that is closed and opened again, or a second one, shows the same as the first. It asks again by
itself, through a button that nobody sees: twice a second while something runs, rarely else, and
only while that part is looked at. No event waits, none is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HIDDEN = "rocm-sd-speed-unseen"

POLL = """
() => {
  const page = () => {
    const app = document.querySelector("gradio-app");
    return (app && app.shadowRoot) || document;
  };
  const find = (name) => page().querySelector("#PREFIX_" + name);
  const first = find("status");
  if (!first || first.dataset.rocmSdPolled) { return; }
  first.dataset.rocmSdPolled = "yes";
  let asked = -1e9, answered = "never";
  const timer = setInterval(() => {
    const status = find("status"), button = find("poll");
    if (status !== first) { clearInterval(timer); return; }
    if (!button || document.hidden || status.offsetParent === null) { return; }
    const mark = status.querySelector("[data-tick]");
    const tick = mark ? mark.dataset.tick : "";
    const past = Date.now() - asked;
    const rest = mark && mark.dataset.state === "running" ? 450 : mark ? 3000 : 450;
    if (past < (tick === answered ? 15000 : rest)) { return; }
    answered = tick;
    asked = Date.now();
    button.click();
  }, 250);
}
"""
"""PREFIX begins the ids of the part's elements. `answered`: the tick of the answer before the last
question; while it stands, one is awaited.
"""


def asking(gr: Any, prefix: str) -> tuple[Any, Any]:
    """The button by which the page asks again, and the token of what it shows."""
    with gr.Column(elem_classes=[HIDDEN]):  # gradio would draw a line around what is hidden in it
        poll = gr.Button("Ask again", elem_id=f"{prefix}_poll", elem_classes=[HIDDEN])
        token = gr.Textbox(show_label=False, elem_id=f"{prefix}_token", elem_classes=[HIDDEN])
    for component in (poll, token):
        component.do_not_save_to_config = True  # the WebUI's defaults of controls
    return poll, token


def follow(gr: Any, blocks: Any, prefix: str) -> None:
    """Have the page ask when it is loaded, and again; its status has `data-tick`."""
    script = "_js" if gr.__version__.startswith("3.") else "js"
    blocks.load(fn=None, **{script: POLL.replace("PREFIX", prefix)})


def on(event: Callable[..., Any], fn: Callable[..., Any], inputs: Any, outputs: Any) -> None:
    """An event that no queue and no other event holds up, and that is not part of the API."""
    import gradio as gr

    private = {"api_name": False} if major(gr) < 6 else {"api_visibility": "private"}
    event(fn=fn, inputs=inputs, outputs=outputs, queue=False, show_progress="hidden", **private)


def major(gr: Any) -> int:
    """The first number of this gradio's version."""
    return int(gr.__version__.split(".")[0])
