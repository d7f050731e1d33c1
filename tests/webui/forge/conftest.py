"""The double's start as in `inside`, made a Forge's: what it has commented out is taken away, and
its checkpoints are of a Forge's modules.

These are ../forge_double's or ../reforge_double's; those of a checkout that ROCM_SD_FORGE_INSIDE
names where it is one of that kind.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

WEBUI = Path(__file__).resolve().parents[1]
CHECKOUT = WEBUI.parents[1]
ROOTS = ("backend", "ldm_patched", "modules_forge")
KINDS = {"forge": ("backend", "forge_double"), "reforge": ("ldm_patched", "reforge_double")}
"""The package that each has, and the double of it."""
ARGUMENTS = {"forge": "backend.args", "reforge": "ldm_patched.modules.args_parser"}


def _inside() -> Any:
    path = WEBUI / "inside" / "conftest.py"
    spec = importlib.util.spec_from_file_location("inside_conftest", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


inside = _inside()
FakeGpu, Start, WebUI = inside.FakeGpu, inside.Start, inside.WebUI
start = inside.start
gpu = inside.gpu
pytest_collection_finish = inside.pytest_collection_finish


def real() -> Path | None:
    place = os.environ.get("ROCM_SD_FORGE_INSIDE")
    return Path(place) if place else None


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ROOTS]:
        del sys.modules[name]


class Forge:
    """Starts of one of the kinds; `webui` is the latest."""

    def __init__(self, kind: str, begin: Callable[..., Any]) -> None:
        self.kind = kind
        self._begin = begin
        self.dtype = torch.bfloat16
        self.webui: Any = None
        self.whole: dict[str, Any] | None = None

    def __call__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        whole: bool | dict[str, Any] = False,
        **options: Any,
    ) -> Any:
        """As `start`, whose double is a Forge. `whole`: its checkpoints have a whole UNet, whose
        layers are asked for with these arguments.
        """
        forget()
        self.dtype = dtype
        self.whole = ({} if whole is True else whole) if whole is not False else None
        before = options.pop("before", lambda webui: None)

        def prepare(webui: Any) -> None:
            importlib.import_module("forge_help").make_forge(webui, self)
            before(webui)

        if real() is not None:
            options["cuda"] = False
            importlib.import_module("absent").allow_absent()
            self.arguments.always_cpu = True
        self.webui = self._begin(before=prepare, dtype=dtype, **options)
        return self.webui

    @property
    def home(self) -> Any:
        """The Python module that has the attention functions."""
        return importlib.import_module(
            "backend.attention" if self.kind == "forge" else "ldm_patched.ldm.modules.attention"
        )

    @property
    def arguments(self) -> Any:
        """Its command line's; forgotten with it."""
        return importlib.import_module(ARGUMENTS[self.kind]).args

    @property
    def names(self) -> tuple[str, ...]:
        if self.kind == "forge":
            return ("attention_function", "attention_function_single_head_spatial")
        return ("optimized_attention", "optimized_attention_masked")

    def bindings(self) -> dict[str, Any]:
        """Each place in which a function of `home`, or one that stands in for it, is bound."""
        functions = [v for v in vars(self.home).values() if callable(v)]
        found: dict[str, Any] = {}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ROOTS and module is not None:
                for key, value in vars(module).items():
                    if any(value is f for f in functions) or type(value).__name__ == "Function":
                        found[f"{name}.{key}"] = value
        return found


@pytest.fixture(params=list(KINDS))
def forge(
    request: pytest.FixtureRequest, start: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Forge]:
    package, double = KINDS[request.param]
    place = real()
    if place is not None and not (place / package).is_dir():
        pytest.skip(f"the checkout has no {package}")
    monkeypatch.syspath_prepend(str(place or WEBUI / double))
    if place is not None:
        monkeypatch.syspath_prepend(str(place / "packages_3rdparty"))
    yield Forge(request.param, start)
    forget()
