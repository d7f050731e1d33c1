"""Our runtime above AMD's own HIP and HSA runtimes, which have a card of paper: what they dispatch
is executed by the executor of machine code, their own kernels too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from lib_rocm_sd.arch import PACKAGE, Arch, table
from lib_rocm_sd.device import Facts, decide
from lib_rocm_sd.ops import registry
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.runtime import build, clang, process, source
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.subject import Subject
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, Verdict
from tests.real_hip.debian import LIMIT_S, Card
from tests.runtime.code_objects import SCALE
from tests.trials.scaling import SCALING, SPEC, Scaling
from tests.trials.world import World
from tests.verify.amdgpu import executor, launch
from tests.waiting import wait_until

CARDS = (
    *(("trixie", gfx) for gfx in ("gfx1100", "gfx1030", "gfx90a", "gfx942")),
    *(("bookworm", gfx) for gfx in ("gfx90a", "gfx1030")),
)
SAID: dict[str, dict[str, Any]] = {
    "bookworm": {
        "others": ["LaunchError: hipModuleLoadData: hipErrorSharedObjectInitFailed (303)"] * 2,
        "blocks": [
            "LaunchError: hipModuleLaunchKernel: hipErrorLaunchFailure (719)",
            "LaunchError: hipModuleLaunchKernel: hipErrorInvalidConfiguration (9)",
        ],
        "function": "LaunchError: hipModuleGetFunction: hipErrorNotFound (500)",
        "memory": "DeviceOutOfMemoryError: hipMalloc: hipErrorOutOfMemory (2)",
        "card": "LaunchError: hipSetDevice: hipErrorInvalidDevice (101)",
    },
    "trixie": {
        "others": [
            "LaunchError: hipModuleLoadData: shared object initialization failed (303)",
            None,
        ],
        "blocks": [
            "LaunchError: hipModuleLaunchKernel: unspecified launch failure (719)",
            "LaunchError: hipModuleLaunchKernel: invalid argument (1)",
        ],
        "function": "LaunchError: hipModuleGetFunction: named symbol not found (500)",
        "memory": "DeviceOutOfMemoryError: hipMalloc: out of memory (2)",
        "card": "LaunchError: hipSetDevice: invalid device ordinal (101)",
    },
}
"""What HIP 5.2 and 5.7 say."""
OPS = ("attention", "conv 3x3", "group norm", "layer norm", "linear")
HANG_LIMIT_S = 3
FILL = "__amd_rocclr_fillBufferAligned"
ASKED = """
import json, re, sys
from ctypes import Structure, byref, c_float, c_int64, c_uint64, c_void_p, create_string_buffer
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from lib_rocm_sd.arch import table
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime.card import BareLauncher, HipCard
from lib_rocm_sd.runtime.compile_worker import load
from lib_rocm_sd.trials.child import Device

class ScaleParams(Structure):
    _fields_ = [("x", c_uint64), ("out", c_uint64), ("count", c_int64), ("a", c_float)]

def trouble(call, *arguments):
    try:
        call(*arguments)
    except (LaunchError, DeviceOutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"

library, gfx, right, *others = Path(sys.argv[2]), *sys.argv[3:]
card = HipCard(load(library), 0)
free = card.free_bytes()
x, out = card.allocate(800), card.allocate(4096)
numbers = np.arange(200, dtype=np.float32)
card.write(x, numbers.tobytes())
launcher = BareLauncher(card.driver, 0, table()[gfx], lambda spec: Path(right).read_bytes())
hip, events, elapsed = card.driver._library, (c_void_p * 2)(), c_float()
for place in range(2):
    assert hip.hipEventCreate(byref(events, 8 * place)) == 0
begin, end = map(c_void_p, events)
found, elapsed_ms = [], []
for stream in (0, card.new_stream(), card.new_stream()):
    card.fill(out, 0xA5, 4096)
    card.synchronise()
    launcher.stream = stream
    assert hip.hipEventRecord(begin, c_void_p(stream)) == 0
    launcher(KernelSpec("scale.hip", "scale"), 4, 64, ScaleParams(x, out, 200, 2.5), Device(0))
    assert hip.hipEventRecord(end, c_void_p(stream)) == 0
    assert hip.hipStreamWaitEvent(c_void_p(0), end, 0) == 0
    card.synchronise()
    assert hip.hipEventElapsedTime(byref(elapsed), begin, end) == 0
    elapsed_ms.append(elapsed.value)
    found.append(card.read(out, 804).hex())
properties = create_string_buffer(1 << 13)  # begins with the name
assert hip.hipGetDeviceProperties(properties, 0) == 0
arch_name = re.search(rb"gfx[0-9a-f]+[:a-z0-9+-]*", properties.raw)[0].decode()
module = card.driver.load(Path(right).read_bytes())
function, params = card.driver.function(module, "scale"), ScaleParams(x, out, 200, 2.5)
card.free(x)
print(json.dumps({
    "free": free,
    "found": found,
    "elapsed_ms": elapsed_ms,
    "properties": [properties.value.decode(), arch_name],
    "others": [trouble(card.driver.load, Path(other).read_bytes()) for other in others],
    "blocks": [
        trouble(card.driver.launch, function, 1, block, 0, 0, params) for block in (128, 1025)
    ],
    "function": trouble(card.driver.function, module, "nothing"),
    "memory": trouble(card.allocate, 1 << 40),
    "card": trouble(HipCard, load(library), 1),
}))
"""


def on(*cards: tuple[str, str]) -> pytest.MarkDecorator:
    names = [f"{release}-{gfx}" for release, gfx in cards]
    return pytest.mark.parametrize("card", cards, indirect=True, ids=names)


@on(*CARDS)
def test_the_runtime_does_what_it_is_asked(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses another GPU's code; 5.2 also a newer version of code objects than ours."""
    row = card.row
    other = table()["gfx1100" if row.gfx != "gfx1100" else "gfx1030"]
    codes = [launch.built(SPEC, row), launch.built(SPEC, other)]
    newer = [each.replace("version=4", "version=5") for each in clang._DEVICE_OPTIONS]
    monkeypatch.setattr(clang, "_DEVICE_OPTIONS", newer)
    compiler, text = launch.compiler(), source.flatten(SCALE)
    assert compiler is not None
    defines = {**row.defines(), **dict(SPEC.defines)}
    codes.append(compiler.compile(text, SPEC.entry, row, defines, "scale.hip"))
    files = [str(tmp_path / str(place)) for place in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        Path(file).write_bytes(code)
    words = [sys.executable, "-c", ASKED, str(PACKAGE.parent), card.library, row.gfx, *files]
    done = process.run(words, limit_s=LIMIT_S)
    assert not done.trouble, done.output
    answer = json.loads(done.output.splitlines()[-1])
    x = [float(place) for place in range(200)]
    right = np.array([2.5 * x[i] + x[i ^ 1] for i in range(200)], np.float32).tobytes()
    assert answer.pop("found") == [(right + b"\xa5" * 4).hex()] * 3
    assert all(0 < elapsed_ms < 1e6 for elapsed_ms in answer.pop("elapsed_ms"))
    name, gcn_arch = answer.pop("properties")
    facts = Facts("cuda", 0, name, "5.7", gcn_arch)
    assert (name, decide(facts, {}).gfx) == ("Card of paper", row.gfx), gcn_arch
    assert answer == {"free": 1 << 30, **SAID[card.release]}
    assert card.paper.wrong == []
    assert [each for each in card.paper.launched if each[0] == "scale"] == [("scale", 4, 64)] * 3
    assert FILL in {name for name, _, _ in card.paper.launched}
    assert {"barrier and", "vendor packet of format 1"} <= set(card.paper.notes())


def tried(card: Card, subject: Subject) -> Verdict:
    ((_, verdict),) = Conductor(card.place, class_limit_s=LIMIT_S).run([subject])
    return verdict


def changed(folder: Path, former: str, new: str) -> KernelSpec:
    """The toy op's kernel with a mistake."""
    made = KernelSpec(str(folder / "wrong.hip"), "scale", SPEC.defines)
    text = source.flatten(SCALE)
    assert former in text
    Path(made.source).write_text(text.replace(former, new), encoding="utf-8")
    return made


def scaling_of(row: Arch, patch: pytest.MonkeyPatch, spec: KernelSpec = SPEC) -> Subject:
    """The toy op, compiled from `spec`."""
    code = build.CodeObject(launch.built(spec, row), "clang", True, 0.0)
    patch.setattr(build, "build", lambda spec, arch: code)
    patch.setattr(build, "cached", lambda spec, arch: code)
    return Subject.of(SCALING, SCALING.variants[0], None, Scaling(1024, 2.0), row)


@pytest.mark.parametrize("name", OPS)
@on(*CARDS)
def test_a_trial_of_an_op_passes(name: str, card: Card, fresh_cache: Path) -> None:
    (op,) = (each for each in registry.ops() if each.name == name)
    variant, (_, problem) = op.variants[0], op.usual[0]
    if isinstance(problem, ConvProblem):
        problem = replace(problem, in_channels=64, out_channels=64)
    config = next(iter(variant.configs(card.row, problem)))
    subject = Subject.of(op, variant, config, problem, card.row)
    verdict = tried(card, subject)
    assert verdict.outcome == PASSED and card.paper.wrong == [], verdict.reason
    assert {spec.entry for spec in subject.specs} & {entry for entry, _, _ in card.paper.launched}


@on(("trixie", "gfx1100"))
def test_a_hang_is_ended_and_remembered(
    card: Card, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its dispatch never completes, so the child waits within HIP's own synchronisation."""
    monkeypatch.setattr(executor, "MOST_STEPS", 10_000)
    endless = changed(tmp_path, "p.out[i] =", "for (;;) ((volatile float*)p.out)[i] =")
    scaling_of(card.row, monkeypatch, endless)
    receive = Link.receive

    def once_it_hangs(link: Link, limit_s: float) -> dict[str, Any] | None:
        answer = receive(link, limit_s)
        is_trying = answer is not None and answer["kind"] == "trying"
        assert not is_trying or wait_until(lambda: card.paper.wrong)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Link, "receive", once_it_hangs)
        world = World(card.place, tmp_path / "journal", HANG_LIMIT_S)
        assert world.run() == "torch"
        world.settled()
    assert world.run() == "torch" and world.launch.count == 0
    said = f"hung: Scaling(count=128, factor=2.0, dtype='float32'): no answer within {HANG_LIMIT_S}"
    assert said in world.why()
    assert ["not at an end" in each for each in card.paper.wrong] == [True]
    later = World(card.place, tmp_path / "journal", LIMIT_S)
    assert later.run() == later.run(3.0) == "torch" and later.children == 0
    assert later.why() == world.why() and "we stopped testing" in later.why(3.0)
    scaling_of(card.row, monkeypatch)
    assert later.gate.ask() == 2  # the user has pressed "Check this card"
    later.settled()
    assert later.run() == later.run(3.0) == "rocm_sd"
    for each in (world, later):
        each.gate.stop()


@on(CARDS[0], CARDS[-1])
def test_an_address_outside_of_memory_is_the_runtimes_own_fault(
    card: Card, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = changed(tmp_path, "p.out[i] =", "p.out[i + (i64(1) << 44)] =")
    verdict = tried(card, scaling_of(card.row, monkeypatch, wrong))
    assert verdict.outcome == FAULTED
    assert "Memory access fault by GPU node-1" in verdict.reason
    assert len(card.paper.wrong) == 1 and "lie in no buffer" in card.paper.wrong[0]
