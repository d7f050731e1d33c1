"""Makes .venv for `install.py demo` and `install.py test`, from Python's standard library alone.

Three steps: a virtual environment, the build of torch that fits the machine, the packages of
requirements/*.txt. A stamp in .venv records what is done, so that a second run starts at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "rocm_sd.json"

TORCH = "torch==2.13.0"
OLDEST_REUSED_TORCH = (2, 1)
OLDEST_TORCH_OF_NEW_DIFFUSERS = (2, 6)
OLDEST_PIP_THAT_RESOLVES = (22, 2)
PYTORCH_INDEX = "https://download.pytorch.org/whl"
MODULES = {
    "demo": ("torch", "diffusers", "transformers", "safetensors", "numpy", "PIL"),
    "page": ("gradio",),
    "test": ("gradio", "playwright", "pytest", "ruff", "mypy", "tinygrad", "ziglang"),
}
"""What can be imported when all is there; each purpose needs the demo's, too."""
LISTS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "page": ("page.txt",),
    "test": ("page.txt", "test.txt"),
}
"""The files in requirements/ beside the demo's."""


class SetupError(Exception):
    """The set-up cannot go on; the message is for the person at the keyboard."""


@dataclass(frozen=True)
class TorchSource:
    """Where a build of torch comes from: what to call it, and pip's arguments for its index."""

    name: str
    index: tuple[str, ...] = ()


ROCM = TorchSource("torch for ROCm", ("--index-url", f"{PYTORCH_INDEX}/rocm7.2"))
CPU = TorchSource("torch for the CPU", ("--index-url", f"{PYTORCH_INDEX}/cpu"))
CONFIGURED = TorchSource("torch from the package index that pip is set up for")


def say(line: str) -> None:
    """Progress, shown at once."""
    print(line, flush=True)


def environment(purpose: str, *, amd_gpu: bool, allow_large: bool) -> Path:
    """The Python of .venv with all that `purpose` ('demo', 'page' or 'test') needs.

    `amd_gpu` asks for torch's ROCm build first; `allow_large` accepts another vendor's GPU
    runtime. Raises SetupError.
    """
    stamp = read_stamp()
    if stamp is not None and is_complete(purpose, stamp):
        return PYTHON
    if stamp is None or _call(PYTHON, "-c", "pass").returncode:
        say("1. Making .venv")
        _new_venv()
    _renew_old_pip()
    say("2. torch")
    version = torch_of(PYTHON) or _install_torch(amd_gpu, allow_large)
    say(f"   torch {version}")
    say("3. The other packages")
    constraints = VENV / "constraints.txt"
    constraints.write_text(f"torch=={version}\n", encoding="utf-8")
    wanted = [w for file in requirement_files(purpose, version) for w in ("-r", str(file))]
    _install_packages("--constraint", str(constraints), *wanted)
    _write_stamp({**(read_stamp() or {}), **stamp_of(purpose, version)})
    return PYTHON


# --- the stamp


def requirement_files(purpose: str, torch_version: str) -> list[Path]:
    """The lists in requirements/ that `purpose` needs beside torch."""
    older = numbers(torch_version) < OLDEST_TORCH_OF_NEW_DIFFUSERS
    names = ["demo-older-torch.txt" if older else "demo.txt", *LISTS[purpose]]
    return [ROOT / "requirements" / name for name in names]


def stamp_of(purpose: str, torch_version: str) -> dict[str, str]:
    """What the stamp says when all is there: torch's version and each requirement file's hash."""
    files = requirement_files(purpose, torch_version)
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {"torch": torch_version, **hashes}


def read_stamp() -> dict[str, str] | None:
    """The stamp; empty where a set-up was interrupted, None where .venv is missing or not ours."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(stamp: dict[str, str]) -> None:
    STAMP.write_text(json.dumps(stamp), encoding="utf-8")


def is_complete(purpose: str, stamp: dict[str, str]) -> bool:
    """Whether .venv holds all that `purpose` needs; nothing is imported to find out."""
    version = stamp.get("torch", "")
    if not version or {**stamp, **stamp_of(purpose, version)} != stamp:
        return False
    modules = tuple(dict.fromkeys(MODULES["demo"] + MODULES[purpose]))
    search = f"import importlib.util as u; assert all(map(u.find_spec, {modules!r}))"
    return _call(PYTHON, "-c", search).returncode == 0


# --- the virtual environment


def _new_venv() -> None:
    if VENV.exists() and read_stamp() is None and any(VENV.iterdir()):
        raise SetupError(f"{VENV} exists and was not made by this script: rename or remove it.")
    version = torch_of(sys.executable)
    reused = numbers(version) >= OLDEST_REUSED_TORCH
    if reused:
        say(f"   this Python has torch {version}: it is used as it is")
    if VENV.exists():
        shutil.rmtree(VENV)
    VENV.mkdir()
    _write_stamp({})  # first, so that what an interruption leaves is known to be ours
    make_venv(see_host=reused)


def make_venv(*, see_host: bool) -> None:
    """Make .venv with a pip in it; with `see_host` it also sees the calling Python's packages."""
    option = ["--system-site-packages"] * see_host
    venv = [sys.executable, "-m", "venv", *option]
    virtualenv = [sys.executable, "-m", "virtualenv", *option]
    host_pip = [sys.executable, "-m", "pip", "--python", PYTHON, "install", "--quiet"]
    ways: tuple[list[list[object]], ...] = (
        [[*venv, VENV]],
        [[*virtualenv, VENV]],
        [[*venv, "--without-pip", VENV], [*host_pip, "--ignore-installed", "pip"]],
    )
    said = []
    for commands in ways:
        failed = next((done for done in (_call(*c) for c in commands) if done.returncode), None)
        if failed is None:
            break
        said.append(last_line(failed.stdout))
    else:
        raise SetupError(
            f"Python cannot make a virtual environment here ({'; '.join(said)}).\n"
            "On Debian and Ubuntu this helps: sudo apt install python3-venv"
        )
    if see_host and sys.prefix != sys.base_prefix:
        _link_calling_venv()


def _link_calling_venv() -> None:
    """Show .venv the calling venv's packages too; --system-site-packages shows the base's only."""
    site = _call(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    link = Path(site.strip(), "calling_python.pth")
    link.write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")


def _renew_old_pip() -> None:
    if numbers(_call(PYTHON, "-m", "pip", "--version").stdout) < OLDEST_PIP_THAT_RESOLVES:
        say("   renewing pip")
        _pip_install("--quiet", "--upgrade", "pip")


# --- torch


def torch_of(python: Path | str) -> str:
    """The version of the torch that `python` can import; '' if it cannot."""
    done = _call(python, "-c", "import torch; print('torch', torch.__version__)", timeout_s=120)
    found = re.search(r"^torch (\S+)$", done.stdout, re.MULTILINE)
    return found.group(1) if found and done.returncode == 0 else ""


def _install_torch(amd_gpu: bool, allow_large: bool) -> str:
    say("   looking up which build fits this machine")
    source = choose_torch(amd_gpu=amd_gpu, allow_large=allow_large)
    say(f"   installing {source.name}")
    _pip_install("--no-compile", *source.index, TORCH)
    version = torch_of(PYTHON)
    if not version:
        raise SetupError(f"{source.name} was installed but cannot be imported.")
    return version


def choose_torch(*, amd_gpu: bool, allow_large: bool) -> TorchSource:
    """The first source whose build fits: ROCm's for an AMD GPU, the CPU's, what pip is set up for.

    pip is asked what it would install. An answer with another vendor's GPU runtime in it is refused
    unless `allow_large`. Raises SetupError with the reason for each source.
    """
    reasons = []
    for source in (ROCM, CPU, CONFIGURED) if amd_gpu else (CPU, CONFIGURED):
        report, why = resolve(source)
        foreign = foreign_packages(report)
        if report and (allow_large or not foreign):
            return source
        if foreign:
            why = (
                f"it brings {len(foreign)} packages of another vendor's GPU runtime, gigabytes in "
                f"all: {', '.join(foreign[:3])} ..."
            )
        reasons.append(f"  {source.name}: {why}")
    raise SetupError(
        f"No build of {TORCH} that fits this machine could be had:\n" + "\n".join(reasons) + "\n"
        "Install a torch of your choice for the Python you call this with, and run it again: that "
        "torch is then used as it is. Or add --allow-large."
    )


def resolve(source: TorchSource) -> tuple[dict[str, Any], str]:
    """pip's report of what it would install from `source`; else empty, and why.

    pip also looks into the extra indexes and folders that it is set up for. A torch from there does
    not count for a source with an index of its own: CONFIGURED finds it, without that index.
    """
    quick = ["--timeout", "8", "--retries", "0"] if source.index else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", report, *quick]
        done = _call(PYTHON, "-m", "pip", "install", *options, *source.index, TORCH)
        if "(from versions: none)" in done.stdout:
            return {}, "its package index could not be reached, or has none for this Python"
        if done.returncode or not report.is_file():
            return {}, last_line(done.stdout)
        found = json.loads(report.read_text(encoding="utf-8"))
    if source.index and not _from_pytorch(found):
        return {}, "its package index could not be reached; what was found came from elsewhere"
    return found, ""


def _from_pytorch(report: dict[str, Any]) -> bool:
    """Whether torch in pip's `report` comes from PyTorch's own index, not from an extra one."""
    for item in report.get("install", ()):
        if item["metadata"]["name"].lower() == "torch":
            host = urlsplit(item["download_info"]["url"]).hostname or ""
            return host == "pytorch.org" or host.endswith(".pytorch.org")
    return False


def foreign_packages(report: dict[str, Any]) -> list[str]:
    """The packages in pip's `report` that belong to another vendor's GPU runtime."""
    found = []
    for item in report.get("install", ()):
        name = item["metadata"]["name"].lower().replace("_", "-")
        version = item["metadata"]["version"]
        if name.startswith(("nvidia-", "cuda-")) or (name == "torch" and "+cu" in version):
            found.append(f"{name} {version}")
    return found


# --- the other packages


def fast_installer(python: Path | str) -> list[str]:
    """The words before the packages for `python` to install them by uv; [] where pip has to.

    uv takes a tenth of pip's time. It does not see what a venv takes from the Python around it, and
    it does not read pip's settings, so that an index of the user's own is pip's to ask.
    """
    asked = _call(python, "-c", "import sys; print(sys.prefix)")
    config = Path(asked.stdout.strip(), "pyvenv.cfg")
    if asked.returncode or not config.is_file() or "= true" in config.read_text(encoding="utf-8"):
        return []
    settings = _call(python, "-m", "pip", "config", "list")
    if settings.returncode or re.search(r"[.]index-url=|[.]no-index=", settings.stdout):
        return []
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--timeout", "30"]
    for uv in ([python, "-m", "uv", "--version"], [*pip, "--only-binary=:all:", "uv"]):
        if _call(*uv).returncode == 0:
            return [str(python), "-m", "uv", "pip", "install", "--python", str(python)]
    return []


def _install_packages(*arguments: str) -> None:
    """Install by uv where that can be, else by pip. Raises SetupError when pip fails."""
    words = fast_installer(PYTHON)
    if words:
        status, said = _shown([*words, *arguments])
        if status == 0:
            return
        say(f"   uv could not, pip tries: {last_line(said)}")
    _pip_install(*arguments)


# --- running things


def _call(*command: object, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command`, its output captured as text; one that cannot be run counts as failed."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, str(error))


def _pip_install(*arguments: str) -> None:
    """Run pip install and show what it fetches and installs. Raises SetupError when it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    status, said = _shown([*command, "--progress-bar", "off"])
    if status:
        raise SetupError(
            f"{said}\npip failed, see above. The command was:\n  {shlex.join(command)}"
        )


def _shown(command: list[str]) -> tuple[int, str]:
    """Run an installer, with a line for what it fetches and installs; its status and output."""
    said = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as running:
        for line in running.stdout or ():
            said.append(line)
            if line.lstrip().startswith(("Downloading", "Installing", "Building", "Installed")):
                say(f"   {line.strip()[:100]}")
    return running.returncode, "".join(said)


def last_line(text: str) -> str:
    """The last line of a tool's output that says something."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("[notice]")]
    return said[-1] if said else "it said nothing"


def numbers(text: str) -> tuple[int, ...]:
    """The first two numbers in `text`: (2, 13) of '2.13.0+cpu'; () where there is none."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
