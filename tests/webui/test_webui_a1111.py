"""tests/webui/inside with A1111's gradio, but for the UNet's, which test_webui_a1111_unet.py has.

Two files: workers take tests by the file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.webui.environments import A1111
from tests.webui.inside_run import check


@pytest.mark.slow
def test_webui(tmp_path: Path) -> None:
    check(A1111, tmp_path, "-k", "not unet")
