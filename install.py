#!/usr/bin/env python3
"""Sets this extension up. Needs Python 3.10 or newer and nothing else.

python install.py         as the WebUI runs it at every start, and ComfyUI-Manager at each update:
                          compiles what the GPUs here need
python install.py doctor  python -m lib_rocm_sd doctor, also where -m does not look in here,
                          as in ComfyUI's portable package
python3 install.py demo   makes .venv, installs what is missing, generates the demo's pictures;
                          with --ui it opens the Speed test tab as a page of this machine
python3 install.py test   the same set-up, then linters and tests; other arguments go to pytest
"""

# Annotations are strings and the syntax is Python 3.6's on purpose: an older Python has to read
# this far to be able to say what it lacks.
import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from lib_rocm_sd.arch import Arch
    from lib_rocm_sd.console import Progress
    from lib_rocm_sd.ops.base import KernelSpec

NAME = "ROCm SD Optimization"
ROOT = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 10)
COMPILE_LIMIT_S = 300
TRIAL_LIMIT_S = 120
LEAST_TRIAL_S = 20
"""What importing torch may take; with less nothing is begun."""
ASK_LIMIT_S = KERNEL_LIMIT_S = 60
FAILURES_BEFORE_GIVING_UP = 2
MOST_TEST_WORKERS = 4
TRY = (
    "import sys; sys.path.insert(0, sys.argv[1]); from lib_rocm_sd.first_trials import main; "
    "raise SystemExit(main(sys.argv[2], float(sys.argv[3]), sys.argv[4:]))"
)
MIN_JOBS, MAX_JOBS = 2, 16
"""Compilations at a time: as many as there are cores, between these. Each takes about 130 MiB."""


def say(line: str) -> None:
    """One line of progress, shown at once; nothing where standard output is closed or full."""
    try:
        print(line, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # else Python tries again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- as a host runs it


def webui_hook() -> int:
    """Never spoils a host's start: whatever goes wrong is one line, and the status is 0."""
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        prepare_kernels()
    except (Exception, KeyboardInterrupt) as error:
        reason = " ".join(str(error).split()) or "interrupted"
        say(f"{NAME}: {type(error).__name__}: {reason}. All else works as before.")
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    return 0


def interrupt(_number: int, _frame: "FrameType | None") -> None:
    """Let SIGTERM end what it would leave behind: compilers and their folders."""
    raise KeyboardInterrupt


def prepare_kernels() -> None:
    """Compile ahead what the GPUs of this machine need, into the cache where the host looks, and
    have it tried there in processes that may die.
    """
    from lib_rocm_sd import cache
    from lib_rocm_sd.runtime import torch_build

    if "--skip-install" in sys.argv[1:] + torch_build.webui_arguments(os.environ):
        say(f"{NAME}: --skip-install: nothing is compiled now, but later, in the background.")
        return
    folder = host_cache(Path(sys.argv[0]))
    if folder is not None:
        cache.set_directory(folder)
    reason, chosen = wanted_gpus()
    if reason:
        say(f"{NAME}: {reason}.")
    deadline = time.monotonic() + COMPILE_LIMIT_S
    for arch in chosen:
        compile_for(arch, deadline)
    try_kernels(chosen, folder, deadline)


def wanted_gpus() -> "tuple[str, list[Arch]]":
    """What to compile for, and the reason where that is nothing.

    A GPU inside the processor counts only where there is no card: torch takes the card.
    """
    from lib_rocm_sd import present

    for line in present.ignored_overrides():
        say(f"{NAME}: {line}")
    reason = present.contradiction()
    if reason:
        return f"nothing is compiled: {reason}. All else works as before", []
    gpus = present.find()
    ask = not gpus and present.torch_alone_knows()
    if not (gpus or ask):
        return "no AMD GPU is reported by this system. All else works as before", []
    known = [arch for _, arch in gpus if arch is not None]
    if not (known or ask):
        names = ", ".join(name for name, _ in gpus)
        return f"not among the GPUs known here: {names}. All else works as before", []
    reason = torch_refusal()
    if reason:
        return reason, []
    if ask:
        known, why = present.ask_torch(ASK_LIMIT_S, lambda line: say(f"{NAME}: {line}"))
        if not known:
            return f"nothing is compiled now: {why}. All else works as before", []
    return "", [arch for arch in known if not arch.integrated] or known


def torch_refusal() -> str:
    """Why what is compiled now might never be used by the torch that is installed; else empty.

    Where that changes later, the host compiles while it is open.
    """
    from lib_rocm_sd.runtime import torch_build

    later = "what it needs is compiled later, in the background"
    try:
        build = torch_build.installed()
    except ValueError as error:
        return f"{error}; {later}"
    if build is None:
        return f"torch is not installed yet; {later}"
    reason = torch_build.refusal(build, os.environ)
    return f"nothing is compiled: {reason}. All else works as before" if reason else ""


def host_cache(script: Path) -> "Path | None":
    """The cache folder of the WebUI in whose `extensions` folder `script` lies; None if in none.

    `script` is as it was called: the extension may be a symbolic link there.
    """
    if os.environ.get("SD_WEBUI_CACHE_DIR"):
        return Path(os.environ["SD_WEBUI_CACHE_DIR"])
    extensions = Path.cwd().joinpath(script).parent.parent
    return extensions.parent / "cache" if extensions.name == "extensions" else None


def compile_for(arch: "Arch", deadline: float) -> None:
    """Compile what `arch` needs and is not cached, a line for each.

    None is started after `deadline`, a reading of time.monotonic().
    """
    from lib_rocm_sd import cache, console
    from lib_rocm_sd.ops.attention.kernel import table_reasons as ignored
    from lib_rocm_sd.runtime import build, compilers
    from lib_rocm_sd.shipped import AT_START, shipped
    from lib_rocm_sd.trials import stamp

    specs = shipped(arch, AT_START)
    for reason in ignored(arch):
        say(f"{NAME}: {reason}")
    missing = [spec for spec in specs if not build.is_cached(spec, arch)]
    if not missing:
        say(f"{NAME}: {arch.gfx}: all {len(specs)} kernels are ready.")
        return
    if cache.directory() is None:
        say(f"{NAME}: nothing is compiled now, it could not be kept. All else works as before.")
        for reason in cache.reasons():
            say(f"  {reason}")
        return
    stamp.drop(arch.gfx)
    jobs = min(max(os.cpu_count() or MIN_JOBS, MIN_JOBS), MAX_JOBS)
    say(
        f"{NAME}: {arch.gfx}: compiling {len(missing)} of {len(specs)} kernels, once, "
        f"{jobs} at a time."
    )
    os.environ.setdefault("ROCM_SD_COMPILE_TIME_LIMIT_S", str(KERNEL_LIMIT_S))
    with console.Progress() as progress:
        progress.show(f"{NAME}: {console.how_far('compiling', 0, len(missing), 0.0)}")
        if compilers.serves(arch):
            compile_each(missing, arch, deadline, jobs, progress)
            return
    say("  No compiler here can serve. All else works as before.")
    for name, reasons in compilers.survey(arch).items():
        say(f"  {name}: {'; '.join(reasons)}")


def try_kernels(chosen: "list[Arch]", folder: "Path | None", deadline: float) -> None:
    """Have all that was compiled tried on the cards, once, in a process that has torch and in
    children of it, which alone launch something. Nothing for a card that lacks a kernel.
    """
    from lib_rocm_sd import console
    from lib_rocm_sd.first_trials import MARK, PROGRESS
    from lib_rocm_sd.runtime import build, process
    from lib_rocm_sd.shipped import AT_START, shipped
    from lib_rocm_sd.trials import stamp

    wanted = [
        arch.gfx
        for arch in chosen
        if not stamp.is_there(arch.gfx)
        and all(build.is_cached(spec, arch) for spec in shipped(arch, AT_START))
    ]
    limit_s = min(deadline - time.monotonic(), TRIAL_LIMIT_S)
    if not wanted or limit_s < LEAST_TRIAL_S:
        return
    say(f"{NAME}: {', '.join(wanted)}: trying the kernels in a process of their own, once.")
    words = [str(ROOT), str(folder or ""), str(limit_s - LEAST_TRIAL_S / 2), *wanted]
    with console.Progress(say) as progress:

        def heard(line: str) -> None:
            if line.startswith(PROGRESS):
                progress.show(f"{NAME}: {line[len(PROGRESS) :]}")

        progress.show(f"{NAME}: trying kernels")
        done = process.run([sys.executable, "-c", TRY, *words], limit_s, heard=heard)
    told = [line for line in done.output.splitlines() if line.startswith(MARK)]
    for line in told:
        say(f"  {line[len(MARK) :]}")
    for gfx in wanted:
        if not stamp.is_there(gfx):
            stamp.put(gfx, whole=False)
    if done.trouble or not told:
        why = f"that {done.trouble}" if done.trouble else "torch reports no card for them"
        say(f"  {why[:1].upper()}{why[1:]}. They are tried later, in the background.")


def compile_each(
    missing: "list[KernelSpec]", arch: "Arch", deadline: float, jobs: int, progress: "Progress"
) -> None:
    """Compile `missing`, `jobs` at a time; ends early at `deadline`, after a few failures, or where
    nothing can be kept.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from lib_rocm_sd import cache, console
    from lib_rocm_sd.runtime import process
    from lib_rocm_sd.shipped import label

    started = time.monotonic()
    failures = finished = 0
    group = process.Group(polite=False)
    pool = ThreadPoolExecutor(jobs, initializer=group.join)
    try:
        running = {pool.submit(attempt, spec, arch, deadline): spec for spec in missing}
        for done in as_completed(running):
            outcome = done.result()
            if outcome is None:
                continue
            finished += 1
            failures += outcome[1]
            progress.clear()
            say(f"  [{finished}/{len(missing)}] {label(running[done])}: {outcome[0]}")
            if failures == FAILURES_BEFORE_GIVING_UP:
                say("  No more is tried now; it is tried again later, in the background.")
                return
            if cache.unwritten():
                group.end()
                say(f"  Nothing more is compiled now, it is not kept: {cache.unwritten()}")
                return
            left_s = console.left_s(started, finished, len(missing))
            far = console.how_far("compiling", finished, len(missing), left_s)
            progress.show(f"{NAME}: {far}")
    except BaseException:
        group.end()
        raise
    finally:
        progress.clear()
        pool.shutdown(cancel_futures=True)
    if finished < len(missing):
        left = len(missing) - finished
        say(f"  Time is up; the other {left} are compiled later, in the background.")
    else:
        say(f"  That took {time.monotonic() - started:.0f} s.")


def attempt(spec: "KernelSpec", arch: "Arch", deadline: float) -> "tuple[str, bool] | None":
    """Compile one; what came of it and whether that is a failure. None: too late to begin."""
    from lib_rocm_sd.errors import CompileError
    from lib_rocm_sd.runtime import build

    if time.monotonic() > deadline:
        return None
    try:
        made = build.build(spec, arch)
    except CompileError as error:
        return str(error), True
    return f"{made.compiler}, {made.seconds:.1f} s", False


# --- the two commands


def run(python: Path, *words: str) -> int:
    """Run a module of `python` here, its output shown; its exit status."""
    unwanted = ("PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {k: value for k, value in os.environ.items() if k not in unwanted}
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        # Tests start it some hundred times; to compile torch anew takes seconds each time.
        environment["PYTHONPYCACHEPREFIX"] = str(ROOT / ".cache" / "bytecode")
    command = [str(python), "-m", *words]
    return subprocess.run(command, cwd=str(ROOT), env=environment, check=False).returncode


def demo(python: Path, arguments: "list[str]") -> int:
    """Generate the demo's pictures, or serve its page."""
    return run(python, "lib_rocm_sd", "demo", *arguments)


def test(python: Path, arguments: "list[str]") -> int:
    """Every check; the status of the last one that failed. mypy, which takes a minute, is shown
    after pytest, beside which it runs.
    """
    # One more than there are cores: tests wait for children and browsers.
    workers = ["--workers", str(min((os.cpu_count() or 1) + 1, MOST_TEST_WORKERS))]
    types = subprocess.Popen(
        [str(python), "-m", "mypy"], cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        status = 0
        for check in (
            ["ruff", "check", "--output-format", "concise", "."],
            ["ruff", "format", "--check", "."],
            ["pytest", *workers, *arguments],
        ):
            say(f"== {' '.join(check)}")
            status = run(python, *check) or status
        said, _ = types.communicate()
        say(f"== mypy\n{said.decode(errors='replace').rstrip()}")
        return types.returncode or status
    finally:
        types.kill()


def command(name: str, arguments: "list[str]") -> int:
    """`demo` or `test`: set up what it needs, then run it."""
    from lib_rocm_sd import present
    from tools import environment as setup

    parser = argparse.ArgumentParser(prog=f"install.py {name}", allow_abbrev=False)
    parser.add_argument(
        "--allow-large", action="store_true", help="take gigabytes of another vendor's GPU runtime"
    )
    options, rest = parser.parse_known_args(arguments)
    amd_gpu = sys.platform == "linux" and any(arch for _, arch in present.find())
    try:
        purpose = "page" if name == "demo" and "--ui" in rest else name
        python = setup.environment(purpose, amd_gpu=amd_gpu, allow_large=options.allow_large)
        return {"demo": demo, "test": test}[name](python, rest)
    except (setup.SetupError, OSError) as error:
        say(f"\n{error}")
        return 1
    except KeyboardInterrupt:
        say("\nInterrupted; run it again to go on.")
        return 130


def main() -> int:
    """Choose by the first argument; without one, a host is the caller."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if str(ROOT) not in sys.path:  # python -I and -P leave it out
        sys.path.insert(0, str(ROOT))
    if sys.version_info < OLDEST_PYTHON:
        found = f"{sys.version.split()[0]} ({sys.executable})"
        say(f"{NAME} needs Python 3.10 or newer; this is {found}.")
        return 1 if name else 0
    with contextlib.suppress(ImportError):  # the hook reports it
        from lib_rocm_sd import console

        console.escape()
    if name in ("demo", "test"):
        return command(name, sys.argv[2:])
    if name == "doctor":
        from lib_rocm_sd.__main__ import main as commands

        return commands(sys.argv[1:])
    if name in ("-h", "--help"):
        say(__doc__ or "")
        return 0
    return webui_hook()


if __name__ == "__main__":
    sys.exit(main())
