"""Every place that has an attention function: what is replaced, what is not, what comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.hosts.webui.attention import Bindings, Function
from lib_rocm_sd.hosts.webui.host import Kind

HOME = "tiny_forge.attention"
KIND = Kind(HOME, ("chosen",), "of_vae", "", "", ("tiny_forge.text",))
SOURCE = """
def plain(q): return "plain"
def frugal(q): return "frugal"
def of_vae(q): return "of the VAE"
chosen = plain
"""


class Owner:
    stands_aside = False


Make = Callable[..., ModuleType]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Adds a Python module of the WebUI's, with these names in it."""

    def module(name: str, folder: str = "webui", **names: Any) -> ModuleType:
        made = ModuleType(name)
        made.__file__ = str(tmp_path / folder / f"{name.rpartition('.')[2]}.py")
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return module


@pytest.fixture
def home(make: Make) -> Any:
    made = make(HOME)
    exec(SOURCE, vars(made))
    return made


@pytest.fixture
def bindings() -> Bindings:
    def ours(theirs: Any, name: str) -> Function:
        compute: Any = lambda q: f"ours for {name}"  # noqa: E731
        return Function(theirs, compute, Owner())

    return Bindings(ours)


def of(module: ModuleType, name: str) -> Any:
    return vars(module)[name](0)


def test_all_that_has_it_gets_ours_and_gets_it_back(
    make: Make, home: Any, bindings: Bindings
) -> None:
    plain, of_vae = home.plain, home.of_vae
    unet, renamed = make("tiny_forge.unet", chosen=plain), make("an_extension", theirs=plain)
    vae = make("tiny_forge.vae", of_vae=of_vae)
    bindings.put(KIND)
    assert [of(home, "chosen"), of(unet, "chosen"), of(renamed, "theirs")] == [
        "ours for chosen"
    ] * 3
    assert of(home, "of_vae") == of(vae, "of_vae") == "ours for of_vae"
    assert home.chosen is unet.chosen is renamed.theirs
    assert len(bindings.places) == 5 and f"{HOME}.chosen" in bindings.places
    bindings.take()
    assert home.chosen is unet.chosen is renamed.theirs is plain
    assert home.of_vae is vae.of_vae is of_vae
    assert not bindings.places and not bindings.displaced_by()


def test_what_else_is_there_stays(make: Make, home: Any, bindings: Bindings) -> None:
    plain, frugal = home.plain, home.frugal
    text = make("tiny_forge.text.t5", chosen=plain)
    torchs = make("a_package", "site-packages/a_package", chosen=plain)
    beside = make("tiny_forge.other", frugal=frugal)
    bindings.put(KIND)
    assert home.plain is plain  # under its own name it is what the others fall back to
    assert text.chosen is torchs.chosen is plain and beside.frugal is frugal


def test_what_is_imported_later_is_found_too(make: Make, home: Any, bindings: Bindings) -> None:
    bindings.put(KIND)
    late = make("tiny_forge.late", chosen=home.plain)
    bindings.put(KIND)
    assert of(late, "chosen") == "ours for chosen" and len(bindings.places) == 3
    during = make("tiny_forge.during", chosen=home.chosen)
    bindings.take()
    assert late.chosen is during.chosen is home.plain


def test_a_script_that_nobody_can_import(
    make: Make, home: Any, bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = make("a_script", chosen=home.plain)
    del sys.modules["a_script"]
    monkeypatch.setattr(host, "scripts", lambda: (script,))
    bindings.put(KIND)
    assert of(script, "chosen") == "ours for chosen"
    bindings.take()
    assert script.chosen is home.plain


def test_who_was_there_before_stays_and_is_named(make: Make, home: Any, bindings: Bindings) -> None:
    unet = make("tiny_forge.unet", chosen=home.plain)

    def another(q: Any) -> str:
        return "another's"

    home.chosen = another
    bindings.put(KIND)
    assert home.chosen is another
    assert of(unet, "chosen") == "ours for chosen"
    ((name, places),) = bindings.displaced_by().items()
    assert name.startswith("another of") and places == [f"{HOME}.chosen"]
    bindings.take()
    assert home.chosen is another and unet.chosen is home.plain


def test_who_comes_after_stays_and_is_named(make: Make, home: Any, bindings: Bindings) -> None:
    bindings.put(KIND)
    ours = home.chosen

    def wraps(q: Any) -> str:
        return f"wrapped {ours(q)}"

    home.chosen = wraps
    assert list(bindings.displaced_by().values()) == [[f"{HOME}.chosen"]]
    late = make("tiny_forge.late", chosen=home.plain)
    bindings.put(KIND)  # looks again
    assert home.chosen is wraps and late.chosen is ours
    assert list(bindings.displaced_by().values()) == [[f"{HOME}.chosen"]]
    bindings.take()
    assert home.chosen is wraps


def test_ours_is_equal_to_what_it_stands_in_for(home: Any, bindings: Bindings) -> None:
    """Forge looks which function is in use, to tell how much memory a step takes."""
    bindings.put(KIND)
    ours = home.chosen
    assert ours in [home.plain] and ours not in [home.frugal] and ours == ours
    assert len({ours, home.plain}) == 1
    assert ours.__name__ == "plain" and ours.__module__ == HOME
