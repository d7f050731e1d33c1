"""Our blocks in a real WebUI's UNets, whose checkout ROCM_SD_WEBUI names: tools/unet_networks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.webui.environments import A1111, CHECKOUT, REAL, prepare

LIMIT_S = 3600


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ldm", "sgm", "others"])
def test_no_row_is_wrong(part: str) -> None:
    place = os.environ.get("ROCM_SD_WEBUI")
    if not place:
        pytest.skip("ROCM_SD_WEBUI names no checkout of a WebUI")
    assert (Path(place) / "modules" / "sd_hijack.py").is_file(), f"no WebUI is at {place}"
    for reason in map(prepare, (REAL, A1111)):
        if reason:
            pytest.skip(reason)
    folders = (CHECKOUT, REAL.folder, A1111.folder)
    done = subprocess.run(
        [sys.executable, "-m", "tools.unet_networks", "--part", part],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " rows, 0 wrong" in done.stdout
