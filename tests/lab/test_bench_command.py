"""`bench`: what it refuses, what it does without a GPU, and what it says of the time left."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.commands import bench
from lib_rocm_sd.lab import rows

OPS = (
    "attention",
    "attention_backward",
    "call",
    "door",
    "group_norm",
    "layer_norm",
    "linear",
    "norm_gradients",
    "upscaler",
    "vae",
)


@pytest.mark.parametrize("op", [*OPS, "speed"])
@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_is_none_is_refused_by_its_name(
    op: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["bench", op, "--device", device]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--device {device}" in line


@pytest.mark.parametrize("op", OPS)
def test_a_folder_is_no_file_to_write(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["bench", op, "--device", "cpu", "--json", str(tmp_path)]) == 2
    assert f"--json: {tmp_path} is a folder, not a file" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["attention", "vae"])
def test_a_folder_is_no_result(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", op, "--from", str(tmp_path)]) == 2
    assert f"--from {tmp_path}: " in capsys.readouterr().err


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """No GPU, and what the benchmarks are asked for instead of being run."""
    found: list[argparse.Namespace] = []

    def keep(table: Any, args: argparse.Namespace, *more: Any) -> int:
        found.append(args)
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench.benchmark, "run", keep)
    return found


@pytest.mark.parametrize("op", OPS)
def test_without_a_gpu_a_small_try_that_says_so(
    op: str, asked: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(parsed(op)) == 0
    (args,) = asked
    assert args.quick and args.small == (op not in ("call", "door"))
    said = capsys.readouterr().err
    assert "no GPU" in said and "--device cpu" in said


@pytest.mark.parametrize("words", [("--device", "cpu"), ("--quick",), ("--sizes", "512")])
def test_what_is_asked_for_is_not_made_small(
    words: tuple[str, ...], asked: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(parsed("vae", *words)) == 0
    assert not asked[0].small and capsys.readouterr().err == ""


def test_the_time_left_follows_from_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 10.0, 100.0])
    told = rows.Countdown([1.0, 2.0, 30.0], lambda: next(times))
    for case in ("first", "second", "third"):
        told.next(case)
    assert capsys.readouterr().err.splitlines() == [
        "[1/3] first",
        "[2/3] second (about 5 min left)",
        "[3/3] third (about 17 min left)",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "about 1 s"), (89, "about 89 s"), (3000, "about 50 min")]
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert rows.duration(seconds) == words
    assert rows.duration(2 * 3600.0) == "about 2 h"
