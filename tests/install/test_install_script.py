"""install.py as a script: any Python, any end, any output; it never spoils a start."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import install
from lib_rocm_sd.runtime import compilers
from tests.install.install_doubles import GFX1100, SCRIPT, Builder, gpus
from tests.waiting import WAIT_S, wait_until

SKIP = "--skip-install"
PRETEND = """
import runpy, sys
started = []
sys.addaudithook(lambda event, _: started.append(1) if event == "subprocess.Popen" else None)
from lib_rocm_sd import device
from lib_rocm_sd.runtime import process, torch_build
from lib_rocm_sd import shipped as support
device.kfd_gpus = lambda: ["gfx1100"]
torch_build.installed = lambda: torch_build.TorchBuild("2.9.0+rocm6.4", None, "6.4")
every = support.shipped
support.shipped = lambda arch, names: dict(list(every(arch, names).items())[:{count}])
real = process.run
tried = process.Finished("", "rocm_sd: tried", 1.0)
process.run = lambda *a, **k: tried if "first_trials" in str(a[0]) else real(*a, **k)
sys.argv = [{script!r}]
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    assert not {{"torch", "numpy"}} & set(sys.modules)
    print(len(started), "processes")
"""


def test_an_older_python_can_read_the_file() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 7))
    assert "from __future__" not in text, "Python 3.6 does not know annotations from __future__"
    first = [node.names[0].name for node in tree.body if isinstance(node, ast.Import)]
    assert set(first) <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["demo"], 1), (["test"], 1)])
def test_an_older_python_is_told(
    arguments: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(sys, "argv", ["install.py", *arguments])
    assert install.main() == status
    assert "needs Python 3.10 or newer" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [OSError("no such\ndisk"), KeyboardInterrupt(), ImportError("x"), RuntimeError()]
)
def test_every_failure_is_one_line_and_status_0(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(install, "prepare_kernels", fail)
    assert install.main() == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert type(error).__name__ in out
    assert "All else works as before" in out


@pytest.mark.parametrize(
    ("argv", "variable", "skipped"),
    [
        (["--skip-install"], None, True),
        ([], "--medvram --skip-install", True),
        ([], '--ckpt-dir "C:\\broken quote --skip-install', True),
        ([], "--skip-install-not", False),
        ([], None, False),
    ],
)
def test_skip_install(
    argv: list[str],
    variable: str | None,
    skipped: bool,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(sys, "argv", ["install.py", *argv])
    if variable is not None:
        monkeypatch.setenv("COMMANDLINE_ARGS", variable)
    assert install.main() == 0
    assert (not builder.built) is skipped


def test_no_gpu_and_an_unknown_gpu(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch)
    assert install.main() == 0
    assert "no AMD GPU" in capsys.readouterr().out
    gpus(monkeypatch, "gfx803")
    assert install.main() == 0
    assert "not among the GPUs known here: gfx803." in capsys.readouterr().out
    assert not builder.built
    gpus(monkeypatch, "gfx1100", "gfx803")
    assert install.main() == 0
    assert "gfx803" not in capsys.readouterr().out
    assert builder.built


def test_doctor_where_python_looks_nowhere_else() -> None:
    """As ComfyUI's portable package has it: a `._pth` file beside python.exe isolates it, so that
    -m finds nothing in the current folder.
    """
    done = subprocess.run(
        [sys.executable, "-I", "install.py", "doctor", "--help"],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--self-test" in done.stdout


def test_the_whole_script_as_comfyui_manager_runs_it(tmp_path: Path) -> None:
    """ltdrdata/ComfyUI-Manager f39cbd56, glob/manager_core.py: `python install.py` in the folder,
    which counts as installed if the status is 0. Where ComfyUI's nodes look for kernels is the
    user's cache, which is no host's.
    """
    extension = tmp_path / "custom_nodes" / "rocm-sd"
    extension.parent.mkdir()
    extension.symlink_to(SCRIPT.parent)
    environment = {k: v for k, v in os.environ.items() if k != "COMMANDLINE_ARGS"}
    environment |= {"COMFYUI_FOLDERS_BASE_PATH": str(tmp_path), "HIP_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "install.py"],
        cwd=extension,
        env={**environment, "ROCM_SD_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "WebUI" not in done.stdout


def test_no_folder_of_comfyui_is_a_webuis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "custom_nodes" / "rocm-sd"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SD_WEBUI_CACHE_DIR", raising=False)
    assert install.host_cache(Path("install.py")) is None


def test_the_whole_script_in_a_webuis_folder(tmp_path: Path) -> None:
    """Started as the WebUI starts it, on this machine, whatever GPU that has."""
    extension = tmp_path / "extensions" / "rocm-sd"
    extension.parent.mkdir()
    extension.symlink_to(SCRIPT.parent)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COMMANDLINE_ARGS": "--skip-install"}
    done = subprocess.run(
        [sys.executable, str(extension / "install.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize("how", ["-I", "-P", "PYTHONSAFEPATH"])
def test_a_python_that_leaves_the_scripts_folder_out(how: str, tmp_path: Path) -> None:
    """Whatever GPU this machine has, nothing is compiled: there is no cache."""
    if how != "-I" and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought it")
    (tmp_path / "file").touch()
    environment = {**os.environ, "ROCM_SD_CACHE_DIR": str(tmp_path / "file" / "below")}
    options = [how] if how.startswith("-") else []
    done = subprocess.run(
        [sys.executable, *options, str(SCRIPT)],
        cwd=tmp_path,
        env=environment if options else {**environment, how: "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert "All else works as before" in done.stdout
    assert "Error" not in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's devices and pipes")
@pytest.mark.parametrize("how", ["full", "pipe", "closed"])
def test_a_standard_output_that_takes_nothing_spoils_nothing(how: str) -> None:
    command = [sys.executable, str(SCRIPT)]
    with contextlib.ExitStack() as stack:
        if how == "full":
            output: Any = stack.enter_context(Path("/dev/full").open("w"))
        elif how == "pipe":
            reader, writer = os.pipe()
            os.close(reader)
            output = stack.enter_context(os.fdopen(writer, "w"))
        else:
            output = subprocess.DEVNULL
            command = ["/bin/sh", "-c", 'exec "$0" "$@" >&-', *command]
        done = subprocess.run(
            command,
            env={**os.environ, "COMMANDLINE_ARGS": SKIP},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_from_outside_waits_for_no_kernel_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The only compiler sleeps; the start and it end at once, and no folder stays."""
    programs, temporary = tmp_path / "bin", tmp_path / "tmp"
    programs.mkdir()
    temporary.mkdir()
    slow = programs / "clang"
    slow.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "  *cpus*) echo clang version 19.1.0; echo '    gfx1100';;\n"
        f"  *) echo $$ > {tmp_path}/$$.new; /bin/mv {tmp_path}/$$.new {tmp_path}/$$.pid\n"
        "     exec /bin/sleep 3600;;\nesac\n",
        encoding="utf-8",
    )
    slow.chmod(0o755)
    (programs / "ld.lld").symlink_to(slow)
    code = (
        "from lib_rocm_sd.runtime import clang, compilers\n"
        "compilers.all_compilers = clang.path_clangs\n"
        + PRETEND.format(script=str(SCRIPT), count=8)
    )
    environment = {
        **os.environ,
        "PATH": str(programs),
        "TMPDIR": str(temporary),
        "ROCM_SD_CACHE_DIR": str(tmp_path / "cache"),
        "ROCM_SD_COMPILE_TIME_LIMIT_S": "3600",
    }
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the child ignores it too
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=SCRIPT.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert wait_until(lambda: list(tmp_path.glob("*.pid")))
        assert list(temporary.glob("rocm_sd_*"))
        started.send_signal(number)
        out, _ = started.communicate(timeout=WAIT_S)
    finally:
        started.kill()
    assert "KeyboardInterrupt: interrupted" in out and "Traceback" not in out
    assert started.returncode == 0
    assert not list(temporary.iterdir())
    assert not [path for path in tmp_path.glob("*.pid") if Path("/proc", path.stem).exists()]


def test_little_is_done_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    """Real compiler, real cache, pretended GPU: no process, no torch, no numpy."""
    if not any(not why for why in compilers.survey(GFX1100).values()):
        pytest.skip("no compiler for gfx1100 on this machine")
    extension = tmp_path / "extensions" / "rocm-sd"
    extension.parent.mkdir()
    extension.symlink_to(SCRIPT.parent)
    code = PRETEND.format(script=str(extension / "install.py"), count=2)

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=SCRIPT.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        )
        return done.stdout.splitlines()

    first = run()
    assert "compiling 2 of 2 kernels" in first[0] and first[-1] != "0 processes"
    trying = "gfx1100: trying the kernels in a process of their own, once."
    assert trying in first[-3] and first[-2] == "  tried"
    assert list((tmp_path / "cache" / "rocm_sd" / "code").glob("*.co"))
    ready, processes = run()
    assert "all 2 kernels are ready" in ready and processes == "0 processes"


@pytest.mark.parametrize("said", ["", "1"])
def test_compiled_modules_are_kept_but_not_beside_sources_where_that_is_unwanted(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", said)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    given: dict[str, str] = {}

    def started(*_: Any, env: dict[str, str], **__: Any) -> Any:
        given.update(env)
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", started)
    assert install.run(Path(sys.executable), "json.tool") == 0
    assert "PYTHONDONTWRITEBYTECODE" not in given
    kept = given.get("PYTHONPYCACHEPREFIX")
    assert kept == (str(SCRIPT.parent / ".cache" / "bytecode") if said else None)
