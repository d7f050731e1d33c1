"""README.md and the other documents agree with the tree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lib_rocm_sd import __version__
from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.lab import card_file, speed_result
from tools import card_table, results_table

ROOT = results_table.ROOT
README = results_table.README
CARDS = ROOT / "docs" / "cards.md"
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]
    + [ROOT / "kernels" / "tuned" / "README.md"]
)
MOST_WORDS = 900
FOLDERS = ("docs", "kernels", "lib_rocm_sd", "models", "requirements", "scripts", "tests", "tools")
MADE_LATER = ("docs/results/cards/", "docs/results/self-tests/")
"""Folders that the first file an owner sends will make."""
FIGURE = r"\d\S* ?(?:[nµmu]s|[KMG]i?B|TFLOPS?|it/s|of 255|% faster|times (?:as|faster|the speed))\b"
"""How a measured figure looks."""


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _id(document: Path) -> str:
    return str(document.relative_to(ROOT))


# --- README


def test_the_readme_is_short() -> None:
    words = README.read_text(encoding="utf-8").split()
    assert len(words) <= MOST_WORDS


def test_the_first_paragraph_says_that_no_amd_card_ran_it_and_how_to_be_the_first() -> None:
    sent = [json.loads(path.read_text("utf-8")) for path in card_table.SELF_TESTS.glob("*.json")]
    first = README.read_text(encoding="utf-8").split("\n\n")[1]
    assert ("never run on an AMD card" in first) == (not sent)
    assert "(#be-the-first)" in first
    help_ = README.read_text(encoding="utf-8").split("### Be the first")[1]
    assert "--self-test" in help_


def test_every_figure_of_the_readme_is_from_a_file() -> None:
    """Times, sizes and differences stand between markers, or in a sentence that is checked."""
    begin, end = results_table.markers("figures")
    before, rest = README.read_text(encoding="utf-8").split(begin)
    table, after = rest.split(end)
    assert re.findall(FIGURE, table), "the pattern finds what it has to"
    demo = json.loads(_text("docs/results/demo-h200.json"))
    assert demo["device"]["name"].endswith("H200")
    said = f"at most {demo['largest_difference']} of 255"
    others = (before + after).replace("\n", " ")
    assert said in others
    assert re.findall(FIGURE, others.replace(said, "")) == []


@pytest.mark.parametrize("document", results_table.PLACES, ids=_id)
def test_the_tables_are_those_of_the_result_files(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert results_table.renewed(document) == text, "run `python tools/results_table.py --write`"


# --- cards


def test_the_table_of_cards_is_arch_json() -> None:
    text = CARDS.read_text(encoding="utf-8")
    assert card_table.with_tables(text) == text, "run `python tools/card_table.py --write`"
    for gfx, arch in amd_table().items():
        assert f"| {gfx} | {arch.family} |" in text
        assert all(name in text for name in arch.names)


def test_the_table_of_cards_says_what_is_executed() -> None:
    """Also whose kernels: the table must not say more than the tests do."""
    pytest.importorskip("torch")
    from tests.verify.amdgpu import test_amdgpu_kernels as executed

    whole = {gfx for gfx, what in card_table.EXECUTED.items() if what.startswith("every")}
    assert whole == {*executed.GPUS, *executed.NEWER}
    assert set(card_table.EXECUTED) - whole == set(executed.SIMILAR)
    for arch in amd_table().values():
        said = card_table.machine_code(arch)
        assert said.startswith("executed") == (arch.gfx in card_table.EXECUTED)


def sent(gfx: str, failures: int, outcome: str = "passed", **more: object) -> dict[str, object]:
    """A file as an owner sends it."""
    row = {"op": "attention", "variant": "rocm_sd", "problem": "N1", "reason": "wrong by 1"}
    machine = {"card": "RX | <b>7900", "gfx": gfx, "os": "Windows 11", "torch": "2.9"}
    return {
        **{"format": card_file.FORMAT, "date": "2030-01-02T03:04:05Z", "running": None},
        **{"machine": machine, "complete": True, "rows": [{**row, "passed": not failures}]},
        "verdicts": [{"subject": "attention, rocm_sd: N1", "outcome": outcome, "reason": "x"}],
        **more,
    }


def test_what_owners_sent_is_taken_and_counted(tmp_path: Path) -> None:
    folder, file = tmp_path / "self-tests", tmp_path / "sent.json"
    assert card_table.on_cards("gfx1100", folder) == "not yet"
    assert card_table.self_tests(folder) == card_table.NONE_YET
    for document in (
        sent("gfx1100", 0),
        sent("gfx1100", 1),
        sent("gfx1100", 0, "faulted"),
        sent("gfx942", 0, complete=False),
    ):
        file.write_text(json.dumps(document), encoding="utf-8")
        assert card_table.take(file, folder).parent == folder
    assert card_table.on_cards("gfx1100", folder) == "1 of 3 self-tests passed"
    assert card_table.on_cards("gfx942", folder) == "0 of 1 self-tests passed"
    assert card_table.on_cards("gfx1030", folder) == "not yet"
    head, _, *rows = card_table.self_tests(folder).splitlines()
    assert len(rows) == 4 and {row.count(" | ") for row in rows} == {head.count(" | ")}
    said = [re.findall(r"\[(.*)\]\(results/self-tests/rocm_sd-selftest-gfx", row) for row in rows]
    assert sorted(said) == [
        *(["1 of 2 wrong"], ["1 of 2 wrong"], ["all 2 passed"], ["did not finish; 0 of 2 wrong"]),
    ]
    assert all("| RX  b7900 | gfx" in row for row in rows)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({}, "sent.json is no result of the self-test"),
        (sent("gfx1100", 0, ended=r"in C:\Users\somebody\a.dll"), "names a folder"),
        (sent("../gfx1100", 0), "no known card and date"),
        (sent("gfx1100", 0, date="today"), "no known card and date"),
    ],
)
def test_a_file_that_is_not_taken(
    document: dict[str, object], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sent.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match=why):
        card_table.take(file, tmp_path / "self-tests")
    assert card_table.main([str(file)]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


# --- tables of measured times


def test_attentions_table_has_what_was_measured_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(label: str, variant: str, time_us: float | None, dtype: str = "float16") -> dict:
        sizes = {"batch": 2, "heads": 8, "seq_q": 64, "seq_k": 77, "head_dim": 40}
        problem = {**sizes, "dtype": dtype, "mask": "none"}
        error = None if time_us is None else 1e-4
        return dict(label=label, variant=variant, median_us=time_us, error=error, problem=problem)

    rows = [
        *(row("A", "rocm_sd", 10.0), row("A", "rocm_sd", 99.0), row("A", "sdpa", 20.0)),
        *(row("A", "sdpa flash", None), row("A", "Doggettx-like", 123.4), row("A", "x", 1.0)),
        *(row("A", "rocm_sd", 7.0, "bfloat16"), row("B", "sdpa", 5.0)),
        row(results_table.LEFT_OUT[0], "rocm_sd", 1.0),
    ]
    file = tmp_path / "attention-h200.json"
    file.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    head, rule, *lines = results_table.attention().splitlines()
    assert head.count("|") == rule.count("|") == 11
    assert lines == [
        "| A | 2x8x64x77x40 | 10.0 | 20.0 |  | 123 | 0.50 |  | 1.0e-04 | 1.0e-04 |",
        "| B | 2x8x64x77x40 |  | 5.0 |  |  |  |  |  | 1.0e-04 |",
    ]
    pytest.importorskip("torch")
    from lib_rocm_sd.ops.attention.problem import CASES

    assert set(results_table.LEFT_OUT) <= {case.name for case in CASES}


def test_the_summary_names_its_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that the result file lacks is an error, not an empty cell."""
    for name in ("attention-h200.json", "vae-h200.json"):
        (tmp_path / name).write_text('{"rows": []}', encoding="utf-8")
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    with pytest.raises(KeyError):
        results_table.figures()


# --- every document


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_links_lead_somewhere(document: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = document if not path else document.parent / path
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert wrong == []


def _anchors(document: Path) -> set[str]:
    """The names by which a page on GitHub links to a document's headings."""
    found = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in found)
    return {heading.replace(" ", "-") for heading in kept}


def test_an_anchor_is_what_github_makes_of_a_heading(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A new card: a row\n\n### attention-*.json\n", encoding="utf-8")
    assert _anchors(page) == {"a-new-card-a-row", "attention-json"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_paths_in_code_exist(document: Path) -> None:
    """Files and folders of this repository that are named between backticks."""
    named = re.findall(r"`([\w.-]+/[\w./-]*)(?:`|:)", document.read_text(encoding="utf-8"))
    ours = [name for name in named if name.split("/")[0] in FOLDERS and name not in MADE_LATER]
    assert [name for name in ours if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_what_examples_import_exists(document: Path) -> None:
    """Of this project; what else an example takes may be absent here."""
    text = document.read_text(encoding="utf-8")
    examples = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for statement in re.findall(r"^from lib_rocm_sd\S* import .+$", examples, re.MULTILINE):
        pytest.importorskip("torch")
        exec(statement, {})


def test_every_picture_is_shown() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    pictures = [path.name for path in (ROOT / "docs" / "images").iterdir()]
    assert [name for name in pictures if f"images/{name}" not in text] == []


def test_the_picture_of_the_speed_test_names_its_device() -> None:
    """Its figures are a file's, and no AMD card's."""
    caption = _text("docs/usage.md").split("images/speed-test.png)")[1].split("\n\n")[1]
    measured = speed_result.read(ROOT / "docs/results/speed-test-h200.json")
    assert "(results/speed-test-h200.json)" in caption
    assert f"**{measured.machine['card']}**" in caption
    assert measured.complete and not any(row.reason for row in measured.rows)


def test_the_documents_say_the_version_that_this_is() -> None:
    said = re.findall(r'"version": "([^"]+)"', _text("docs/api.md"))
    assert said == [__version__]
    newest = re.findall(r"^## (\S+) \(", _text("CHANGELOG.md"), re.MULTILINE)[0]
    assert newest == __version__


def test_documented_variables_exist() -> None:
    source = "".join(p.read_text(encoding="utf-8") for p in ROOT.glob("lib_rocm_sd/**/*.py"))
    named = set(re.findall(r"ROCM_SD_[A-Z_]+", _text("docs/usage.md")))
    assert named == set(re.findall(r"ROCM_SD_[A-Z_]+", source))


def test_documented_commands_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"-m lib_rocm_sd (\w+)", text))
    main = _text("lib_rocm_sd/__main__.py")
    known = {"doctor", "compile", "inspect", "bench", "demo", "profile", "results", "tune"}
    assert named == known | {"scaling", "capture", "replay", "suite"}
    assert all(f'"{name}"' in main for name in named)


def test_ruff_has_one_version() -> None:
    pinned = re.findall(r"^ruff==(\S+)$", _text("requirements/test.txt"), re.MULTILINE)
    assert len(pinned) == 1
    assert set(re.findall(r'"ruff==([^"]+)"', _text(".pre-commit-config.yaml"))) == set(pinned)
