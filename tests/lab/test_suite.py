"""`suite`: whole pictures by every way on the CPU; its result, its scenarios and its figures."""

from __future__ import annotations

import json
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lib_rocm_sd import __main__, cache
from lib_rocm_sd.commands import suite as command
from lib_rocm_sd.commands.little_model import MODEL
from lib_rocm_sd.lab import model_cases
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.sensors import Reading
from lib_rocm_sd.lab.suite import captions, document, quality, run, serving
from lib_rocm_sd.lab.suite.painter import (
    Enlarger,
    Painter,
    enlarger,
    random_painter,
)
from lib_rocm_sd.lab.suite.workloads import (
    ESRGAN,
    PRESETS,
    PROMPTS,
    SD15,
    SDXL,
    WORKLOADS,
    Workload,
)
from tests.lab.test_suite_results import measured

CPU = torch.device("cpu")
ARGUMENTS = ("suite", "--preset", "standard", "--workload", "SD 1.5 512x512")


@pytest.fixture(scope="module")
def painters() -> dict[str, Painter | Enlarger]:
    every: dict[str, Painter | Enlarger] = {ESRGAN: enlarger(CPU, torch.float32, small=True)}
    return every | {n: random_painter(n, CPU, torch.float32, small=True) for n in (SD15, SDXL)}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_makes_its_pictures(
    workload: Workload, painters: dict[str, Painter | Enlarger]
) -> None:
    small = workload.small()
    painter = painters[small.model]
    if small.kind == "lora":
        pytest.importorskip("peft", reason="peft is not installed (requirements/test.txt has it)")
        assert isinstance(painter, Painter)
        painter = painter.with_lora()
    shot = painter.paint(small, PROMPTS)
    times = {"hires": 2, "upscale": 4}.get(small.kind, 1)
    assert [image.size for image in shot.images] == [
        (times * small.width, times * small.height)
    ] * small.batch
    later = int(small.steps * 0.7) if small.kind == "hires" else 0
    without_steps = small.kind in ("decode", "upscale")
    assert len(shot.steps) == (0 if without_steps else small.steps + later)
    assert shot.seconds >= shot.decode + shot.upscale > 0
    assert bool(shot.text) == (not without_steps)
    assert bool(shot.upscale) == (small.kind == "upscale") != bool(shot.decode)
    again = painter.paint(small, PROMPTS)
    assert quality.distance(shot.images[0], again.images[0]).largest == 0


def test_the_settings_are_those_of_mlperf() -> None:
    (one,) = (workload for workload in WORKLOADS if workload.name == "SDXL 1024x1024")
    assert (one.steps, one.guidance, one.width, one.height) == (20, 8.0, 1024, 1024)
    assert "no MLPerf result" in one.like
    names = [workload.name for workload in WORKLOADS]
    assert all(set(preset) <= set(names) for preset in PRESETS.values())


def test_a_run_writes_all_that_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = ("--way", "sdp", "--way", "Doggettx", "--way", "ours: attention")
    status = __main__.main([*ARGUMENTS, *ways, "--page", str(tmp_path), "--cards", "1"])
    assert status == 0
    (path,) = tmp_path.glob("*.json")
    made = document.read(path)
    assert made.complete and made.about["dtype"] == "float32"
    assert made.about["model"] == "random weights, small"
    assert {row.test for row in made.rows} == set(document.PARTS) - {"CLIP score", "upscale"}
    case = "SD 1.5 512x512, reduced to 64x64 and 3 steps"
    assert made.workloads[case]["like"] == "" and len(made.workloads) == 4
    whole = {row.way: row for row in made.rows if row.test == "picture" and row.case == case}
    assert whole["sdp"].largest == 0 and whole["sdp"].first > 0 and whole["sdp"].cpu_ms > 0
    assert 0 <= whole["Doggettx-like"].largest <= 2
    assert "no GPU" in whole["ours: attention"].reason
    assert math.isnan(whole["sdp"].energy_j)  # a CPU has no sensor: absent, and not zero
    content = json.loads(path.read_text(encoding="utf-8"))
    assert next(row for row in content["rows"] if row["part"] == "picture")["energy_j"] is None
    printed = capsys.readouterr().out
    assert "Doggettx-like" in printed and "text encoder" not in printed
    heading, head, first, *_ = printed.splitlines()
    assert heading == "SD 1.5 512x512, reduced to 64x64 and 3 steps"
    assert first.startswith("sdp") and head.index("PSNR") + 4 == first.index("equal") + 5
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert path.name in page and "no MLPerf results" in page
    pictures = sorted(each.name for each in (tmp_path / "pictures" / path.stem).iterdir())
    stem = "SD_1.5_512x512__reduced_to_64x64_and_3_steps"
    assert f"{stem}--float32.png" in pictures and f"{stem}.svg" in pictures


def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: run.Plan) -> Any:
        yield measured("SD 1.5 512x512", "sdp", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "rows", interrupted)
    path = tmp_path / "result.json"
    assert __main__.main([*ARGUMENTS, "--json", str(path)]) == 130
    made = document.read(path)
    assert [row.median for row in made.rows] == [1.0] and not made.complete


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    rows = [measured("SD 1.5 512x512", way, 1.0) for way in ("sdp", "ours")]
    monkeypatch.setattr(run, "rows", lambda plan: iter(rows))
    monkeypatch.setattr(command, "write_json", full)
    status = __main__.main(["suite", "--workload", "512", "--json", str(tmp_path / "result.json")])
    told = capsys.readouterr()
    assert status == 0 and told.err.count("cannot be written: No space left on device") == 1
    assert "ours" in told.out


def test_a_card_that_disappears_is_a_reason(painters: dict[str, Painter | Enlarger]) -> None:
    def gone(pipeline: Any) -> Any:
        raise RuntimeError("HIP error: the device was lost")

    plan = run.Plan(
        [WORKLOADS[0].small()],
        painters.__getitem__,
        {"sdp": command._sdp, "gone": gone},
        lambda: "no sensor",
        1,
        1,
        PROMPTS,
        lambda text: None,
    )
    rows = list(run.rows(plan))
    assert [row.reason for row in rows if row.way == "gone"] == [
        "RuntimeError: HIP error: the device was lost"
    ]
    assert any(row.median > 0 for row in rows if row.way == "sdp")


def test_a_card_that_is_lost_between_pictures_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "a" * 600  # longer than what a reader takes, as torch's words for short memory are
    failed = measured("SD 1.5 512x512", "ours", 2.0, note=more)

    def lost(plan: run.Plan) -> Any:
        yield measured("SD 1.5 512x512", "sdp", 1.0)
        yield failed
        raise RuntimeError(f"HIP error: the device was lost {more}")

    monkeypatch.setattr(run, "rows", lost)
    path = tmp_path / "result.json"
    assert __main__.main([*ARGUMENTS, "--json", str(path)]) == 1
    assert f"the device was lost {more}: the result has the rows so far" in capsys.readouterr().err
    made = document.read(path)
    assert [row.median for row in made.rows] == [1.0, 2.0] and not made.complete
    assert made.rows[1].note == more[:500] and "lost aaa" in made.about["incomplete"]


def test_a_card_that_is_lost_at_the_idle_reading_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("HIP error: the device was lost")

    monkeypatch.setattr(run, "clean", lost)
    path = tmp_path / "result.json"
    assert __main__.main([*ARGUMENTS, "--json", str(path)]) == 1
    assert "the device was lost: the result has the rows so far" in capsys.readouterr().err
    made = document.read(path)
    assert not made.rows and not made.complete and made.about["preset"] == "standard"


def test_clip_scores_before_a_card_was_lost_are_kept(
    painters: dict[str, Painter | Enlarger],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clip:
        def __init__(self, folder: Path) -> None:
            self.asked = 0

        def scores(self, images: Any, captions: Any, device: Any) -> list[float]:
            self.asked += 1
            if self.asked > 2:
                raise RuntimeError("HIP error: the device was lost")
            return [30.0 + self.asked]

    (tmp_path / "captions.txt").write_text("one\ntwo\nthree", encoding="utf-8")
    monkeypatch.setattr(captions, "Clip", Clip)
    monkeypatch.setattr(run, "rows", lambda plan: iter(()))
    monkeypatch.setattr(command, "random_painter", lambda *given: painters[SD15])
    words = ["--captions", str(tmp_path / "captions.txt"), "--clip", str(tmp_path)]
    words += ["--way", "sdp", "--way", "Doggettx", "--json", str(tmp_path / "result.json")]
    assert __main__.main(["suite", "--workload", "SD 1.5 512x512", *words]) == 0
    kept, lost = document.read(tmp_path / "result.json").rows
    assert (kept.median, kept.runs, kept.reason) == (31.5, 2, "")
    assert "the mean of 2 captions; ended early: RuntimeError: HIP error" in kept.note
    assert lost.reason == "RuntimeError: HIP error: the device was lost"


def test_sdxls_vae_computes_in_float32_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As diffusers' pipeline has it; by all of ours it stays in half."""
    if not torch.empty(1).half().add(1).item():
        pytest.skip("no half on this CPU")
    painter = random_painter(SDXL, CPU, torch.float16, small=True)
    workload = Workload("decode", SDXL, 64, 64, kind="decode")
    seen, vae = [], painter.pipeline.vae
    own = type(vae).decode

    def decode(self: Any, latents: torch.Tensor) -> Any:
        seen.append((latents.dtype, self.dtype))
        return own(self, latents)

    monkeypatch.setattr(type(vae), "decode", decode)
    monkeypatch.setattr(command.engine, "usable", lambda *given: [])
    painter.paint(workload, PROMPTS)
    with command.WAYS["ours"](painter.pipeline):
        painter.paint(workload, PROMPTS)
    painter.paint(workload, PROMPTS)
    half, full = torch.float16, torch.float32
    assert seen == [(full, full), (half, half), (full, full)] and vae.dtype == half


def test_a_picture_that_is_not_finite_is_told(painters: dict[str, Painter | Enlarger]) -> None:
    painter = painters[SD15]
    assert isinstance(painter, Painter)

    @contextmanager
    def overflowing(pipeline: Any) -> Any:
        own = pipeline.vae.decode
        pipeline.vae.decode = lambda latents: (own(latents)[0] * math.nan,)
        yield lambda: ""
        del pipeline.vae.decode

    workload = Workload("decode", SD15, 64, 64, kind="decode")
    ways = {"sdp": command._sdp, "overflows": overflowing}
    plan = run.Plan(
        [workload], painters.__getitem__, ways, lambda: "", 1, 1, PROMPTS, lambda _: None
    )
    rows = {row.way: row for row in run.rows(plan) if row.test == "picture"}
    assert rows["sdp"].largest == 0 and not rows["sdp"].note
    assert "not finite" in rows["overflows"].note and rows["overflows"].median > 0
    assert math.isnan(rows["overflows"].largest)


def test_a_server_that_fails_is_told_as_one(
    painters: dict[str, Painter | Enlarger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(serving, "server", fails)
    monkeypatch.setattr(run, "rows", lambda plan: iter(()))
    monkeypatch.setattr(command, "random_painter", lambda *given: painters[SD15])
    path = tmp_path / "result.json"
    assert __main__.main([*ARGUMENTS, "--way", "sdp", "--json", str(path)]) == 0
    assert [(row.test, row.unit, row.reason) for row in document.read(path).rows] == [
        ("offline", "pictures/s", ""),
        ("server", "s", "RuntimeError: planted"),
    ]


def test_a_cache_without_locks_is_no_other_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "_opened_lock", lambda path: None)
    monkeypatch.setattr(run, "rows", lambda plan: iter(()))
    assert __main__.main(["suite", "--workload", "512"]) == 0
    assert "cannot be locked" in capsys.readouterr().err


def test_an_upscaler_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program runs on a CPU by torch's convolutions."""
    monkeypatch.setattr(command.engine, "usable", lambda device: [])
    workload = next(w for w in WORKLOADS if w.kind == "upscale").small()
    painter = enlarger(CPU, torch.float32, small=True)
    module, plain = painter.pipeline.upscaler, painter.paint(workload, PROMPTS)
    assert np.isin(np.asarray(plain.images[0]), (0, 255)).mean() < 0.2  # distances would be none
    with command.WAYS["ours"](painter.pipeline):
        made = painter.paint(workload, PROMPTS)
    assert painter.pipeline.upscaler is module
    assert quality.distance(plain.images[0], made.images[0]).largest <= 1
    for name in ("Doggettx-like", "ours: attention"):
        with pytest.raises(run.NotHere, match="has no attention"):
            command.WAYS[name](painter.pipeline).__enter__()


def test_a_row_keeps_what_sensors_told_over_time(painters: dict[str, Painter | Enlarger]) -> None:
    """From the card's readings to the file, over all turns."""
    source: Any = SimpleNamespace(origin="a test", close=lambda: None)
    source.read = lambda: Reading(power_w=100.0, core_mhz=2000.0)
    workload = next(w for w in WORKLOADS if w.kind == "decode").small()
    ways = {"sdp": command._sdp}
    plan = run.Plan(
        [workload], painters.__getitem__, ways, lambda: source, 2, 1, PROMPTS, lambda text: None
    )
    row = next(run.rows(plan))
    trace = document.COLUMNS.as_json(row)["trace"]
    assert set(trace) == {"seconds", "core_mhz", "power_w"} and set(trace["power_w"]) == {100.0}
    assert trace["seconds"] == sorted(trace["seconds"]) and len(trace["seconds"]) >= 4
    assert document._row(document.COLUMNS.as_json(row)).trace == trace


@pytest.mark.parametrize(("long_s", "runs"), [(1e9, 6), (0.0, 2)])
def test_a_long_picture_is_timed_once_in_a_turn(
    painters: dict[str, Painter | Enlarger],
    monkeypatch: pytest.MonkeyPatch,
    long_s: float,
    runs: int,
) -> None:
    """And its energy is that of one."""
    asked: list[int] = []

    def energy(summaries: Any, pictures: int = 1) -> dict[str, Any]:
        asked.append(pictures)
        return {}

    monkeypatch.setattr(run, "LONG_S", long_s)
    monkeypatch.setattr(run, "measured_power", energy)
    workload = next(w for w in WORKLOADS if w.kind == "decode").small()
    ways = {"sdp": command._sdp}
    plan = run.Plan(
        [workload], painters.__getitem__, ways, lambda: "", 2, 3, PROMPTS, lambda text: None
    )
    assert next(run.rows(plan)).runs == runs
    assert asked == [runs // 2]


def test_turns_before_a_card_disappeared_are_kept(
    painters: dict[str, Painter | Enlarger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory cannot be given back either, once it is gone."""
    cleaned: list[torch.device] = []

    def clean(device: torch.device) -> None:
        cleaned.append(device)
        if len(cleaned) > 2:  # after float32 and the first turn
            raise RuntimeError("HIP error: the device was lost")

    monkeypatch.setattr(run, "clean", clean)
    workload = next(w for w in WORKLOADS if w.kind == "decode").small()
    ways = {"sdp": command._sdp}
    plan = run.Plan(
        [workload], painters.__getitem__, ways, lambda: "", 3, 1, PROMPTS, lambda text: None
    )
    row = next(run.rows(plan))
    assert row.median > 0 and not row.reason
    assert row.note == "ended early: RuntimeError: HIP error: the device was lost"
    assert "the device was lost" in command.TEXT.line(row)


def test_a_lora_without_peft_is_a_reason(
    painters: dict[str, Painter | Enlarger], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(unet: Any) -> None:
        raise ModuleNotFoundError("No module named 'peft'")

    monkeypatch.setattr(model_cases, "add_lora", absent)
    workload = next(w for w in WORKLOADS if w.kind == "lora").small()
    ways = {"sdp": command._sdp}
    plan = run.Plan(
        [workload], painters.__getitem__, ways, lambda: "", 1, 1, PROMPTS, lambda text: None
    )
    (row,) = run.rows(plan)
    assert row.reason == "ModuleNotFoundError: No module named 'peft'"


def test_two_at_once_are_refused() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cache.lock(command.LOCK, 0.0) as got:
            assert got
            held.set()
            done.wait(600)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(600)
    try:
        assert __main__.main([*ARGUMENTS]) == 2
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    "words, reason",
    [
        (("--workload", "nothing"), "no workload"),
        (("--way", "nothing"), "no way"),
        (("--cards", "0"), "at least 1"),
        (("--cards", "2", "--device", "cpu"), "--cards 2: torch has 1"),
        (("--clip", "there"), "--captions"),
        (("--clip", "there", "--captions", "README.md", "--workload", "512"), "is no CLIP"),
        (("--captions", "nowhere.txt"), "--captions"),
        (("--against", "nowhere.json"), "--against"),
        (("--model", "nowhere"), "does not exist"),
    ],
)
def test_bad_options_are_told(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["suite", *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_checkpoint_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"not a checkpoint")
    (tmp_path / "folder").mkdir()
    for path in (file, tmp_path / "folder"):
        with pytest.raises(ValueError, match=f"{path.name} is no checkpoint that diffusers reads"):
            command.loaded_painter(path, CPU, torch.float32)


def test_the_little_model_is_painted_by() -> None:
    painter = command.loaded_painter(MODEL, CPU, torch.float32)
    assert painter.model == SD15 and not painter.random
    shot = painter.paint(replace(WORKLOADS[0].small(), steps=1), PROMPTS)
    assert len(shot.images) == 1 and shot.text > 0


# -- scenarios ------------------------------------------------------------------------------------


def test_all_requests_are_served_by_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(serving.time, "monotonic", lambda: now)
    served: list[tuple[str, int]] = []
    both = threading.Barrier(2)

    def paint(card: str) -> serving.Paint:
        def work(number: int) -> None:
            nonlocal now
            if len(served) >= 2:
                both.wait(600)  # each card has one of the two
            now += 9.0 - 2 * len(served) if len(served) < 2 else 1.0
            served.append((card, number))

        return work

    row = serving.offline(Row(case="a", way="b"), [paint("one"), paint("two")], 6, 4)
    assert served[:2] == [("one", 0), ("two", 0)]  # these do not count
    assert sorted(number for _, number in served[2:]) == list(range(6))
    assert sorted(card for card, _ in served[2:]) == ["one"] * 3 + ["two"] * 3
    assert row.median > 0 and row.first == 9.0  # seconds, of the card that took longer


def test_latencies_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a picture takes a second, and nothing else any time."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(serving.time, "monotonic", lambda: now)
    monkeypatch.setattr(serving.time, "sleep", sleep)
    row = serving.server(Row(case="a", way="b"), [lambda number: sleep(1.0)], 200, 1.0)
    assert row.p10 >= 1.0 and row.median < row.p90 < row.p95 <= row.p99
    assert row.within == pytest.approx(1.0) and "Poisson, 0.8 requests a second" in row.note
    slow = serving.server(Row(case="a", way="b"), [lambda number: sleep(30.0)], 20, 30.0)
    assert slow.within == 0


def test_an_interruption_ends_all_cards() -> None:
    painted: list[int] = []
    begun, interrupted = threading.Event(), threading.Event()
    before = threading.active_count()

    def first(number: int) -> None:
        begun.wait(600)
        interrupted.set()
        raise KeyboardInterrupt

    def second(number: int) -> None:
        begun.set()
        interrupted.wait(600)
        painted.append(number)

    with pytest.raises(KeyboardInterrupt):
        serving._served([first, second], [0.0] * 9)
    assert len(painted) <= 1 and threading.active_count() == before


def test_an_error_of_a_card_ends_a_scenario() -> None:
    def fails(number: int) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        serving.offline(Row(), [fails, fails], 3, 1)


# -- figures --------------------------------------------------------------------------------------


def test_distances_of_pictures() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 250, (33, 47, 3), dtype=np.uint8)
    one, other = Image.fromarray(values), Image.fromarray(values + 3)
    same = quality.distance(one, one)
    assert (same.largest, same.mean, same.psnr) == (0, 0.0, math.inf)
    assert same.ssim == pytest.approx(1.0) and same.flip == pytest.approx(0.0)
    apart = quality.distance(one, other)
    assert (apart.largest, apart.mean) == (3, 3.0)
    assert apart.psnr == pytest.approx(20 * math.log10(255 / 3))
    assert 0.9 < apart.ssim < 1 and 0 < apart.flip < 0.1
    assert apart.histogram == (0, 0, 0, 33 * 47 * 3, 0, 0, 0, 0, 0, 0)
    assert "100.00%" in quality.drawn({"a way": apart.histogram})
    tiny = Image.fromarray(values[:3, :7])
    assert math.isnan(quality.distance(tiny, tiny).ssim)
    with pytest.raises(ValueError, match="different sizes"):
        quality.distance(one, tiny)


@pytest.mark.parametrize(
    "name, data",
    [
        ("a.txt", "one\n\n two \nthree é".encode()),
        ("a.txt", "one\ntwo\nthree é".encode("utf-8-sig")),
        ("a.txt", "one\ntwo\nthree é".encode("utf-16")),
        ("a.tsv", "id\tcaption\n1\tone\n2\ttwo\n3\tthree é".encode()),
        ("a.tsv", 'id\tcaption\n1\tone\n2\t"two"\n3\tthree é'.encode()),
        ("a.csv", 'caption,id\none,1\n"two",2\n"three\n é",3'.encode()),
    ],
)
def test_captions_are_read(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert captions.read(tmp_path / name) == ["one", "two", "three é"]


def test_a_folder_of_captions_and_bad_ones(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two\nlines"), ("a.txt", "one")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert captions.read(tmp_path) == ["one", "two lines"]
    (tmp_path / "c.txt").write_bytes(b"good\nb\xe9d")
    with pytest.raises(ValueError, match=r"c\.txt, line 2: not text"):
        captions.read(tmp_path)
    (tmp_path / "d.tsv").write_text("id\ttext\n1\ta", encoding="utf-8")
    with pytest.raises(ValueError, match="no column 'caption'"):
        captions.read(tmp_path / "d.tsv")
    (tmp_path / "q.tsv").write_text('caption\tid\n"quotes\t1\n"a ""b"""\t2\n', encoding="utf-8")
    assert captions.read(tmp_path / "q.tsv") == ['"quotes', 'a "b"']
    (tmp_path / "f.csv").write_text("caption\n" + "a" * 200_000, encoding="utf-8")
    with pytest.raises(ValueError, match="f.csv is no table"):
        captions.read(tmp_path / "f.csv")
    (tmp_path / "e.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="no caption"):
        captions.read(tmp_path / "e.txt")


def test_a_clip_scores_pictures(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 300}
    text |= {"num_hidden_layers": 1, "max_position_embeddings": 16, "projection_dim": 8}
    vision = {**text, "image_size": 32, "patch_size": 16}
    del vision["vocab_size"], vision["max_position_embeddings"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no CLIP of transformers"):
        captions.Clip(tmp_path / "nothing")

    class Processor:
        @staticmethod
        def from_pretrained(folder: str, **options: Any) -> Any:
            def process(text: Any, images: Any, **options: Any) -> Any:
                ids = torch.arange(4).repeat(len(text), 1) + len(text[0])
                pixels = torch.stack(
                    [torch.full((3, 32, 32), i.getpixel((0, 0))[0] / 255) for i in images]
                )
                return transformers.BatchEncoding({"input_ids": ids, "pixel_values": pixels})

            return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers, "CLIPProcessor", Processor)
        images = [Image.new("RGB", (32, 32))] * 2
        scores = captions.Clip(tmp_path).scores(images, ["a", "a"], CPU)
    assert len(scores) == 2 and scores[0] == scores[1] and 0 <= scores[0] <= 100
