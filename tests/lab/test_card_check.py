"""The check of a card: its process, what the page follows and shows, and where the file goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd import cache
from lib_rocm_sd.commands import selftest
from lib_rocm_sd.hosts.ui import check_part
from lib_rocm_sd.hosts.ui.check_part import CheckView
from lib_rocm_sd.lab import card_check, card_file
from lib_rocm_sd.lab.card_check import CardCheck
from lib_rocm_sd.lab.speed_job import Busy
from lib_rocm_sd.trials.link import Link
from tests.lab import played_selftest
from tests.lab.played_selftest import document
from tests.lab.speedtest_doubles import Side
from tests.ops.toy_op import GFX1100
from tests.waiting import WAIT_S, wait_until

HOSTILE = '"><img src=x onerror=alert(1)>'


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A view of a machine with a gfx1100, whose self-test writes this file and ends so."""
    monkeypatch.setattr(card_check, "identify", lambda place: GFX1100)
    side, overs, running = Side(tmp_path), [], []

    def begin(end: str, content: dict[str, Any]) -> tuple[CheckView, list[int], Side]:
        def command(path: Path, device: Any) -> list[str]:
            assert device == side.device
            words = (played_selftest.__file__, str(path), end, json.dumps(content))
            return [sys.executable, "-I", *words]

        monkeypatch.setattr(card_check, "command", command)
        running.append(CardCheck())
        return CheckView(running[-1], side, lambda: overs.append(1)), overs, side

    yield begin
    for each in running:
        each.stop()
        assert each.wait(WAIT_S)


def finished(view: CheckView) -> Any:
    assert view.start() == ""
    assert view.check.wait(WAIT_S)
    return view.state("")


# -- from the button to the file


def test_a_check_that_passes(checks: Any, tmp_path: Path) -> None:
    view, overs, side = checks("0", document())
    before = view.state("")
    assert before.can_run and not before.can_stop and before.result == ""
    assert check_part.IDLE in before.status
    state = finished(view)
    assert "All 60 checks passed on gfx1100." in state.result
    assert state.can_run and not state.can_stop and overs == [1] and not side.held
    (file,) = tmp_path.glob(card_file.FILES)
    assert f'download="{file.name}"' in state.result
    assert view.state(state.token).result is None
    later = CheckView(CardCheck(), Side(tmp_path), lambda: None).state("")
    assert later.result == state.result, "a page that is opened after a restart"


def test_what_went_wrong_is_named(checks: Any) -> None:
    view, _, _ = checks("1", document(failures=3))
    said = finished(view).result
    assert "3 of 60 checks did not pass on gfx1100: conv 3x3, rocm_sd: N1 8/16: wrong by" in said
    assert "; and 1 more." in said
    assert "<td>56 of 59</td>" in said and "<td>1 of 1</td>" in said
    assert said.count("<li>") == 3


def test_the_page_follows_and_can_stop_it(checks: Any, tmp_path: Path) -> None:
    view, overs, side = checks("waits", document(complete=False))
    assert view.start() == ""
    assert wait_until(lambda: "testing attention, 12 of 60" in view.state("").status)
    during = view.state("")
    assert 'aria-valuenow="20"' in during.status and 'aria-label="Check this card"' in during.status
    assert during.can_stop and not during.can_run and side.held
    assert "it is running" in view.start()
    view.check.stop()
    assert view.check.wait(WAIT_S)
    after = view.state(during.token)
    assert after.can_run and overs == [1] and not side.held
    assert "did not finish: stopped by the user; it stopped after 60 checks" in after.result
    (file,) = tmp_path.glob(card_file.FILES)
    assert json.loads(file.read_text())["ended"] == "stopped by the user"


def test_a_card_that_ends_the_process_costs_a_line(checks: Any, tmp_path: Path) -> None:
    running = "conv 3x3, rocm_sd: N1 8/16"
    view, overs, _ = checks("dies", document(complete=False, running=running))
    said = finished(view).result
    assert "did not finish: Memory access fault by GPU node-1 (SIGABRT)" in said
    assert f"it stopped at {running} after 60 checks of 60. Those passed." in said
    (file,) = tmp_path.glob(card_file.FILES)
    assert "Memory access fault" in json.loads(file.read_text())["ended"]
    assert overs == [1]


def test_a_process_that_says_nothing(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_check, "SILENT_S", 0.5)
    view, _, _ = checks("waits", document(complete=False))
    assert "did not finish: its process said nothing for" in finished(view).result


def test_a_check_that_cannot_be_run(checks: Any) -> None:
    view, overs, _ = checks("refuses", document())
    state = finished(view)
    assert "The self-test was not run: the GPU is away." in state.status
    assert state.result == "" and state.can_run


def test_it_waits_for_nobody(checks: Any, tmp_path: Path) -> None:
    view, _, side = checks("0", document())
    side.reason = "a picture is being made"
    assert view.start() == "Not started: a picture is being made."
    side.reason, side.generating = "", True
    state = finished(view)
    assert "The check could not be run: a picture is being made." in state.status
    assert not list(tmp_path.iterdir())


def test_without_a_card_the_button_says_why() -> None:
    view = CheckView(CardCheck(), Side(), lambda: None)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    state = view.state("")
    assert not state.can_run and state.result == ""
    assert "This machine&#x27;s card cannot be checked: no GPU: this is the CPU." in state.status
    assert view.start() == "Not started: no GPU: this is the CPU."
    with pytest.raises(Busy):
        view.check.start(Side())


def test_stopped_before_there_is_a_file(checks: Any, tmp_path: Path) -> None:
    view, _, _ = checks("hang", document())
    found = view.check._found(tmp_path / "none.json", "ended from outside (SIGKILL)", "")
    assert found.state == "failed"
    view.check.stop()
    found = view.check._found(tmp_path / "none.json", "ended from outside (SIGKILL)", "")
    assert (found.state, found.text) == ("stopped", "Stopped before the first check.")
    view.check._progress = found
    assert found.text in view.state("").status


def test_the_real_command_in_its_process(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the command's own refusal, which it says as in a terminal."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    real, links = card_check.command, list[Link]()
    view, _, _ = checks("0", document())
    monkeypatch.setattr(card_check, "command", real)

    def linked(words: list[str]) -> Link:
        links.append(Link(words))
        return links[0]

    monkeypatch.setattr(card_check, "Link", linked)
    assert "The self-test was not run: no GPU: this is the CPU." in finished(view).status
    assert links[0].status() == selftest.NOT_RUN


@pytest.mark.parametrize("backend", ["hip", "zluda"])
def test_the_process_has_the_hosts_cache_and_its_zluda(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the WebUI has compiled is there, and the WebUI finds its verdicts."""
    monkeypatch.setattr(cache._state, "host", tmp_path)
    here = GFX1100 if backend == "hip" else replace(GFX1100, backend="zluda")
    beside = SimpleNamespace(companions=lambda: [Path("amdhip64_6.dll"), Path("nvcuda.dll")])
    monkeypatch.setattr(card_check, "identify", lambda place: here)
    monkeypatch.setattr(card_check.zluda, "loaded", lambda: beside)
    place = torch.device("cuda", 3)
    *_, known, asked = card_check.command(tmp_path / "out.json", place)
    root, *places = json.loads(known)
    assert (Path(root) / "lib_rocm_sd").is_dir()
    assert places == [place for place in sys.path if place]

    def main(path: Path, number: int, as_json: bool, step: Any) -> int:
        step("testing attention", 12, 60)
        assert (path, number, as_json) == (tmp_path / "out.json", 3, False)
        return 0

    folders: list[str] = []
    monkeypatch.setattr(selftest, "main", main)
    monkeypatch.setattr(selftest.threading, "Thread", lambda **how: SimpleNamespace(start=list))
    monkeypatch.setattr(cache, "set_directory", folders.append)
    loaded, steps = list[Path](), list[Any]()
    monkeypatch.setattr(selftest.compile_worker, "load", loaded.append)
    assert selftest.child(**json.loads(asked), say=steps.append) == 0
    assert folders == [str(tmp_path)]
    assert loaded == (beside.companions() if backend == "zluda" else [])
    assert steps == [{"text": "testing attention", "done": 12, "total": 60}]


# -- the file


@pytest.mark.parametrize(
    "content",
    [
        *("{}", "[]", "3", "{", json.dumps({"format": card_file.FORMAT})),
        json.dumps({**document(), "verdicts": [{}]}),
        json.dumps({**document(), "rows": [{"op": 3}]}),
        json.dumps({**document(), "machine": None}),
        json.dumps(document()) + " " * card_file.MOST_BYTES,
    ],
)
def test_a_file_that_is_none_of_ours(content: str, tmp_path: Path) -> None:
    file = tmp_path / "rocm_sd-selftest-gfx1100-2030-01-02.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError):
        card_file.read(file)
    assert "cannot be shown" in check_part.result(file)


def test_what_a_file_says_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / "rocm_sd-selftest-gfx1100-2030-01-02.json"
    made = document(failures=1, running=HOSTILE, complete=False, ended=HOSTILE)
    made["machine"] |= {"card": HOSTILE, HOSTILE: HOSTILE}
    made["rows"][0] |= {"op": HOSTILE, "reason": HOSTILE}
    file.write_text(json.dumps(made), encoding="utf-8")
    assert "<img" not in check_part.result(file)


def test_all_that_is_in_the_file_is_shown(tmp_path: Path) -> None:
    """Each fact of the machine; of the other fields the sentence, the counts and the failures."""
    file = tmp_path / "rocm_sd-selftest-gfx1100-2030-01-02.json"
    made = document()
    made["machine"] |= {"a_new_fact": "its value"}
    file.write_text(json.dumps(made), encoding="utf-8")
    shown = check_part.result(file)
    for value in ("2030-01-02T03:04:05Z", "Radeon RX 7900 XTX", "A new fact", "its value"):
        assert value in shown
    assert "None" not in shown


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("url = https://github.com/somebody/rocm.git", "github.com/somebody/rocm/issues/new"),
        ("url = https://github.com/somebody/rocm", "github.com/somebody/rocm/issues/new"),
        ("url = /home/somebody/rocm.git", "Issues > New issue > Result from a card"),
        ("url = https://token:x@github.com/somebody/rocm", "Result from a card"),
        ("", "Result from a card"),
    ],
)
def test_where_to_send_it(
    config: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text(f'[remote "origin"]\n\t{config}\n')
    monkeypatch.setattr("lib_rocm_sd.arch.PACKAGE", tmp_path / "lib_rocm_sd")
    where = check_part._where()
    assert said in where and "token" not in where and "home" not in where
