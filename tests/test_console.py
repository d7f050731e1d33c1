"""Our lines on consoles that lack a letter, are closed, or are not there."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lib_rocm_sd import console
from tests.clock import Clock
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "/\u6269\u5c55"  # "extensions" in Chinese
ESCAPED = FOLDER.encode("ascii", "backslashreplace").decode()


def strict(encoding: str) -> io.TextIOWrapper:
    """As Windows gives for standard output, and ComfyUI puts in the place of both streams."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def shown(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(stream.encoding)


class Tee:
    """A program's own stream, which does not tell its encoding."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self.write, self.flush = stream.write, stream.flush


def closed() -> io.TextIOWrapper:
    made = strict("utf-8")
    made.close()
    return made


@contextmanager
def logged() -> Iterator[io.TextIOWrapper]:
    """Standard error, to which alone our log goes. Not a fixture: pytest's own stream would take
    its place before the test.
    """
    log = logging.getLogger("rocm_sd")
    handler = logging.StreamHandler(strict("cp1252"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", handler.stream)
        patch.setattr(log, "propagate", False)
        patch.setattr(log, "handlers", [handler])
        yield handler.stream


@pytest.mark.parametrize(
    ("encoding", "line"),
    [("cp1252", ESCAPED), ("cp932", "/\\u6269\u5c55"), ("utf-8", FOLDER), ("utf-16", FOLDER)],
)
def test_what_the_console_lacks_is_escaped(
    encoding: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = strict(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    console.say(f"nothing in {FOLDER}")
    assert shown(stream).splitlines() == [f"nothing in {line}"]


def test_an_encoding_that_is_not_told_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = strict("cp1252")
    monkeypatch.setattr(sys, "stdout", Tee(stream))
    console.say(FOLDER)
    assert shown(stream).splitlines() == [ESCAPED]


def test_bytes_of_a_name_that_are_no_letters_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = strict("utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    console.say(b"/\xff".decode("utf-8", "surrogateescape"))
    assert shown(stream).splitlines() == ["/\\udcff"]


@pytest.mark.parametrize("stream", [None, closed(), object()])
def test_without_a_console_nothing_is_said(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    console.say("lost")
    console.Log().warning("lost")


def test_the_log_escapes_a_line_and_a_traceback() -> None:
    with logged() as stream:
        try:
            exec(compile("raise KeyError('x')", f"{FOLDER}/ours.py", "exec"))
        except KeyError as error:
            console.Log().error("in %s: %r", FOLDER, error, exc_info=error)
    first, *rest = shown(stream).splitlines()
    assert first == f"in {ESCAPED}: KeyError('x')"
    assert rest[0].startswith("Traceback") and rest[-1] == "KeyError: 'x'"
    assert any(f'File "{ESCAPED}/ours.py", line 1' in line for line in rest)


def test_a_log_whose_console_is_closed_fails_nothing() -> None:
    with logged() as stream:
        stream.close()
        console.Log().warning("lost")


def test_values_are_formatted_only_for_a_level_that_is_shown() -> None:
    class Unread:
        def __str__(self) -> str:
            raise AssertionError

    with logged() as stream:
        console.Log("rocm_sd.a_test").info("%s", Unread())
        console.Log("rocm_sd.a_test").warning("100%")
    assert shown(stream).splitlines() == ["100%"]


def test_a_command_escapes(tmp_path: Path) -> None:
    program = (
        "from lib_rocm_sd import __main__\n"
        "from lib_rocm_sd.commands import results as command\n"
        f"command.rendered = lambda *_: {FOLDER!r}\n"
        f"raise SystemExit(__main__.main(['results', {str(tmp_path)!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.stderr == b""
    assert done.stdout.decode().splitlines() == [ESCAPED]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell that closes standard output")
def test_a_command_without_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lib_rocm_sd", "results", str(tmp_path)]
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" "$@" >&-', *command],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        check=False,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, b"")


TERMINAL = """
import fcntl, struct, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from lib_rocm_sd import console
with console.Progress(print) as progress:
    progress.show("trying kernels, 1 of 2")
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 24, 16, 0, 0))
    progress.show("trying kernels, 2 of 2")
    progress.show("trying")
print("end")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's terminals")
def test_progress_is_seen_on_the_terminal_though_a_host_keeps_both_streams() -> None:
    """As the WebUI's modules/launch_utils.py does: subprocess.run with two pipes."""
    import pty

    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL],
        stdin=theirs,
        capture_output=True,
        cwd=ROOT,
        start_new_session=True,
        check=False,
        timeout=WAIT_S,
    )
    seen = os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"end\n", b"")
    first, cut, short = "trying kernels, 1 of 2", "trying kernels,", "trying"
    shown = (first, cut.ljust(len(first)), short.ljust(len(cut)), " " * len(short))
    assert seen == "".join(f"\r{text}\r" for text in shown)


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr(console, "_terminal", lambda: None)
    monkeypatch.setattr(console.time, "monotonic", clock)
    with console.Progress(lines.append) as progress:
        for seconds in range(40):
            progress.show(str(seconds))
            progress.clear()
            clock.turn(1.0)
    assert lines == ["15", "30"]


def test_a_terminal_that_was_closed_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def fileno(self) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(console, "_terminal", Closed)
    lines: list[str] = []
    with console.Progress(lines.append) as progress:
        progress.show("trying")
    assert lines == []
