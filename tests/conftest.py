"""Shared by all tests: nothing is written outside of pytest's folders.

GPU tests skip with the engine's reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache folder is one of this session's; a test may still name another."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ROCM_SD_CACHE_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setenv("LOCALAPPDATA", folder)
        yield


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder for one test only."""
    from lib_rocm_sd import cache

    folder = tmp_path / "cache"
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(folder))
    cache.reset()
    yield folder
    monkeypatch.undo()
    cache.reset()


@pytest.fixture
def brief_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Performance measures for a tenth of a second per problem only."""
    from lib_rocm_sd import tune

    monkeypatch.setattr(tune, "measure", partial(tune.measure, budget_s=0.1))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where the engine cannot use one, for the reason it gives."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    from lib_rocm_sd.engine import engine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = engine.usable(device)
    if reasons:
        pytest.skip("; ".join(reasons))
