"""README.md and the other documents agree with the tree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.doctor.card import FORMAT
from tools import card_table, results_table

ROOT = card_table.README.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_table_of_cards_is_arch_json() -> None:
    text = card_table.README.read_text(encoding="utf-8")
    assert card_table.with_table(text) == text, "run `python tools/card_table.py --write`"
    for gfx, arch in amd_table().items():
        assert f"| {gfx} | {arch.family} |" in text
        assert all(name in text for name in arch.names)


def test_the_table_of_cards_says_what_is_executed() -> None:
    """Also whose kernels: README must not say more than the tests do."""
    pytest.importorskip("torch")
    from tests.amdgpu import test_amdgpu_kernels as executed

    whole = {gfx for gfx, what in card_table.EXECUTED.items() if what.startswith("every")}
    assert whole == set(executed.GPUS)
    assert set(card_table.EXECUTED) - whole == set(executed.SIMILAR)
    for arch in amd_table().values():
        said = card_table.machine_code(arch)
        assert said.startswith("executed") == (arch.gfx in card_table.EXECUTED)


def test_what_owners_sent_is_counted(tmp_path: Path) -> None:
    assert card_table.on_cards("gfx1100", tmp_path) == "not yet"
    for number, (gfx, failed) in enumerate((("gfx1100", 0), ("gfx1100", 2), ("gfx942", 0))):
        document = {
            **{"format": FORMAT, "complete": True, "passed": 291, "failed": failed},
            "machine": {"gfx": gfx},
        }
        (tmp_path / f"{number}.json").write_text(json.dumps(document), encoding="utf-8")
    assert card_table.on_cards("gfx1100", tmp_path) == "1 of 2 self-tests passed"
    assert card_table.on_cards("gfx942", tmp_path) == "1 of 1 self-tests passed"
    assert card_table.on_cards("gfx1030", tmp_path) == "not yet"
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="other.json is no result"):
        card_table.on_cards("gfx1100", tmp_path)


def test_the_figures_are_those_of_the_result_file() -> None:
    text = results_table.README.read_text(encoding="utf-8")
    assert results_table.with_table(text) == text, "run `python tools/results_table.py --write`"


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
    from lib_rocm_sd.ops.attention.cases import CASES

    assert set(results_table.LEFT_OUT) <= {case.name for case in CASES}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_documented_variables_exist() -> None:
    usage = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    source = "".join(p.read_text(encoding="utf-8") for p in ROOT.glob("lib_rocm_sd/**/*.py"))
    named = set(re.findall(r"ROCM_SD_[A-Z_]+", usage))
    assert named == set(re.findall(r"ROCM_SD_[A-Z_]+", source))


def test_documented_commands_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"-m lib_rocm_sd (\w+)", text))
    main = (ROOT / "lib_rocm_sd" / "__main__.py").read_text(encoding="utf-8")
    assert named == {"doctor", "compile", "inspect", "bench", "demo", "results", "tune"}
    assert all(f'"{name}"' in main for name in named)


def test_ruff_has_one_version() -> None:
    pinned = re.findall(r"^ruff==(\S+)$", _text("requirements/test.txt"), re.MULTILINE)
    assert len(pinned) == 1
    assert set(re.findall(r'"ruff==([^"]+)"', _text(".pre-commit-config.yaml"))) == set(pinned)


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
