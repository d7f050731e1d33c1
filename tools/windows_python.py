"""python -m tools.windows_python [FOLDER]: a Python of Windows that Wine starts, for tests.

From registries alone: PyPI's Windows wheel of panda3d has CPython's DLL and extension modules as
python.org builds them, for programs that it packs. The modules in Python are this interpreter's, of
the same minor version; the program that calls Py_Main is made here. Needs Wine (Debian's wine64),
clang, lld, and once the network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache" / "windows_python"
_WINE = ("wine64", "wine")
_DEBIANS_WINE = Path("/usr/lib/wine/wine64")
_LIMIT_S = 300.0
_MAIN = r"""
typedef unsigned short wchar;
void *LoadLibraryW(const wchar *);
void *GetProcAddress(void *, const char *);
wchar *GetCommandLineW(void);
wchar **CommandLineToArgvW(const wchar *, int *);
void ExitProcess(int);
int start(void) {
    int count;
    wchar **words = CommandLineToArgvW(GetCommandLineW(), &count);
    int (*run)(int, wchar **) = GetProcAddress(LoadLibraryW(L"python%s.dll"), "Py_Main");
    ExitProcess(run(count, words));
    return 0;
}
"""
_CALLED = {
    "kernel32.dll": ("LoadLibraryW", "GetProcAddress", "GetCommandLineW", "ExitProcess"),
    "shell32.dll": ("CommandLineToArgvW",),
}


class MissingError(Exception):
    """What this machine lacks for it, in words."""


def wine() -> str:
    """The program. Raises MissingError."""
    found = next(filter(None, map(shutil.which, _WINE)), None)
    if found is None and _DEBIANS_WINE.is_file():
        return str(_DEBIANS_WINE)
    if found is None:
        raise MissingError("Wine is not here (Debian's package wine64)")
    return found


def command(folder: Path = FOLDER) -> list[str]:
    """What starts that Python. Raises MissingError where it was not made."""
    program = folder / "python.exe"
    if not program.is_file():
        raise MissingError(f"{program} is not here: python -m tools.windows_python makes it")
    return [wine(), str(program)]


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """The variables of a Wine of its own, without messages and without what no test needs, which
    takes three of four parts of a start.
    """
    unwanted = ("mscoree", "mshtml", "winemenubuilder.exe", "explorer.exe", "services.exe")
    return {
        **os.environ,
        "WINEPREFIX": str(folder / "wine"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": f"{','.join(unwanted)}=d",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": windows(folder / "bytecode"),
    }


def windows(path: Path) -> str:
    """The name that a file of this machine has in Wine."""
    return "Z:" + str(path).replace("/", "\\")


def program(name: str) -> str:
    """A program of LLVM's, by its name alone or Debian's newest. Raises MissingError."""
    names = [name, *(f"{name}-{number}" for number in range(24, 15, -1))]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingError(f"{name} is not here")
    return found


def linked(path: Path, source: str, calls: Mapping[str, Sequence[str]], *options: str) -> None:
    """Compile C to a module of Windows that needs nothing but `calls`, functions by their DLL.

    Raises MissingError without clang and lld, CalledProcessError where they refuse.
    """
    clang, linker = program("clang"), program("lld-link")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "a.c").write_text(source, encoding="utf-8")
        target = ("--target=x86_64-pc-windows-msvc", "-c", "-O1", "-ffreestanding")
        commands = [[clang, *target, "-Wno-everything", "a.c", "-o", "a.obj"]]
        for index, (library, functions) in enumerate(calls.items()):
            rows = "".join(f"  {each}\n" for each in functions)
            (work / f"{index}.def").write_text(f"LIBRARY {library}\nEXPORTS\n{rows}", "utf-8")
            made = [f"/def:{index}.def", "/machine:x64", f"/out:{index}.lib"]
            commands.append([linker, *made])
        libraries = [f"{index}.lib" for index in range(len(calls))]
        out = ["/nodefaultlib", f"/out:{path}", f"/implib:{work / 'out.lib'}"]
        commands.append([linker, *options, *out, "a.obj", *libraries])
        for each in commands:
            subprocess.run(each, cwd=work, check=True, capture_output=True, timeout=600)


def make(folder: Path = FOLDER) -> None:
    """Fetch, unpack and build it. Raises MissingError, CalledProcessError or OSError."""
    wine()
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "DLLs").mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    where = ["--platform", "win_amd64", "--python-version", version, "-d", str(part)]
    subprocess.run([*pip, *where, "panda3d"], check=True, timeout=_LIMIT_S)
    (wheel,) = part.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            file = Path(name).name
            if name.startswith("deploy_libs/") and not file.startswith("api-ms-"):
                beside = file.lower().startswith(("python", "vcruntime"))
                (part / file if beside else part / "DLLs" / file).write_bytes(archive.read(name))
    wheel.unlink()
    skipped = shutil.ignore_patterns("site-packages", "__pycache__", "lib-dynload", "test")
    shutil.copytree(sysconfig.get_path("stdlib"), part / "Lib", ignore=skipped)
    (part / "Lib" / "site-packages").mkdir()
    linked(part / "python.exe", _MAIN % version, _CALLED, "/entry:start", "/subsystem:console")
    # Its output goes through a pipe: where it is a file, Python does not start in this Wine.
    started = subprocess.run(
        [*command(part), "-c", "import ctypes, sys; print(sys.version)"],
        env=environment(part),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if started.returncode:
        raise MissingError(f"it does not start in Wine: {' '.join(started.stderr.split())[-400:]}")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.windows_python", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder.absolute()
    try:
        make(folder)
    except (MissingError, subprocess.SubprocessError, OSError) as error:
        print(f"No Windows Python was made: {error}")
        return 1
    print(f"{folder / 'python.exe'} starts in Wine.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
