"""install.py: what it compiles, and when it ends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import install
from lib_rocm_sd import cache
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import compilers
from lib_rocm_sd.shipped import AT_START, in_order, label, shipped
from tests.install.install_doubles import GFX1100, Builder, gpus
from tests.waiting import WAIT_S


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


def test_attention_comes_first_and_what_the_checkpoint_does_not_need_last() -> None:
    parts = shipped(GFX1100, AT_START)
    specs = list(parts)
    attention = attention_kernel.shipped_specs(GFX1100)
    assert specs[: len(attention)] == attention
    assert list(dict.fromkeys(parts.values())) == ["attention", "unet SD1.5", "vae"]
    sdxl = shipped(GFX1100, in_order("SDXL"))
    assert list(dict.fromkeys(sdxl.values())) == ["attention", "unet SDXL", "vae", "unet SD1.5"]
    assert sdxl.keys() == parts.keys()
    assert in_order("another") == AT_START
    vae = {spec.source for spec, part in parts.items() if part == "vae"}
    assert vae == {"conv3x3.hip", "upsample_conv.hip", "pack.hip"}
    assert "layer_norm.hip" in {spec.source for spec, part in sdxl.items() if part == "unet SDXL"}


def test_several_are_compiled_at_a_time(monkeypatch: pytest.MonkeyPatch, builder: Builder) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    together = threading.Barrier(3)
    builder.outcome = lambda: together.wait(WAIT_S) if len(builder.built) == 0 else None
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
    assert "KeyboardInterrupt: interrupted. All else works" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("defines", "name"),
    [
        ({"CONV_STRIDE": 2, "STATISTICS": 1, "BF16_HALVES": 0}, "x, stride 2, statistics, float16"),
        ({"NORM": 1, "SHORTCUT": 1, "BF16_HALVES": 1}, "x, norm, shortcut, bfloat16"),
        ({"STEP_MERGE": 1, "THREADS": 256}, "x"),
        ({"ADDED": 1, "BF16_HALVES": 0}, "x, addition, float16"),
        ({"NORM": 1, "WEIGHTS_IN_ROWS": 1}, "x, weights as they lie, norm"),
    ],
)
def test_what_a_kernel_is_called(defines: dict[str, int], name: str) -> None:
    assert label(KernelSpec("x.hip", "x", tuple(defines.items()))) == name


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
    assert f"the other {left} are compiled later, in the background" in capsys.readouterr().out


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
    assert "it is tried again later, in the background" in out


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
    assert lines[1] == "  No compiler here can serve. All else works as before."
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


@pytest.mark.parametrize(
    ("folder", "words"),
    [("{file}/below", "{file}/below cannot be"), ("~nosuchuser/x", "~nosuchuser/x is not used: ")],
)
def test_without_a_cache_nothing_is_compiled(
    folder: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, "gfx1100")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", folder.format(file=file))
    cache.reset()
    try:
        assert install.main() == 0
    finally:
        cache.reset()
    assert not builder.built
    assert f"  {words.format(file=file)}" in capsys.readouterr().out
