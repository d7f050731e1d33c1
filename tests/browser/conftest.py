"""A WebUI's double for each gradio, Debian's chromium, and pages in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import launched
from tests.browser.pages import Visit
from tests.browser.served import Served
from tests.webui.environments import A1111, CHECKOUT, FORGE, prepare

HERE = str(Path(__file__).parent)
ARTEFACTS = CHECKOUT / "outputs" / "browser"
Open = Callable[..., Visit]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them start servers and a browser."""
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser of the system; none is downloaded."""
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session", params=[A1111, FORGE], ids=lambda environment: environment.name)
def webui(
    request: pytest.FixtureRequest, chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The double, with this extension on a GPU that is the CPU."""
    pytest.importorskip("torch", reason="torch is not installed")
    reason = prepare(request.param)
    if reason:
        pytest.skip(reason)
    with Served(request.param, tmp_path_factory.mktemp(request.param.name)) as served:
        yield served


@pytest.fixture
def visit(webui: Served, chromium: Any) -> Iterator[Open]:
    """Opens the page, as often as a test wants; scripts' errors in any of them fail the test."""
    visits: list[Visit] = []

    def open_page(*, theme: str = "light", width: int = 1280, height: int = 900) -> Visit:
        visits.append(Visit(chromium, webui.address, theme, {"width": width, "height": height}))
        return visits[-1]

    yield open_page
    errors = [error for one in visits for error in one.errors]
    for one in visits:
        one.close()
    assert not errors
    assert webui.ask("state")["errors"] == [], webui.console()


@pytest.fixture
def artefact(webui: Served) -> Callable[[str], Path]:
    """Where a screenshot of this name goes."""

    def path(name: str) -> Path:
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        return ARTEFACTS / f"{webui.environment.name}-{name}.png"

    return path
