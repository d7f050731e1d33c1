"""Ops are listed, and asked which kernels they launch, where there is no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES, HALVES
from tests.ops.unmeasured import told

ROOT = Path(__file__).resolve().parents[2]


def child(code: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, timeout=600, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_without_torch_the_same_is_told() -> None:
    without = child(
        "import json, sys; sys.modules['torch'] = None\n"  # importing it raises
        "from tests.ops.unmeasured import told; print(json.dumps(told()))"
    )
    assert json.loads(without) == told()


def test_a_name_stands_for_torchs_own_once_it_is_used() -> None:
    child(
        "import sys; from lib_rocm_sd.ops.linear import ours, torch as variants;"
        "assert 'torch' not in sys.modules; variants.F.gelu; ours.torch.float16;"
        "import torch; assert ours.torch is variants.torch is torch;"
        "assert variants.F is torch.nn.functional"
    )


def test_dtypes_have_their_names() -> None:
    assert DTYPES["bfloat16"] is torch.bfloat16
    assert {*DTYPE_NAMES} == {*DTYPES.values(), torch.bool}
    assert (torch.float16, torch.bfloat16) == HALVES
    assert torch.int8 not in DTYPE_NAMES
