"""The loader under Windows' own Python, which Wine starts: each test is a process there.

`python -m tools.windows_python` makes that Python. DLLs are stand-ins that answer with a number, by
which a test sees which file was called; where Windows would look for one of the display driver's,
in System32, there is one that answers 1.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lib_rocm_sd.arch import PACKAGE
from tests.runtime.windows_files import answering, dll
from tools import windows_python
from tools.windows_python import windows

HIP, COMGR = "amdhip64_7.dll", "amd_comgr.dll"
SYMBOL = "hipModuleLaunchKernel"
LIMIT_S = 600.0
PLACE = Path("my files (x86)", "K\u00fcnstler", "\u6269\u5c55", *("x" * 60 for _ in range(4)))
"""Spaces, an umlaut, Chinese, and more than 260 characters."""


@pytest.fixture(scope="session")
def python() -> list[str]:
    """What starts it; skips without it."""
    try:
        return windows_python.command()
    except windows_python.MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def system32(python: list[str]) -> Iterator[Path]:
    """The folder of the display driver's files; what a test puts there is removed."""
    folder = windows_python.FOLDER / "wine" / "drive_c" / "windows" / "system32"
    names = (HIP, COMGR, "rocm_kpack.dll")
    yield folder
    for name in names:
        (folder / name).unlink(missing_ok=True)


def run(python: list[str], script: str, *words: Path, **environment: str) -> list[str]:
    """The lines that `script` prints there."""
    code = f"import sys; sys.path.insert(0, {windows(PACKAGE.parent)!r})\n{script}"
    done = subprocess.run(
        [*python, "-c", code, *map(windows, words)],
        env={**windows_python.environment(), "PYTHONIOENCODING": "utf-8", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    return done.stdout.decode().split("\r\n")[:-1]


def therock(folder: Path) -> Path:
    """The folder with TheRock's libraries: HIP, which answers 7, needs rocm_kpack.dll."""
    bin_folder = folder / "_rocm_sdk_core" / "bin"
    dll(bin_folder / "rocm_kpack.dll", answering(kpack_open=7))
    needs = {"rocm_kpack.dll": ["kpack_open"]}
    dll(bin_folder / HIP, answering(**{SYMBOL: "kpack_open"}), needs)
    dll(bin_folder / COMGR, answering(amd_comgr_do_action=9))
    return bin_folder


FOUND = f"""
from lib_rocm_sd.runtime import hip
print(hip.library().{SYMBOL}())
print(hip.loaded_runtime())
print([path.name for path in hip.loaded_libraries() if path.name.startswith("rocm")])
"""


def test_the_sdk_is_loaded_before_the_drivers(
    python: list[str], system32: Path, tmp_path: Path
) -> None:
    """Also what it needs is from beside it, wherever it lies."""
    folder = therock(tmp_path / PLACE)
    dll(system32 / HIP, answering(**{SYMBOL: 1}))
    dll(system32 / "rocm_kpack.dll", answering(kpack_open=1))
    answers = run(python, f"sys.path.append(sys.argv[1])\n{FOUND}", tmp_path / PLACE)
    assert answers == ["7", windows(folder / HIP), "['rocm_kpack.dll']"]


def test_without_an_sdk_the_drivers_is_found(
    python: list[str], system32: Path, tmp_path: Path
) -> None:
    dll(system32 / HIP, answering(**{SYMBOL: 1}))
    answers = run(python, FOUND)
    assert answers[0] == "1"
    assert answers[1].lower() == rf"c:\windows\system32\{HIP}"


@pytest.mark.parametrize(("order", "answer"), [(("driver", "sdk"), 1), (("sdk", "driver"), 7)])
def test_of_two_of_one_name_it_is_torchs(
    order: Sequence[str], answer: int, python: list[str], system32: Path, tmp_path: Path
) -> None:
    """Windows binds torch to the one that is loaded first; asked for its name, it tells one."""
    files = {"sdk": therock(tmp_path) / HIP, "driver": system32 / HIP}
    dll(files["driver"], answering(**{SYMBOL: 1}))
    torch = dll(
        tmp_path / "torch" / "lib" / "torch_hip.dll", answering(ask=SYMBOL), {HIP: [SYMBOL]}
    )
    script = f"""
import ctypes
from lib_rocm_sd.runtime import hip
sys.path.append(sys.argv[1])
for path in sys.argv[2:]:
    last = ctypes.CDLL(path)
print(last.ask(), hip.library().{SYMBOL}())
print(sum(hip.AMDHIP64.matches(path.name) for path in hip.loaded_libraries()))
"""
    answers = run(python, script, tmp_path, *(files[name] for name in order), torch)
    assert answers == [f"{answer} {answer}", "2"]


def test_zludas_is_known_from_its_first_call_on(python: list[str], tmp_path: Path) -> None:
    """Its nvcuda.dll loads HIP when it first calls it."""
    folder = therock(tmp_path)
    zluda = dll(tmp_path / "nvcuda.dll", answering(ask=SYMBOL), delayed={HIP: [SYMBOL]})
    script = """
import ctypes
from pathlib import Path
from lib_rocm_sd.runtime import hip
ctypes.CDLL(sys.argv[1])
library = ctypes.CDLL(sys.argv[2])
print(hip.called_by(Path(sys.argv[2])), library.ask(), hip.called_by(Path(sys.argv[2])))
"""
    answers = run(python, script, folder / HIP, zluda)
    assert answers == [f"None 7 {windows(folder / HIP)}"]


def test_hiprtcs_worker_has_the_comgr_beside_it(
    python: list[str], system32: Path, tmp_path: Path
) -> None:
    """Which it loads by its name alone, for which Windows looks in System32 first."""
    folder = therock(tmp_path)
    dll(system32 / COMGR, answering(amd_comgr_do_action=1))
    dll(folder / "hiprtc-builtins0716.dll", answering(nothing=0))
    version = """
int hiprtcVersion(int *major, int *minor) {
    int (*ask)(void) = GetProcAddress(LoadLibraryA("amd_comgr.dll"), "amd_comgr_do_action");
    *major = ask(), *minor = 1;
    return 0;
}
"""
    names = ["CreateProgram", "CompileProgram", "GetProgramLogSize", "GetProgramLog"]
    names += ["GetCodeSize", "GetCode", "DestroyProgram", "GetErrorString"]
    others = answering(**{f"hiprtc{name}": 0 for name in names})
    declared = "void *LoadLibraryA(char *); void *GetProcAddress(void *, char *);"
    dll(
        folder / "hiprtc0716.dll",
        f"{declared}{others}__declspec(dllexport) {version.strip()}",
        {"kernel32.dll": ["LoadLibraryA", "GetProcAddress"]},
    )
    script = """
sys.path.append(sys.argv[1])
from lib_rocm_sd.runtime import library_compilers
for each in library_compilers.hiprtcs():
    print(each.path, each.facts())
"""
    answers = run(python, script, tmp_path)
    facts = {"trouble": "", "version": "9.1", "targets": None}
    assert answers == [f"{windows(folder / 'hiprtc0716.dll')} {facts}"]


def test_a_start_asks_windows_for_its_cards(python: list[str]) -> None:
    """The registry, a console of Japan, one that is not there, and nobody's home."""
    script = r"""
import os, winreg
from lib_rocm_sd import cache, present
from lib_rocm_sd.runtime import process
import install
os.environ.update(LOCALAPPDATA=r"Q:\nobody", USERPROFILE=r"Q:\nobody")
adapters = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
for number, name in ((0, "AMD Radeon RX 6700 XT"), (1, "AMD Radeon K\xfcnstler"), (2, "")):
    with winreg.CreateKey(winreg.HKEY_LOCAL_MACHINE, rf"{adapters}\{number:04d}") as key:
        if name:
            winreg.SetValueEx(key, "DriverDesc", 0, winreg.REG_SZ, name)
print([arch and arch.gfx for _, arch in present.find()])
sys.argv = ["install.py"]
print(install.main())
winreg.DeleteKey(winreg.HKEY_LOCAL_MACHINE, rf"{adapters}\0000")
print(install.main())
print(cache.directory(), cache.reasons()[0])
print(process.run([sys.executable, "-c", "raise SystemExit(3)"], 60).trouble)
sys.stdout, said = None, sys.stdout
print(install.main(), file=said)
"""
    answers = run(python, script, PYTHONIOENCODING="cp932")
    assert answers[0] == "['gfx1031', None]"
    assert "torch is not installed yet" in answers[1] and answers[2] == "0"
    assert r"not among the GPUs known here: AMD Radeon K\xfcnstler" in answers[3]
    assert answers[4] == "0" and answers[5].startswith(r"None Q:\nobody\rocm_sd")
    assert answers[6:] == ["failed (exit status 3)", "0"]
