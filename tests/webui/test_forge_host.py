"""tests/webui/forge: the WebUI's double with a Forge's backend, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.webui.environments import FORGE
from tests.webui.inside_run import run_inside


@pytest.mark.slow
def test_forges(tmp_path: Path) -> None:
    output = run_inside("forge", FORGE, tmp_path)
    assert " passed" in output and " skipped" not in output
