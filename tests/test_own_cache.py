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
    now = cache.directory()
    assert users not in {*AT_IMPORT.parents, *now.parents}
    assert (now == AT_IMPORT) == (os.environ["PROBE_WORKERS"] == "0")  # each worker has its own
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(now)
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "ROCM_SD_CACHE_DIR"])
def test_collecting_leaves_the_users_cache_alone(
    tmp_path: Path, variable: str, workers: str
) -> None:
    users = tmp_path / "users"
    users.mkdir(mode=0o700)
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE, encoding="utf-8")
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "tests.conftest",
                "-p",
                "no:cacheprovider",
            ),
            *("--workers", workers, "--rootdir", str(tmp_path), str(probe)),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            variable: str(users),
            "PROBE_USERS": str(users),
            "PROBE_WORKERS": workers,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(users.iterdir()) == []
