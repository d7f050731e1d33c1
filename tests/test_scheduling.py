"""Which tests one of pytest-xdist's workers has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_xdist_make_scheduler, scope_of


def test_a_worker_has_a_file_a_test_or_the_pages_of_one_gradio() -> None:
    usual = "tests/vae/test_x.py"
    assert scope_of(f"{usual}::test_a[1]") == scope_of(f"{usual}::test_b") == usual
    apart = "tests/ops/conv/test_simt_conv.py::test_a"
    assert scope_of(f"{apart}[1]") == f"{apart}[1]"
    pages = [f"tests/browser/test_x.py::test_a[{each}]" for each in ("a", "b", "b-light")]
    first, second, third = map(scope_of, [*pages[:2], pages[2].replace("x.py", "y.py")])
    assert first != second == third


def test_xdist_asks_for_these() -> None:
    pytest.importorskip("xdist")
    options = {"dist": "loadfile", "tx": ["popen"]}
    config: Any = SimpleNamespace(getvalue=options.__getitem__, option=SimpleNamespace(debug=False))
    page = "tests/browser/test_x.py::test_a[gradio3]"
    assert pytest_xdist_make_scheduler(config, None)._split_scope(page) == scope_of(page)
    options["dist"] = "load"
    assert pytest_xdist_make_scheduler(config, None) is None
