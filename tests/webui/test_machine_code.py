"""Runs tests/webui/machine: the WebUI's double on a GPU whose machine code is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.webui.environments import A1111
from tests.webui.inside_run import run_inside


@pytest.mark.slow
def test_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("tinygrad", reason="tinygrad, which decodes AMD's instructions, is missing")
    from tests.verify.amdgpu.launch import missing

    why = missing("gfx1100")
    if why:
        pytest.skip(why)
    output = run_inside("machine", A1111, tmp_path)
    assert " skipped" not in output and "3 passed" in output
