"""Which tests one of pytest-xdist's workers has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_xdist_make_scheduler


def test_a_worker_has_a_file_a_test_or_the_pages_of_one_gradio() -> None:
    pytest.importorskip("xdist")
    options = {"dist": "loadfile", "tx": ["popen"]}
    config: Any = SimpleNamespace(getvalue=options.__getitem__, option=SimpleNamespace(debug=False))
    scope = pytest_xdist_make_scheduler(config, None)._split_scope
    usual = "tests/vae/test_x.py"
    assert scope(f"{usual}::test_a[1]") == scope(f"{usual}::test_b") == usual
    apart = "tests/ops/conv/test_simt_conv.py::test_a"
    assert scope(f"{apart}[1]") == f"{apart}[1]"
    pages = [f"tests/browser/test_{name}.py::test_a" for name in "xy"]
    first, second = ({scope(f"{page}[{gradio}-1]") for page in pages} for gradio in ("a", "b"))
    assert len(first) == len(second) == 1 and first != second
    options["dist"] = "load"
    assert pytest_xdist_make_scheduler(config, None) is None
