"""The WebUI's script with a torch that is too old: one line, and nothing else of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """
import json, runpy, sys, torch
torch.__version__ = sys.argv[1]
del torch.compiler
sys.path.insert(0, sys.argv[2])
there = runpy.run_path(sys.argv[2] + "/scripts/rocm_sd.py")
ours = [name for name in sys.modules if name.startswith("lib_rocm_sd.hosts.webui")]
print(json.dumps([[name for name in there if name.startswith("Rocm")], ours]))
"""


@pytest.mark.parametrize("version", ["2.0.1+rocm5.4.2", "1.13.1"])
def test_one_line_names_the_version_that_is_needed(version: str) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, version, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.stderr == ""
    line, answer = done.stdout.splitlines()
    assert f"torch {version} is too old, 2.1 or newer is needed" in line
    assert json.loads(answer) == [[], []]
