"""install.py as the WebUI runs it."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import install
from lib_rocm_sd import arch, cache, device
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, compilers, torch_build
from lib_rocm_sd.runtime.torch_build import TorchBuild
from lib_rocm_sd.shipped import AT_START, shipped

SCRIPT = Path(install.__file__)
GFX1100 = arch.table()["gfx1100"]
SKIP = "--skip-install"
ROCM = TorchBuild("2.9.0+rocm6.4", None, "6.4.43482")


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMMANDLINE_ARGS", "SD_WEBUI_CACHE_DIR", device.OVERRIDE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["install.py"])


class Builder:
    """Stands for runtime.build: a specification is cached once built."""

    def __init__(self, outcome: Callable[[], object] | None = None) -> None:
        self.built: list[object] = []
        self.outcome = outcome

    def is_cached(self, spec: object, _arch: object) -> bool:
        return spec in self.built

    def build(self, spec: object, _arch: object) -> object:
        if self.outcome is not None:
            self.outcome()
        self.built.append(spec)
        return types.SimpleNamespace(code=b"", compiler="clang", cached=False, seconds=0.5)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    double = Builder()
    monkeypatch.setattr(build, "is_cached", double.is_cached)
    monkeypatch.setattr(build, "build", double.build)
    monkeypatch.setattr(compilers, "serves", lambda arch: True)
    monkeypatch.setattr(torch_build, "installed", lambda: ROCM)
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "60")
    return double


def gpus(monkeypatch: pytest.MonkeyPatch, *gfx: str) -> None:
    monkeypatch.setattr(device, "kfd_gpus", lambda: list(gfx))


# --- the oldest Python


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


# --- never spoils a start


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
    assert "The WebUI works as before" in out


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


# --- which cache, which GPUs


def test_the_cache_is_the_webuis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = tmp_path / "data" / "extensions" / "rocm-sd"
    extension.parent.mkdir(parents=True)
    extension.symlink_to(SCRIPT.parent)
    assert install.host_cache(extension / "install.py") == tmp_path / "data" / "cache"
    monkeypatch.chdir(extension.parent)
    assert install.host_cache(Path("rocm-sd/install.py")) == tmp_path / "data" / "cache"
    assert install.host_cache(tmp_path / "elsewhere" / "install.py") is None
    monkeypatch.setenv("SD_WEBUI_CACHE_DIR", str(tmp_path / "given"))
    assert install.host_cache(extension / "install.py") == tmp_path / "given"


def test_gpus_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "gfx1100", "gfx1036", "gfx1100", "gfx803")
    found = install.find_gpus()
    assert [name for name, _ in found] == ["gfx1100", "gfx1036", "gfx803"]
    assert found[0][1] is GFX1100
    assert found[2][1] is None


@pytest.mark.parametrize(
    ("present", "variables", "expected"),
    [
        (["gfx1031"], {"": "10.3.0"}, ["gfx1030"]),
        (["gfx1031", "gfx1100"], {"_1": "11.0.0"}, ["gfx1031", "gfx1100"]),
        (["gfx1031"], {"_0": "10.3.0"}, ["gfx1031", "gfx1030"]),
        ([], {"": "10.3.0"}, []),
    ],
)
def test_gpus_under_an_override(
    present: list[str],
    variables: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, *present)
    for suffix, value in variables.items():
        monkeypatch.setenv(device.OVERRIDE + suffix, value)
    assert [name for name, _ in install.find_gpus()] == expected


def test_gpus_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ["Intel(R) UHD Graphics", None, "AMD Radeon RX 7900 XTX", "AMD Radeon(TM) Graphics"]
    registry = types.SimpleNamespace(
        HKEY_LOCAL_MACHINE=1,
        OpenKey=lambda parent, name: contextlib.nullcontext(name),
        QueryInfoKey=lambda key: (len(adapters), 0, 0),
        QueryValueEx=lambda key, value: _described(adapters[int(key)]),
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(sys, "platform", "win32")
    found = install.find_gpus()
    assert [name for name, _ in found] == ["AMD Radeon RX 7900 XTX", "AMD Radeon(TM) Graphics"]
    assert found[0][1] is GFX1100
    assert found[1][1] is None


def _described(name: str | None) -> tuple[str, int]:
    if name is None:
        raise FileNotFoundError("no DriverDesc")
    return name, 1


@pytest.mark.parametrize("value", ["", "  ", "11", "gfx1100", "11.0.x"])
def test_an_override_that_is_no_version_is_ignored(
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setenv(device.OVERRIDE, value)
    assert install.main() == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert ("=" + value + " is ignored" in first) == bool(value.strip())
    assert len(builder.built) == len(shipped(GFX1100, AT_START))


# --- for what torch, for which card


@pytest.mark.parametrize(
    ("build_of_torch", "words"),
    [
        (None, "torch is not installed yet; what it needs is compiled while the WebUI is open"),
        (ValueError("version.py cannot be read"), "version.py cannot be read; what it needs"),
        (TorchBuild("2.13.0+cpu", None, None), "torch 2.13.0+cpu is a build without a GPU"),
        (TorchBuild("2.7.1+cu118", "11.8", None), "2.7.1+cu118 is a build for CUDA"),
    ],
)
def test_a_torch_that_cannot_use_them_has_nothing_compiled(
    build_of_torch: TorchBuild | Exception | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def installed() -> TorchBuild | None:
        if isinstance(build_of_torch, Exception):
            raise build_of_torch
        return build_of_torch

    gpus(monkeypatch, "gfx1100")
    for name in ("ZLUDA", "ZLUDA_NVRTC_LIB", "ZLUDA_COMGR_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_build, "installed", installed)
    assert install.main() == 0
    out = capsys.readouterr().out
    assert words in out and out.count("\n") == 1
    assert not builder.built


def test_a_gpu_inside_the_processor_counts_where_there_is_no_card(
    monkeypatch: pytest.MonkeyPatch, builder: Builder
) -> None:
    gpus(monkeypatch, "gfx1036", "gfx1100", "gfx803")
    assert install.wanted_gpus() == ("", [GFX1100])
    gpus(monkeypatch, "gfx1036")
    assert install.wanted_gpus() == ("", [arch.table()["gfx1036"]])


# --- compiling


def test_one_line_for_each_kernel_and_nothing_the_second_time(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, "gfx1100")
    specs = list(shipped(GFX1100, AT_START))
    assert install.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(specs)
    assert [line.split("]")[0] for line in lines[1:-1]] == [
        f"  [{number}/{len(specs)}" for number in range(1, len(specs) + 1)
    ]
    assert any("] attention, head_dim 40, float16: clang, 0.5 s" in line for line in lines)
    assert any("] conv3x3, norm, 1x1 shortcut, statistics, float16: " in line for line in lines)
    assert len(set(builder.built)) == len(builder.built) == len(specs)
    assert install.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{install.NAME}: gfx1100: all {len(specs)} kernels are ready."
    ]


def test_attention_comes_first_and_the_whole_vae_is_there() -> None:
    specs = list(shipped(GFX1100, AT_START))
    attention = attention_kernel.shipped_specs(GFX1100)
    assert specs[: len(attention)] == attention
    others = {spec.source for spec in specs[len(attention) :]}
    assert others == {"conv3x3.hip", "upsample_conv.hip", "pack.hip", "group_norm_silu.hip"}


def test_several_are_compiled_at_a_time(monkeypatch: pytest.MonkeyPatch, builder: Builder) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    together = threading.Barrier(3)
    builder.outcome = lambda: together.wait(10) if len(builder.built) == 0 else None
    assert install.main() == 0
    assert len(builder.built) == len(shipped(GFX1100, AT_START))


@pytest.mark.parametrize(("cores", "jobs"), [(None, 2), (1, 2), (4, 4), (64, install.MAX_JOBS)])
def test_how_many_at_a_time(
    cores: int | None,
    jobs: int,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert install.main() == 0
    assert f"once, {jobs} at a time." in capsys.readouterr().out


def test_an_interruption_ends_it(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    gpus(monkeypatch, "gfx1100")
    builder.outcome = interrupt
    assert install.main() == 0
    assert not builder.built
    assert "KeyboardInterrupt: interrupted. The WebUI works" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("defines", "name"),
    [
        ({"CONV_STRIDE": 2, "STATISTICS": 1, "BF16_HALVES": 0}, "x, stride 2, statistics, float16"),
        ({"NORM": 1, "SHORTCUT": 1, "BF16_HALVES": 1}, "x, norm, shortcut, bfloat16"),
        ({"STEP_MERGE": 1, "THREADS": 256}, "x"),
    ],
)
def test_what_a_kernel_is_called(defines: dict[str, int], name: str) -> None:
    assert install.label(KernelSpec("x.hip", "x", tuple(defines.items()))) == name


def test_compiling_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(
        time, "monotonic", lambda: float(install.COMPILE_LIMIT_S) * (len(builder.built) >= 2) * 2
    )
    assert install.main() == 0
    made = len(builder.built)
    left = len(shipped(GFX1100, AT_START)) - made
    assert 2 <= made <= 2 + (os.cpu_count() or 2)
    assert f"the other {left} are compiled while the WebUI is open" in capsys.readouterr().out


def test_a_failing_compiler_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise CompileError("clang", "crashed", "log", "source")

    gpus(monkeypatch, "gfx1100")
    builder.outcome = fail
    assert install.main() == 0
    out = capsys.readouterr().out
    assert out.count("clang: crashed") == install.FAILURES_BEFORE_GIVING_UP
    assert "it is tried again while the WebUI is open" in out


def test_without_a_compiler_the_reasons_are_shown(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(compilers, "serves", lambda arch: False)
    monkeypatch.setattr(
        compilers, "survey", lambda arch: {"hipcc": ["no SDK"], "clang": ["too old"]}
    )
    assert install.main() == 0
    assert not builder.built
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  No compiler here can serve. The WebUI works as before."
    assert lines[2:] == ["  hipcc: no SDK", "  clang: too old"]


def test_the_first_line_comes_before_any_compiler_is_asked(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def serves(arch: object) -> bool:
        said.append(capsys.readouterr().out)
        return False

    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(compilers, "serves", serves)
    monkeypatch.setattr(compilers, "survey", lambda arch: {"clang": ["hangs"]})
    assert install.main() == 0
    assert "gfx1100: compiling" in said[0]


def test_a_full_disk_is_said_once_and_ends_it(
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    fresh_cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(cache, "_replace", full)
    builder.outcome = lambda: cache.write("code", "key", b"code")
    assert install.main() == 0
    out = capsys.readouterr().out
    assert out.count("Nothing more is compiled now, it is not kept: cannot write") == 1
    assert "No space left on device" in out and "That took" not in out
    assert len(builder.built) < len(shipped(GFX1100, AT_START))


def test_what_lies_in_a_cache_that_cannot_be_written_is_ready(
    monkeypatch: pytest.MonkeyPatch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, "gfx1100")
    builder.built = list(shipped(GFX1100, AT_START))
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert install.main() == 0
    assert "kernels are ready" in capsys.readouterr().out


def test_without_a_cache_nothing_is_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, "gfx1100")
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(tmp_path / "file" / "below"))
    cache.reset()
    try:
        assert install.main() == 0
    finally:
        cache.reset()
    assert not builder.built
    assert f"  {tmp_path / 'file' / 'below'} cannot be" in capsys.readouterr().out


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
        timeout=60,
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
        timeout=60,
    )
    assert "The WebUI works as before" in done.stdout
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
            timeout=60,
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
        "     exec /bin/sleep 600;;\nesac\n",
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
        "ROCM_SD_COMPILE_TIME_LIMIT_S": "600",
    }
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=SCRIPT.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("*.pid")) and time.monotonic() < end:
            time.sleep(0.02)
        assert list(tmp_path.glob("*.pid")) and list(temporary.glob("rocm_sd_*"))
        started.send_signal(number)
        out, _ = started.communicate(timeout=60)
    finally:
        started.kill()
    assert "KeyboardInterrupt: interrupted" in out and "Traceback" not in out
    assert started.returncode == 0
    assert not list(temporary.iterdir())
    assert not [path for path in tmp_path.glob("*.pid") if Path("/proc", path.stem).exists()]


PRETEND = """
import runpy, sys
from lib_rocm_sd import device
from lib_rocm_sd.runtime import torch_build
from lib_rocm_sd import shipped as support
device.kfd_gpus = lambda: ["gfx1100"]
torch_build.installed = lambda: torch_build.TorchBuild("2.9.0+rocm6.4", None, "6.4")
every = support.shipped
support.shipped = lambda arch, names: dict(list(every(arch, names).items())[:{count}])
sys.argv = [{script!r}]
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    assert "torch" not in sys.modules, "torch was imported"
"""


def test_under_half_a_second_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    """Real compiler, real cache, pretended GPU; the best of five runs, Python's start included. Of
    the processor's time, since the machine may have more to do.
    """
    resource = pytest.importorskip("resource")
    if not any(not why for why in compilers.survey(GFX1100).values()):
        pytest.skip("no compiler for gfx1100 on this machine")
    extension = tmp_path / "extensions" / "rocm-sd"
    extension.parent.mkdir()
    extension.symlink_to(SCRIPT.parent)
    code = PRETEND.format(script=str(extension / "install.py"), count=2)

    def run() -> tuple[float, str]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=SCRIPT.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return spent, done.stdout

    _, first = run()
    assert "compiling 2 of 2 kernels" in first
    assert list((tmp_path / "cache" / "rocm_sd" / "code").glob("*.co"))
    runs = [run() for _ in range(5)]
    assert all("all 2 kernels are ready" in said for _, said in runs)
    assert min(seconds for seconds, _ in runs) < 0.5


def test_set_directory_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: Builder
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setenv("SD_WEBUI_CACHE_DIR", str(tmp_path))
    try:
        assert install.main() == 0
        assert cache.directory() == tmp_path / "rocm_sd"
    finally:
        cache.set_directory(None)
