"""Runs tests that lie in tests/webui in a process of its own, with the gradio of an environment:
`inside` against the WebUI's double, others likewise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests import sweeps
from tests.webui.environments import CHECKOUT, REAL, Environment, prepare

WEBUI = CHECKOUT / "tests" / "webui"
DOUBLE = WEBUI / "double"
LIMIT_S = 3600


def run_inside(
    folder: str,
    environment: Environment,
    tmp_path: Path,
    *options: str,
    real: Path | None = None,
    first: Environment | None = None,
) -> str:
    """Pytest's output for a folder of tests/webui, all of whose tests must pass.

    Skips where torch or the environment cannot be had. `options` are pytest's. `real`: the checkout
    of a WebUI that is started in place of the double; `options` then say which tests. `first`: an
    environment that hides packages of the other.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    environments = [REAL, environment] if real else [environment]
    environments = [first, *environments] if first else environments
    for reason in map(prepare, environments):
        if reason:
            pytest.skip(reason)
    tests = str(WEBUI / folder)
    places = [*(str(each.folder) for each in environments), *([] if real else [str(DOUBLE)])]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", tests, "--confcutdir", tests, *options]
    command += [] if real else [tests]
    place = f"tests/webui/{folder}/"
    if os.environ.get(sweeps.VARIABLE):
        left_out = [name.removeprefix(place) for name in sweeps.LONG if name.startswith(place)]
        command += [f"--deselect={name}" for name in left_out]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            **(_for_real(real) if real else {}),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # `inside` starts the double some two hundred times
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def _for_real(checkout: Path) -> dict[str, str]:
    """Nothing of ours is left in the checkout."""
    return {
        "ROCM_SD_INSIDE": str(checkout),
        "PYTHONPYCACHEPREFIX": str(REAL.folder / "pycache"),
    }


def check(environment: Environment, tmp_path: Path, *options: str) -> None:
    """All of `inside` pass, none is skipped; skips where the environment cannot be had.

    `options` are pytest's.
    """
    results = tmp_path / "results.xml"
    run_inside("inside", environment, tmp_path, f"--junitxml={results}", *options)
    suite = ET.parse(results).getroot().find("testsuite")
    assert suite is not None
    assert int(suite.get("tests", 0)) > 50
    assert int(suite.get("skipped", 0)) == 0
