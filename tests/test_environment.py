"""The set-up behind `install.py demo` and `install.py test`; doubles play pip and Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import environment as setup

Answer = Callable[[list[str]], tuple[int, str]]


def report_of(*packages: str, host: str = "https://download.pytorch.org") -> dict[str, Any]:
    """pip's report with these 'name version' in it, all from `host`."""
    items = (package.split() for package in packages)
    return {
        "install": [
            {"metadata": {"name": n, "version": v}, "download_info": {"url": f"{host}/{n}.whl"}}
            for n, v in items
        ]
    }


CPU_REPORT = report_of("torch 2.13.0+cpu", "sympy 1.14.0", "filelock 3.20", "setuptools 80.0")
ROCM_REPORT = report_of("torch 2.13.0+rocm7.2", "triton-rocm 3.7.1", "sympy 1.14.0")
CUDA_REPORT = report_of("torch 2.13.0", "nvidia-cublas 13.1", "nvidia_cudnn_cu13 9.20", "triton 3")


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ".venv"
    monkeypatch.setattr(setup, "VENV", folder)
    monkeypatch.setattr(setup, "PYTHON", folder / "bin" / "python")
    monkeypatch.setattr(setup, "STAMP", folder / "rocm_sd.json")
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was run; everything succeeds and prints nothing, unless `answers` says otherwise."""
    made: list[list[str]] = []
    answer(monkeypatch, made, lambda words: (0, ""))
    return made


def answer(monkeypatch: pytest.MonkeyPatch, made: list[list[str]], how: Answer) -> None:
    def call(*words: object, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        texts = [str(word) for word in words]
        made.append(texts)
        status, out = how(texts)
        return subprocess.CompletedProcess(texts, status, out)

    monkeypatch.setattr(setup, "_call", call)


def sources(monkeypatch: pytest.MonkeyPatch, **reports: dict[str, Any]) -> list[str]:
    """Let `resolve` answer with these, by 'rocm', 'cpu', 'configured'; others are out of reach."""
    keys = {setup.ROCM: "rocm", setup.CPU: "cpu", setup.CONFIGURED: "configured"}
    asked: list[str] = []

    def resolve(source: setup.TorchSource) -> tuple[dict[str, Any], str]:
        asked.append(keys[source])
        report = reports.get(keys[source])
        return (report, "") if report else ({}, "no matching distribution")

    monkeypatch.setattr(setup, "resolve", resolve)
    return asked


# --- which torch


@pytest.mark.parametrize(
    ("amd_gpu", "reports", "chosen", "asked"),
    [
        (False, {"cpu": CPU_REPORT, "configured": CUDA_REPORT}, setup.CPU, ["cpu"]),
        (True, {"rocm": ROCM_REPORT, "cpu": CPU_REPORT}, setup.ROCM, ["rocm"]),
        (True, {"cpu": CPU_REPORT}, setup.CPU, ["rocm", "cpu"]),
        (False, {"configured": CPU_REPORT}, setup.CONFIGURED, ["cpu", "configured"]),
        (
            False,
            {"cpu": CUDA_REPORT, "configured": CPU_REPORT},
            setup.CONFIGURED,
            ["cpu", "configured"],
        ),
    ],
)
def test_the_build_that_fits(
    amd_gpu: bool,
    reports: dict[str, Any],
    chosen: setup.TorchSource,
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = sources(monkeypatch, **reports)
    assert setup.choose_torch(amd_gpu=amd_gpu, allow_large=False) == chosen
    assert log == asked


def test_another_vendors_runtime_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    sources(monkeypatch, configured=CUDA_REPORT)
    with pytest.raises(setup.SetupError) as refusal:
        setup.choose_torch(amd_gpu=False, allow_large=False)
    said = str(refusal.value)
    assert "torch for the CPU: no matching distribution" in said
    assert "2 packages of another vendor's GPU runtime" in said
    assert "nvidia-cudnn-cu13 9.20" in said
    assert "--allow-large" in said
    assert setup.choose_torch(amd_gpu=False, allow_large=True) == setup.CONFIGURED


@pytest.mark.parametrize(
    ("report", "foreign"),
    [
        (CPU_REPORT, []),
        (ROCM_REPORT, []),
        (CUDA_REPORT, ["nvidia-cublas 13.1", "nvidia-cudnn-cu13 9.20"]),
        (report_of("torch 2.13.0+cu130"), ["torch 2.13.0+cu130"]),
        (report_of("CUDA_bindings 13.5"), ["cuda-bindings 13.5"]),
        ({}, []),
    ],
)
def test_foreign_packages(report: dict[str, Any], foreign: list[str]) -> None:
    assert setup.foreign_packages(report) == foreign


def test_resolve_reads_pips_report(
    venv: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(words: list[str]) -> tuple[int, str]:
        if "cpu" in words[-2]:
            return 1, "WARNING: something\nERROR: no space left\n\n[notice] A new pip\n"
        if "rocm" in words[-2]:
            return 1, f"ERROR: Could not find {setup.TORCH} (from versions: none)\nERROR: No match"
        Path(words[words.index("--report") + 1]).write_text(json.dumps(CUDA_REPORT))
        return 0, ""

    answer(monkeypatch, calls, pip)
    assert setup.resolve(setup.CPU) == ({}, "ERROR: no space left")
    assert "could not be reached" in setup.resolve(setup.ROCM)[1]
    assert setup.resolve(setup.CONFIGURED) == (CUDA_REPORT, "")
    assert all("--dry-run" in words for words in calls)
    assert "--timeout" in calls[0]
    assert "--timeout" not in calls[2]


@pytest.mark.parametrize(
    ("host", "counts"),
    [
        ("https://download.pytorch.org", True),
        ("https://download-r2.pytorch.org", True),
        ("https://notpytorch.org", False),
        ("file:///srv/wheels", False),
    ],
)
def test_a_torch_from_an_extra_index_does_not_count_for_pytorchs(
    host: str,
    counts: bool,
    venv: Path,
    calls: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = report_of("filelock 3", "torch 2.13.0+cpu", host=host)

    def pip(words: list[str]) -> tuple[int, str]:
        Path(words[words.index("--report") + 1]).write_text(json.dumps(report))
        return 0, ""

    answer(monkeypatch, calls, pip)
    found, why = setup.resolve(setup.CPU)
    assert (found == report) is counts
    assert ("could not be reached" in why) is not counts
    assert setup.resolve(setup.CONFIGURED) == (report, "")


# --- the virtual environment


def works(*needles: str) -> Answer:
    """Commands that contain all `needles` succeed, others say why they do not."""
    return lambda words: (0, "") if all(n in words for n in needles) else (1, "No module named x")


@pytest.mark.parametrize(
    ("answers", "last"),
    [(works("venv"), "venv"), (works("virtualenv"), "virtualenv"), (works("--quiet"), None)],
)
def test_ways_to_a_virtual_environment(
    answers: Answer,
    last: str | None,
    venv: Path,
    calls: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer(monkeypatch, calls, answers)
    if last is None:
        with pytest.raises(setup.SetupError, match="apt install python3-venv"):
            setup.make_venv(see_host=False)
        return
    setup.make_venv(see_host=False)
    assert last in calls[-1]
    assert "--system-site-packages" not in calls[-1]


def test_the_hosts_pip_serves_where_ensurepip_is_missing(
    venv: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def debian(words: list[str]) -> tuple[int, str]:
        return (0, "") if "--without-pip" in words or "--python" in words else (1, "no ensurepip")

    answer(monkeypatch, calls, debian)
    setup.make_venv(see_host=False)
    assert calls[-1][calls[-1].index("--python") + 1] == str(setup.PYTHON)


def test_a_foreign_venv_is_left_alone(venv: Path, calls: list[list[str]]) -> None:
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    with pytest.raises(setup.SetupError, match="not made by this script"):
        setup.environment("demo", amd_gpu=False, allow_large=False)
    assert (venv / "pyvenv.cfg").exists()


@pytest.mark.parametrize(
    ("version", "reused"), [("2.13.0+cpu", True), ("2.1.2+rocm5.7", True), ("1.13.1", False)]
)
def test_a_torch_that_is_there_is_reused(
    version: str,
    reused: bool,
    tmp_path: Path,
    venv: Path,
    calls: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: list[tuple[str, ...]] = []
    site = tmp_path / "lib"
    site.mkdir()
    venv.mkdir()
    setup.STAMP.write_text("{}")
    sources(monkeypatch, cpu=CPU_REPORT)

    def python(words: list[str]) -> tuple[int, str]:
        if "import torch" in words[-1]:
            own = any(setup.TORCH in arguments for arguments in installed)
            seen = version if reused or words[0] == sys.executable else "2.13.0+cpu" if own else ""
            return (0, f"torch {seen}\n") if seen else (1, "ModuleNotFoundError")
        if words[1:] == ["-c", "pass"]:
            return 1, "gone"
        return 0, str(site) if "sysconfig" in words[-1] else "pip 24.0 from there"

    answer(monkeypatch, calls, python)
    monkeypatch.setattr(setup, "_pip_install", lambda *arguments: installed.append(arguments))
    setup.environment("demo", amd_gpu=False, allow_large=False)
    made = next(words for words in calls if "venv" in words)
    assert ("--system-site-packages" in made) is reused
    assert any(setup.TORCH in arguments for arguments in installed) is not reused
    in_use = version if reused else "2.13.0+cpu"
    assert (venv / "constraints.txt").read_text() == f"torch=={in_use}\n"
    listed = "demo-older-torch.txt" if version.startswith("2.1.2") else "demo.txt"
    assert installed[-1][-1] == str(setup.ROOT / "requirements" / listed)
    assert setup.read_stamp() == setup.stamp_of("demo", in_use)


def test_an_interrupted_set_up_is_taken_up_again(
    venv: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(words: list[str]) -> tuple[int, str]:
        if "venv" in words:
            (venv / "half-made").touch()
            raise KeyboardInterrupt
        return 1, ""

    answer(monkeypatch, calls, interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            setup.environment("demo", amd_gpu=False, allow_large=False)
        assert setup.read_stamp() == {}


# --- the other packages


@pytest.fixture
def alone(venv: Path) -> Path:
    """A .venv that sees no packages but its own."""
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    return venv


def prefix_and(venv: Path, words: list[str], settings: str) -> tuple[int, str]:
    if words[-1] == "list":
        return 0, settings
    return 0, f"{venv}\n"


def test_uv_installs_where_it_sees_all_that_pip_does(
    alone: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "global.extra-index-url='https://wheels.here'\n"
    answer(monkeypatch, calls, lambda words: prefix_and(alone, words, settings))
    python = str(setup.PYTHON)
    assert setup.fast_installer(python)[:5] == [python, "-m", "uv", "pip", "install"]


@pytest.mark.parametrize("settings", ["global.index-url='https://here'", "install.no-index='1'"])
def test_an_index_of_the_users_own_is_pips_to_ask(
    settings: str, alone: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, calls, lambda words: prefix_and(alone, words, settings))
    assert setup.fast_installer(setup.PYTHON) == []


def test_packages_around_a_venv_are_pips_to_see(
    alone: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, calls, lambda words: prefix_and(alone, words, ""))
    (alone / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert setup.fast_installer(setup.PYTHON) == []
    (alone / "pyvenv.cfg").unlink()
    assert setup.fast_installer(setup.PYTHON) == []


def test_where_uv_cannot_be_had_pip_installs(
    alone: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_uv(words: list[str]) -> tuple[int, str]:
        return (1, "no wheel") if "uv" in words else prefix_and(alone, words, "")

    answer(monkeypatch, calls, no_uv)
    assert setup.fast_installer(setup.PYTHON) == []
    assert any("--only-binary=:all:" in words for words in calls), "pip was not asked for uv"


def test_where_uv_fails_pip_tries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def shown(command: list[str]) -> tuple[int, str]:
        ran.append(command)
        return (2, "error: no such host\n") if "uv" in command else (0, "")

    monkeypatch.setattr(setup, "fast_installer", lambda python: ["python", "-m", "uv"])
    monkeypatch.setattr(setup, "_shown", shown)
    setup._install_packages("numpy")
    assert [("uv" in words, "numpy" in words) for words in ran] == [(True, True), (False, True)]
    assert "uv could not, pip tries: error: no such host" in capsys.readouterr().out


# --- the stamp


def test_the_second_run_does_nothing(venv: Path, calls: list[list[str]]) -> None:
    venv.mkdir()
    stamp = setup.stamp_of("test", "2.13.0+cpu")
    setup.STAMP.write_text(json.dumps(stamp))
    for purpose in ("demo", "test"):
        assert setup.environment(purpose, amd_gpu=False, allow_large=False) == setup.PYTHON
    assert len(calls) == 2
    assert all("find_spec" in words[-1] for words in calls)


@pytest.mark.parametrize("text", ["{}", "", "[1]", '{"torch": "2.13.0+cpu"}', '{"demo.txt": "0"}'])
def test_an_unfinished_stamp_is_not_complete(text: str, venv: Path, calls: list[list[str]]) -> None:
    venv.mkdir()
    setup.STAMP.write_text(text)
    stamp = setup.read_stamp()
    assert stamp is not None
    assert not setup.is_complete("demo", stamp)


def test_a_changed_requirement_is_noticed(venv: Path, calls: list[list[str]]) -> None:
    demo = setup.stamp_of("demo", "2.13.0+cpu")
    assert setup.is_complete("demo", demo)
    assert not setup.is_complete("test", demo)
    assert not setup.is_complete("demo", {**demo, "demo.txt": "0" * 64})


# --- what tools say


def test_numbers_and_last_line() -> None:
    assert setup.numbers("pip 23.2.1 from /usr/lib/python3.11") == (23, 2)
    assert setup.numbers("") == ()
    assert setup.last_line("a\nb\n[notice] c\n\n") == "b"
    assert setup.last_line("") == "it said nothing"
