"""What tests compile is kept, whole, for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import compiled


def test_an_entry_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "compiled")
    compiled._prune.cache_clear()
    times = []

    def make(made: Path) -> None:
        times.append(1)
        (made / "code.co").write_bytes(b"1")
        if len(times) == 1:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        compiled.entry("k", make)
    for _ in range(2):
        assert (compiled.entry("k", make) / "code.co").read_bytes() == b"1"
    assert len(times) == 2 and [each.name for each in (tmp_path / "compiled").iterdir()] == ["k"]
    compiled._prune.cache_clear()


def test_what_is_old_or_too_much_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_BYTES", 100)
    now = 10.0 * compiled.KEPT_S
    names = ("new", "large", "next", "old")
    folders = [tmp_path / name for name in names]
    used = (now, now - 1, now - 2, now - 2 * compiled.KEPT_S)
    sizes = (40, 50, 20, 1)
    gone = compiled._superfluous(list(zip(used, sizes, folders, strict=True)), now)
    assert [each.name for each in gone] == ["next", "old"]
