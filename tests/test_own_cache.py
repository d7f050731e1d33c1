"""The suite and the user's own cache have nothing to do with each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = """
import os, subprocess, sys
from pathlib import Path
from lib_rocm_sd import cache
AT_IMPORT = cache.directory()
cache.write("compilers", "probe", b"collected")
ASKED = "from lib_rocm_sd import cache; print(cache.directory())"

def test_is_elsewhere():
    users = Path(os.environ["PROBE_USERS"])
    here = cache.directory()
    assert users not in AT_IMPORT.parents and users not in here.parents
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(here)
"""


@pytest.mark.parametrize("workers", [[], ["--workers", "1"]], ids=["alone", "worker"])
def test_collecting_leaves_the_users_cache_alone(tmp_path: Path, workers: list[str]) -> None:
    users = tmp_path / "users"
    users.mkdir(mode=0o700)
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider", *workers, "--rootdir", str(tmp_path), str(probe)]
    variables = dict.fromkeys(("XDG_CACHE_HOME", "ROCM_SD_CACHE_DIR", "PROBE_USERS"), str(users))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(users.iterdir()) == []
