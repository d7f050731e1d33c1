"""A caught error's traceback is in the log, once."""

from __future__ import annotations

import pytest

from lib_rocm_sd.hosts import trouble


def fail(message: str) -> None:
    raise KeyError(message)


def caught(message: str) -> str:
    try:
        fail(message)
    except KeyError as error:
        return trouble.once(error)
    raise AssertionError


def test_once_for_each_place(caplog: pytest.LogCaptureFixture) -> None:
    trouble._logged.clear()
    assert caught("first") == "KeyError: 'first'"
    assert caught("second") == "KeyError: 'second'"
    assert caplog.text.count("Traceback") == 1
    assert "in fail" in caplog.text
    try:
        fail("third")
    except KeyError as error:
        trouble.once(error)
    assert caplog.text.count("Traceback") == 2
