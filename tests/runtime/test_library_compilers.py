"""Compilers that are libraries, made here from C source: what they are given is checked in C."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.runtime import libraries, library_compilers
from lib_rocm_sd.runtime.compiler import Compiler
from lib_rocm_sd.runtime.library_compilers import LibraryCompiler
from tests.runtime.code_objects import c_library, compile_scale
from tests.runtime.processes import reach_limits_when

HIPRTC = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
struct program { const char *source, *name; char log[4096]; };
static struct program the_program;
int hiprtcVersion(int *major, int *minor) { *major = 9; *minor = 1; return 0; }
const char *hiprtcGetErrorString(int status) { return status == 6 ? "COMPILATION" : "OTHER"; }
int hiprtcCreateProgram(void **program, const char *source, const char *name, int headers,
                        const char **texts, const char **names) {
    if (headers || texts || names) return 3;
    the_program.source = strdup(source), the_program.name = strdup(name);
    *program = &the_program;
    return 0;
}
int hiprtcCompileProgram(void *program, int count, const char **options) {
    struct program *p = program;
    if (p != &the_program) return 4;
    char *at = p->log + sprintf(p->log, "%s|%s", p->name, p->source);
    for (int i = 0; i < count; i++) at += sprintf(at, "|%s", options[i]);
    if (strstr(p->source, "CRASH")) *(volatile int *)0 = 0;
    if (!strncmp(p->source, "HANG ", 5)) {
        fclose(fopen(p->source + 5, "w"));
        for (;;) sleep(1);
    }
    return strstr(p->source, "FAIL") ? 6 : 0;
}
int hiprtcGetProgramLogSize(void *program, size_t *size) {
    *size = strlen(((struct program *)program)->log) + 1;
    return 0;
}
int hiprtcGetProgramLog(void *program, char *log) {
    strcpy(log, ((struct program *)program)->log);
    return 0;
}
int hiprtcGetCodeSize(void *program, size_t *size) { *size = 5; return program != &the_program; }
int hiprtcGetCode(void *program, char *code) { memcpy(code, "a\0b\0c", 5); return 0; }
int hiprtcDestroyProgram(void **program) { *program = NULL; return 0; }
"""


@pytest.fixture(scope="module")
def hiprtc(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """hiprtc's interface, found under its name among files that only look like it."""
    folder = tmp_path_factory.mktemp("rocm")
    c_library("int nothing;", folder / "libhiprtc.so.99")  # sorts first, exports no interface
    c_library("int nothing;", folder / "libhiprtc-builtins.so.9")
    c_library(HIPRTC, folder / "libhiprtc.so.9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "rocm_library_folders", lambda: [folder])
        (compiler,) = library_compilers.hiprtcs()
    return compiler


def test_hiprtc_is_found_by_its_symbol(hiprtc: Compiler) -> None:
    assert isinstance(hiprtc, LibraryCompiler) and hiprtc.path.name == "libhiprtc.so.9"
    assert hiprtc.refusals(arch.table()["gfx1100"]) == []


def test_only_builtins_means_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c_library("int nothing;", tmp_path / "libhiprtc.so.7")
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    (compiler,) = library_compilers.hiprtcs()
    assert "does not export hiprtcCreateProgram" in compiler.refusals(arch.table()["gfx1100"])[0]


def test_hiprtc_gets_source_name_and_options(hiprtc: Compiler) -> None:
    assert compile_scale(hiprtc) == b"a\0b\0c"
    with pytest.raises(CompileError, match="COMPILATION") as caught:
        hiprtc.compile("FAIL", "k", arch.table()["gfx1201"], {"B": 2, "A": 1}, "dir/k.hip")
    assert caught.value.log.split("|") == [
        "k.hip",
        "FAIL",
        "--offload-arch=gfx1201",
        "-nogpuinc",
        "-std=c++17",
        "-O3",
        "-DA=1",
        "-DB=2",
    ]


def test_a_crash_inside_a_library_leaves_this_process_alone(hiprtc: Compiler) -> None:
    with pytest.raises(CompileError, match="crashed"):
        hiprtc.compile("CRASH", "k", arch.table()["gfx1100"], {}, "k.hip")


def test_a_hang_inside_a_library_ends(
    hiprtc: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "50")
    hangs = tmp_path / "hangs"
    reach_limits_when(monkeypatch, hangs.exists)
    with pytest.raises(CompileError, match="took longer than 50 s"):
        hiprtc.compile(f"HANG {hangs}", "k", arch.table()["gfx1100"], {}, "k.hip")


COMGR = r"""
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef uint64_t H;
static char log_text[4096];
static int language, step;
static const int actions[3] = {2, CODEGEN, LINK};
void amd_comgr_get_version(size_t *major, size_t *minor) { *major = MAJOR; *minor = 1; }
int amd_comgr_status_string(int status, const char **text) { *text = "WRONG"; return 0; }
int amd_comgr_get_isa_count(size_t *count) { *count = 2; return 0; }
int amd_comgr_get_isa_name(size_t index, const char **name) {
    *name = index ? "amdgcn-amd-amdhsa--gfx1100" : "amdgcn-amd-amdhsa--gfx942";
    return index > 1;
}
int amd_comgr_create_data(int kind, H *data) { *data = 0x1122334455667788ull; return kind != 1; }
int amd_comgr_release_data(H data) { return 0; }
int amd_comgr_set_data(H data, size_t size, const char *bytes) {
    sprintf(log_text, "%.*s", (int)size, bytes);
    return data != 0x1122334455667788ull;
}
int amd_comgr_set_data_name(H data, const char *name) {
    return strcmp(name, "scale.hip") || data != 0x1122334455667788ull;
}
int amd_comgr_create_data_set(H *set) { *set = 0x8877665544332211ull; return 0; }
int amd_comgr_destroy_data_set(H set) { return 0; }
int amd_comgr_data_set_add(H set, H data) {
    return set != 0x8877665544332211ull || data != 0x1122334455667788ull;
}
int amd_comgr_create_action_info(H *info) { *info = 77; return 0; }
int amd_comgr_destroy_action_info(H info) { return 0; }
int amd_comgr_action_info_set_language(H info, int value) { language = value; return info != 77; }
int amd_comgr_action_info_set_isa_name(H info, const char *name) {
    return strcmp(name, "amdgcn-amd-amdhsa--gfx1100");
}
int amd_comgr_action_info_set_option_list(H info, const char **options, size_t count) {
    for (size_t i = 0; i < count; i++) strcat(strcat(log_text, "|"), options[i]);
    return 0;
}
int amd_comgr_action_info_set_logging(H info, bool logging) { return !logging; }
int amd_comgr_do_action(int action, H info, H inputs, H outputs) {
    char said[64];
    sprintf(said, "|action %d language %d", action, language);
    strcat(log_text, said);
    return step > 2 || action != actions[step++] || language != HIP || info != 77;
}
int amd_comgr_action_data_count(H set, int kind, size_t *count) {
    *count = kind == 5 || kind == 8;
    return 0;
}
int amd_comgr_action_data_get_data(H set, int kind, size_t index, H *data) {
    *data = kind;
    return 0;
}
int amd_comgr_get_data(H data, size_t *size, char *bytes) {
    const char *text = data == 8 ? "code" : log_text;
    *size = strlen(text);
    if (bytes) memcpy(bytes, text, *size);
    return 0;
}
"""


@pytest.mark.parametrize(("major", "hip", "codegen", "link"), [(2, 4, 6, 9), (3, 3, 4, 7)])
def test_comgr_speaks_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int, hip: int, codegen: int, link: int
) -> None:
    values = [f"-DMAJOR={major}", f"-DHIP={hip}", f"-DCODEGEN={codegen}", f"-DLINK={link}"]
    c_library(COMGR, tmp_path / f"libamd_comgr.so.{major}", *values)
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    (compiler,) = library_compilers.comgrs()
    assert compiler.refusals(arch.table()["gfx1100"]) == []
    assert f"comgr {major}.1" in compiler.refusals(arch.table()["gfx1030"])[0]
    assert compile_scale(compiler) == b"code"


def test_comgrs_log_reaches_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["-DMAJOR=3", "-DHIP=9", "-DCODEGEN=4", "-DLINK=7"]  # a language of another version
    c_library(COMGR, tmp_path / "libamd_comgr.so", *values)
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    (compiler,) = library_compilers.comgrs()
    with pytest.raises(CompileError, match="WRONG") as caught:
        compile_scale(compiler)
    assert caught.value.log.startswith("int a;|") and "|-std=c++17|-O3|-DLDS" in caught.value.log
    assert caught.value.log.endswith("|action 2 language 3")


def test_an_unknown_comgr_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["-DMAJOR=4", "-DHIP=3", "-DCODEGEN=4", "-DLINK=7"]
    c_library(COMGR, tmp_path / "libamd_comgr.so.4", *values)
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    (compiler,) = library_compilers.comgrs()
    (reason,) = compiler.refusals(arch.table()["gfx1100"])
    assert "4.1" in reason and "versions 2 and 3" in reason


def test_dependencies_beside_a_library_are_found_under_their_unversioned_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch's ROCm wheels: what needs libamd_comgr.so.3 finds it as libamd_comgr.so."""
    build, wheel = tmp_path / "build", tmp_path / "wheel"
    named = c_library(
        "int needed(void) { return 0; }", build / "libneeded.so.3", "-Wl,-soname,libneeded.so.3"
    )
    c_library(
        HIPRTC + "int needed(void); int use(void) { return needed(); }",
        wheel / "libhiprtc.so",
        str(named),
        "-Wl,--no-as-needed",
    )
    named.rename(wheel / "libneeded.so")
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [wheel])
    (compiler,) = library_compilers.hiprtcs()
    assert compiler.refusals(arch.table()["gfx1100"]) == []
    assert compile_scale(compiler) == b"a\0b\0c"
    (wheel / "libneeded.so").unlink()
    with pytest.raises(CompileError, match=r"libneeded\.so\.3"):
        compile_scale(compiler)


def test_hiprtc_can_open_the_comgr_beside_it_by_its_versioned_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c_library("int nothing;", tmp_path / "libamd_comgr.so", "-Wl,-soname,libamd_comgr.so.3")
    opens = "#include <dlfcn.h>\n" + HIPRTC.replace(
        "*major = 9", '*major = dlopen("libamd_comgr.so.3", RTLD_NOW) ? 9 : 0'
    )
    path = c_library(opens, tmp_path / "libhiprtc.so", "-ldl")
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    (compiler,) = library_compilers.hiprtcs()
    assert isinstance(compiler, LibraryCompiler) and compiler.path == path
    assert compiler.facts()["version"] == "9.1"


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libamd_comgr.so").write_bytes(b"\0amd_comgr_do_action\0")
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    (compiler,) = library_compilers.comgrs()
    assert str(tmp_path) in compiler.refusals(arch.table()["gfx1100"])[0]


def test_a_file_twice_under_two_names_is_one_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = c_library(HIPRTC, tmp_path / "libhiprtc.so.7.1")
    (tmp_path / "libhiprtc.so.7").symlink_to(path)
    (tmp_path / "libhiprtc.so").symlink_to(path)
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    assert len(library_compilers.hiprtcs()) == 1
