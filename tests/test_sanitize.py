"""tools/sanitize.py: what it makes of compute-sanitizer's words. The worker runs under the shim."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.ops.attention.problems import TINY, Drawn
from tests.ops.attention.replay import Place, every_config
from tests.verify import simt
from tools import sanitize, sanitize_worker
from tools.sanitize import Run

FRAME = "========= COMPUTE-SANITIZER\n"
DONE = "rocm_sd sanitize: 124 launches, 0 wrong\n"
CLEAN = FRAME + DONE + "========= ERROR SUMMARY: 0 errors\n"
NO_RACES = (
    FRAME + DONE + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
OUT_OF_BOUNDS = (
    FRAME
    + """========= Invalid __global__ read of size 16 bytes
=========     at attention_forward+0x6c0
=========     by thread (32,0,0) in block (0,0,0)
=========     Access to 0x7f2c5d002680 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2c5d000000 of size 9,856 bytes
=========
========= Invalid __global__ read of size 16 bytes
=========     at attention_forward+0x6d0
=========     by thread (33,0,0) in block (0,0,0)
=========
rocm_sd sanitize: 1 launches, 0 wrong
========= ERROR SUMMARY: 2 errors
"""
)
RACE = (
    FRAME
    + """========= Error: Race reported between Write access at attention_forward+0x9d0
=========     and Read access at attention_forward+0xbb0 [512 hazards]
=========
rocm_sd sanitize: 1 launches, 0 wrong
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
)
UNINITIALIZED = (
    FRAME
    + """========= Uninitialized __global__ memory read of size 16 bytes
=========     at attention_forward+0x6c0
=========
rocm_sd sanitize: 1 launches, 0 wrong
========= ERROR SUMMARY: 128 errors
"""
)
NO_DEVICE = FRAME + "========= Error: Device not supported\n"
HELP = """  --tool arg
  --kernel-name arg                     Filter kernels
  --kernel-name-exclude arg
  --target-processes arg
  --report-api-errors arg
"""
OLD_HELP = HELP.replace("--kernel-name", "--kernel-regex").replace("--report-api-errors", "")


@pytest.mark.parametrize(("tool", "text"), [("memcheck", CLEAN), ("racecheck", NO_RACES)])
def test_clean(tool: str, text: str) -> None:
    run = Run(tool, False, 0, 41.0, text)
    assert (run.found, run.launches, run.faults) == (0, 124, [])
    assert Run(tool, True, 0, 41.0, text).faults == ["the planted fault was not found"]


@pytest.mark.parametrize(
    ("tool", "text", "found", "words"),
    [
        ("memcheck", OUT_OF_BOUNDS, 2, "Invalid __global__ read of size 16 bytes"),
        ("racecheck", RACE, 1, "Error: Race reported between Write access"),
        ("initcheck", UNINITIALIZED, 128, "Uninitialized __global__ memory read"),
    ],
)
def test_found(tool: str, text: str, found: int, words: str) -> None:
    run = Run(tool, False, sanitize.FOUND_STATUS, 3.0, text)
    assert run.found == found
    assert run.faults[0] == f"{found} found"
    assert run.faults[1].startswith(words)
    assert len(run.faults) == 2
    assert Run(tool, True, sanitize.FOUND_STATUS, 3.0, text).faults == []


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (None, FRAME + DONE, "stopped after 150 s"),
        (1, NO_DEVICE, "no summary, status 1: Error: Device not supported"),
        (255, "", "no summary, status 255: it said nothing"),
        (139, FRAME + "========= ERROR SUMMARY: 0 errors\n", "did not come to its end"),
        (1, CLEAN.replace("0 wrong", "3 wrong"), "status 1"),
    ],
)
def test_a_run_that_did_not_end_well(status: int | None, text: str, words: str) -> None:
    run = Run("memcheck", False, status, 150.0, text)
    assert words in run.faults[0]
    assert "clean" not in sanitize.table([run])


def test_table() -> None:
    runs = [Run("memcheck", False, 0, 41.26, CLEAN), Run("racecheck", True, 86, 9.0, RACE)]
    lines = sanitize.table(runs).splitlines()
    assert lines[1].split() == ["memcheck", "124", "0", "41.3", "clean"]
    assert lines[2].split()[:4] == ["racecheck,", "planted", "1", "1"]
    assert lines[2].endswith("found, as it must be")


def test_options_are_those_that_the_help_has() -> None:
    assert sanitize.options("memcheck", HELP)[-2:] == ["--kernel-name", "kns=attention_forward"]
    old = sanitize.options("racecheck", OLD_HELP)
    assert old[-2:] == ["--kernel-regex", "kns=attention_forward"]
    assert "--report-api-errors" not in old
    assert "--report-api-errors" in sanitize.options("memcheck", HELP)
    assert sanitize.options("memcheck", "")[-1] == str(sanitize.FOUND_STATUS)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts stand in for the tool")
def test_cuda_home_comes_before_path(tmp_path: Path) -> None:
    home = executable(tmp_path / "cuda" / "bin" / sanitize.NAME, "#!/bin/sh\n")
    other = executable(tmp_path / "other" / sanitize.NAME, "#!/bin/sh\n")
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(other.parent)}
    assert sanitize.find(environ) == str(home)
    assert sanitize.find({"PATH": str(other.parent)}) == str(other)


def test_without_a_sanitizer_it_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sanitize, "find", lambda environ: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert sanitize.main([]) == 2
    said = capsys.readouterr().out
    assert str(tmp_path / "cuda" / "bin") in said
    assert str(tmp_path / "bin") in said


STAND_IN = """#!/bin/sh
case "$*" in
*--help*) echo "--kernel-name --target-processes" ;;
*"--plant memcheck"*) echo "========= ERROR SUMMARY: 3 errors"; exit 86 ;;
*) echo "rocm_sd sanitize: 5 launches, 0 wrong"; echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.mark.skipif(sys.platform == "win32", reason="shell scripts stand in for the tool")
def test_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executable(tmp_path / "bin" / sanitize.NAME, STAND_IN)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sanitize, "worker", lambda *arguments: ["true", *arguments])
    assert sanitize.main(["--tool", "memcheck", "--logs", str(tmp_path / "logs")]) == 0
    assert "clean" in capsys.readouterr().out
    assert "3 errors" in (tmp_path / "logs" / "memcheck-planted.log").read_text(encoding="utf-8")
    assert sanitize.main(["--tool", "initcheck"]) == 1
    assert "was not found" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a shell stands in for the tool")
def test_a_command_that_takes_too_long_is_stopped() -> None:
    status, text = sanitize.run(["/bin/sh", "-c", "echo begun; exec sleep 3600"], 1.0)
    assert status is None
    assert "begun" in text


def test_the_work_is_every_config() -> None:
    from lib_rocm_sd.ops.attention import kernel

    todo = every_config(Place("sm_80"))
    specs = {place.spec(kind) for place, kind in todo}
    arch = Place("sm_80").arch
    assert specs >= {*kernel.shipped_specs(arch), *kernel.searched_specs(arch)}
    assert {kind.mask for _, kind in todo} == set(kernel.MASK_KINDS)


def test_problems_are_one_aligned_and_one_misaligned() -> None:
    for _, kind in every_config(Place("sm_80"))[::7]:
        (_, one), (_, other) = sanitize_worker.problems(kind)
        odd = ["misaligned" in drawn.story or "ragged" in drawn.story for drawn in (one, other)]
        assert sorted(odd) == [False, True]


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_the_worker_judges_what_it_launches() -> None:
    todo = every_config(Place("sm_80"))[:2]
    later = time.monotonic() + 600

    def right(place: Place, drawn: Drawn) -> torch.Tensor:
        return place.attention()(*drawn.inputs)

    assert sanitize_worker.check(todo, right, later) == (5, [])
    launches, wrong = sanitize_worker.check(todo, lambda *job: math.nan * right(*job), later)
    assert (launches, len(wrong)) == (5, 5)
    assert TINY.name in wrong[0]
    assert "long_problem" in wrong[2]
    launches, wrong = sanitize_worker.check(todo, right, time.monotonic() - 1)
    assert launches == 0
    assert "not done in time" in wrong[0]


def test_barriers_are_taken_away() -> None:
    assert sanitize_worker.without_barriers("a; barrier();") == "a; ;"
    with pytest.raises(ValueError, match="no barrier"):
        sanitize_worker.without_barriers("a;")


def test_without_a_card_the_worker_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sanitize_worker"])
        assert sanitize_worker.main() == 2
    assert "no NVIDIA card" in capsys.readouterr().out
