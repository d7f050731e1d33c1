"""kernels/tuned: who decides which config runs first, and what is ignored, with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd.arch import KERNELS_DIR, amd_table, table
from lib_rocm_sd.commands import tune
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.shipped import part_specs

ROOT = KERNELS_DIR.parent
GFX = "gfx1100"
ROW = table()[GFX]
DIM = 64
SPACE = kernel.configs(ROW, DIM)
DEFINES = [name for name, _ in kernel.spec("float16", DIM, "none", SPACE[0]).defines]
FACTS: dict[str, dict[str, Any]] = {
    "modelled": {
        **{"of": 4, "cycles_per_1024_pairs": 900.5, "bound": 0.5, "vgprs": 100, "spills": 0},
        **{"scratch_bytes": 0, "lds_bytes": 1024, "waves_per_simd": 4},
    },
    "measured": {"times": [{"problem": "B1 H1 Sq8 Sk8 D64", "time_us": 1.5, "default_us": 2.0}]},
}
ABOUT: dict[str, dict[str, Any]] = {
    "modelled": {name: "said" for name in tune.ABOUT["modelled"]},
    "measured": {name: "said" for name in tune.ABOUT["measured"]},
}


def entry(config: kernel.AttentionConfig, source: str = "modelled", **other: Any) -> dict[str, Any]:
    form = kernel.form("float16", DIM)
    return {"form": form, "config": kernel.fields_of(config), **FACTS[source], **other}


def section(config: kernel.AttentionConfig, source: str = "modelled", **about: Any) -> Any:
    return {
        **{"source": source, **ABOUT[source], "defines": DEFINES},
        **{"entries": [entry(config, source)], **about},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernels/tuned."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def have(folder: Path) -> Callable[..., Path]:
    """Writes gfx1100's table."""

    def write(*sections: Any) -> Path:
        path = tuned.path_of(GFX, "attention")
        tune.write(path, tune.new(GFX, list(sections)))
        return path

    return write


def first() -> kernel.AttentionConfig:
    return kernel.ordered(ROW, "float16", DIM)[0]


def test_without_a_table_the_safe_default_is_first_and_nothing_is_said(folder: Path) -> None:
    assert kernel.ordered(ROW, "float16", DIM) == list(SPACE)
    assert kernel.table_reasons(ROW) == []


def test_the_tables_choice_is_first_and_none_is_lost(have: Callable[..., Path]) -> None:
    have(section(SPACE[-1]))
    found = kernel.ordered(ROW, "float16", DIM)
    assert found[0] == SPACE[-1] and sorted(map(str, found)) == sorted(map(str, SPACE))
    assert kernel.choice(ROW, "float16", DIM).source == "modelled"
    assert kernel.table_reasons(ROW) == []
    others = [("bfloat16", DIM, "none"), ("float16", 40, "none"), ("float16", DIM, "bool")]
    for form in others:
        assert kernel.ordered(ROW, *form)[0] == kernel.configs(ROW, form[1])[0]
    assert kernel.ordered(table()["gfx1101"], "float16", DIM)[0] == SPACE[0]


def test_what_is_compiled_ahead_is_what_runs(have: Callable[..., Path]) -> None:
    from lib_rocm_sd.ops.attention.ours import MatrixAttention
    from lib_rocm_sd.ops.attention.problem import AttentionProblem

    have(section(SPACE[-1]))
    problem = AttentionProblem(1, 1, 8, 8, DIM)
    variant = MatrixAttention()
    assert variant.configs(ROW, problem)[0] == SPACE[-1]
    assert list(variant.defaults(ROW, problem)) == [SPACE[-1], SPACE[0]]
    assert kernel.spec("float16", DIM, "none", SPACE[-1]) in kernel.shipped_specs(ROW)
    large = kernel.configs(ROW, 512)
    one = {"form": kernel.form("float16", 512), "config": kernel.fields_of(large[-1])}
    have(section(SPACE[-1], entries=[one]))
    assert kernel.spec("float16", 512, "none", large[-1]) in part_specs("vae", ROW)


def test_a_measured_choice_wins_the_newest_first(have: Callable[..., Path]) -> None:
    old, new = "2026-01-02", "2026-11-21"
    have(
        section(SPACE[1]),
        section(SPACE[2], "measured", date=old, card="one"),
        section(SPACE[3], "measured", date=new, card="another"),
    )
    assert first() == SPACE[3]
    have(section(SPACE[2], "measured", date=new), section(SPACE[3], "measured", date=old))
    assert first() == SPACE[2]
    assert kernel.choice(ROW, "float16", DIM).source == "measured"


def test_a_stale_choice_is_ignored_for_the_next_one(have: Callable[..., Path]) -> None:
    gone = {**kernel.fields_of(SPACE[2]), "block_k": 48}
    measured = section(SPACE[2], "measured")
    measured["entries"][0]["config"] = gone
    have(section(SPACE[1]), measured)
    assert first() == SPACE[1]
    (reason,) = kernel.table_reasons(ROW)
    assert "measured choice for float16, 64, none" in reason and "search space" in reason


@pytest.mark.parametrize("config", [{"block_k": 32}, {**kernel.fields_of(SPACE[1]), "more": 1}])
def test_a_config_needs_exactly_the_fields_of_today(
    have: Callable[..., Path], config: dict[str, Any]
) -> None:
    have(section(SPACE[1], entries=[{**entry(SPACE[1]), "config": config}]))
    assert first() == SPACE[0]
    assert "search space" in kernel.table_reasons(ROW)[0]


def test_definitions_that_the_kernel_has_no_more(have: Callable[..., Path]) -> None:
    have(section(SPACE[1], defines=[*DEFINES, "OLD"]))
    assert first() == SPACE[0]
    assert "definitions that the kernel no longer has" in kernel.table_reasons(ROW)[0]


def half(text: str) -> bytes:
    return text.encode()[: len(text) // 2]


GOOD = tune.text_of(tune.new(GFX, [section(SPACE[1])]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not json", "damaged"),
        (b"", "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        (half(GOOD), "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[1]", "not of the format"),
        (GOOD.replace("tuned 1", "tuned 2").encode(), "not of the format"),
        (GOOD.replace(GFX, "gfx1201").encode(), "it is for 'attention' on 'gfx1201'"),
        (GOOD.replace('"attention"', '"conv"').encode(), "it is for 'conv'"),
        (GOOD.replace("modelled", "guessed").encode(), "neither that it is measured"),
        (GOOD.replace('"entries"', '"other"').encode(), "lacks its entries"),
        (GOOD.replace('"form"', '"firm"').encode(), "lacks its form"),
        (GOOD.replace('"config": {', '"config": {"x": [], ').encode(), "neither number nor word"),
        (GOOD.encode() + b" " * tuned.MOST_BYTES, "bytes"),
    ],
)
def test_a_damaged_or_foreign_table_is_ignored_and_said(
    have: Callable[..., Path], data: bytes, words: str
) -> None:
    path = have(section(SPACE[1]))
    assert first() == SPACE[1]
    path.write_bytes(data)
    assert kernel.ordered(ROW, "float16", DIM) == list(SPACE)
    (reason,) = kernel.table_reasons(ROW)
    assert reason.startswith(f"kernels/tuned/{GFX}/attention.json is ignored: ")
    assert words in reason and len(reason) < 250


def test_a_table_that_cannot_be_read(folder: Path) -> None:
    tuned.path_of(GFX, "attention").mkdir(parents=True)
    assert first() == SPACE[0]
    assert "it cannot be read" in kernel.table_reasons(ROW)[0]


def test_the_reason_is_shown(
    have: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import install
    from lib_rocm_sd.commands import doctor
    from lib_rocm_sd.ops.attention.ours import MatrixAttention
    from lib_rocm_sd.ops.attention.problem import AttentionProblem
    from lib_rocm_sd.runtime import build

    have(section(SPACE[1])).write_bytes(b"half")
    monkeypatch.setattr(build, "is_cached", lambda spec, row: True)
    install.compile_for(ROW, 0.0)
    said = capsys.readouterr().out
    assert "attention.json is ignored: it is damaged" in said and "are ready" in said
    found = doctor._tuned(ROW)
    assert found["default"] == 12 and "is damaged" in found["reasons"][0]
    assert "is damaged" in "\n".join(doctor._work_text({"work": [], "tuned": [found]}))
    notes = MatrixAttention().notes(ROW, AttentionProblem(1, 1, 8, 8, DIM))
    assert len(notes) == 1 and "is damaged" in notes[0]


def test_a_table_needs_no_torch(have: Callable[..., Path]) -> None:
    code = (
        "import sys; from lib_rocm_sd.commands import tune; "
        "from lib_rocm_sd.arch import table; from lib_rocm_sd.ops.attention import kernel as k; "
        "print(len(k.shipped_specs(table()['gfx1100'])), k.table_reasons(table()['gfx1100'])); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(len(kernel.shipped_specs(ROW)))


# -- what may be kept ----------------------------------------------------------------------------


def problems_with(source: str, *, about: Any = None, facts: Any = None) -> list[str]:
    one = section(SPACE[1], source, **(about or {}))
    one["entries"][0] |= facts or {}
    return tune.problems(tune.text_of(tune.new(GFX, [one])).encode())


def test_a_good_table_has_no_problems() -> None:
    assert problems_with("modelled") == problems_with("measured") == []


@pytest.mark.parametrize(
    ("source", "about", "facts", "words"),
    [
        ("modelled", {}, {"spills": 3}, "it spills registers"),
        ("modelled", {}, {"scratch_bytes": 4}, "it spills registers"),
        ("modelled", {}, {"vgprs": 300}, "does not fit"),
        ("modelled", {}, {"lds_bytes": 1 << 20}, "does not fit"),
        ("modelled", {}, {"waves_per_simd": 0}, "does not fit"),
        ("modelled", {}, {"bound": 1.5}, "impossible"),
        ("modelled", {}, {"cycles_per_1024_pairs": float("nan")}, "impossible"),
        ("modelled", {}, {"vgprs": "many"}, "vgprs is 'many'"),
        ("modelled", {}, {"more": 1}, "'more' is not known"),
        ("modelled", {"user": "somebody"}, {}, "'user' is not known"),
        ("modelled", {"compiler": "/home/somebody/clang"}, {}, "a folder"),
        ("measured", {"card": "C:\\Users"}, {}, "a folder"),
        ("measured", {"card": "me@host"}, {}, "an address"),
        ("measured", {"card": "x" * 300}, {}, "too long"),
        ("measured", {"card": "a\nb"}, {}, "not plain text"),
        ("measured", {"card": ""}, {}, "empty"),
        ("measured", {"torch": None}, {}, "torch is None"),
        ("measured", {"entries": []}, None, "no entries"),
        ("measured", {}, {"times": []}, "no times"),
        ("measured", {}, {"times": [{"problem": "x", "time_us": -1, "default_us": 1}]}, "impos"),
        ("measured", {}, {"times": [{"problem": "x", "time_us": 1, "default_us": 0}]}, "impos"),
        ("measured", {}, {"times": [{"problem": "<b>", "time_us": 1, "default_us": 1}]}, "plain"),
        ("measured", {}, {"times": [3]}, "not of a problem"),
        ("measured", {}, {"form": {"dtype": "float16"}}, "no form of attention"),
        ("measured", {}, {"form": kernel.form("float16", 72)}, "no kernel is shipped"),
        ("measured", {}, {"config": {"block_k": 3}}, "not the kernel's any more"),
        ("measured", {"defines": ["OLD"]}, {}, "not the kernel's any more"),
    ],
)
def test_what_may_not_be_kept(source: str, about: Any, facts: Any, words: str) -> None:
    if facts is None:
        one = {**section(SPACE[1], source), **about}
        content = tune.text_of(tune.new(GFX, [one]))
        found = tune.problems(content.encode())
    else:
        found = problems_with(source, about=about, facts=facts)
    assert found and any(words in reason for reason in found), found


def test_a_form_stands_once_and_a_folder_is_its_gpus() -> None:
    twice = section(SPACE[1], entries=[entry(SPACE[1]), entry(SPACE[2])])
    content = tune.text_of(tune.new(GFX, [twice])).encode()
    assert any("twice" in reason for reason in tune.problems(content))
    assert "it is for" in tune.problems(GOOD.encode(), "gfx1201")[0]
    assert "no row" in tune.problems(GOOD.replace(GFX, "gfx9999").encode())[0]
    assert "no sections" in tune.problems(json.dumps(tune.new(GFX, [])).encode())[0]
    more = json.dumps({**tune.new(GFX, [section(SPACE[1])]), "by": "me"})
    assert "it has 'by'" in tune.problems(more.encode())[0]


def test_a_section_replaces_that_of_the_same_origin_only(have: Callable[..., Path]) -> None:
    have(section(SPACE[1]), section(SPACE[2], "measured", card="one"))
    content = tune.with_section(GFX, section(SPACE[3], "measured", card="two"))
    assert [each["source"] for each in content["sections"]] == ["measured", "measured", "modelled"]
    content = tune.with_section(GFX, section(SPACE[3], "measured", card="one"))
    assert len(content["sections"]) == 2
    content = tune.with_section(GFX, section(SPACE[3]))
    assert len(content["sections"]) == 2
    modelled = content["sections"][1]
    assert modelled["entries"][0]["config"] == kernel.fields_of(SPACE[3])
    assert json.loads(tune.text_of(content)) == content


def test_what_is_stale_is_not_written_again(have: Callable[..., Path]) -> None:
    measured = section(SPACE[2], "measured")
    other = entry(kernel.configs(ROW, 40)[0], "measured", form=kernel.form("float16", 40))
    measured["entries"].append(other)
    measured["entries"][0]["config"] = {"block_k": 3}
    have(measured, section(SPACE[1], "measured", card="two", defines=["OLD"]))
    content = tune.with_section(GFX, section(SPACE[3]))
    assert [len(each["entries"]) for each in content["sections"]] == [1, 1]
    assert content["sections"][0]["entries"][0]["form"]["head_dim"] == 40
    assert content["sections"][1]["source"] == "modelled"


# -- what is kept --------------------------------------------------------------------------------


def tables() -> list[Path]:
    return sorted((KERNELS_DIR / "tuned").glob("*/*.json"))


@pytest.mark.parametrize("path", tables(), ids=lambda path: path.parent.name)
def test_a_kept_table_is_whole_and_not_stale(path: Path) -> None:
    gfx = path.parent.name
    assert path.name == "attention.json" and gfx in table()
    assert tune.problems(path.read_bytes(), gfx) == []
    assert kernel.table_reasons(table()[gfx]) == []
    for dtype in kernel.DTYPES:
        for head_dim in kernel.SHIPPED_HEAD_DIMS:
            assert kernel.choice(table()[gfx], dtype, head_dim).source, (dtype, head_dim)


def test_every_row_that_a_user_can_own_has_a_table() -> None:
    assert not amd_table().keys() - {path.parent.name for path in tables()}
