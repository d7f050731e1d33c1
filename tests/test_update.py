"""What docs/releasing.md promises to users who update."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.runtime import compilers
from tools import try_update
from tools.try_update import ROOT, Found, Start

DOCUMENT = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
GOOD = Found(Start(34, 0), Start(0, 34), Start(14, 20), [], import_stayed=False)


def test_an_update_compiles_what_changed_and_keeps_what_is_the_users(tmp_path: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout, or there is no git")
    survey = compilers.survey(arch.table()["gfx1100"])
    if all(survey.values()):
        pytest.skip("no compiler here can serve gfx1100")
    found = try_update.attempt(tmp_path, try_update.OP, "gfx1100")
    assert try_update.as_documented(found), found
    made, cached = found.other_kernel.made, found.other_kernel.cached
    assert 0 < made < found.first.made == made + cached, "some come from another file"


@pytest.mark.parametrize(
    "found",
    [
        replace(GOOD, first=Start(0, 0)),
        replace(GOOD, same_kernels=Start(1, 33)),
        replace(GOOD, other_kernel=Start(0, 34)),
        replace(GOOD, lost=["config.json"]),
        replace(GOOD, import_stayed=True),
    ],
)
def test_anything_else_is_not_as_documented(found: Found) -> None:
    assert try_update.as_documented(GOOD)
    assert not try_update.as_documented(found)


def test_names_that_users_have_saved_are_those_of_the_document() -> None:
    """A renamed setting loses what users chose: it needs a line in the changelog, and here."""
    pytest.importorskip("torch")
    from lib_rocm_sd.hosts.ui import options
    from lib_rocm_sd.hosts.webui import settings

    keys = {value for name, value in vars(settings).items() if name.endswith("_KEY")}
    saved = keys | {value for name, value in vars(options).items() if name.endswith("_KEY")}
    assert len(saved) == 12
    assert [name for name in sorted(saved) if f"`{name}`" not in DOCUMENT] == []
