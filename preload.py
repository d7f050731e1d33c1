"""Command-line flags. The WebUI calls `preload` before it parses its command line.

No environment variable is set here, above all not TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL: it would
change what torch's own attention computes with, also for pictures made with this extension off.
"""

from __future__ import annotations

import argparse


def preload(parser: argparse.ArgumentParser) -> None:
    """Add our flag to the WebUI's parser."""
    parser.add_argument(
        "--opt-rocm-sd",
        action="store_true",
        help="prefer this extension's attention where several optimizers are asked for by flags",
    )
