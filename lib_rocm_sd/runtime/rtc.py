"""hiprtc and NVRTC: the same C interface under two prefixes. Runs in the worker process only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any


class RtcError(Exception):
    """A function of the library failed; `log` is what the compiler said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Rtc:
    """The library behind `library`.

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
        """The code object and the log. Raises RtcError with the log."""
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
                raise RtcError(self._message("CompileProgram", status), log)
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
            raise RtcError(self._message(function, status))

    def _message(self, function: str, status: int) -> str:
        return f"{self._prefix}{function}: {(self._text(status) or b'?').decode()} ({status})"
