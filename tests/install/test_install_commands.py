"""`install.py demo` and `install.py test`: how they end, and which checks run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import install
from tools import environment as setup


def test_a_setup_error_ends_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(purpose: str, *, amd_gpu: bool, allow_large: bool) -> Path:
        assert (purpose, allow_large) == ("demo", True)
        raise setup.SetupError("no torch to be had")

    monkeypatch.setattr(setup, "environment", refuse)
    monkeypatch.setattr(sys, "argv", ["install.py", "demo", "--allow-large", "--steps", "3"])
    assert install.main() == 1
    assert capsys.readouterr().out == "\nno torch to be had\n"


def test_other_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error: BaseException = OSError("read-only file system")

    def fail(*_: object, **__: object) -> Path:
        raise error

    monkeypatch.setattr(setup, "environment", fail)
    monkeypatch.setattr(sys, "argv", ["install.py", "test"])
    assert install.main() == 1
    assert capsys.readouterr().out == "\nread-only file system\n"
    error = KeyboardInterrupt()
    assert install.main() == 130
    assert "run it again to go on" in capsys.readouterr().out


def test_every_check_runs_and_one_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(python: Path, *words: str) -> int:
        ran.append(words)
        return 0

    class Types:
        """mypy beside the tests."""

        returncode = 2

        def __init__(self, command: list[str], **_: object) -> None:
            ran.append(tuple(command[2:]))

        def communicate(self) -> tuple[bytes, None]:
            return b"said", None

        def kill(self) -> None:
            pass

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install.subprocess, "Popen", Types)
    monkeypatch.setattr(setup, "environment", lambda *_, **__: Path("python"))
    monkeypatch.setattr(sys, "argv", ["install.py", "test", "-k", "engine", "-x"])
    assert install.main() == 2
    assert [words[0] for words in ran] == ["mypy", "ruff", "ruff", "pytest"]
    assert ran[-1][0] == "pytest" and ran[-1][-3:] == ("-k", "engine", "-x")
    assert "--workers" in ran[-1]
