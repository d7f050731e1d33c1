"""Runs tests/webui/machine: the WebUI's double on a GPU whose machine code is executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.webui.environments import A1111, CHECKOUT, prepare

MACHINE = CHECKOUT / "tests" / "webui" / "machine"
LIMIT_S = 600


@pytest.mark.slow
def test_machine_code(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("tinygrad", reason="tinygrad, which decodes AMD's instructions, is missing")
    from tests.amdgpu.launch import missing

    why = missing("gfx1100") or prepare(A1111)
    if why:
        pytest.skip(why)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(MACHINE), "--confcutdir", str(MACHINE), str(MACHINE)]
    path = os.pathsep.join([str(A1111.folder), str(CHECKOUT / "tests" / "webui" / "double")])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout and "3 passed" in done.stdout
