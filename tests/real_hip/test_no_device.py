"""The real HIP runtime on a machine without an AMD GPU: what it says, and that it is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lib_rocm_sd.arch import PACKAGE, table
from lib_rocm_sd.runtime import clang, process
from tests.real_hip import debian
from tests.runtime.test_hip_library import STATUSES
from tests.trials import scaling
from tests.trials.world import World
from tools import debian_hip

SAID = {
    "bookworm": "hipSetDevice: hipErrorInvalidDevice (101)",
    "trixie": "hipSetDevice: no ROCm-capable device is detected (100)",
}
"""HIP 5.2 has names in place of sentences, and no device is to it a wrong number of one."""
VERSIONS = {"bookworm": 502, "trixie": 507}
ASKED = """
import ctypes, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import hip, layouts
from lib_rocm_sd.runtime.card import HipCard
def trouble(call, *arguments):
    try:
        call(*arguments)
    except LaunchError as error:
        return str(error)
layouts.ROOT = Path(sys.argv[2])
library = hip.library()
driver, count, version = hip.HipDriver(library), ctypes.c_int(7), ctypes.c_int()
library.hipGetDeviceCount(ctypes.byref(count)), library.hipRuntimeGetVersion(ctypes.byref(version))
print(json.dumps({
    "path": str(hip.loaded_runtime()),
    "version": version.value,
    "devices": count.value,
    "troubles": [
        trouble(HipCard, library, 0),
        trouble(driver.load, b"code"),
        trouble(driver.function, 1, "a"),
    ],
    "texts": [driver._text(int(status)).decode() for status in sys.argv[3:]],
}))
"""


@pytest.fixture(params=list(SAID))
def release(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Children run under its C library."""
    debian.under(request.param, folder, monkeypatch)
    return str(request.param)


@pytest.fixture
def world(release: str, fresh_cache: Path, tmp_path: Path) -> Iterator[World]:
    """A program behind its gate, whose trials' child loads the real library."""
    row = table()["gfx1100"]
    if all(each.refusals(row) for each in (*clang.path_clangs(), *clang.zig_clangs())):
        pytest.skip("no clang for gfx1100")
    library = debian_hip.libraries(release) / debian.FILES["hiprtc"]
    made = World(scaling.place(library), tmp_path / "journal")
    yield made
    made.gate.stop()
    made.settled()


def test_a_trial_is_not_made_and_why_is_shown(release: str, world: World) -> None:
    assert world.run() == "torch"
    world.settled()
    assert world.run() == "torch" and world.launch.count == 0
    assert SAID[release] in world.why()
    assert [line for line in world.said if SAID[release] in line]


def test_the_runtime_finds_it_and_gives_its_words(release: str) -> None:
    root = debian_hip.libraries(release).parents[2]
    words = [sys.executable, "-I", "-c", ASKED, str(PACKAGE.parent), str(root), *map(str, STATUSES)]
    done = process.run(words, limit_s=debian.LIMIT_S)
    assert not done.trouble, done.output
    answer = json.loads(done.output)
    assert Path(answer["path"]).parent == debian_hip.libraries(release).resolve()
    assert (answer["version"] // 10**5, answer["devices"]) == (VERSIONS[release], 0)
    calls = ("hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction")
    assert answer["troubles"] == [SAID[release].replace(calls[0], call) for call in calls]
    if release == "trixie":  # the double says what HIP says
        texts = dict(zip(STATUSES, answer["texts"], strict=True))
        assert texts == STATUSES
