"""`python -m lib_rocm_sd bench vae` on the CPU with coders of few channels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.lab import models, vae, vae_ways
from lib_rocm_sd.lab.models import Coder, Runner, Way
from lib_rocm_sd.lab.rows import GOES_ON, Result, Row, read
from lib_rocm_sd.lab.vae_ways import WAYS, Reference
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.vae import policy
from tests.clock import Clock

pytest.importorskip("diffusers", reason="diffusers is a dev extra")
CPU = torch.device("cpu")
TINY = ["bench", "vae", "--small", "--device", "cpu", "--dtype", "bfloat16", "--runs", "1"]


@pytest.fixture(scope="module")
def decoder() -> Coder:
    return models.coder("decoder", CPU, torch.float32, small=True)


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert isinstance(rows, list)
    return rows


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_the_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vae, "why_not_compiled", lambda device: ["triton is not installed"])
    file, plot = tmp_path / "v.json", tmp_path / "v.svg"
    assert __main__.main([*TINY, "--json", str(file), "--plot", str(plot)]) == 0
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["complete"] is True and document["incomplete"] == ""
    assert document["machine"]["dtype"] == "bfloat16" and document["machine"]["runs"] == 1
    rows = document["rows"]
    names = [way.name for way in WAYS]
    for role in models.ROLES:
        assert [row["way"] for row in rows if row["role"] == role] == names
    reasons = {row["way"]: row["reason"] for row in rows}
    assert reasons.pop("compiled channels-last") == "triton is not installed"
    assert "own convolutions only" in reasons.pop("rocm_sd own convolutions")
    assert not any(reasons.values())
    assert {row["ran"] != "" for row in rows if row["plan"].startswith("whole frame")} == {True}
    assert all(row["ran"] == "" for row in rows if not row["way"].startswith("rocm_sd"))
    measured = [row for row in rows if not row["reason"]]
    assert all(row["size"] == 64 and row["runs"] == 1 and row["median_ms"] > 0 for row in measured)
    assert all(row["ms_per_megapixel"] > row["median_ms"] for row in measured)
    assert all(row["reference"] == "torch float32" for row in measured)
    errors = {(row["role"], row["way"]): row["error"] for row in measured}
    for role in models.ROLES:
        assert errors[role, "rocm_sd Memory"] <= 2 * errors[role, "eager"] < 0.1
        assert errors[role, "overlap-blend tiling"] > 0.1
        assert errors[role, "per-tile GroupNorm tiling"] > 0.1
    printed = capsys.readouterr()
    assert "rocm_sd Memory" in printed.out and "encoder" in printed.out
    lines = printed.err.splitlines()
    assert sum(line.startswith("    64 rocm_sd Memory") for line in lines) == 2
    assert any(line.startswith("[16/18] encoder, 64x64: ") for line in lines)
    assert plot.read_text(encoding="utf-8").startswith("<svg")


def test_each_way_meets_a_resolution_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    command_line = [*TINY, "--roles", "decoder", "--ways", "eager", "auto", "--json", str(file)]
    assert __main__.main(command_line) == 0
    rows = rows_of(file)
    assert [row["way"] for row in rows] == ["rocm_sd Auto", "eager"]
    assert [row["first_at"] for row in rows] == ["56x64", "24x64"]
    assert all(row["first_ratio"] == row["first_ms"] / row["second_ms"] for row in rows)


def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float) -> list[Any]:
    """The reasons of the compiled rows of a decoder and an encoder, each of which takes so long."""
    clock = Clock()

    @contextmanager
    def slow(coder: Coder) -> Iterator[Runner]:
        clock.turn(seconds)
        yield Runner(coder.module)

    monkeypatch.setattr(vae, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(vae_ways, "WAYS", (Way("compiled", "slow", slow, slow=True, most=64),))
    monkeypatch.setattr(vae, "COMPILE_LIMIT_S", 4.0)
    file = tmp_path / "v.json"
    assert __main__.main([*TINY, "--json", str(file)]) == 0
    return [row["reason"] for row in rows_of(file)]


def test_no_size_is_compiled_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae, "why_not_compiled", lambda device: [])
    assert compiling(monkeypatch, tmp_path, 1.0) == ["", ""]
    assert compiling(monkeypatch, tmp_path, 3.0) == ["", "not compiled and timed within 4 s"]
    assert compiling(monkeypatch, tmp_path, 9.0) == ["not compiled and timed within 4 s"] * 2


def test_without_a_compiler_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(vae.shutil, "which", lambda name: None)
    assert compiling(monkeypatch, tmp_path, 0.0) == ["there is no C++ compiler"] * 2
    find = vae.importlib.util.find_spec
    monkeypatch.setattr(
        vae.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    assert vae.why_not_compiled(torch.device("cuda")) == ["triton is not installed"]


def options(*words: str) -> Any:
    parser = __main__.argparse.ArgumentParser()  # type: ignore[attr-defined]
    vae.add_arguments(parser)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(words)


def test_usual_sizes() -> None:
    found = {way.key: vae.sizes(options(), way, "decoder") for way in WAYS}
    assert found["memory"] == [512, 1024, 2048, 4096, 8192]
    assert found["auto"] == found["eager"] == found["overlap-blend"] == [512, 1024, 2048, 4096]
    assert found["performance"] == found["own"] == found["compiled"] == [512, 1024, 2048]
    assert {tuple(vae.sizes(options(), way, "encoder")) for way in WAYS} == {(512, 1024, 2048)}
    quick = {way.key: vae.sizes(options("--quick"), way, "decoder") for way in WAYS}
    assert quick["memory"] == [512, 1024] and quick["compiled"] == []
    asked = options("--sizes", "640", "512", "640")
    assert all(vae.sizes(asked, way, "decoder") == [640, 512] for way in WAYS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "100"], "100 is not a multiple of 8"),
        (["--sizes", "0"], "0 is not a multiple of 8"),
        (["--ways", "compiled-ours"], "--ways: bench vae has auto, "),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
        (["--from", "/nowhere.json"], "--from /nowhere.json"),
        (["--runs", "0"], "--runs must be at least 1"),
    ],
)
def test_bad_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", "vae", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


@contextmanager
def interrupting(coder: Coder) -> Iterator[Runner]:
    if coder.small:
        raise KeyboardInterrupt
    yield Runner(coder.module)


def test_what_was_measured_before_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = (Way("channels-last", "stops", interrupting, most=64), *WAYS[6:])
    monkeypatch.setattr(vae_ways, "WAYS", (*WAYS[4:5], *rest))
    file = tmp_path / "v.json"
    assert __main__.main([*TINY, "--json", str(file)]) == 130
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["complete"] is False and document["incomplete"] == "interrupted"
    assert [row["way"] for row in document["rows"]] == ["eager"]
    assert "eager" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))


def test_a_result_says_that_it_is_not_complete_until_it_is(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    document = Result(vae.COLUMNS, {"device": "none"}, file)
    document.rows.append(Row(size=512, way="eager", median=3.0))
    document.end(GOES_ON)
    partial = json.loads(file.read_text(encoding="utf-8"))
    assert partial["complete"] is False and "goes on" in partial["incomplete"]
    assert partial["rows"][0]["median_ms"] == 3.0 and partial["rows"][0]["error"] is None
    document.end()
    assert json.loads(file.read_text(encoding="utf-8"))["complete"] is True
    again = read(file, vae.COLUMNS, "none")
    assert again.machine == {"device": "none"}
    assert again.rows[0].way == "eager" and again.rows[0].error != 0


def test_a_result_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"device": "a card", "gfx": "gfx0", "torch": "2", "runs": 5, "timing": "events"}
    file, plot = tmp_path / "v.json", tmp_path / "v.svg"
    document = Result(vae.COLUMNS, machine, file)
    document.rows.append(Row(size=512, way="eager", runs=5, median=3.0, peak_mib=100.0, error=1e-3))
    document.end()
    assert __main__.main(["bench", "vae", "--from", str(file), "--plot", str(plot)]) == 0
    assert "a card" in capsys.readouterr().out and "a card" in plot.read_text(encoding="utf-8")
    file.write_text('{"rows": [{"size": 1}]}', encoding="utf-8")
    assert __main__.main(["bench", "vae", "--from", str(file)]) == 2


def refusals() -> dict[tuple[str, str], list[str]]:
    problem = CONVS["3x3"].usual[0][1]
    return {
        (kind, variant.name): variant.refusals(None, problem)
        for kind, op in CONVS.items()
        for variant in op.variants
    }


def test_own_convolutions_only_refuses_torchs_and_is_undone() -> None:
    before = refusals()
    with vae_ways.own_convolutions_only():
        within = refusals()
    assert refusals() == before
    for (kind, name), why in within.items():
        expected = before[kind, name] if name == "rocm_sd" else ["own convolutions only"]
        assert why == expected
    assert before["3x3", "torch"] == []


def test_the_modules_memory_format_is_put_back(decoder: Coder) -> None:
    strides = [parameter.stride() for parameter in decoder.module.parameters()]
    with models.channels_last(decoder) as runner:
        inside = [parameter.stride() for parameter in decoder.module.parameters()]
        runner.call(decoder.random_input(16, 16))
    assert [parameter.stride() for parameter in decoder.module.parameters()] == strides != inside


def failing(error: Exception) -> Runner:
    def call(image: torch.Tensor) -> torch.Tensor:
        raise error

    return Runner(call)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "out of memory: "),
        (NotSupportedError("p", {"rocm_sd": ["no GPU"], "torch": ["not"]}), "rocm_sd: no GPU, t"),
        (MemoryError(), "out of memory: MemoryError"),
        (TypeError("odd"), "TypeError: odd"),
    ],
    ids=["torch", "refusals", "python", "other"],
)
def test_a_failure_is_a_row_with_its_reason(decoder: Coder, error: Exception, reason: str) -> None:
    row = vae_ways.measure(decoder, WAYS[4], failing(error), 64, 8, 1, Reference(None, ""))
    assert row.reason.startswith(reason) and row.runs == 0


def test_what_is_wrong_is_not_timed(decoder: Coder) -> None:
    exact = vae_ways.exact(decoder, 64)
    bad = Runner(lambda image: decoder.module(image).fill_(float("nan")))
    row = vae_ways.measure(decoder, WAYS[0], bad, 64, 8, 1, exact)
    assert row.reason == "wrong: the output has NaN or infinity" and row.runs == 0
    small = Runner(lambda image: decoder.module(image)[:, :, :32])
    row = vae_ways.measure(decoder, WAYS[0], small, 64, 8, 1, exact)
    assert "(1, 3, 32, 64), expected (1, 3, 64, 64)" in row.reason
    assert vae.complaints([row], "float16") == [f"decoder 64 rocm_sd Auto: {row.reason}"]


def test_a_long_run_is_the_only_one(decoder: Coder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    runner = Runner(lambda image: calls.append(image.shape) or decoder.module(image))  # type: ignore[func-returns-value]
    monkeypatch.setattr(vae_ways, "LONG_MS", 0.0)
    monkeypatch.setattr(vae_ways, "FRESH_MOST", 32)
    row = vae_ways.measure(decoder, WAYS[4], runner, 64, 8, 5, Reference(None, ""))
    assert len(calls) == 2 and row.runs == 1 and row.median == row.second_ms
    calls.clear()
    monkeypatch.setattr(vae_ways, "REFERENCE_MOST", 32)
    row = vae_ways.measure(decoder, WAYS[4], runner, 64, 8, 5, Reference(None, ""))
    assert len(calls) == row.runs == 1
    assert row.median == row.first_ms and row.first_at == "64x64"


def test_bands_are_compared_with_the_whole_frame(
    decoder: Coder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "SMALLEST_BYTES", 1 << 20)
    with vae_ways.ours(decoder, "Memory") as runner:
        row = vae_ways.measure(decoder, WAYS[3], runner, 192, 8, 1, vae_ways.exact(decoder, 192))
    assert "bands" in row.plan and not row.reason and not row.note
    assert (row.steps, row.steps_share) == (0, 0) and row.error < 1e-4
    assert "0/255 on 0.0000% beside the whole frame" in vae.TEXT.line(row)
    assert vae.complaints([row], "float16") == []


def test_steps_are_counted_after_quantisation() -> None:
    whole = torch.linspace(-1, 1, 3 * 4 * 64).reshape(1, 3, 4, 64)
    assert vae_ways.steps(whole, whole.clone()) == (0.0, 0.0)
    other = whole.clone()
    other[0, 1, 2, 3] += 2 / 255
    most, share = vae_ways.steps(other, whole)
    assert most == 1 and share == 1 / whole.numel()
    row = Row(size=1024, way="rocm_sd Memory", runs=1, median=1.0, steps=2, steps_share=share)
    assert "bands differ from the whole frame by 2/255" in vae.complaints([row], "float16")[0]


def test_an_error_of_ours_is_judged_beside_eagers() -> None:
    eager = Row(size=512, way="eager", error=0.02)
    near = Row(size=512, way="rocm_sd Auto", error=0.03)
    far = Row(size=512, way="rocm_sd Memory", error=0.05)
    assert vae.complaints([eager, near], "float16") == []
    assert vae.complaints([eager, near, far], "float16") == [
        "decoder 512 rocm_sd Memory: error 5.0e-02, at most 4.0e-02 is right"
    ]
    assert len(vae.complaints([near], "float16")) == 1


def test_exact_leaves_the_weights_as_they_were() -> None:
    coder = models.coder("decoder", CPU, torch.bfloat16, small=True)
    before = {name: tensor.clone() for name, tensor in coder.module.state_dict().items()}
    exact = vae_ways.exact(coder, 32)
    assert exact.image is not None and exact.image.dtype == torch.float32
    assert exact.source == "torch float32"
    after = coder.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert vae_ways.exact(coder, 4096) == Reference(None, "")


def test_exact_comes_in_bands_where_torch_has_too_little_memory(
    decoder: Coder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vae_ways.exact(decoder, 32).image

    def short(image: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(decoder.module), "__call__", lambda self, image: short(image))
        exact = vae_ways.exact(decoder, 32)
    assert exact.source == "rocm_sd float32 in bands"
    assert exact.image is not None and expected is not None
    assert (exact.image - expected).abs().max() < 1e-4 * expected.abs().max()
