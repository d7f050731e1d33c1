"""A child of the test beside ZLUDA that is given the stand-in's nvcuda, and needs no torch.

The first argument is its file. It has the child's protocol, and of the steps the one that calls
nvcuda first, which ROCM_SD_FAKE_ZLUDA lets crash or hang.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lib_rocm_sd.runtime.zluda import Nvcuda
from lib_rocm_sd.trials import child


class Tester:
    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say

    def test(self, head: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        self._say({"kind": "trying", "problem": "versions"})
        unknown = Nvcuda(ctypes.CDLL(sys.argv[1])).unknown()
        if unknown:
            return {"outcome": "refused", "reason": f"versions: {unknown}"}
        return {"outcome": "passed"}


def opened(head: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> Tester:
    if head["torch"] != "zluda":
        raise RuntimeError("not as the parent asks")
    return Tester(say)


sys.modules["lib_rocm_sd.trials.torch_child"] = ModuleType("torch_child")
child.opened = opened
raise SystemExit(child.main())
