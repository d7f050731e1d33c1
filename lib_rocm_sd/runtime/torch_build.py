"""What the installed torch was built for, read from its version.py. torch is not imported."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from lib_rocm_sd.device import ALLOW_ZLUDA
from lib_rocm_sd.runtime import layouts

OLDEST = (2, 1)
"""torch.compiler came with it."""
# Set by a user, or by a launcher that has loaded ZLUDA.
_ZLUDA_VARIABLES = ("ZLUDA", "ZLUDA_NVRTC_LIB", "ZLUDA_COMGR_LOG_LEVEL")
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True)
class TorchBuild:
    """`cuda` and `hip` are the versions that torch was built with, None without."""

    version: str
    cuda: str | None
    hip: str | None


def installed() -> TorchBuild | None:
    """The torch that `import torch` would find; None where there is none.

    Raises ValueError where its version.py cannot be read.
    """
    folder = layouts.package_folder("torch")
    if folder is None:
        return None
    path = folder / "version.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    facts = _constants(tree)
    if not facts.get("__version__"):
        raise ValueError(f"{path} names no version")
    return TorchBuild(str(facts["__version__"]), facts.get("cuda"), facts.get("hip"))


def _constants(tree: ast.Module) -> dict[str, str | None]:
    """Names that are assigned a text or None."""
    constants: dict[str, str | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str | None):
            constants.update(
                {each.id: value.value for each in targets if isinstance(each, ast.Name)}
            )
    return constants


def too_old(version: str) -> str:
    """Why nothing of ours runs with a torch of this version; empty where it is new enough, or is no
    number.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) >= OLDEST:
        return ""
    return f"torch {version} is too old, {'.'.join(map(str, OLDEST))} or newer is needed"


def refusal(build: TorchBuild, environ: Mapping[str, str]) -> str:
    """Why this torch will not launch our kernels on an AMD GPU; empty when it can."""
    old = too_old(build.version)
    if old or build.hip:
        return old
    if not build.cuda:
        return f"torch {build.version} is a build without a GPU"
    if not zluda_present(environ):
        return f"torch {build.version} is a build for CUDA, and there is no ZLUDA to run it on AMD"
    if environ.get(ALLOW_ZLUDA) == "0":
        return f"torch {build.version} runs through ZLUDA, and {ALLOW_ZLUDA}=0 is set"
    return ""


def zluda_present(environ: Mapping[str, str]) -> bool:
    """Whether the launcher was asked for ZLUDA or has loaded it, or a search path leads to it."""
    if any(environ.get(name) for name in _ZLUDA_VARIABLES):
        return True
    paths = " ".join(environ.get(name, "") for name in _SEARCH_PATHS)
    return "zluda" in paths.lower() or "--use-zluda" in webui_arguments(environ)


def webui_arguments(environ: Mapping[str, str]) -> list[str]:
    """The words of COMMANDLINE_ARGS, from which the WebUI's launcher takes its arguments."""
    text = environ.get("COMMANDLINE_ARGS", "")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
