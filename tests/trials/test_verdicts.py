"""Verdicts outlive the process, can be read, and are told in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib_rocm_sd import cache
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.verdicts import (
    FAULTED,
    HUNG,
    INTERRUPTED,
    KILLED,
    PASSED,
    REFUSED,
    WRONG,
    Verdict,
)

pytestmark = pytest.mark.usefixtures("fresh_cache")
GOOD = Verdict("attention D64", PASSED, "", 1e-4, 2e-3, 0.25, ("far: too little memory",), "Card")


def test_a_verdict_is_kept_and_dated() -> None:
    written = verdicts.write("k1", GOOD)
    cache.reset()
    assert verdicts.read("k1") == written
    assert written.date.endswith("Z")
    assert written.passed
    assert written.refusal == ""
    verdicts.forget("k1")
    assert verdicts.read("k1") is None


def test_people_can_read_it(fresh_cache: Path) -> None:
    verdicts.write("k1", GOOD)
    text = (fresh_cache / "verdicts" / "k1").read_bytes()
    assert b'"outcome": "passed"' in text
    assert b"far: too little memory" in text


def test_what_was_damaged_is_no_verdict(fresh_cache: Path) -> None:
    verdicts.write("k1", GOOD)
    path = fresh_cache / "verdicts" / "k1"
    path.write_bytes(path.read_bytes().replace(b"passed", b"pasted"))
    assert verdicts.read("k1") is None
    cache.write(verdicts.KIND, "k2", b"[1, 2]")
    cache.write(verdicts.KIND, "k3", b'{"outcome": "passed"}')
    assert verdicts.read("k2") is None
    assert verdicts.read("k3") is None
    assert list(verdicts.every()) == []


@pytest.mark.parametrize("outcome", [WRONG, FAULTED, HUNG, KILLED, REFUSED, INTERRUPTED])
def test_every_other_outcome_refuses_with_its_reason(outcome: str) -> None:
    verdict = Verdict("conv", outcome, "it said so")
    assert not verdict.passed
    assert f"{outcome}: it said so" in verdict.refusal


def test_reasons_have_no_folders() -> None:
    written = verdicts.write(
        "k", Verdict("conv", FAULTED, "in /home/me/kernel.co\nand C:\\Users\\me x")
    )
    assert written.reason == "in PATH and PATH"
    assert len(verdicts.clean("x" * 1000)) == verdicts.MOST_TEXT


def test_a_second_death_bars_for_good() -> None:
    once = verdicts.interrupted("k", "conv", "Card", "a process ended in it", INTERRUPTED)
    assert once.asks_again
    twice = verdicts.interrupted("k", "conv", "Card", "a process ended in it", INTERRUPTED)
    assert not twice.asks_again
    assert "2 times" in twice.refusal


def test_every_lists_all_by_subject() -> None:
    verdicts.write("b", Verdict("two", PASSED))
    verdicts.write("a", Verdict("one", WRONG))
    assert [(key, each.subject) for key, each in verdicts.every()] == [("a", "one"), ("b", "two")]


@pytest.mark.parametrize(
    ("reason", "fault"),
    [
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: HIP error: unspecified launch failure", True),
        ("Memory access fault by GPU node-1 on address 0x7f. Reason: Page not present", True),
        ("HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception.", True),
        ("CompileError: clang: illegal operand", False),
        ("wrong by 0.3, the tolerance is 0.002", False),
        ("RuntimeError: HIP out of memory", False),
    ],
)
def test_words_that_name_a_fault(reason: str, fault: bool) -> None:
    assert verdicts.names_fault(reason) is fault
