"""What was compiled is tried at the start, in a process that has torch, and spoils no start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import install
from lib_rocm_sd import console
from lib_rocm_sd.first_trials import MARK, PROGRESS
from lib_rocm_sd.runtime import compilers, process, torch_build
from lib_rocm_sd.runtime.torch_build import TorchBuild
from lib_rocm_sd.shipped import AT_START, shipped
from lib_rocm_sd.trials import stamp
from tests.install.install_doubles import GFX1100, SCRIPT, Builder, gpus

TRY_KERNELS = install.try_kernels


class Trials:
    """Stands for process.run, and for what is run: the process that has torch."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.trouble, self.put = "", False
        self.meanwhile: Sequence[str] = ()
        self.output = f"a warning\n{MARK}Card: 71 of 71 kernels passed.\n"

    def run(
        self, command: list[str], limit_s: float, heard: Callable[[str], None]
    ) -> process.Finished:
        self.commands.append(command)
        for line in self.meanwhile:
            heard(line)
        assert 0 < limit_s <= install.TRIAL_LIMIT_S
        if self.put:
            stamp.put(command[-1])
        return process.Finished(self.trouble, self.output, 1.0)


@pytest.fixture
def trials(fresh_cache: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """All is compiled for a gfx1100, and a process stands for the one that has torch."""
    monkeypatch.setattr(install, "try_kernels", TRY_KERNELS)
    builder.built = list(shipped(GFX1100, AT_START))
    made = Trials()
    monkeypatch.setattr(process, "run", made.run)
    gpus(monkeypatch, "gfx1100")
    return made


def test_what_is_compiled_is_tried_once(
    trials: Trials, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials.put = True
    assert install.main() == 0
    ready, trying, told = capsys.readouterr().out.splitlines()
    assert ready.endswith("kernels are ready.")
    assert trying.endswith("gfx1100: trying the kernels in a process of their own, once.")
    assert told == "  Card: 71 of 71 kernels passed."  # and no warning of torch's
    (command,) = trials.commands
    assert command[-1] == "gfx1100"
    assert install.main() == 0
    assert len(trials.commands) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("trouble", "output", "words"),
    [
        ("took longer than 120 s and was ended", "", "That took longer than 120 s and was ended."),
        ("crashed (SIGSEGV)", "Traceback", "That crashed (SIGSEGV). They are tried later"),
        ("", "a warning of torch's", "Torch reports no card for them. They are tried later"),
    ],
)
def test_trials_that_fail_spoil_no_start(
    trials: Trials, trouble: str, output: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trials.trouble, trials.output = trouble, output
    assert install.main() == 0
    assert words in capsys.readouterr().out
    assert install.main() == 0
    assert len(trials.commands) == 1  # the next start is quick
    assert not stamp.is_whole("gfx1100")  # but the WebUI goes on


def test_how_far_the_trials_are_is_shown_meanwhile(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a line of standard output where there is no terminal, at most every SELDOM_S."""
    monkeypatch.setattr(console, "_terminal", lambda: None)
    monkeypatch.setattr(console, "SELDOM_S", 0.0)
    far = "trying kernels, 40 of 195, about 30 s"
    trials.meanwhile = ["a warning", f"{PROGRESS}{far}", f"{MARK}no progress"]
    assert install.main() == 0
    assert capsys.readouterr().out.splitlines()[2:4] == [
        f"{install.NAME}: trying kernels",
        f"{install.NAME}: {far}",
    ]


def test_an_interruption_of_the_trials_ends_them(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "run", interrupted)
    assert install.main() == 0
    assert capsys.readouterr().out.endswith("interrupted. All else works as before.\n")
    assert not stamp.is_there("gfx1100")


def test_nothing_is_tried_where_a_kernel_is_missing_or_torch_is(
    trials: Trials, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "serves", lambda arch: False)
    builder.built.pop()
    assert install.main() == 0
    monkeypatch.setattr(torch_build, "installed", lambda: None)
    assert install.main() == 0
    assert trials.commands == []


def test_a_new_torch_or_a_kernel_compiled_anew_is_tried_again(
    trials: Trials, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.put = True
    install.main()
    builder.built.pop()
    install.main()
    assert len(trials.commands) == 2
    newer = TorchBuild("2.10.0+rocm7", None, "7.0")
    monkeypatch.setattr(torch_build, "installed", lambda: newer)
    install.main()
    assert len(trials.commands) == 3


def test_the_process_that_has_torch_imports_what_it_needs() -> None:
    """The real one, on this machine, whatever GPU that has."""
    pytest.importorskip("torch")
    words = [str(SCRIPT.parent), "", "1", "gfx000"]
    done = process.run([sys.executable, "-c", install.TRY, *words], 60)
    assert (done.trouble, MARK in done.output) == ("", False)
