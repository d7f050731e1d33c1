"""A note that all that is tried ahead has been, with this torch, driver and kernels.

Read at a start in place of dozens of verdicts, without torch and without the driver. Where it is
wrong, nothing is: each class is still asked for before it is launched.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import suppress

from lib_rocm_sd import __version__, cache
from lib_rocm_sd.runtime import libraries, source, torch_build
from lib_rocm_sd.runtime.compiler import file_identity
from lib_rocm_sd.runtime.layouts import AMDHIP64
from lib_rocm_sd.trials import verdicts

KIND = "tried"


def is_there(gfx: str) -> bool:
    """The install has had its turn for cards of this kind, however far it came."""
    return cache.read(KIND, _key(gfx)) is not None


def is_whole(gfx: str) -> bool:
    """Nothing is left to be tried ahead."""
    data = cache.read(KIND, _key(gfx))
    with suppress(ValueError, TypeError, KeyError):
        return bool(json.loads(data or b"{}")["whole"])
    return False


def put(gfx: str, whole: bool = True) -> None:
    """All was tried, or as much as the install has time for."""
    row = {"gfx": gfx, "whole": whole, "date": verdicts.now()}
    cache.write(KIND, _key(gfx), json.dumps(row).encode())


def drop(gfx: str) -> None:
    """Something is compiled anew."""
    cache.delete(KIND, _key(gfx))


def _key(gfx: str) -> str:
    try:
        build = torch_build.installed()
    except ValueError:
        build = None
    system = (platform.system(), platform.release())
    return cache.key_of(
        "tried 1", gfx, __version__, repr(build), *system, *_runtimes(), source.digest()
    )


def _runtimes() -> Iterator[str]:
    """The HIP runtime's files: torch's, the SDK's, and on Windows the driver's."""
    for path in libraries.files(libraries.rocm_library_folders(), AMDHIP64):
        yield file_identity("hip", path)
