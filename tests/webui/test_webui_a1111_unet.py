"""What tests/webui/inside has of the UNet, with A1111's gradio: see test_webui_a1111.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.webui.environments import A1111
from tests.webui.inside_run import check


@pytest.mark.slow
def test_webui(tmp_path: Path) -> None:
    check(A1111, tmp_path, "-k", "unet")
