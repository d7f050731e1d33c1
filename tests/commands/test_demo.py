"""The command `demo`."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
image = pytest.importorskip("PIL.Image")

from lib_rocm_sd import __main__
from lib_rocm_sd.commands import demo, demo_pictures
from lib_rocm_sd.commands.little_model import ROOT
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.vae.program import Program

PROMPTS = ["a red circle left of a blue square", "a big green star"]


def run(out: Path, *more: str) -> int:
    common = ["--out", str(out), "--device", "cpu", "--steps", "2", "--prompts", *PROMPTS]
    return __main__.main(["demo", *common, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, shown = tmp_path_factory.mktemp("demo") / "new" / "folder", io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert run(out) == 0
    (out.parent / "shown.txt").write_text(shown.getvalue(), encoding="utf-8")
    return out


def attention_calls(found: dict[str, Any]) -> int:
    rows = found["ran"]["rows"]
    return sum(row["calls"] for row in rows if row["op"] == "attention")


def test_it_writes_its_three_files(finished: Path) -> None:
    assert sorted(file.name for file in finished.iterdir()) == sorted(demo.OUTPUTS)


def test_the_report_says_what_ran_and_how_long(finished: Path) -> None:
    found = json.loads((finished / "report.json").read_text(encoding="utf-8"))
    assert [row["prompt"] for row in found["pictures"]] == PROMPTS
    assert all(row["without_s"] > 0 and row["with_s"] > 0 for row in found["pictures"])
    assert found["agree"] is True
    assert found["largest_difference"] <= demo_pictures.AGREE_FLOAT32
    assert found["patched"] == {"replaced": 16, "left_alone": {}}
    assert attention_calls(found) == 2 * (2 * 14 + 1)
    assert found["device"]["backend"] == "cpu"
    assert found["dtype"] == "float32"
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["seconds"] > 0


def test_without_a_gpu_it_says_that_the_speed_means_nothing(finished: Path) -> None:
    text = (finished / "report.txt").read_text(encoding="utf-8")
    assert demo_pictures.NO_GPU in text
    assert "not active" in text
    assert "torch's own attention" in text
    assert "they agree" in text


def test_the_vae_alone_is_whole_and_in_bands_the_same(finished: Path) -> None:
    vae = json.loads((finished / "report.json").read_text(encoding="utf-8"))["vae"]
    assert (vae["programs"], vae["left_alone"]) == (["decoder", "encoder"], {})
    assert vae["agree"] is True
    assert vae["bands"].startswith("bands, ")
    assert vae["convolutions"] == ["torch"]
    assert vae["encoder_error"] < 1e-5
    single, half = vae["decodes"]
    assert (single["dtype"], half["dtype"]) == ("float32", "bfloat16")
    for row in (single, half):
        assert row["bands_largest"] <= 1
        assert row["bands_share"] <= 1e-4
    assert single["ours_vs_float32_largest"] < 0.01
    assert 0 < half["ours_vs_float32_mean"] <= 1.1 * half["torch_vs_float32_mean"]


def test_the_report_names_the_vae(finished: Path) -> None:
    text = (finished / "report.txt").read_text(encoding="utf-8")
    assert "VAE        decoder and encoder run as our program, convolutions by torch" in text
    assert "float32, in bands against the whole frame: largest difference 0/255, on 0.0" in text
    assert "bfloat16, mean difference from torch's float32: ours 0." in text
    assert "x conv 3x3 by torch\n" in text


def test_the_sheet_shows_both_sides_and_the_difference(finished: Path) -> None:
    sheet = np.asarray(image.open(finished / "demo.png").convert("RGB"))
    cell, gap = demo_pictures.CELL, demo_pictures.GAP
    step = cell + demo_pictures.CAPTION + gap
    assert sheet.shape == (demo_pictures.HEAD + 3 * step, 3 * cell + 4 * gap, 3)
    for row in range(3):  # two prompts, and the VAE alone
        top = demo_pictures.HEAD + row * step + demo_pictures.CAPTION - 6
        columns = [
            sheet[top : top + cell, gap + i * (cell + gap) : gap + i * (cell + gap) + cell]
            for i in range(3)
        ]
        assert columns[0].std() > 5
        assert abs(columns[0].astype(int) - columns[1]).max() <= 3
        assert columns[2].max() <= demo_pictures.AGREE_FLOAT32 * demo_pictures.AMPLIFIED


def test_progress_is_shown(finished: Path) -> None:
    shown = (finished.parent / "shown.txt").read_text(encoding="utf-8")
    assert f"[1/2] {PROMPTS[0]}" in shown
    assert "loading tiny-sd" in shown
    assert str(finished / "demo.png") in shown


def test_in_half_precision_it_says_what_half_itself_costs(tmp_path: Path) -> None:
    more = ["--prompts", PROMPTS[0], "--dtype", "bfloat16", "--repeats", "2"]
    run(tmp_path, *more)
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["dtype"] == "bfloat16"
    assert found["pictures"][0]["half_vs_float32_mean"] < 4
    assert attention_calls(found) == 2 * (2 * 14 + 1)
    assert [row["dtype"] for row in found["vae"]["decodes"]] == ["float32", "bfloat16"]
    text = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "half precision itself, against float32" in text


def test_wrong_attention_is_told_and_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong:
        def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: Any, session: Session) -> Any:
            return q.flatten(2)

    monkeypatch.setattr(host, "functional", Wrong())
    assert run(tmp_path, "--prompts", PROMPTS[0], "--steps", "1") == 1
    assert "DO NOT AGREE" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["agree"] is False


def test_a_vae_that_is_left_alone_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lib_rocm_sd.vae import program
    from lib_rocm_sd.vae.steps import Recipe

    def read(module: torch.nn.Module) -> Recipe:
        return Recipe("decoder", (), ("it is odd",))

    monkeypatch.setattr(program, "read", read)
    assert run(tmp_path, "--prompts", PROMPTS[0], "--steps", "1") == 0
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["vae"]["programs"] == []
    assert found["vae"]["left_alone"] == {"decoder": ["it is odd"], "encoder": ["it is odd"]}
    text = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "VAE        decoder left alone: it is odd" in text


def test_a_wrong_vae_is_told_and_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Program.__call__

    def wrong(program: Program, image: torch.Tensor, **options: Any) -> torch.Tensor:
        made = right(program, image, **options)
        return made + 0.05 if options["mode"] == "banded" else made

    monkeypatch.setattr(Program, "__call__", wrong)
    assert run(tmp_path, "--prompts", PROMPTS[0], "--steps", "1") == 1
    assert "THIS IS NOT AS IT SHOULD BE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "nowhere"], "there is no model in nowhere"),
        (["--steps", "0"], "--steps is 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--device", "nonsense"], "--device nonsense cannot be used"),
        (["--out", str(Path(__file__) / "below")], "cannot be written: Not a directory"),
    ],
)
def test_what_cannot_run_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert run(tmp_path / "out", *more) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_diffusers_it_names_the_command_that_installs_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['diffusers'] = None\n"
        f"sys.argv = ['', 'demo', '--out', {str(tmp_path)!r}]\n"
        "from lib_rocm_sd.__main__ import main\n"
        "raise SystemExit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "needs diffusers: use `python3 install.py demo`" in ended.stderr


# --- what the numbers mean


def sides(without: int, with_: int, reference: int | None = None) -> demo.Sides:
    def flat(value: int) -> np.ndarray[Any, Any]:
        return np.full((8, 8, 3), value, np.uint8)

    whole = None if reference is None else flat(reference)
    return demo.Sides("a circle", flat(without), flat(with_), 3.0, 2.0, whole)


def decodes(**changed: Any) -> dict[str, Any]:
    row = {
        "dtype": "float16",
        "bands_largest": 0,
        "bands_share": 0.0,
        "torch_vs_float32_mean": 0.02,
        "ours_vs_float32_mean": 0.02,
        "ours_vs_float32_largest": 3.0,
    }
    return {"encoder_error": changed.pop("encoder_error", 0.0), "decodes": [{**row, **changed}]}


@pytest.mark.parametrize(
    ("changed", "agree"),
    [
        ({}, True),
        ({"bands_largest": 1, "bands_share": 1e-4}, True),
        ({"bands_largest": 2, "bands_share": 1e-6}, False),
        ({"bands_largest": 1, "bands_share": 2e-4}, False),
        ({"ours_vs_float32_mean": 0.023}, False),
        ({"encoder_error": 0.1}, False),
        ({"dtype": "float32"}, False),
        ({"dtype": "float32", "ours_vs_float32_largest": 1.0}, True),
    ],
    ids=str,
)
def test_what_a_vae_may_differ_by(changed: dict[str, Any], agree: bool) -> None:
    assert demo_pictures.vae_agrees(decodes(**changed)) is agree


OURS = {"rows": [{"variant": "rocm_sd"}]}
THEIRS: dict[str, Any] = {"rows": [{"variant": "sdpa"}]}


@pytest.mark.parametrize(("with_", "agree"), [(102, True), (103, False), (97, False)])
def test_float32_may_differ_by_two(with_: int, agree: bool) -> None:
    assert demo.comparison([sides(100, with_)], "cpu", THEIRS, True)["agree"] is agree


@pytest.mark.parametrize(("with_", "agree"), [(104, True), (105, False)])
def test_half_may_differ_as_much_as_half_does(with_: int, agree: bool) -> None:
    found = demo.comparison([sides(100, with_, 96)], "hip", OURS, False)
    assert found["agree"] is agree
    assert found["pictures"][0]["half_vs_float32_mean"] == 4


@pytest.mark.parametrize(
    ("backend", "ran", "said"),
    [
        ("cpu", THEIRS, demo_pictures.NO_GPU),
        ("hip", THEIRS, demo_pictures.NOT_OURS),
        ("hip", OURS, demo_pictures.TINY),
    ],
)
def test_when_the_speed_means_something(backend: str, ran: dict[str, Any], said: str) -> None:
    found = demo.comparison([sides(1, 1)], backend, ran, True)
    assert found["speed"] == said
    assert found["ratio"] == 1.5
