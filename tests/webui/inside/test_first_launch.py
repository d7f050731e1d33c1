"""The page is open before all kernels are compiled: the WebUI's own path until then, ours after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import FakeGpu, Start, WebUI

OURS = "ROCm SD - fused attention for AMD GPUs"
PATIENCE_S = 600.0
"""Only stops a test that hangs."""


class Builder:
    """Compiles nothing: each kernel takes until `allow` was called for it."""

    def __init__(self) -> None:
        self.made: set[Any] = set()
        self.fails: Callable[[Any], bool] = lambda spec: False
        self.allowed = threading.Semaphore(0)
        self.ended = False

    @staticmethod
    def key(spec: Any) -> Any:
        """Equal in all starts of the double, whose classes differ."""
        return (spec.source, spec.entry, spec.defines)

    def is_cached(self, spec: Any, arch: Any) -> bool:
        return self.key(spec) in self.made

    def build(self, spec: Any, arch: Any) -> None:
        self.allowed.acquire()
        if self.ended:
            return
        if self.fails(spec):
            from lib_rocm_sd.errors import CompileError

            raise CompileError(f"no compiler made {spec.entry}", "planted", "a long log", "source")
        self.made.add(self.key(spec))

    def allow(self, count: int = 1000) -> None:
        for _ in range(count):
            self.allowed.release()


@pytest.fixture
def builder() -> Iterator[Builder]:
    made = Builder()
    yield made
    made.ended = True
    made.allow()


@pytest.fixture
def gpu(builder: Builder) -> FakeGpu:
    gpu = FakeGpu()
    gpu.builder = builder
    return gpu


def state(webui: WebUI) -> Any:
    return webui.library("runtime.background").state()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "that takes too long"
        time.sleep(0.005)


def attention_kernels(webui: WebUI) -> int:
    support = webui.library("shipped")
    row = webui.library("arch").by_gfx("gfx1100")
    return list(support.shipped(row, support.AT_START).values()).count("attention")


def test_the_webuis_own_path_until_the_kernels_are_ready(
    start: Start, gpu: FakeGpu, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = start(extension=False).txt2img()
    webui = start(gpu=gpu)
    assert state(webui).running
    assert webui.applied == "ROCm SD"  # the setting and "Automatic" are as they will be
    assert not webui.is_ours()
    assert OURS in [item.title() for item in webui.sd_hijack.optimizers]
    assert "compiling, 0 of " in webui.status
    result = webui.txt2img()
    assert result.decoded[0].equal(expected.decoded[0])
    assert not gpu.seen

    kernels = attention_kernels(webui)
    builder.allow(kernels)
    until(webui.is_ours)
    assert state(webui).done == kernels
    assert state(webui).running  # the VAE's come after
    assert not webui.txt2img().decoded[0].equal(expected.decoded[0])
    assert gpu.seen
    builder.allow()
    until(lambda: not state(webui).running)
    out = capsys.readouterr().out
    total = state(webui).total
    assert f"ROCm SD: compiling {total} kernels for gfx1100 in the background" in out
    assert out.count("ROCm SD: attention runs on our kernel from now on") == 1
    assert f"ROCm SD: all {total} kernels are compiled" in out
    assert not webui.errors_reported


def test_it_switches_between_generations(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    expected = start(extension=False).txt2img(n_iter=2)
    webui = start(gpu=gpu)
    with webui.generating():
        builder.allow()
        until(lambda: not state(webui).running)
        time.sleep(0.1)
        assert not webui.is_ours()
        assert webui.txt2img(n_iter=2).decoded[0].equal(expected.decoded[0])
    until(webui.is_ours)


def test_the_vae_waits_for_its_own_kernels(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    gpu.convs = True
    webui = start(gpu=gpu)
    vae = webui.library("hosts.webui.vae")
    assert vae.refusals()[0].startswith("compiling, 0 of ")
    assert "being compiled" in webui.library("hosts.webui.speedtest").side.busy()
    builder.allow(attention_kernels(webui))
    until(webui.is_ours)
    assert vae.refusals()[0].startswith("compiling, ")
    builder.allow()
    until(lambda: not state(webui).running)
    assert vae.refusals() == []
    assert webui.library("hosts.webui.speedtest").side.busy() == ""


def test_only_the_vaes_kernels_are_missing(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    gpu.convs = True
    first = start(gpu=gpu)
    builder.allow()
    until(lambda: not state(first).running)
    builder.made = {key for key in builder.made if key[0] == "attention.hip"}
    builder.allowed = threading.Semaphore(0)
    webui = start(gpu=gpu)
    assert state(webui).running
    assert webui.is_ours()
    assert webui.library("hosts.webui.vae").refusals()[0].startswith("compiling, ")


def test_a_chosen_optimizer_stays(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    webui = start(gpu=gpu)
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    before = webui.forwards
    builder.allow()
    until(lambda: not state(webui).running)
    until(lambda: not webui.ours.waits)
    assert webui.applied == "sdp"
    assert webui.forwards == before
    webui.shared.opts.set("cross_attention_optimization", "Automatic")
    assert webui.is_ours()


@pytest.mark.parametrize("args", ["--opt-sdp-attention", "--disable-opt-split-attention"])
def test_flags_that_choose_otherwise(
    start: Start, gpu: FakeGpu, builder: Builder, args: str
) -> None:
    plain = start(extension=False, args=args)
    expected = (plain.applied, [f.__name__ for f in plain.forwards])
    webui = start(gpu=gpu, args=args)
    assert (webui.applied, [f.__name__ for f in webui.forwards]) == expected
    builder.allow()
    until(lambda: not state(webui).running)
    until(lambda: not webui.ours.waits)
    assert (webui.applied, [f.__name__ for f in webui.forwards]) == expected


def test_a_model_that_is_loaded_later(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    webui = start(gpu=gpu, args="--skip-load-model-at-start")
    builder.allow()
    until(lambda: not state(webui).running)
    until(lambda: not webui.ours.waits)
    assert webui.applied is None
    webui.sd_models.load_model()
    assert webui.is_ours()


def test_a_kernel_that_is_wrong_is_left_out(
    start: Start, gpu: FakeGpu, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.wrong = True
    expected = start(extension=False).txt2img()
    webui = start(gpu=gpu)
    builder.allow()
    until(lambda: not state(webui).running)
    until(lambda: OURS not in [item.title() for item in webui.sd_hijack.optimizers])
    until(lambda: webui.applied == "Doggettx")
    assert webui.txt2img().decoded[0].equal(expected.decoded[0])
    assert "self-test failed" in webui.status
    assert "not used on this machine: self-test failed" in capsys.readouterr().out


def test_nothing_compiles(
    start: Start, gpu: FakeGpu, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    builder.fails = lambda spec: True
    webui = start(gpu=gpu)
    builder.allow()
    until(lambda: not state(webui).running)
    until(lambda: webui.applied == "Doggettx")
    assert not webui.is_ours()
    assert "compiling failed: no compiler made" in webui.status
    log = webui.data / "cache" / "rocm_sd" / "compile.log"
    assert state(webui).log_path == str(log)
    assert "a long log" in log.read_text(encoding="utf-8")
    assert f"what the compilers said is in {log}" in capsys.readouterr().out
    webui.initialize.reload_ui()  # is no reason to try again
    assert webui.applied == "Doggettx"
    assert not state(webui).running

    builder.fails = lambda spec: False
    webui.library("runtime.background").forget()
    webui.library("engine.engine").engine.reset()
    webui.ours.compile_again()
    until(webui.is_ours)
    assert webui.applied == "ROCm SD"
    assert webui.status.startswith("Attention runs on our kernel (gfx1100)")


def test_compile_again_where_all_was_well(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    webui = start(gpu=gpu)
    builder.allow()
    until(webui.is_ours)
    until(lambda: not state(webui).running)
    builder.allowed = threading.Semaphore(0)
    builder.made.clear()
    webui.library("runtime.background").forget()
    webui.library("engine.engine").engine.reset()
    webui.ours.compile_again()
    assert not webui.is_ours()
    assert webui.applied == "ROCm SD"
    assert "compiling, 0 of " in webui.status
    builder.allow()
    until(webui.is_ours)


def test_reload_ui_while_compiling(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    webui = start(gpu=gpu)
    total = state(webui).total
    for _ in range(3):
        webui.initialize.reload_ui()
        assert webui.applied == "ROCm SD"
        assert not webui.is_ours()
        assert state(webui).total == total
    builder.allow()
    until(webui.is_ours)
    webui.initialize.reload_ui()
    assert webui.is_ours()


def test_enable_off_while_compiling(start: Start, gpu: FakeGpu, builder: Builder) -> None:
    expected = start(extension=False).txt2img()
    webui = start(gpu=gpu)
    assert webui.txt2img(False).decoded[0].equal(expected.decoded[0])
    assert not webui.is_ours()
    builder.allow()
    until(webui.is_ours)
    assert webui.txt2img(False).decoded[0].equal(expected.decoded[0])
    assert webui.is_ours()


def test_an_unsupported_card_compiles_nothing(start: Start, builder: Builder) -> None:
    gpu = FakeGpu(("gfx803 is not among the GPUs that this extension knows",))
    gpu.builder = builder
    webui = start(gpu=gpu)
    assert state(webui).total == 0
    assert webui.applied == "Doggettx"
