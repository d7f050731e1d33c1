"""Flattening of kernel sources, and the numbered source in a compile error."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import numbered
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.runtime import source
from lib_rocm_sd.runtime.clang import Clang, path_clangs
from lib_rocm_sd.runtime.compiler import defines_options


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernels/ folder with two headers that include one another and a kernel."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.h").write_text('#pragma once\n#include "b.h"\nint a;\n')
    (tmp_path / "common" / "b.h").write_text("#pragma once\nint b;\n")
    (tmp_path / "k.hip").write_text('// k\n#include "common/b.h"\n#include "common/a.h"\nint k;\n')
    monkeypatch.setattr(arch, "KERNELS_DIR", tmp_path)
    return tmp_path


def test_each_header_once_in_place_with_lines_kept(kernels: Path) -> None:
    assert source.flatten("k.hip").splitlines() == [
        '#line 1 "k.hip"',
        "// k",
        '#line 1 "common/b.h"',
        "",
        "int b;",
        '#line 3 "k.hip"',
        '#line 1 "common/a.h"',
        "",
        '#line 3 "common/a.h"',
        "int a;",
        '#line 4 "k.hip"',
        "int k;",
    ]


def test_a_change_of_a_header_is_seen(kernels: Path) -> None:
    before = source.flatten("k.hip")
    known = source.digest()
    (kernels / "common" / "b.h").write_text("long long b;\n")
    assert "long long b;" in source.flatten("k.hip")
    assert "long long b;" not in before
    assert source.digest() != known


def test_the_ends_of_lines_change_nothing(kernels: Path) -> None:
    """A checkout of Windows may have others: what is cached for one serves the other."""
    before = source.flatten("k.hip"), source.digest()
    for path in kernels.rglob("*.*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert (source.flatten("k.hip"), source.digest()) == before


def test_a_missing_header_is_named(kernels: Path) -> None:
    (kernels / "k.hip").write_text('#include "common/c.h"\n')
    with pytest.raises(FileNotFoundError, match=r'k\.hip includes "common/c\.h"'):
        source.flatten("k.hip")


def test_a_comment_is_no_change(kernels: Path) -> None:
    """Else a typo mended in one has every user compile, try and measure again."""
    before, known = source.bare(source.flatten("k.hip")), source.digest()
    (kernels / "common" / "b.h").write_text('#pragma once\n\n// "one\n  int b;  /* int c;\n*/\n')
    assert source.flatten("k.hip").count('"one') == 1
    assert source.bare(source.flatten("k.hip")) == before == "int b;\nint a;\nint k;"
    assert source.digest() == known
    (kernels / "common" / "b.h").write_text('#pragma once\nint b;\nchar s[] = "// no comment";\n')
    assert '"// no comment"' in source.bare(source.flatten("k.hip")) and source.digest() != known


def test_a_missing_kernel_is_an_error(kernels: Path) -> None:
    with pytest.raises(FileNotFoundError):
        source.flatten("none.hip")


def test_the_shims_header_stays(kernels: Path) -> None:
    (kernels / "k.hip").write_text('#if defined(SIMT_SHIM)\n#include "simt.h"\n#endif\n')
    assert '#include "simt.h"' in source.flatten("k.hip")


@pytest.mark.parametrize("kernel", sorted(path.name for path in arch.KERNELS_DIR.glob("*.hip")))
def test_the_shipped_kernels_include_nothing_more(kernel: str) -> None:
    left = re.findall(r"^\s*#\s*include.*", source.flatten(kernel), re.MULTILINE)
    assert left == ['#include "simt.h"']


def test_nvidias_headers_are_found_and_watched(kernels: Path) -> None:
    (kernels / "nvidia").mkdir()
    (kernels / "nvidia" / "c.h").write_text('#include "common/b.h"\nint c;\n')
    (kernels / "k.hip").write_text('#include "nvidia/c.h"\n')
    assert "int b;" in source.flatten("k.hip") and "int c;" in source.flatten("k.hip")
    known = source.digest()
    (kernels / "nvidia" / "c.h").write_text("long long c;\n")
    assert "long long c;" in source.flatten("k.hip")
    assert source.digest() != known


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942", "sm_90"])
def test_amd_takes_nothing_of_nvidias_folder(gfx: str) -> None:
    row = arch.table()[gfx]
    clang = next((c for c in path_clangs() if isinstance(c, Clang)), None)
    if clang is None:
        pytest.skip("no clang in PATH")
    taken = set()
    for spec in {each.source: each for each in attention_kernel.shipped_specs(row)}.values():
        defines = defines_options({**row.defines(), **dict(spec.defines), "SIMT_SHIM": 1})
        text = source.flatten(spec.source).replace('#include "simt.h"', "")
        done = subprocess.run(
            [*clang.program, "-E", "-x", "c++", *defines, "-"],
            input=text.encode(),
            capture_output=True,
            check=True,
        )
        taken |= set(re.findall(r'"(\w+)/\w+\.h"', done.stdout.decode()))
    assert taken == ({"common"} if row.is_amd else {"common", "nvidia"})


def test_numbers_follow_line_directives() -> None:
    shown = numbered('#line 1 "k.hip"\nint a;\n#line 7 "common/b.h"\nint b;\nint c;')
    assert shown.splitlines() == [
        "k.hip:",
        "    1  int a;",
        "common/b.h:",
        "    7  int b;",
        "    8  int c;",
    ]
