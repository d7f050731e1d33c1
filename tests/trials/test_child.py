"""The child as a process: light, quiet, and gone with its parent."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.trials import child, recording
from lib_rocm_sd.trials.link import Link, _command
from tests.trials import scaling

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("ready"),
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
]
ROOT = Path(__file__).parents[2]
LOADED = """
import sys
import lib_rocm_sd.trials.child
print([name for name in ("torch", "gradio") if name in sys.modules])
"""
QUIET = """
import os, resource, sys
from lib_rocm_sd.trials import child
child.quiet()
say = child.answers()
print("what a library prints")
os.system("echo from below")
say({"core": resource.getrlimit(resource.RLIMIT_CORE)})
"""
PARENT = """
import sys, time
from lib_rocm_sd.trials.link import Link
link = Link()
print(link._process.pid, flush=True)
time.sleep(60)
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def test_it_needs_no_torch() -> None:
    assert python(LOADED).stdout.strip() == "[]"


def test_nothing_but_answers_comes_out_and_no_core_is_left() -> None:
    done = python(QUIET)
    assert json.loads(done.stdout) == {"core": [0, 0]}
    assert "what a library prints" in done.stderr
    assert "from below" in done.stderr


def opened(hip_file: Path) -> Link:
    link = Link()
    link.send({"kind": "open", **scaling.place(hip_file).as_dict(), "torch": False})
    assert link.receive(30) == {"kind": "ready"}
    return link


def test_it_ends_when_its_input_does_also_in_a_hang(
    hip_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "hang:1")
    link = opened(hip_file)
    spec = scaling.SPEC
    code = scaling.subject(2.0).codes(arch.table()["gfx1100"])[spec]
    rows, blobs = recording.packed(recorded())
    row = [spec.source, spec.entry, [list(pair) for pair in spec.defines]]
    head = {"kind": "class", "rows": rows, "codes": [[row, len(blobs)]]}
    link.send(head, [*blobs, code])
    answer = link.receive(30)
    assert answer is not None
    assert answer["kind"] == "trying"
    link._letters.put(None)  # its input ends
    assert link.receive(30) is None
    assert link.status() == 0
    link.end()


def recorded() -> list[recording.Recording]:
    from lib_rocm_sd.trials import recorder

    each = scaling.subject(2.0)
    return recorder.recordings(each.op, each.variant, each.config, each.problem)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_it_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip())
        assert child.exists()
        parent.kill()
        parent.wait(600)
        until(lambda: gone(child))


def gone(process: Path) -> bool:
    try:
        return " Z " in (process / "stat").read_text()
    except OSError:
        return True


def until(true: Callable[[], bool]) -> None:
    """Waits for what happens, a minute at most."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_finds_the_packages_of_this_interpreter() -> None:
    import numpy

    assert _command()[-1] == str(Path(numpy.__file__).parents[1])


class Broken:
    """A trial that fails by a mistake of ours."""

    def test(self, head: dict[str, Any], blobs: Any) -> dict[str, Any]:
        raise KeyError("linear")


def test_a_mistake_of_ours_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts where it ends while a thread reads its input: that looked like a crash."""

    class Inbox:
        messages: ClassVar[list[Any]] = [({}, []), ({}, [])]

        def get(self) -> Any:
            if not self.messages:
                raise EOFError
            return self.messages.pop()

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(child, "quiet", lambda: None)
    monkeypatch.setattr(child, "answers", lambda: said.append)
    monkeypatch.setattr(child, "_inbox", lambda stream: Inbox())
    monkeypatch.setattr(child, "opened", lambda head, say: Broken())
    with pytest.raises(EOFError):
        child.main()
    ready, verdict = said
    assert ready == {"kind": "ready"}
    assert verdict["outcome"] == "refused" and not verdict["lasting"]
    assert "the trial itself failed: KeyError: 'linear'" in verdict["reason"]
