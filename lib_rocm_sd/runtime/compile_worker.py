"""The process in which compiler libraries are loaded: a crash or a hang inside LLVM ends this
process, not the host's.

Reads a job (JSON, see `CompilerJob`) and writes `result.json` and, for a compilation, `kernel.co`
beside it. Imports nothing of ours but the table of names.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd.runtime.layouts import AMDHIP64, COMGR, HIPRTC

_SOURCE, _LOG, _EXECUTABLE = 1, 5, 8  # amd_comgr_data_kind_t, the same in both versions
_COMPILE_TO_BC = 2
_TRIPLE = "amdgcn-amd-amdhsa--"


@dataclass(frozen=True)
class _Layout:
    """The values that differ between the major versions."""

    hip: int
    codegen_to_relocatable: int
    link_to_executable: int
    disassemble_executable: int


_LAYOUTS = {2: _Layout(4, 6, 9, 12), 3: _Layout(3, 4, 7, 10)}

_HANDLE = c_uint64
_SIGNATURES: dict[str, list[Any]] = {
    "status_string": [c_int, POINTER(c_char_p)],
    "get_isa_count": [POINTER(c_size_t)],
    "get_isa_name": [c_size_t, POINTER(c_char_p)],
    "create_data": [c_int, POINTER(_HANDLE)],
    "release_data": [_HANDLE],
    "set_data": [_HANDLE, c_size_t, c_char_p],
    "set_data_name": [_HANDLE, c_char_p],
    "get_data": [_HANDLE, POINTER(c_size_t), c_char_p],
    "create_data_set": [POINTER(_HANDLE)],
    "destroy_data_set": [_HANDLE],
    "data_set_add": [_HANDLE, _HANDLE],
    "create_action_info": [POINTER(_HANDLE)],
    "destroy_action_info": [_HANDLE],
    "action_info_set_language": [_HANDLE, c_int],
    "action_info_set_isa_name": [_HANDLE, c_char_p],
    "action_info_set_option_list": [_HANDLE, POINTER(c_char_p), c_size_t],
    "action_info_set_logging": [_HANDLE, c_bool],
    "action_data_count": [_HANDLE, c_int, POINTER(c_size_t)],
    "action_data_get_data": [_HANDLE, c_int, c_size_t, POINTER(_HANDLE)],
    "do_action": [c_int, _HANDLE, _HANDLE, _HANDLE],
}
_RTC_CODE = {"hiprtc": "Code", "nvrtc": "CUBIN"}


class LibraryError(Exception):
    """A function of the library failed; `log` is what the compiler said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Comgr:
    """AMD's code object manager, libamd_comgr: clang and lld in a library. The functions are the
    same in version 2 and 3; the enumerations are not: version 3 dropped a language and two actions.

    Raises LibraryError when its major version is neither 2 nor 3."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, types in _SIGNATURES.items():
            function = getattr(library, f"amd_comgr_{name}")
            function.argtypes, function.restype = types, c_int
        library.amd_comgr_get_version.argtypes = [POINTER(c_size_t), POINTER(c_size_t)]
        library.amd_comgr_get_version.restype = None
        major, minor = c_size_t(), c_size_t()
        library.amd_comgr_get_version(byref(major), byref(minor))
        self.version = f"{major.value}.{minor.value}"
        if major.value not in _LAYOUTS:
            raise LibraryError(f"libamd_comgr {self.version}: only versions 2 and 3 are known here")
        self._layout = _LAYOUTS[major.value]

    def targets(self) -> list[str]:
        """The gfx ids that this version compiles for."""
        count = c_size_t()
        self._call("get_isa_count", byref(count))
        names: list[str] = []
        for index in range(count.value):
            name = c_char_p()
            self._call("get_isa_name", index, byref(name))
            names.append((name.value or b"").decode().removeprefix(_TRIPLE))
        return names

    def compile(
        self, source: str, file_name: str, gfx: str, options: Sequence[str]
    ) -> tuple[bytes, str]:
        """The linked code object and the log. Raises LibraryError with the log."""
        info = self._new("create_action_info")
        self._call("action_info_set_logging", info, True)
        self._call("action_info_set_language", info, self._layout.hip)
        self._call("action_info_set_isa_name", info, f"{_TRIPLE}{gfx}".encode())
        logs: list[str] = []
        data = self._data_set(_SOURCE, source.encode("utf-8"), file_name)
        for action, action_options in (
            (_COMPILE_TO_BC, list(options)),
            (self._layout.codegen_to_relocatable, ["-O3"]),
            (self._layout.link_to_executable, []),
        ):
            words = (c_char_p * max(len(action_options), 1))(*map(str.encode, action_options))
            self._call("action_info_set_option_list", info, words, len(action_options))
            data = self._act(action, info, data, logs)
        code = self._contents(data, _EXECUTABLE)
        if not code:
            raise LibraryError("linked nothing", "\n".join(logs))
        return code[0], "\n".join(logs)

    def disassemble(self, code: bytes, gfx: str) -> str:
        """A linked code object as text. Raises LibraryError with the log."""
        info = self._new("create_action_info")
        self._call("action_info_set_logging", info, True)
        self._call("action_info_set_isa_name", info, f"{_TRIPLE}{gfx}".encode())
        data = self._data_set(_EXECUTABLE, code, "kernel.co")
        data = self._act(self._layout.disassemble_executable, info, data, [])
        return "".join(
            text.decode("utf-8", errors="replace") for text in self._contents(data, _SOURCE)
        )

    def _data_set(self, kind: int, contents: bytes, name: str) -> c_uint64:
        data = self._new("create_data", kind)
        self._call("set_data", data, len(contents), contents)
        self._call("set_data_name", data, name.encode("utf-8"))
        inputs = self._new("create_data_set")
        self._call("data_set_add", inputs, data)
        self._call("release_data", data)
        return inputs

    def _act(self, action: int, info: c_uint64, inputs: c_uint64, logs: list[str]) -> c_uint64:
        outputs = self._new("create_data_set")
        status = self._library.amd_comgr_do_action(action, info, inputs, outputs)
        logs += [
            log.decode("utf-8", errors="replace").rstrip("\0\n")
            for log in self._contents(outputs, _LOG)
        ]
        if status:
            raise LibraryError(
                f"action {action}: {self._status(status)}", "\n".join(filter(None, logs))
            )
        self._call("destroy_data_set", inputs)
        return outputs

    def _contents(self, data_set: c_uint64, kind: int) -> list[bytes]:
        count = c_size_t()
        self._call("action_data_count", data_set, kind, byref(count))
        contents: list[bytes] = []
        for index in range(count.value):
            data = self._new("action_data_get_data", data_set, kind, index)
            size = c_size_t()
            self._call("get_data", data, byref(size), None)
            buffer = ctypes.create_string_buffer(size.value)
            self._call("get_data", data, byref(size), buffer)
            self._call("release_data", data)
            contents.append(buffer.raw)
        return contents

    def _new(self, function: str, *arguments: Any) -> c_uint64:
        handle = _HANDLE()
        self._call(function, *arguments, byref(handle))
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, f"amd_comgr_{function}")(*arguments)
        if status:
            raise LibraryError(f"amd_comgr_{function}: {self._status(status)}")

    def _status(self, status: int) -> str:
        text = c_char_p()
        self._library.amd_comgr_status_string(status, byref(text))
        return f"{(text.value or b'?').decode()} ({status})"


class Rtc:
    """hiprtc and NVRTC: the same C interface under two prefixes.

    `prefix` is hiprtc or nvrtc; `code` names the getter: Code (hiprtc), CUBIN (nvrtc).
    """

    def __init__(self, library: ctypes.CDLL, prefix: str, code: str) -> None:
        self._library, self._prefix, self._code = library, prefix, code
        texts = POINTER(c_char_p)
        signatures: dict[str, list[Any]] = {
            "Version": [POINTER(c_int), POINTER(c_int)],
            "CreateProgram": [POINTER(c_void_p), c_char_p, c_char_p, c_int, texts, texts],
            "CompileProgram": [c_void_p, c_int, texts],
            "GetProgramLogSize": [c_void_p, POINTER(c_size_t)],
            "GetProgramLog": [c_void_p, c_char_p],
            f"Get{code}Size": [c_void_p, POINTER(c_size_t)],
            f"Get{code}": [c_void_p, c_char_p],
            "DestroyProgram": [POINTER(c_void_p)],
        }
        for name, types in signatures.items():
            function = getattr(library, prefix + name)
            function.argtypes, function.restype = types, c_int
        self._text = getattr(library, f"{prefix}GetErrorString")
        self._text.argtypes, self._text.restype = [c_int], c_char_p

    @property
    def version(self) -> str:
        """The library's version, such as 12.9."""
        major, minor = c_int(), c_int()
        self._call("Version", byref(major), byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, file_name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """The code object and the log. Raises LibraryError with the log."""
        program = c_void_p()
        self._call(
            "CreateProgram", byref(program), source.encode(), file_name.encode(), 0, None, None
        )
        try:
            words = (c_char_p * max(len(options), 1))(*(option.encode() for option in options))
            status = getattr(self._library, f"{self._prefix}CompileProgram")(
                program, len(options), words
            )
            log = (
                self._bytes(program, "ProgramLog").decode("utf-8", errors="replace").rstrip("\0\n")
            )
            if status:
                raise LibraryError(self._message("CompileProgram", status), log)
            return self._bytes(program, self._code), log
        finally:
            self._call("DestroyProgram", byref(program))

    def _bytes(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"Get{what}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        if size.value:
            self._call(f"Get{what}", program, buffer)
        return buffer.raw[: size.value]

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, self._prefix + function)(*arguments)
        if status:
            raise LibraryError(self._message(function, status))

    def _message(self, function: str, status: int) -> str:
        return f"{self._prefix}{function}: {(self._text(status) or b'?').decode()} ({status})"


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
    except LibraryError as error:
        answer = {"trouble": str(error), "log": error.log}
    except (OSError, AttributeError) as error:
        answer = {"trouble": f"{job.library}: {error}", "log": ""}
    (folder / "result.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _do(job: CompilerJob, folder: Path) -> dict[str, Any]:
    library = load(Path(job.library))
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


def load_before_torch(paths: Sequence[str]) -> None:
    """ZLUDA's libraries (Zluda.companions), of which the first two are needed. Raises OSError."""
    for number, path in enumerate(paths):
        with nullcontext() if number < 2 else suppress(OSError):
            load(Path(path))


def load(path: Path) -> ctypes.CDLL:
    """Load a library whose own dependencies lie beside it.

    torch's ROCm wheels ship them under unversioned file names, so the dynamic linker asks for a
    `libamd_comgr.so.3` that no file is called; loaded by path first, the library answers to that
    name. HIP and hiprtc open comgr by its name at their first use, on Windows with the driver's in
    System32 before their own (TheRock#7132): one that is loaded answers first there too.
    """
    if HIPRTC.matches(path.name) or (sys.platform == "win32" and AMDHIP64.matches(path.name)):
        beside = sorted(each for each in path.parent.glob("*") if COMGR.matches(each.name))
        for comgr in beside:
            with suppress(OSError):
                load(comgr)
                break
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
