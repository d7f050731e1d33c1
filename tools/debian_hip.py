"""python -m tools.debian_hip [FOLDER]: AMD's HIP runtime, comgr and hiprtc as Debian 12 and 13 have
them, for tests.

apt fetches and dpkg unpacks them with all that they need, the C library too: nothing is installed,
and what else runs on this machine finds none of it. Needs a Debian with apt, and once the network.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tools.windows_python import MissingError

FOLDER = Path(__file__).parents[1] / ".cache" / "debian_hip"
RELEASES = {"bookworm": ("libhsakmt-dev", "libhsa-runtime-dev"), "trixie": ()}
"""With the headers of what stands below HIP, for tests/verify/thunk."""
PACKAGES = ("libamdhip64-5", "libhiprtc-builtins5")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIMIT_S = 600.0


def libraries(release: str, folder: Path = FOLDER) -> Path:
    """Where a release's libraries lie. Raises MissingError where it was not fetched."""
    found = folder / release / "usr" / "lib" / "x86_64-linux-gnu"
    if not (found / "libamdhip64.so.5").exists():
        raise MissingError(f"{found} has no libamdhip64: python -m tools.debian_hip fetches it")
    return found


def python(release: str, made: Path, preload: Path | None = None) -> Path:
    """`made`, a program that is this interpreter under the release's C library, with a library
    loaded first. Raises MissingError where that C library is too old for this interpreter.
    """
    found = libraries(release)
    loader = next((FOLDER / release).rglob("ld-linux-x86-64.so.2"))
    places = f"{found}:{FOLDER / release / 'lib' / 'x86_64-linux-gnu'}"
    first = ["--preload", preload] if preload else []
    words = [loader, *first, "--argv0", sys.executable, "--library-path", places, sys.executable]
    made.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n', encoding="utf-8")
    made.chmod(0o755)
    done = subprocess.run([made, "-c", ""], capture_output=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise MissingError(f"this Python does not start with {release}'s C library: {said}")
    return made


def fetch(release: str, folder: Path = FOLDER) -> None:
    """Fetch and unpack a release's packages. Raises MissingError or OSError."""
    part = folder / f"{release}.part"
    shutil.rmtree(part, ignore_errors=True)
    apt = part / "apt"
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()  # as if nothing were installed: all that is needed comes
    (apt / "sources").write_text(f"deb [signed-by={_KEYS}] {_mirror()} {release} main\n", "utf-8")
    settings = {
        "Dir::Etc::SourceList": apt / "sources",
        "Dir::Etc::SourceParts": "-",
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "APT::Sandbox::User": "",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _run(*command, "update")
    _run(
        *command,
        "install",
        "--yes",
        "--download-only",
        "--no-install-recommends",
        *PACKAGES,
        *RELEASES[release],
    )
    for package in (apt / "archives").glob("*.deb"):
        _run("dpkg", "-x", str(package), str(part))
    shutil.rmtree(apt)
    shutil.rmtree(folder / release, ignore_errors=True)
    part.rename(folder / release)


def _mirror() -> str:
    """From which this machine has Debian's packages."""
    wanted = ("--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI)", "Created-By: Packages")
    for line in _run("apt-get", "indextargets", *wanted).splitlines():
        origin, component, mirror = line.split()
        if (origin, component) == ("Debian", "main"):
            return mirror
    raise MissingError("apt has no list of Debian's packages here")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
            text=True,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired as error:
        raise MissingError(str(error)) from error
    if done.returncode:
        raise MissingError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.debian_hip", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder.absolute()
    failed = 0
    for release in RELEASES:
        try:
            fetch(release, folder)
            print(f"{libraries(release, folder)}: fetched")
        except (MissingError, OSError) as error:
            failed = 1
            print(f"{release}: AMD's libraries were not fetched: {error}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
