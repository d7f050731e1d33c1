"""The pinned gradio of A1111 and of Forge, each in a folder of its own, made once from PyPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.environment import fast_installer

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALL_LIMIT_S = 600


@dataclass(frozen=True)
class Environment:
    """Packages that shadow those of the interpreter, whose torch and pytest are used."""

    name: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the packages lie: in $ROCM_SD_TEST_CACHE, else in the checkout's .cache."""
        base = os.environ.get("ROCM_SD_TEST_CACHE") or CHECKOUT / ".cache"
        version = f"{sys.version_info.major}{sys.version_info.minor}"
        return Path(base) / f"{self.name}-py{version}"


# Pillow 9.5, which both pin, has no wheel for Python 3.12 and newer.
PILLOW = "pillow==9.5.*" if sys.version_info < (3, 12) else "pillow<11"
A1111 = Environment(
    "gradio3",
    (
        "gradio==3.41.2",
        "fastapi==0.94.0",
        "pydantic==1.10.*",
        "numpy==1.26.*",
        PILLOW,
        "httpx==0.24.1",
        "huggingface-hub<0.26",
    ),
)
FORGE = Environment(
    "gradio4",
    (
        "gradio==4.40.0",
        "fastapi==0.104.1",
        "pydantic==2.8.2",
        "numpy==1.26.*",
        PILLOW,
        "httpx==0.24.1",
        "huggingface-hub==0.26.2",
    ),
)
# What a real Forge's backend imports beside FORGE's, whose huggingface-hub it hides.
FORGE_BACKEND = Environment(
    "forge",
    (
        "--no-deps",  # torch is the interpreter's
        "diffusers==0.31.0",
        "einops",
        "huggingface-guess",
        "huggingface-hub==0.36.*",
        "psutil",
        "sentencepiece",
        "tokenizers==0.22.*",
        "transformers==4.57.*",
    ),
)
# What the start of a real WebUI needs beside A1111's. inside/real_parts.py stubs the rest.
REAL = Environment(
    "webui",
    (
        "--no-deps",  # torch is the interpreter's
        "--no-binary=antlr4-python3-runtime",  # there is no wheel of it
        "antlr4-python3-runtime==4.9.3",
        "diskcache==5.6.*",
        "einops",
        "huggingface-hub==0.36.*",
        "inflection==0.5.1",
        "lark==1.1.2",
        "lightning-utilities",
        "omegaconf==2.2.3",
        "piexif==1.1.3",
        "psutil",
        "pytorch_lightning==1.9.4",
        "scipy",
        "setuptools<80",
        "spandrel==0.3.4",
        "tokenizers==0.22.*",
        "tomesd==0.1.3",
        "torchdiffeq",
        "torchmetrics",
        "torchsde==0.2.6",
        "trampoline",
        "transformers==4.57.*",
    ),
)


def prepare(environment: Environment) -> str:
    """Install the packages if that was not done; the reason why it cannot be done, or ''."""
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(environment.folder.with_suffix(".lock")):
        return _prepare(environment)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, where the system can do that."""
    with path.open("w", encoding="utf-8") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(environment: Environment) -> str:
    folder = environment.folder
    stamp = folder / "complete.txt"
    wanted = "\n".join(environment.packages)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    command = fast_installer(sys.executable) or pip
    options = ["--quiet", "--only-binary=:all:", "--target", str(folder)]
    try:
        subprocess.run(
            [*command, *options, *environment.packages],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{environment.name}: its packages took more than {INSTALL_LIMIT_S} s"
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        return f"{environment.name} cannot be installed: {last[0]}"
    stamp.write_text(wanted, encoding="utf-8")
    return ""
