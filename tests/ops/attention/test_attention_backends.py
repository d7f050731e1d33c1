"""torch's scaled_dot_product_attention by one backend: its switches, and why torch refuses one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.attention import libraries
from lib_rocm_sd.ops.attention.libraries import BACKENDS, SdpaBackend, only
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call

CPU = torch.device("cpu")
ARCH = table()["gfx1100"]
PROBLEM = AttentionProblem(2, 3, 17, 15, 40, "float32")


def switches() -> tuple[bool, ...]:
    """How torch's switches stand."""
    cuda: Any = torch.backends.cuda
    names = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")
    cudnn = getattr(cuda, "cudnn_sdp_enabled", lambda: False)()
    return (*(getattr(cuda, name)() for name in names), cudnn)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    libraries.torchs_refusals.cache_clear()
    before = switches()
    yield
    assert switches() == before
    libraries.torchs_refusals.cache_clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_the_switches_are_as_they_were_afterwards() -> None:
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        before = switches()
        with pytest.raises(RuntimeError, match="planted"), only("efficient"):
            assert switches() == (False, True, True, False)
            raise RuntimeError("planted")
        assert switches() == before
        with only("math"):
            assert switches() == (False, False, True, False)
        assert switches() == before and not before[1]
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_two_threads_take_turns() -> None:
    before, entered, let_go = switches(), threading.Event(), threading.Event()
    seen: list[tuple[bool, ...]] = []

    def first() -> None:
        with only("flash"):
            entered.set()
            let_go.wait(600)

    def second() -> None:
        with only("math"):
            seen.append(switches())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(600)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive() and not seen
    let_go.set()
    for thread in threads:
        thread.join(600)
    assert seen == [(False, False, True, False)] and switches() == before


def test_an_older_torch_has_another_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, bool]] = []

    @contextmanager
    def sdp_kernel(**switched: bool) -> Iterator[None]:
        given.append(switched)
        yield

    monkeypatch.setattr(libraries, "_module", lambda: None)
    monkeypatch.setattr(libraries, "_asker", lambda backend: None)
    monkeypatch.setattr(torch.backends.cuda, "sdp_kernel", sdp_kernel)
    with only("flash"):
        pass
    assert given == [{"enable_flash": True, "enable_mem_efficient": False, "enable_math": False}]
    assert libraries.switch_refusals("flash") == []
    (told,) = libraries.switch_refusals("cudnn")
    assert told.endswith("has no switch for cudnn attention")


@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("mask", ["none", "bool", "float32"])
def test_it_computes_attention(backend: str, mask: str) -> None:
    if backend == "flash" and mask == "bool":
        mask = "float32"
    problem = replace(PROBLEM, mask=mask)
    inputs = ATTENTION.make_inputs(problem, CPU, 1)
    made = SdpaBackend(backend).run(Call(problem, inputs))
    if mask == "none":
        assert relative_error(made, ATTENTION.reference(inputs)) < 1e-5
    else:  # of a query without keys an older torch gives NaN: the self-test's to say
        right = ATTENTION.reference(inputs)
        assert relative_error(made[:, :-1], right[:, :-1]) < 1e-5


def test_before_torch_has_a_gpu_there_is_nothing_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never() -> int:
        raise AssertionError("this would make a context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", never)
    for arch in (None, ARCH):
        for backend in BACKENDS:
            assert SdpaBackend(backend).refusals(arch, PROBLEM) == ["no supported GPU"]


@pytest.mark.usefixtures("card")
def test_cudnn_is_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert "cuDNN is NVIDIA's" in SdpaBackend("cudnn").refusals(ARCH, PROBLEM)[-1]


def _asked(*words: str, takes: bool = False, once: bool = False) -> Any:
    """What torch.backends.cuda.can_use_* does."""
    left = list(words)

    def can_use(params: Any, debug: bool = False) -> bool:
        if debug or once:
            for each in left:
                warnings.warn(f"{each} (Triggered internally at sdp_utils.cpp:1.)", stacklevel=2)
            if once:
                left.clear()
        return takes

    return can_use


@pytest.mark.usefixtures("card")
def test_torch_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = torch.backends.cuda
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.delenv(libraries.EXPERIMENTAL, raising=False)
    monkeypatch.setattr(libraries, "_params", lambda problem: "params")
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: True)
    words = "Flash attention on this GPU is experimental."
    monkeypatch.setattr(cuda, "can_use_flash_attention", _asked(words, once=True))
    (why,) = SdpaBackend("flash").refusals(ARCH, PROBLEM)
    assert why.startswith(f"torch does not take it: {words}. On ROCm it is AOTriton's")
    assert why.endswith(f"{libraries.EXPERIMENTAL}=1")
    assert SdpaBackend("flash").refusals(ARCH, PROBLEM) == [why]  # said once, remembered
    (why,) = SdpaBackend("flash").refusals(ARCH, replace(PROBLEM, seq_k=9))
    assert why.startswith("torch does not take it: it does not say why")
    monkeypatch.setattr(torch.version, "hip", None)
    words = "Mask must be None"
    monkeypatch.setattr(cuda, "can_use_efficient_attention", _asked("Efficient not used because:"))
    (why,) = SdpaBackend("efficient").refusals(ARCH, PROBLEM)
    assert why == "torch does not take it: it does not say why"
    monkeypatch.setattr(cuda, "can_use_efficient_attention", _asked(takes=True))
    assert SdpaBackend("efficient").refusals(ARCH, replace(PROBLEM, seq_k=9)) == []
    monkeypatch.setattr(cuda, "is_flash_attention_available", lambda: False)
    (why,) = SdpaBackend("flash").refusals(ARCH, replace(PROBLEM, seq_k=8))
    assert why == "this torch was built without FlashAttention"


@pytest.mark.usefixtures("card")
def test_a_torch_that_cannot_be_asked_leaves_it_to_the_self_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "_asker", lambda backend: None)
    assert SdpaBackend("flash").refusals(ARCH, PROBLEM) == []
    monkeypatch.setattr(libraries, "_asker", lambda backend: _asked())
    monkeypatch.setattr(libraries, "_params", lambda problem: None)
    assert SdpaBackend("efficient").refusals(ARCH, PROBLEM) == []


@pytest.mark.usefixtures("card")
def test_math_does_not_ask_for_all_memory() -> None:
    large = AttentionProblem(2, 8, 16384, 16384, 40)
    assert SdpaBackend("math").refusals(ARCH, large) == ["its scores would take 8192 MiB, and more"]
    assert SdpaBackend("math").refusals(ARCH, AttentionProblem(2, 8, 4096, 4096, 40)) == []


def test_gradients_are_left_to_torchs_own_choice() -> None:
    inputs = ATTENTION.make_inputs(PROBLEM, CPU, 1)
    assert SdpaBackend("math").input_refusals(inputs) == []
    wanted = inputs._replace(q=inputs.q.requires_grad_())
    assert SdpaBackend("math").input_refusals(wanted)
    assert {SdpaBackend(name).name for name in BACKENDS} <= {v.name for v in ATTENTION.every}


@pytest.mark.gpu
def test_on_the_card_torchs_answer_and_its_call_agree() -> None:
    """Where torch says that it takes a backend, it gives attention; else it names a reason."""
    gpu, taken = torch.device("cuda:0"), []
    arch = identify(gpu).arch
    for backend in BACKENDS:
        for problem in (replace(PROBLEM, dtype="float16"), AttentionProblem(1, 2, 64, 77, 64)):
            variant = SdpaBackend(backend)
            why = variant.refusals(arch, problem)
            if why:
                assert all(why) and not why[0].endswith(": ")
                continue
            inputs = ATTENTION.make_inputs(problem, gpu, 1)
            made = variant.run(Call(problem, inputs)).cpu()
            right = ATTENTION.reference(ATTENTION.make_inputs(problem, CPU, 1))
            assert relative_error(made, right) <= ATTENTION.tolerance(problem), backend
            taken.append(backend)
    assert "math" in taken
