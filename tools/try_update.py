"""Tries what an installed WebUI sees of an update, in a folder that is thrown away.

`python -m tools.try_update` puts the committed state of this checkout into the extensions folder of
a WebUI that has nothing else, and compiles there. Then two updates come as the WebUI fetches them:
one that changes no kernel, one that does. It prints what is compiled each time and what stays.
docs/releasing.md says what to expect. It needs git and a compiler, no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OP, KERNEL = "layer_norm_backward", "kernels/norm_gradients.hip"
"""What is compiled, and what of it the second update changes."""
KEPT = {
    "config.json": '{"rocm_sd_headroom_mib": 512}',
    "ui-config.json": '{"txt2img/Enable/value": true}',
    "extensions/rocm-sd/outputs/mine.txt": "an untracked file in the extension's folder",
}
"""What users have in a WebUI, by its path there."""
IMPORTED = "kernels/tuned/gfx1100/attention.json"
"""A tracked file that `tune --import` writes."""


@dataclass(frozen=True)
class Start:
    """What compiling found: how many kernels were made, and how many were there."""

    made: int
    cached: int

    def __str__(self) -> str:
        return f"{self.made} kernels compiled, {self.cached} were there"


@dataclass(frozen=True)
class Found:
    """The first start, one after an update without kernels, one after an update of a kernel.

    `lost`: which of KEPT did not stay; `import_stayed`: whether the imported table did.
    """

    first: Start
    same_kernels: Start
    other_kernel: Start
    lost: list[str]
    import_stayed: bool


def main(arguments: list[str]) -> int:
    """0 where an update did what docs/releasing.md says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--op", default=OP, help="what is compiled: see `compile --help`")
    parser.add_argument("--arch", default="gfx1100", help="for which GPU")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rocm_sd_update_") as folder:
        found = attempt(Path(folder), options.op, options.arch)
    print(f"first start:                       {found.first}")
    print(f"after an update without kernels:   {found.same_kernels}")
    print(f"after an update of one kernel:     {found.other_kernel}")
    print(f"settings and files that were lost: {', '.join(found.lost) or 'none'}")
    print(f"table of `tune --import`:          {'stayed' if found.import_stayed else 'replaced'}")
    return 0 if as_documented(found) else 1


def as_documented(found: Found) -> bool:
    """Whether docs/releasing.md is right."""
    whole = found.first.made
    return (
        whole > 0
        and found.same_kernels == Start(0, whole)
        and found.other_kernel.made > 0
        and not found.lost
        and not found.import_stayed
    )


def attempt(folder: Path, op: str, arch: str) -> Found:
    """Install, update twice; everything in `folder`."""
    origin, webui = folder / "origin", folder / "webui"
    extension = webui / "extensions" / "rocm-sd"
    _git(folder, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(origin))
    _git(origin, "checkout", "--quiet", "-B", "main")  # a checkout may be on no branch
    _git(folder, "clone", "--quiet", str(origin), str(extension))
    for name, text in KEPT.items():
        (webui / name).parent.mkdir(parents=True, exist_ok=True)
        (webui / name).write_text(text, encoding="utf-8")
    first = _start(extension, op, arch)
    (extension / IMPORTED).write_text("{}", encoding="utf-8")
    _publish(origin, "README.md", "\nAnother sentence.\n")
    _update(extension)
    import_stayed = (extension / IMPORTED).read_text(encoding="utf-8") == "{}"
    same_kernels = _start(extension, op, arch)
    _publish(origin, KERNEL, "\nstruct AnotherLine;\n")
    _update(extension)
    other_kernel = _start(extension, op, arch)
    lost = [
        name
        for name, text in KEPT.items()
        if not (webui / name).is_file() or (webui / name).read_text(encoding="utf-8") != text
    ]
    return Found(first, same_kernels, other_kernel, lost, import_stayed)


def _publish(origin: Path, name: str, text: str) -> None:
    """A new commit, with `text` at the end of a file."""
    with (origin / name).open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    _git(origin, *identity, "commit", "--quiet", "--all", "--message", f"Change {name}")


def _update(extension: Path) -> None:
    """The two commands that the WebUI's "Apply and restart UI" runs."""
    _git(extension, "fetch", "--quiet", "--all")
    _git(extension, "reset", "--quiet", "--hard", "origin")


def _start(extension: Path, op: str, arch: str) -> Start:
    """Compile with the extension's own code, into the WebUI's cache folder."""
    cache = extension.parent.parent / "cache" / "rocm_sd"
    words = ("-m", "lib_rocm_sd", "compile", "--arch", arch, "--op", op, "--json", "--jobs", "2")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=extension,
        env={**os.environ, "ROCM_SD_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        text=True,
    )
    rows = json.loads(done.stdout)
    failures = [row["failure"] for row in rows if row["failure"]]
    if failures:
        raise RuntimeError(failures[0])
    cached = sum(row["cached"] for row in rows)
    return Start(len(rows) - cached, cached)


def _git(folder: Path, *words: str) -> None:
    """Run git without the user's own configuration, which may sign or hook commits."""
    git = shutil.which("git")
    if git is None:
        raise RuntimeError("git is not in PATH")
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "1"}
    own |= {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    others = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run([git, *words], cwd=folder, env={**others, **own}, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
