"""Which tests a worker has at a time."""

from __future__ import annotations

from tests.conftest import scope_of


def test_a_worker_has_a_file_a_test_a_folder_or_the_pages_of_one_gradio() -> None:
    usual = "tests/vae/test_x.py"
    assert scope_of(f"{usual}::test_a[1]") == scope_of(f"{usual}::test_b") == usual
    apart = "tests/ops/conv/test_simt_conv.py::test_a"
    assert scope_of(f"{apart}[1]") == f"{apart}[1]"
    ranks = [f"tests/distributed/test_{each}.py::test_a[2 ranks]" for each in "xy"]
    assert scope_of(ranks[0]) == scope_of(ranks[1])
    pages = [f"tests/browser/test_x.py::test_a[{each}]" for each in ("a", "b", "b-light")]
    first, second, third = map(scope_of, [*pages[:2], pages[2].replace("x.py", "y.py")])
    assert first != second == third
