"""Our runtime above AMD's own HIP and HSA runtimes, which have a card of paper: what they dispatch
is executed by the executor of machine code, their own kernels too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from lib_rocm_sd.arch import PACKAGE, Arch, table
from lib_rocm_sd.ops import registry
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.runtime import build, clang, process, source
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.link import Link
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, Verdict
from tests.real_hip import debian
from tests.runtime.code_objects import SCALE
from tests.trials.scaling import SCALING, Scaling
from tests.trials.world import World
from tests.verify import thunk
from tests.verify.amdgpu import executor, launch
from tests.waiting import wait_until
from tools import debian_hip

RELEASE = "bookworm"
SPEC = KernelSpec(SCALE, "scale", (("THREADS", 64),))
OPS = ("attention", "conv 3x3", "group norm", "layer norm", "linear")
LIMIT_S, HANG_LIMIT_S = 600, 3
FILL = "__amd_rocclr_fillBufferAligned"
ASKED = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from lib_rocm_sd.arch import table
from lib_rocm_sd.errors import DeviceOutOfMemoryError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime.card import BareLauncher, HipCard
from lib_rocm_sd.runtime.compile_worker import load
from lib_rocm_sd.trials.child import Device
from tests.runtime.driver_doubles import ScaleParams

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
found = []
for stream in (0, card.new_stream()):
    card.fill(out, 0xA5, 4096)
    card.synchronise()
    launcher.stream = stream
    launcher(KernelSpec("scale.hip", "scale"), 4, 64, ScaleParams(x, out, 200, 2.5), Device(0))
    card.synchronise()
    found.append(card.read(out, 804).hex())
module = card.driver.load(Path(right).read_bytes())
function, params = card.driver.function(module, "scale"), ScaleParams(x, out, 200, 2.5)
card.free(x)
print(json.dumps({
    "free": free,
    "found": found,
    "others": [trouble(card.driver.load, Path(other).read_bytes()) for other in others],
    "blocks": [
        trouble(card.driver.launch, function, 1, block, 0, 0, params) for block in (128, 1025)
    ],
    "function": trouble(card.driver.function, module, "nothing"),
    "memory": trouble(card.allocate, 1 << 40),
    "card": trouble(HipCard, load(library), 1),
}))
"""


@pytest.fixture(scope="session")
def preload(folder: Path) -> Path:
    try:
        root = debian_hip.libraries(RELEASE).parents[2]
        return thunk.built(folder, root / "usr" / "include")
    except (debian_hip.MissingError, thunk.MissingError) as error:
        pytest.skip(str(error))


@pytest.fixture(params=list(thunk.CARDS))
def row(request: pytest.FixtureRequest) -> Arch:
    if reason := launch.missing(request.param):
        pytest.skip(reason)
    return table()[request.param]


@pytest.fixture
def paper(
    row: Arch, preload: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[thunk.Paper]:
    """Children have this card."""
    debian.under(RELEASE, folder, monkeypatch, preload)
    made = thunk.Paper()
    for name, value in made.environment(row.gfx).items():
        monkeypatch.setenv(name, value)
    yield made
    assert not [line for line in made.notes() if "not supported" in line]
    made.end()


def test_the_runtime_does_what_it_is_asked(
    row: Arch, paper: thunk.Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses another GPU's code, and a newer version of code objects than is asked of clang."""
    codes = [launch.built(SPEC, row), launch.built(SPEC, table()["gfx1100"])]
    newer = [each.replace("version=4", "version=5") for each in clang._DEVICE_OPTIONS]
    monkeypatch.setattr(clang, "_DEVICE_OPTIONS", newer)
    compiler, text = launch.compiler(), source.flatten(SCALE)
    assert compiler is not None
    defines = {**row.defines(), **dict(SPEC.defines)}
    codes.append(compiler.compile(text, SPEC.entry, row, defines, "scale.hip"))
    files = [str(tmp_path / str(place)) for place in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        Path(file).write_bytes(code)
    library = str(debian_hip.libraries(RELEASE) / debian.FILES["hiprtc"])
    words = [sys.executable, "-c", ASKED, str(PACKAGE.parent), library, row.gfx, *files]
    done = process.run(words, limit_s=120)
    assert not done.trouble, done.output
    answer = json.loads(done.output.splitlines()[-1])
    x = [float(place) for place in range(200)]
    right = np.array([2.5 * x[i] + x[i ^ 1] for i in range(200)], np.float32).tobytes()
    assert answer.pop("found") == [(right + b"\xa5" * 4).hex()] * 2
    assert answer == {
        "free": 1 << 30,
        "others": ["LaunchError: hipModuleLoadData: hipErrorSharedObjectInitFailed (303)"] * 2,
        "blocks": [
            "LaunchError: hipModuleLaunchKernel: hipErrorLaunchFailure (719)",
            "LaunchError: hipModuleLaunchKernel: hipErrorInvalidConfiguration (9)",
        ],
        "function": "LaunchError: hipModuleGetFunction: hipErrorNotFound (500)",
        "memory": "DeviceOutOfMemoryError: hipMalloc: hipErrorOutOfMemory (2)",
        "card": "LaunchError: hipSetDevice: hipErrorInvalidDevice (101)",
    }
    assert paper.wrong == []
    assert [each for each in paper.launched if each[0] == "scale"] == [("scale", 4, 64)] * 2
    assert FILL in {name for name, _, _ in paper.launched}
    assert {"barrier and", "vendor packet of format 1"} <= set(paper.notes())


def tried(row: Arch, subject: Subject) -> Verdict:
    library = debian_hip.libraries(RELEASE) / debian.FILES["hiprtc"]
    place = Place(0, "hip", "Card of paper", row, str(library), ())
    ((_, verdict),) = Conductor(place, class_limit_s=LIMIT_S).run([subject])
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


def test_a_trial_passes(
    row: Arch, paper: thunk.Paper, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = tried(row, scaling_of(row, monkeypatch))
    assert verdict.outcome == PASSED and verdict.error is not None, verdict.reason
    assert [name for name, _, _ in paper.launched].count("scale") >= 3


@pytest.mark.parametrize("name", OPS)
def test_a_trial_of_an_op_passes(
    name: str, row: Arch, paper: thunk.Paper, fresh_cache: Path
) -> None:
    (op,) = (each for each in registry.ops() if each.name == name)
    variant, (_, problem) = op.variants[0], op.usual[0]
    if isinstance(problem, ConvProblem):
        problem = replace(problem, in_channels=64, out_channels=64)
    config = next(iter(variant.configs(row, problem)))
    subject = Subject.of(op, variant, config, problem, row)
    verdict = tried(row, subject)
    assert verdict.outcome == PASSED and paper.wrong == [], verdict.reason
    assert {spec.entry for spec in subject.specs} & {entry for entry, _, _ in paper.launched}


@pytest.mark.parametrize("row", ["gfx1030"], indirect=True)
def test_a_hang_is_ended_and_remembered(
    row: Arch,
    paper: thunk.Paper,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its dispatch never completes, so the child waits within HIP's own synchronisation."""
    monkeypatch.setattr(executor, "MOST_STEPS", 10_000)
    endless = changed(tmp_path, "p.out[i] =", "for (;;) ((volatile float*)p.out)[i] =")
    library = str(debian_hip.libraries(RELEASE) / debian.FILES["hiprtc"])
    place = Place(0, "hip", "Card of paper", row, library, ())
    scaling_of(row, monkeypatch, endless)
    receive = Link.receive

    def once_it_hangs(link: Link, limit_s: float) -> dict[str, Any] | None:
        answer = receive(link, limit_s)
        return answer if wait_until(lambda: paper.wrong or not _is_trying(answer)) else None

    monkeypatch.setattr(Link, "receive", once_it_hangs)
    world = World(place, tmp_path / "journal", HANG_LIMIT_S)
    assert world.run() == "torch"
    world.settled()
    assert world.run() == "torch" and world.launch.count == 0
    said = f"hung: Scaling(count=128, factor=2.0, dtype='float32'): no answer within {HANG_LIMIT_S}"
    assert said in world.why()
    assert ["not at an end" in each for each in paper.wrong] == [True]
    later = World(place, tmp_path / "journal", LIMIT_S)
    assert later.run() == later.run(3.0) == "torch" and later.children == 0
    assert later.why() == world.why() and "we stopped testing" in later.why(3.0)
    scaling_of(row, monkeypatch)
    assert later.gate.ask() == 2  # the user has pressed "Check this card"
    later.settled()
    assert later.run() == later.run(3.0) == "rocm_sd"
    for each in (world, later):
        each.gate.stop()


def _is_trying(answer: dict[str, Any] | None) -> bool:
    return answer is not None and answer["kind"] == "trying"


def test_an_address_outside_of_memory_is_the_runtimes_own_fault(
    row: Arch,
    paper: thunk.Paper,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    wrong = changed(tmp_path, "p.out[i] =", "p.out[i + (i64(1) << 44)] =")
    verdict = tried(row, scaling_of(row, monkeypatch, wrong))
    assert verdict.outcome == FAULTED
    assert "Memory access fault by GPU node-1" in verdict.reason
    assert len(paper.wrong) == 1 and "lie in no buffer" in paper.wrong[0]
