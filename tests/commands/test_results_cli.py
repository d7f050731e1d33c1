"""`python -m lib_rocm_sd results`: a folder of strangers' files as a table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lib_rocm_sd import __main__
from lib_rocm_sd.commands import results
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_result import Document
from tests.lab.speedtest_doubles import document


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document().write(tmp_path)
    document("Radeon RX 7600", 4.0, gfx="gfx1102", power_limit_w=165.0).write(tmp_path)
    assert __main__.main(["results", str(tmp_path), "--reference", "7900"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert "| Card | System | SD1.5 512x512 self |" in lines
    assert (
        "| Radeon RX 7600 (gfx1102) | Linux, torch 2.9.0, 165 W | 8.00 ms, 1.50x, 25.0 % |" in lines
    )
    assert "| Radeon RX 7900 XTX (gfx1100) | Linux, torch 2.9.0 | 2.00 ms, 1.50x, 100 % |" in lines
    assert "| Radeon RX 7600 (gfx1102) | Linux, torch 2.9.0, 165 W | 8.00 s, 1.50x |" in lines
    assert "in % of Radeon RX 7900 XTX (gfx1100)'s" in printed.out
    assert "a note" not in printed.out


def test_the_newest_of_a_machine_counts(tmp_path: Path) -> None:
    for date, times in (("2026-02-01", 1.0), ("2026-03-01", 2.0), ("2026-01-01", 3.0)):
        made = document(times=times)
        made.date = f"{date}T00:00:00Z"
        made.write(tmp_path)
    (found,), refused = results.gathered(tmp_path)
    assert found.date.startswith("2026-03") and not refused


def test_the_reference_is_the_card_with_most_figures(tmp_path: Path) -> None:
    poor = document("A card")
    del poor.rows[2:]
    text = results.rendered([poor, document("Radeon RX 7600")])
    assert "in % of Radeon RX 7600 (gfx1100)'s" in text
    with pytest.raises(ValueError, match="no card's name contains 'H200'"):
        results.rendered([poor], "H200")


def test_foreign_damaged_and_hostile_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document().write(tmp_path)
    (tmp_path / "bench.json").write_text('{"machine": {}, "rows": []}')
    (tmp_path / "cut.json").write_text('{"format": "rocm_sd speed')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "b\x1b[31m.json").write_bytes(b"\x00")
    evil = Document({"card": "x", "\x1b[2J": {}}, {"preset": "quick"})
    evil.write(tmp_path)
    (tmp_path / "link.json").symlink_to(tmp_path / "cut.json")
    (tmp_path / "folder.json").mkdir()
    assert __main__.main(["results", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "Radeon RX 7900 XTX" in printed.out
    assert "\x1b" not in printed.err + printed.out
    reasons = printed.err.splitlines()
    assert len(reasons) == 6
    assert any("'bench.json' is refused: no result of this speed test" in line for line in reasons)
    assert any("'deep.json' is refused: nested too deeply" in line for line in reasons)
    assert any("'link.json' is refused: a link" in line for line in reasons)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"card": None}, "name the card"),
        ({"card": " "}, "name the card"),
        ({"backend": "cpu"}, "CPU"),
    ],
)
def test_results_that_say_nothing_are_refused(
    tmp_path: Path, facts: dict[str, str | None], words: str
) -> None:
    made = document()
    made.machine |= facts
    made.write(tmp_path)
    documents, refused = results.gathered(tmp_path)
    assert not documents and words in next(iter(refused.values()))


def test_unknown_cases_make_no_columns(tmp_path: Path) -> None:
    made = document()
    made.rows = [Row("vae", f"case {n}", "rocm_sd", "ms", 1.0, 1.0, 1.0, 5) for n in range(1000)]
    made.write(tmp_path)
    documents, refused = results.gathered(tmp_path)
    assert not documents and "no figure of ours" in next(iter(refused.values()))


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    evil = "<img src=x>|[a](http://x.example)`@all`"
    text = results.rendered([document(evil, gfx=evil, os=evil, torch=evil)])
    for piece in ("<img", "](", "`", "@", "http:"):
        assert piece not in text
    for line in text.splitlines():
        assert line.count("|") in (0, 4)


def test_writing_between_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    readme = tmp_path / "R.md"
    readme.write_text("before\n\nafter\n")
    assert __main__.main(["results", str(folder), "--write", str(readme)]) == 2
    assert "markers" in capsys.readouterr().err
    readme.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    assert __main__.main(["results", str(folder), "--write", str(readme)]) == 0
    assert results.NOTHING in readme.read_text() and "old" not in readme.read_text()
    document().write(folder)
    for _ in range(2):
        assert __main__.main(["results", str(folder), "--write", str(readme)]) == 0
    text = readme.read_text()
    assert text.count("Radeon RX 7900 XTX (gfx1100) |") == 3 and text.endswith("after\n")
    assert results.NOTHING not in text


def test_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["results", "nowhere/at/all"]) == 2
    assert "nowhere/at/all does not exist" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    import subprocess

    code = "import sys; import lib_rocm_sd.commands.results; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
