"""The process in which compiler libraries are loaded: a crash or a hang inside LLVM ends this
process, not the host's.

Reads a job (JSON, see `CompilerJob`) and writes `result.json` and, for a compilation, `kernel.co`
beside it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.runtime.comgr import Comgr, ComgrError
from lib_rocm_sd.runtime.rtc import Rtc, RtcError

_RTC_CODE = {"hiprtc": "Code", "nvrtc": "CUBIN"}


@dataclass(frozen=True)
class CompilerJob:
    """`api`: comgr, hiprtc or nvrtc.

    Without a source the question is the library's version and targets, or, with `disassemble`
    (comgr), the text of the code object in kernel.co, to be written to kernel.s.
    """

    api: str
    library: str
    gfx: str = ""
    options: tuple[str, ...] = ()
    file_name: str = ""
    source: str = ""
    disassemble: bool = False

    def save(self, path: Path) -> None:
        """Write the job for the worker."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(name: str) -> int:
    """Do the job in job.json of the folder `name`."""
    folder = Path(name)
    job = CompilerJob(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
    try:
        answer = _do(job, folder)
    except (ComgrError, RtcError) as error:
        answer = {"trouble": str(error), "log": error.log}
    except (OSError, AttributeError) as error:
        answer = {"trouble": f"{job.library}: {error}", "log": ""}
    (folder / "result.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _do(job: CompilerJob, folder: Path) -> dict[str, Any]:
    path = Path(job.library)
    if job.api == "hiprtc":
        _preload(path.parent)
    library = load(path)
    if job.api == "comgr":
        comgr = Comgr(library)
        if job.disassemble:
            text = comgr.disassemble((folder / "kernel.co").read_bytes(), job.gfx)
            (folder / "kernel.s").write_text(text, encoding="utf-8")
            return {"trouble": "", "log": ""}
        if not job.source:
            return {"trouble": "", "version": comgr.version, "targets": comgr.targets()}
        code, log = comgr.compile(job.source, job.file_name, job.gfx, job.options)
    else:
        rtc = Rtc(library, job.api, _RTC_CODE[job.api])
        if not job.source:
            return {"trouble": "", "version": rtc.version, "targets": None}
        code, log = rtc.compile(job.source, job.file_name, job.options)
    (folder / "kernel.co").write_bytes(code)
    return {"trouble": "", "log": log}


def _preload(folder: Path) -> None:
    """Hiprtc opens comgr by its versioned name: one beside it that is loaded answers to that."""
    for path in sorted([*folder.glob("libamd_comgr.so*"), *folder.glob("amd_comgr*.dll")]):
        with suppress(OSError):
            load(path)
            return


def load(path: Path) -> ctypes.CDLL:
    """Load a library whose own dependencies lie beside it.

    torch's ROCm wheels ship them under unversioned file names, so the dynamic linker asks for a
    `libamd_comgr.so.3` that no file is called; loaded by path first, the library answers to that
    name.
    """
    if sys.platform == "win32":
        with os.add_dll_directory(str(path.parent)):
            return ctypes.CDLL(str(path))
    for _ in range(32):
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            missing = re.match(
                r"(lib[^:/]+?\.so)[.\d]*: cannot open shared object file", str(error)
            )
            beside = sorted(path.parent.glob(f"{missing.group(1)}*")) if missing else []
            if not beside or path in beside:
                raise
            load(beside[0])
    raise OSError(f"{path}: its dependencies could not be loaded")
