"""`demo --ui`: the Speed test tab alone, as a page of this machine, with the little model."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from lib_rocm_sd.demo.pipeline import ROOT

ADDRESS = "127.0.0.1"
FIRST_PORT, LAST_PORT = 7870, 7899
"""Tried in this order where no port is asked for; the WebUI's own is 7860."""
STYLE = ROOT / "style.css"
FOLDER = "speedtest"
FONTS = ("system-ui", "sans-serif")
"""Fonts of the machine itself: gradio fetches its own from elsewhere."""


def main(args: argparse.Namespace) -> int:
    """Serve the page until interrupted. 2 where it cannot be served."""
    problem = _missing()
    if problem:
        return _refuse(problem)
    try:
        port = free_port(args.port)
    except (OSError, OverflowError) as error:
        asked = args.port or f"{FIRST_PORT} to {LAST_PORT}"
        return _refuse(f"port {asked} cannot be had: {getattr(error, 'strerror', None) or error}")
    page, options = make(args.device, args.out / FOLDER)
    page.launch(
        server_name=ADDRESS,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        inbrowser=not args.no_browser,
        **options,
    )
    print(f"Speed test: http://{ADDRESS}:{port} (Ctrl+C ends it)", flush=True)
    try:
        page.block_thread()
    finally:
        from lib_rocm_sd.lab.speed_session import session

        session.cancel()
    return 0


def _refuse(problem: str) -> int:
    print(f"demo --ui: {problem}", file=sys.stderr)
    return 2


def _missing() -> str:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        name = error.name or "gradio"
        return f"this needs {name}: use `python3 install.py demo --ui`, which installs it"
    return ""


def free_port(asked: int | None) -> int:
    """`asked`, or the first free of ours, or any. OSError where that cannot be had."""
    candidates = [asked] if asked is not None else [*range(FIRST_PORT, LAST_PORT + 1), 0]
    for port in candidates:
        try:
            with socket.socket() as probe:
                if os.name != "nt":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((ADDRESS, port))
                return int(probe.getsockname()[1])
        except OSError:
            if port == candidates[-1]:
                raise
    raise AssertionError("unreachable")


def make(device: str | None, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The page as a gr.Blocks, and what its launch takes beside address and port."""
    import gradio as gr
    import torch

    from lib_rocm_sd.demo.standalone import Standalone
    from lib_rocm_sd.hosts.ui import speed_tab
    from lib_rocm_sd.hosts.ui.speed_view import View
    from lib_rocm_sd.lab.speed_session import session

    side = Standalone(torch.device(device) if device else None, folder)
    theme = gr.themes.Default(font=FONTS, font_mono=("monospace",))
    looks = {"theme": theme, "css": STYLE.read_text(encoding="utf-8")}
    newest = int(gr.__version__.split(".")[0]) >= 6
    with gr.Blocks(title=TITLE, analytics_enabled=False, **({} if newest else looks)) as page:
        gr.HTML(f"<h2>{TITLE}</h2>")
        speed_tab.content(gr, page, View(session, side))
    return page, looks if newest else {"show_api": False}


TITLE = "ROCm SD: speed test"
