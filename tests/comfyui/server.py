"""A real ComfyUI on the CPU, with the tests' own custom node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import comfyui_process
from tools.comfyui_process import Server

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(__file__).parent / "inside" / "tiny_models"


@contextmanager
def running(
    checkout: Path,
    python: str,
    folder: Path,
    *,
    ours: bool = True,
    page: Path | None = None,
    **environment: str,
) -> Iterator[Server]:
    """ComfyUI of `checkout`, all that it writes under `folder`; `ours`: with this custom node.
    `page`: the folder of its page, where a browser is to see it.
    """
    nodes = {"tiny_models": TINY, **({"rocm_sd": ROOT} if ours else {})}
    known = {**environment, "PYTHONPATH": ""}
    started = comfyui_process.running(checkout, python, folder, nodes, environment=known, page=page)
    with started as server:
        yield server
