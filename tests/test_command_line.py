"""Bad input on the command line: one line that names it, and no traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib_rocm_sd import __main__, checks

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """A file and a folder, and a name of nothing."""
    file, folder = tmp_path / "a-file", tmp_path / "a-folder"
    file.write_text("{}", encoding="utf-8")
    folder.mkdir()
    return {"FILE": str(file), "FOLDER": str(folder), "NOTHING": str(tmp_path / "no" / "thing")}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("tune --import NOTHING", "NOTHING: No such file"),
        ("tune --import FOLDER", "FOLDER is refused: a link, a folder"),
        ("tune --export FOLDER", "--export: FOLDER is a folder, not a file"),
        ("tune --export NOTHING", "--export: there is no folder"),
        ("tune --arch=", "--arch: it is empty"),
        ("compile --arch=", "--arch: it is empty"),
        ("compile --op=", "--op: it is empty"),
        ("compile --arch gfx9999", "--arch: no GPU is called gfx9999"),
        ("inspect --op conv,nonsense", "--op: no op is called nonsense"),
        ("results FILE", "FILE is no folder"),
        ("results NOTHING", "NOTHING does not exist"),
        ("results FOLDER --write NOTHING", "--write NOTHING: No such file"),
        ("results FOLDER --write FOLDER", "--write FOLDER: Is a directory"),
        ("doctor --out FILE", "--out and --gpu go with --self-test"),
        ("doctor --self-test --out FOLDER", "--out: FOLDER is a folder, not a file"),
    ],
)
def test_one_line_names_what_is_wrong(
    words: str, named: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for word, place in places.items():
        words, named = words.replace(word, place), named.replace(word, place)
    assert __main__.main(words.split(" ")) in (1, 2)
    printed = capsys.readouterr()
    (line,) = (printed.err or printed.out).splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--out FILE", "--out FILE is a file, not a folder"),
        ("--model NOTHING", "there is no model in NOTHING"),
        ("--device meta", "--device meta is neither a GPU nor the CPU"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999"),
    ],
)
def test_the_demo_too(
    words: str, named: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("diffusers", "transformers", "PIL"):
        pytest.importorskip(needed)
    for word, place in places.items():
        words, named = words.replace(word, place), named.replace(word, place)
    if "--out" not in words:
        words += f" --out {places['FOLDER']}"
    assert __main__.main(["demo", *words.split(" ")]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "permission denied" in checks.unwritable(tmp_path / "x")


def pretended(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    """Every command fails so."""

    def fail(args: argparse.Namespace) -> int:
        raise failure

    module: Any = SimpleNamespace(add_arguments=lambda parser: None, main=fail)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(monkeypatch, ModuleNotFoundError("no", name="torch"))
    assert __main__.main(["doctor"]) == 2
    assert capsys.readouterr().err == "doctor: this needs torch, which is not installed\n"


def test_a_module_of_ours_that_is_missing_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(monkeypatch, ModuleNotFoundError("no", name="lib_rocm_sd.nothing"))
    with pytest.raises(ModuleNotFoundError):
        __main__.main(["doctor"])


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(monkeypatch, KeyboardInterrupt())
    assert __main__.main(["doctor"]) == __main__.INTERRUPTED
    assert capsys.readouterr().err == "doctor: interrupted\n"


def test_a_refusal_is_a_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended(monkeypatch, checks.UsageError("--out: there is no folder"))
    assert __main__.main(["doctor"]) == 2
    assert capsys.readouterr().err == "doctor: --out: there is no folder\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise")
def test_a_reader_that_leaves_is_no_traceback() -> None:
    """As `… tune | head -0`: the pipe is closed before the table is printed."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lib_rocm_sd", "tune"]
    ran = subprocess.run(
        command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "--help"])
    assert ended.value.code == 0
    assert __main__.COMMANDS[name].split()[0] in capsys.readouterr().out
