"""`profile`: what belongs to what, the parts of a model, and the command's files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from lib_rocm_sd import __main__, functional
from lib_rocm_sd.commands import profile
from lib_rocm_sd.commands.little_model import MODEL
from lib_rocm_sd.commands.profile import WorkRow, parts_named, rows_of, summed

OURS = "rocm_sd | attention | attention: B1 | rocm_sd"


@dataclass
class Event:
    """As torch.profiler gives one; times in µs."""

    name: str
    cpu_parent: Event | None = None
    self_cpu_time_total: float = 1000.0
    kernels: list[Any] = field(default_factory=list)
    device_type: str = "DeviceType.CPU"
    is_async: bool = False


def kernels(*microseconds: float) -> list[Any]:
    return [SimpleNamespace(duration=each) for each in microseconds]


def test_the_innermost_part_and_the_outermost_call_count() -> None:
    unet = Event("part: UNet, the rest")
    down = Event("part: UNet down 0", unet)
    ours = Event(OURS, down, kernels=kernels(5000.0))
    within = Event("aten::bmm", ours, kernels=kernels(1000.0, 2000.0))
    linear = Event("aten::linear", down)
    addmm = Event("aten::addmm", linear, kernels=kernels(250.0))
    alone = Event("aten::add", unet)
    shape = Event("aten::empty", alone)
    launch = Event("cudaLaunchKernel", alone)
    loose = Event("ProfilerStep", None)
    on_gpu = Event("kernel", None, device_type="DeviceType.CUDA")
    events = [unet, down, ours, within, linear, addmm, alone, shape, launch, loose, on_gpu]
    assert set(rows_of(events)) == {
        WorkRow("UNet down 0", "attention", "rocm_sd", 1, 2.0, 8.0),
        WorkRow("UNet down 0", "linear", "torch", 1, 2.0, 0.25),
        WorkRow("UNet down 0", "between operators", "", 0, 1.0, 0.0),
        WorkRow("UNet, the rest", "between operators", "", 0, 2.0, 0.0),
        WorkRow("UNet, the rest", "other operators", "torch", 2, 2.0, 0.0),
        WorkRow("outside of the parts", "between operators", "", 0, 1.0, 0.0),
    }
    assert rows_of(events)[0].gpu_ms == 8.0


def test_rows_are_summed_and_drawn() -> None:
    rows = [
        WorkRow("UNet", "attention", "rocm_sd", 2, 1.0, 6.0),
        WorkRow("UNet", "linear", "torch", 3, 1.0, 1.0),
        WorkRow("VAE & more", "attention", "torch", 1, 1.0, 3.0),
    ]
    assert summed(rows, "kind") == [(("attention",), 3, 2.0, 9.0), (("linear",), 3, 1.0, 1.0)]
    table = profile.render("a picture", rows)
    assert "90.0%" not in table and "60.0%" in table and "70.0%" in table
    drawing = ElementTree.fromstring(profile.drawn("a picture", rows))
    widths = [float(each.get("width", 0)) for each in drawing.iter() if each.tag.endswith("rect")]
    assert widths[1] == pytest.approx(6 * widths[2], abs=0.5)  # after the white ground
    assert widths[3] == pytest.approx(3 * widths[2], abs=0.5)
    spoken = "".join(drawing.itertext())
    assert "VAE & more, attention: 3.00 ms" in spoken


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.attention(x, x, x)


class Unet(nn.Module):
    """One block down and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.down_blocks = nn.ModuleList([Block()])
        self.config = SimpleNamespace(sample_size=8, in_channels=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down_blocks[0](x.view(1, 8, 4, 8)) @ torch.ones(32, 32)
        return made


class Pipeline:
    """All that the command asks of one."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        self.unet, self.vae = Unet(), SimpleNamespace(decode=torch.tanh)

    def to(self, device: torch.device) -> Pipeline:
        return self

    def __call__(self, prompt: str, num_inference_steps: int, latents: Any, **options: Any) -> Any:
        for _ in range(num_inference_steps):
            made = self.unet(latents)
        return SimpleNamespace(images=self.vae.decode(made))


def test_the_parts_leave_no_trace() -> None:
    pipeline = Pipeline()
    pipeline.unet.down_blocks[0].register_forward_pre_hook(lambda *_: None)
    before = dict(vars(pipeline.vae))
    with parts_named(pipeline), torch.profiler.profile() as found:
        pipeline("", 1, torch.randn(1, 4, 8, 8))
        with pytest.raises(RuntimeError):
            pipeline.unet(torch.randn(3))
        pipeline("", 1, torch.randn(1, 4, 8, 8))
    names = [event.name for event in found.events() if event.name.startswith("part: ")]
    assert sorted(names) == sorted(
        ["part: UNet, the rest"] * 3 + ["part: UNet down 0"] * 2 + ["part: VAE decode"] * 2
    )
    assert vars(pipeline.vae) == before
    assert not pipeline.unet._forward_hooks and not pipeline.unet._forward_pre_hooks
    assert len(pipeline.unet.down_blocks[0]._forward_pre_hooks) == 1


def test_a_picture_is_profiled_and_its_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("diffusers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(profile, "load", lambda model, dtype: Pipeline())
    files = {name: tmp_path / f"a.{name}" for name in profile.FILES}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    words += ["--device", "cpu", "--steps", "3", "--without"]
    assert __main__.main(["profile", *words]) == 0
    out = capsys.readouterr().out
    assert "3 steps, float32, without this extension" in out and "UNet down 0" in out
    assert "power and clocks: CPU does not tell them" in out
    document = json.loads(files["json"].read_text(encoding="utf-8"))
    rows = document["rows"]
    assert document["sensors"]["reason"] == "CPU does not tell them"
    (attention,) = (row for row in rows if row["kind"] == "attention")
    assert (attention["part"], attention["calls"], attention["by"]) == ("UNet down 0", 3, "sdpa")
    assert {row["part"] for row in rows} >= {"UNet, the rest", "VAE decode"}
    trace = json.loads(files["trace"].read_text(encoding="utf-8"))
    assert any(str(event.get("name")).startswith("rocm_sd | ") for event in trace["traceEvents"])
    ElementTree.fromstring(files["plot"].read_text(encoding="utf-8"))


def test_a_folder_of_sdxl_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.hosts.tiny_pipelines import sdxl_of_prompts

    tokenizer = transformers.CLIPTokenizer.from_pretrained(MODEL / "tokenizer")
    sdxl_of_prompts(tokenizer).save_pretrained(tmp_path / "tiny-sdxl")
    words = ["--model", str(tmp_path / "tiny-sdxl"), "--device", "cpu", "--steps", "1"]
    assert __main__.main(["profile", *words]) == 0
    out = capsys.readouterr().out
    assert "tiny-sdxl, 1 steps, float32" in out
    assert "text encoder 2" in out and "UNet up 1" in out


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({"_class_name": "FluxPipeline"}, "FluxPipeline in {} has no UNet"),
        (
            {"_class_name": "StableDiffusionPipeline", "unet": [None, None]},
            "StableDiffusionPipeline in {} has no UNet",
        ),
        (
            {"_class_name": "StableDiffusionInpaintPipeline", "unet": ["diffusers", "UNet"]},
            "StableDiffusionInpaintPipeline in {} is not known to make a picture of a prompt alone",
        ),
        (
            {"_class_name": "OnesOwn", "unet": ["diffusers", "UNet"]},
            "OnesOwn in {} is not known to make a picture of a prompt alone",
        ),
        ([], "there is no model of diffusers in {}"),
    ],
)
def test_what_cannot_be_profiled_is_said_in_a_sentence(
    index: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("diffusers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    assert __main__.main(["profile", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"profile: {told.format(tmp_path)}\n"


def test_a_picture_has_the_device_in_a_line_of_its_own_and_no_kind_without_time() -> None:
    rows = [
        WorkRow("VAE decode", "norm", "torch", 2, 3.0, 1.5),
        WorkRow("", "copy", "torch", 1, 9.0, 1e-9),
    ]
    shapes = ElementTree.fromstring(profile.drawn("tiny-sd, 4 steps; a card, torch 2.11", rows))
    words = [shape.text for shape in shapes if shape.tag.endswith("text")]
    assert words[:2] == ["tiny-sd, 4 steps", "a card, torch 2.11"]
    assert "norm" in words and "copy" not in words and "1.50 ms" in words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "nowhere"], "there is no model of diffusers in nowhere"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--trace", "."], "--trace: . is a folder"),
        (["--device", "nonsense"], "--device nonsense"),
    ],
)
def test_bad_options_are_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("diffusers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    assert __main__.main(["profile", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_what_a_picture_waits_for_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = profile._told()
    for message in ("kernels are compiled", "kernels are tried", "kernels are compiled"):
        tell(message)
    assert capsys.readouterr().err == (
        "profile: kernels are compiled\nprofile: kernels are tried\n"
    )
