"""The commands `compile` and `inspect`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib_rocm_sd import __main__, arch
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import compile as compile_cli
from lib_rocm_sd.commands import inspect
from lib_rocm_sd.commands import support as cli_support
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, compilers
from lib_rocm_sd.shipped import AT_START, NAMES, shipped
from tests.runtime.code_objects import SCALE

SPECS = [KernelSpec(SCALE, "scale", (("THREADS", threads),)) for threads in (64, 128)]


@pytest.fixture(autouse=True)
def _small_op(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> None:
    """The only op is the test kernel, in two sizes."""
    module = SimpleNamespace(shipped_specs=lambda row: SPECS, searched_specs=lambda row: SPECS)
    monkeypatch.setattr(inspect, "kernel_modules_of", lambda choice: [module])
    monkeypatch.setattr(compile_cli, "shipped", lambda row, names: dict.fromkeys(SPECS, "small"))
    build.forget_failures()


@pytest.fixture
def gfx1100() -> str:
    """A row that some compiler here can compile for."""
    survey = compilers.survey(arch.table()["gfx1100"])
    if all(survey.values()):
        pytest.skip(f"no compiler for gfx1100: {survey}")
    return "gfx1100"


def test_compile_says_what_it_does_and_ends_with_a_table(
    gfx1100: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["compile", "--arch", gfx1100]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/2] gfx1100 scale THREADS=64: ") and lines[0].endswith(" s")
    assert lines[2].split()[:5] == ["arch", "op", "kernel", "compiler", "variants"]
    assert lines[3].split()[:3] == ["gfx1100", "small", "scale"]
    assert __main__.main(["compile", "--arch", gfx1100, "--jobs", "2"]) == 0
    assert "cached" in capsys.readouterr().out.splitlines()[0]


def test_compile_says_where_its_compiler_was_not_verified(
    gfx1100: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilers, "_verified", dict)
    assert __main__.main(["compile", "--arch", gfx1100]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith(": not verified for gfx1100; used after its self-test")


def test_compile_as_json(gfx1100: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["compile", "--arch", gfx1100, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["defines"]["THREADS"] for row in rows] == [64, 128]
    assert all(row["op"] == "small" for row in rows)
    assert all(row["arch"] == gfx1100 and row["failure"] == "" for row in rows)
    assert all(row["vgpr_spills"] == 0 and row["code_bytes"] > 500 for row in rows)


def test_a_failure_is_shown_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilers, "all_compilers", lambda: [compilers.Absent("none", ["gone"])])
    assert __main__.main(["compile", "--arch", "gfx1100,gfx942"]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED\n") == 4 and "none: gone" in out
    assert __main__.main(["inspect", "--arch", "gfx1100"]) == 1


def test_an_unknown_row_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compile", "inspect"):
        assert __main__.main([command, "--arch", "gfx1100,gfx9999"]) == 2
        said = capsys.readouterr().err
        assert "gfx9999" in said and all(gfx in said for gfx in arch.table())


def test_an_unknown_op_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no op is called rubbish; known: attention"):
        cli_support.kernel_modules_of("attention,rubbish")


def test_all_means_every_row_that_a_user_can_own() -> None:
    assert [row.gfx for row in cli_support.arches_of("all")] == list(arch.amd_table())
    with pytest.raises(UsageError):
        cli_support.arches_of(" , ")


def test_every_op_has_kernels_to_ship_and_to_inspect() -> None:
    for module in cli_support.kernel_modules_of("all"):
        for row in arch.table().values():
            assert module.shipped_specs(row) and module.searched_specs(row)


@pytest.mark.parametrize("gfx", arch.table())
def test_each_kernel_is_shipped_once_and_under_one_op(gfx: str) -> None:
    row = arch.table()[gfx]
    found = shipped(row)
    assert set(found.values()) <= set(NAMES)
    assert [spec for spec, op in found.items() if op == "attention"]
    assert [spec for spec, op in found.items() if op == "conv"]
    vae = shipped(row, ["vae"])
    assert set(vae) <= set(found)
    assert set(shipped(row, AT_START)) >= set(vae)


def test_the_lists_of_kernels_need_no_torch() -> None:
    code = (
        "import sys; from lib_rocm_sd import arch\n"
        "from lib_rocm_sd.shipped import shipped\n"
        "assert shipped(arch.table()['gfx1100'])\n"
        "assert 'torch' not in sys.modules"
    )
    root = arch.KERNELS_DIR.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=600)


def test_inspect_shows_what_the_metadata_says(
    gfx1100: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["inspect", "--op", "attention", "--arch", gfx1100]) == 0
    heads, first, second = capsys.readouterr().out.split("\n\n")[0].splitlines()
    for head in ("THREADS", "VGPRs", "SGPRs", "VGPR spills", "LDS bytes", "waves/SIMD"):
        assert head in heads
    assert first.split()[:3] == ["gfx1100", "scale", "64"] and second.split()[2] == "128"
    assert first.split()[-2:] == ["256", "16"] and second.split()[-2:] == ["512", "16"]


def test_inspect_as_json(gfx1100: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["inspect", "--arch", gfx1100, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[1]
    assert (row["lds_bytes"], row["block"], row["waves_per_simd"]) == (512, 128, 16)
    assert 0 < row["vgprs"] <= 24 and row["vgpr_spills"] == row["scratch_bytes"] == 0


def test_the_command_line_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("doctor", "compile", "inspect"))
    with pytest.raises(SystemExit) as ended:
        __main__.main(["rubbish"])
    assert ended.value.code == 2
