"""The double's start as in `inside`, on a GPU whose machine code is executed: amdgpu_host."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path.append(str(CHECKOUT))


def _inside() -> Any:
    path = Path(__file__).resolve().parents[1] / "inside" / "conftest.py"
    spec = importlib.util.spec_from_file_location("inside_conftest", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


inside = _inside()
start = inside.start
pytest_collection_finish = inside.pytest_collection_finish


class MachineGpu:
    """In place of `inside`'s FakeGpu: nothing of the extension is replaced but where HIP lies."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.hip: Any = None

    def install(self, folder: Path) -> None:
        """Before the WebUI executes the extension's script, whose library is in `folder`."""
        from tests.verify.amdgpu_host import standing_in

        inside.forget()
        before = sys.path
        sys.path = [str(folder), *before]
        try:
            support: Any = importlib.import_module("lib_rocm_sd.shipped")
            support.shipped = lambda arch, names: {}  # compile what is used, when it is used
            self.hip = self._stack.enter_context(standing_in("gfx1100", self._folder))
        finally:
            sys.path = before


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineGpu]:
    """A gfx1100. What the executor refuses fails the test when it ends."""
    with ExitStack() as stack:
        yield MachineGpu(stack, tmp_path_factory.mktemp("hip"))
