"""Runs tests/webui/inside against the WebUI's double, with the gradio of an environment."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.webui.environments import CHECKOUT, Environment, prepare

WEBUI = CHECKOUT / "tests" / "webui"
LIMIT_S = 600


def check(environment: Environment, tmp_path: Path) -> None:
    """All of them pass, none is skipped; skips where the environment cannot be had."""
    pytest.importorskip("torch", reason="torch is not installed")
    reason = prepare(environment)
    if reason:
        pytest.skip(reason)
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(WEBUI / "inside"), "--confcutdir", str(WEBUI / "inside")]
    command += [f"--junitxml={results}", str(WEBUI / "inside")]
    path = os.pathsep.join([str(environment.folder), str(WEBUI / "double")])
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # the double is started anew some two hundred times
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    suite = ET.parse(results).getroot().find("testsuite")
    assert suite is not None
    assert int(suite.get("tests", 0)) > 50
    assert int(suite.get("skipped", 0)) == 0
