"""A folder for the programs that start a Python under a release's C library; a card of paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd.arch import table
from tests.real_hip import debian
from tests.verify import thunk
from tests.verify.amdgpu import launch
from tools import debian_hip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("debian")


@pytest.fixture(scope="session")
def preload(folder: Path) -> Path:
    """The library in the place of libhsakmt, for both releases."""
    try:
        root = debian_hip.libraries("bookworm").parents[2]
        return thunk.built(folder, root / "usr" / "include")
    except (debian_hip.MissingError, thunk.MissingError) as error:
        pytest.skip(str(error))


@pytest.fixture
def card(
    request: Any, preload: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[debian.Card]:
    """Children have this card, a release and a gfx id."""
    release, gfx = request.param
    if reason := launch.missing(gfx):
        pytest.skip(reason)
    library = debian.under(release, folder, monkeypatch, preload) / debian.FILES["hiprtc"]
    paper = thunk.Paper()
    for name, value in paper.environment(gfx).items():
        monkeypatch.setenv(name, value)
    yield debian.Card(release, table()[gfx], paper, str(library))
    assert not [line for line in paper.notes() if "not supported" in line]
    paper.end()
