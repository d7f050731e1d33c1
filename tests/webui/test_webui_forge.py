"""tests/webui/inside with Forge's gradio. A file of its own: workers take tests by the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.webui.environments import FORGE
from tests.webui.inside_run import check


@pytest.mark.slow
def test_webui(tmp_path: Path) -> None:
    check(FORGE, tmp_path)
