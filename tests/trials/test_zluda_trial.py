"""Who says whether our kernels run beside ZLUDA: each step, each end of the child, its verdict."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd import arch, device
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.errors import CompileError, DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, zluda
from lib_rocm_sd.runtime.zluda import Nvcuda, Zluda
from lib_rocm_sd.trials import place as places
from lib_rocm_sd.trials import verdicts, zluda_child
from lib_rocm_sd.trials import zluda as judging
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.verdicts import FAULTED, HUNG, KILLED, PASSED, REFUSED, Verdict
from lib_rocm_sd.trials.zluda_child import COMPILING, Beneath, TorchSide
from tests.verify import zluda_library
from tests.verify.zluda_library import BOXED, PLAIN, UNKNOWN

ROOT = Path(__file__).parents[2]
ROW = arch.table()["gfx1100"]
INFO = DeviceInfo(0, "AMD Radeon RX 7900 XTX [ZLUDA]", "zluda", "gfx1100", ROW)
STEPS = (
    *("the same HIP library", "versions", COMPILING, "the same device", "the same memory"),
    *("the order on the default stream", "the order in another thread"),
    "the order on another stream",
)
BY_NAME = {"boxed": BOXED, "plain": PLAIN, "unknown": UNKNOWN}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Zluda]:
    made = {
        name: zluda_library.built(tmp_path_factory.mktemp(name), *family)
        for name, family in BY_NAME.items()
    }
    for name in ("ROCM_SD_FAKE_ZLUDA", "ROCM_SD_FAKE_HIP_MORE"):
        os.environ.pop(name, None)
    return made


@pytest.fixture
def examine(
    families: dict[str, Zluda], scale_code: build.CodeObject
) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """The verdict of a family's steps, and which were begun. `side` stands for torch's."""

    def run(family: str, side: Any = None, library: str = "") -> tuple[dict[str, Any], list[str]]:
        here, begun = families[family], []
        torchs = side or zluda_library.Torch(here, scale_code.code)
        nvcuda, beneath = Nvcuda(ctypes.CDLL(str(here.nvcuda))), opened(here)
        listed = zluda_child.steps(here, library or str(here.hip), nvcuda, beneath, 0, torchs)
        found = zluda_child.examined(listed, lambda row: begun.append(row["problem"]))
        return found, begun

    return run


def opened(here: Zluda) -> Beneath:
    return Beneath(ctypes.CDLL(str(here.hip)))


@pytest.mark.parametrize("family", ["boxed", "plain"])
def test_all_steps_are_passed(family: str, examine: Any) -> None:
    found, begun = examine(family)
    assert found == {"outcome": PASSED, "reason": ""}
    assert tuple(begun) == STEPS


@pytest.mark.parametrize(
    ("family", "variable", "planted", "step", "words"),
    [
        ("boxed", "ROCM_SD_FAKE_HIP_MORE", "another device", 3, "device 0 is HIP's 1"),
        ("plain", "ROCM_SD_FAKE_ZLUDA", "another range", 4, "by ZLUDA and in"),
        ("boxed", "ROCM_SD_FAKE_ZLUDA", "not translated", 7, "1000 of 1000 rounds were wrong"),
        ("unknown", "ROCM_SD_FAKE_ZLUDA", "", 1, "an unknown ZLUDA, which reports CUDA 11080"),
    ],
)
def test_a_step_that_is_not_passed_is_the_reason(
    family: str,
    variable: str,
    planted: str,
    step: int,
    words: str,
    examine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, planted)
    found, begun = examine(family)
    assert found["outcome"] == REFUSED and found["lasting"]
    assert found["reason"].startswith(f"{STEPS[step]}: ") and words in found["reason"]
    assert tuple(begun) == STEPS[: step + 1]


def test_another_copy_of_hip_is_refused(families: dict[str, Zluda], examine: Any) -> None:
    found, begun = examine("boxed", library="/rocm/bin/amdhip64_6.dll")
    assert "and /rocm/bin/amdhip64_6.dll in the program's" in found["reason"] and len(begun) == 1
    nvcuda, stranger = Nvcuda(ctypes.CDLL(str(families["boxed"].nvcuda))), opened(families["plain"])
    address = ctypes.c_uint64()
    assert nvcuda._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64)) == 0
    with pytest.raises(LaunchError, match="hipMemGetAddressRange: named symbol not found"):
        zluda_child.other_memory(nvcuda, stranger, address.value + 8)


@pytest.mark.parametrize(
    ("version", "refused"), [(50731921, True), (60443483, False), (8 * 10**7, True)]
)
def test_hip_5_and_what_nobody_has_read_is_refused(
    version: int, refused: bool, families: dict[str, Zluda], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = families["plain"]
    beneath = opened(here)
    monkeypatch.setattr(beneath, "number", lambda call: version)
    reason = zluda_child.unknown_version(Nvcuda(ctypes.CDLL(str(here.nvcuda))), beneath)
    assert (f"HIP {version // 10**7} is not among" in reason) == refused == bool(reason)


def test_a_stream_that_hip_does_not_know_is_refused(
    families: dict[str, Zluda], scale_code: build.CodeObject, examine: Any
) -> None:
    """Boxed without saying so: a fork that no longer exports how to open them."""
    side = zluda_library.Torch(families["boxed"], scale_code.code)
    side.driver.translate = lambda handle: handle
    found, begun = examine("boxed", side)
    assert "hipModuleLaunchKernel: invalid argument" in found["reason"] and tuple(begun) == STEPS


class Failing(zluda_library.Torch):
    error: Exception = RuntimeError("no")

    def round(self, number: int) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "outcome", "lasting"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FAULTED, True),
        (LaunchError("hipModuleLoadData: no kernel image"), REFUSED, True),
        (DeviceOutOfMemoryError("out of memory"), REFUSED, False),
    ],
)
def test_what_a_step_raises(
    error: Exception,
    outcome: str,
    lasting: bool,
    families: dict[str, Zluda],
    scale_code: build.CodeObject,
    examine: Any,
) -> None:
    side = Failing(families["plain"], scale_code.code)
    side.error = error
    found, _ = examine("plain", side)
    assert (found["outcome"], found["lasting"]) == (outcome, lasting)
    assert str(error) in found["reason"]
    with pytest.raises(type(error), match=re.escape(str(error))):  # "memory" does not last
        zluda_child.in_a_thread(lambda: zluda_child.out_of_order(side))


def test_torchs_side_sees_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zluda_child, "BUSY_ITEMS", 16)
    late: list[Any] = []

    def ours(x: Any) -> Any:
        late.append(x)
        return late[-1 - (len(late) % 10 == 5)]  # once in ten rounds that of the round before

    side = TorchSide(torch.device("cpu"), (1, 4, 2, 8), lambda x: ours(x)[:, :1].mean())
    side.warm()
    for number in range(20):
        side.round(number)
    assert (side.wrong(), side.wrong()) == (2, 0)
    assert side.memory() == side._busy.data_ptr()


# -- the parent's side


@pytest.fixture
def here(families: dict[str, Zluda], monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> Place:
    code = build.CodeObject(b"code", "a compiler", True, 0.0)
    monkeypatch.setattr(build, "build", lambda spec, row: code)
    monkeypatch.setattr(zluda, "loaded", lambda: families["boxed"])
    ctypes.CDLL(str(families["boxed"].nvcuda))
    return places.here(INFO, 0, ROW)


class Impatient(Link):
    """No time at all for a step that has begun; starting takes what it takes."""

    begun = False

    def receive(self, limit_s: float) -> dict[str, Any] | None:
        answer = super().receive(0.1 if self.begun else limit_s)
        self.begun = bool(answer) and "problem" in (answer or {})
        return answer


def probe(here: Place, file: Path, link: type[Link] = Link) -> Verdict:
    double = str(Path(__file__).with_name("zluda_double.py"))
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r});"
        f"runpy.run_path({double!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(file)]
    return judging.probe(here, "key", lambda: link(command))


def test_a_verdict_is_kept(here: Place, families: dict[str, Zluda]) -> None:
    assert probe(here, families["plain"].nvcuda).passed
    kept = verdicts.read("key")
    assert kept is not None and kept.passed and kept.device == f"{INFO.name} (gfx1100)"
    found = probe(here, families["unknown"].nvcuda)
    assert found.outcome == REFUSED and "reports CUDA 11080" in found.reason
    assert verdicts.read("key") == found


@pytest.mark.parametrize(
    ("planted", "outcome", "words"),
    [
        ("crash", FAULTED, "versions: its process crashed (SIGSEGV)"),
        ("exit", REFUSED, "versions: ended with status 7"),
        ("kill", KILLED, "versions: ended from outside (SIGKILL)"),
        ("hang", HUNG, "versions: no answer within its time limit"),
    ],
)
def test_a_child_that_ends_or_hangs_is_a_verdict(
    planted: str,
    outcome: str,
    words: str,
    here: Place,
    families: dict[str, Zluda],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_ZLUDA", planted)
    link = Impatient if planted == "hang" else Link
    found = probe(here, families["boxed"].nvcuda, link)
    assert found.outcome == outcome and words in found.reason
    kept = verdicts.read("key")
    assert kept == found and kept.asks_again == (planted == "kill")


def test_a_child_that_ends_before_a_step_is_no_verdict(here: Place) -> None:
    """A short memory or a virus scanner may be the reason, and pass."""
    found = judging.probe(here, "key", lambda: Link([sys.executable, "-c", "exit('no memory')"]))
    assert found.reason.startswith("loading ZLUDA and torch: ended with status 1: no memory")
    assert verdicts.read("key") is None


def test_a_child_in_which_torch_has_no_zluda_is_no_verdict(here: Place) -> None:
    """By the real child."""
    found = judging.probe(replace(here, before_torch=here.before_torch[:1]), "key")
    assert found.reason.startswith("LaunchError: in the test's process torch finds")
    assert verdicts.read("key") is None


def test_what_does_not_compile_is_no_verdict(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: KernelSpec, row: Any) -> build.CodeObject:
        raise CompileError("cc", "there is no compiler")

    monkeypatch.setattr(build, "build", fail)
    found = judging.probe(here, "key")
    assert "does not compile: there is no compiler" in found.reason
    assert verdicts.read("key") is None


def test_no_process_is_no_verdict(here: Place) -> None:
    def spawn() -> Link:
        raise OSError("too many processes")

    assert "too many processes" in judging.probe(here, "key", spawn).reason
    assert verdicts.read("key") is None


def test_the_place_is_zludas(here: Place, families: dict[str, Zluda], tmp_path: Path) -> None:
    """The children load the HIP library beneath, and those with torch load ZLUDA before it."""
    zludas = families["boxed"]
    assert here.backend == "hip" and here.library == str(zludas.hip)
    assert here.before_torch[:2] == (str(zludas.hip), str(zludas.nvcuda))
    assert zludas.digest in here.software


# -- what the device is told


@pytest.fixture
def judged(here: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Verdict]]:
    """What probes will find, one after another; as in a new process."""
    coming: list[Verdict] = []
    monkeypatch.setattr(judging, "probe", lambda here, key: verdicts.write(key, coming.pop(0)))
    again(monkeypatch)
    yield coming
    judging.settle(())


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_answers", {})


def answers() -> list[Sequence[str]]:
    """Before and after what is found out."""
    first = judging.judge(INFO)
    judging.settle(())
    return [first, judging.judge(INFO)]


def test_a_passed_verdict_is_found_out_once_and_used_again(
    judged: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged.append(Verdict(judging.SUBJECT, PASSED))
    said: list[str] = []
    monkeypatch.setattr(judging, "say", said.append)
    assert not judging.listen(list)
    assert answers() == [(judging.WAITS,), ()]
    assert len(said) == 2 and "kernels may run beside ZLUDA" in said[1]
    again(monkeypatch)
    assert judging.judge(INFO) == () and not judging.is_running()


def test_another_nvcuda_asks_anew(
    judged: list[Verdict], families: dict[str, Zluda], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged += [Verdict(judging.SUBJECT, PASSED), Verdict(judging.SUBJECT, FAULTED, "it crashed")]
    assert answers()[1] == ()
    monkeypatch.setattr(Zluda, "digest", "another")
    again(monkeypatch)
    first, (reason,) = answers()
    assert first == (judging.WAITS,) and "faulted: it crashed" in reason
    assert "ROCM_SD_ALLOW_ZLUDA=1 overrules this" in reason
    again(monkeypatch)
    assert judging.judge(INFO) == (reason,)


def test_a_killed_child_is_tried_once_more(
    judged: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged += [Verdict(judging.SUBJECT, KILLED, "from outside", deaths=1)]
    judged += [Verdict(judging.SUBJECT, KILLED, "from outside", deaths=2)]
    for _ in range(2):
        assert "from outside" in answers()[1][0]
        again(monkeypatch)
    assert "from outside" in judging.judge(INFO)[0] and judged == []


def test_who_listens_is_told_once(judged: list[Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[str]] = []

    def slow(here: Place, key: str) -> Verdict:
        assert judging.listen(lambda: told.append(judging.judge(INFO)))
        return Verdict(judging.SUBJECT, PASSED)

    monkeypatch.setattr(judging, "probe", slow)
    assert answers() == [(judging.WAITS,), ()]
    assert told == [()]


def test_what_was_refused_is_tested_again_when_somebody_asks(
    judged: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a later start; who listens is told again."""
    judged += [Verdict(judging.SUBJECT, FAULTED, "it crashed"), Verdict(judging.SUBJECT, PASSED)]
    assert not judging.is_refused() and not judging.ask()
    assert "it crashed" in answers()[1][0]
    again(monkeypatch)
    assert "it crashed" in judging.judge(INFO)[0]
    told: list[Sequence[str]] = []
    assert not judging.listen(lambda: told.append(judging.judge(INFO)))
    assert judging.is_refused() and judging.ask()
    judging.settle(())
    assert told == [()] and not judging.is_refused() and not judging.ask()
    again(monkeypatch)
    assert judging.judge(INFO) == ()


def test_a_failure_of_ours_is_a_reason(
    judged: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(here: Place, key: str) -> Verdict:
        raise ValueError("a mistake")

    monkeypatch.setattr(judging, "probe", fail)
    assert answers()[1] == ("the test beside ZLUDA itself failed: ValueError: a mistake",)


def test_a_zluda_that_cannot_be_made_out_is_a_reason(
    judged: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Zluda:
        raise LaunchError("nvcuda is loaded 2 times")

    monkeypatch.setattr(zluda, "loaded", fail)
    assert judging.judge(INFO) == ("torch runs through ZLUDA: nvcuda is loaded 2 times",)
    assert not judging.is_running()


def test_a_device_is_what_is_judged(judged: list[Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    judged.append(Verdict(judging.SUBJECT, PASSED))
    facts = device.Facts("cuda", 0, INFO.name, None, "", (8, 8))
    monkeypatch.setattr(device, "_facts", lambda kind, index: facts)
    monkeypatch.setattr(device, "judge_zluda", judging.judge)
    device.forget()
    first = device.identify(torch.device("cuda", 0)).reasons
    judging.settle(())
    found = device.identify(torch.device("cuda", 0))
    device.forget()
    assert (first, found.reasons, found.gfx) == ((judging.WAITS,), (), "gfx1100")


def test_one_key_gives_its_value() -> None:
    """On which a round counts: by the reference, for the widest numbers of a round."""
    x = torch.full((1, 8, 2, 64), float(zluda_child.EXACT - 1), dtype=torch.float16)
    found = ATTENTION.reference(zluda_child.AttentionInputs(x, x[:, :1], x[:, :1]))
    assert bool((found == zluda_child.EXACT - 1).all())


def test_the_child_runs_our_kernel_between_torchs_writes_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine code for gfx1100, by the executor; streams and the libraries are not there."""
    from tests.verify.amdgpu_host import standing_in

    def in_order(*of_libraries: Any) -> Iterator[zluda_child.Step]:
        yield COMPILING, lambda: zluda_child.warmed(of_libraries[-1])
        yield "order", lambda: zluda_child.out_of_order(of_libraries[-1])

    monkeypatch.setattr(judging, "TESTED", AttentionProblem(1, 1, 20, 1, 64))
    monkeypatch.setattr(zluda_child, "steps", in_order)
    monkeypatch.setattr(zluda_child, "ROUNDS", 3)
    monkeypatch.setattr(zluda_child, "BUSY_ITEMS", 16)
    monkeypatch.setattr(zluda_child, "Nvcuda", lambda library: None)
    monkeypatch.setattr(zluda_child, "Beneath", lambda library: None)
    monkeypatch.setattr(zluda, "loaded", lambda: Zluda(Path("nvcuda"), Path("hip")))
    monkeypatch.setattr(zluda_child, "hip", SimpleNamespace(opened=lambda path: None))
    with standing_in("gfx1100", tmp_path) as gpu:
        try:
            head, blobs = judging._letter(Place(0, "hip", INFO.name, ROW, "", ()))
        except CompileError as error:
            pytest.skip(f"needs a compiler for gfx1100: {error}")
        head["torch"]["problems"] = head["torch"]["problems"][:1]
        tester = zluda_child.ZludaTester(0, ROW, lambda row: None)
        tester._device = torch.device("cpu")
        found = tester.test(head, blobs)
        assert found["outcome"] == PASSED, found
        assert len(gpu.launches) == 3 + 1  # the rounds, and the self-test
        inputs = zluda_child.AttentionInputs
        monkeypatch.setattr(zluda_child, "AttentionInputs", lambda q, k, v: inputs(q, k, v + 1))
        assert "order: 3 of 3 rounds were wrong" in tester.test(head, blobs)["reason"]
