"""Shared by all tests: nothing is written outside of pytest's folders.

GPU tests skip with the engine's reason.
"""

from __future__ import annotations

from collections.abc import Iterator

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
