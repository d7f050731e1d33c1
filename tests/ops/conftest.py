"""What tests of several ops ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.runtime import launcher


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tensors so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def launch() -> Launch:
    """On the GPU."""
    device = torch.device("cuda:0")
    arch = identify(device).arch
    assert arch is not None
    return launcher.launcher_for(device, arch)
