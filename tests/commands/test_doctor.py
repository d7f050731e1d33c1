"""The doctor: useful without a GPU, honest about what is broken, silent about who asks."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import arch, device
from lib_rocm_sd.commands import doctor
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.modules import faster
from lib_rocm_sd.modules.faster import Verdict
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.torch import TorchConv
from tests.ops.toy_op import GFX1100, engine_of
from tests.vae.vae_models import needs_half


class Kernel(MatrixAttention):
    """Our variant with `work` in place of the launch."""

    def __init__(self, work: Callable[..., torch.Tensor]) -> None:
        self.work = work

    def run(self, call: Call[Any, AttentionInputs]) -> torch.Tensor:
        inputs = call.inputs
        return self.work(inputs).to(inputs.q.dtype)


class Convolution(MatrixConv):
    """Our convolution with `share` times the formula in place of the launch."""

    def __init__(self, share: float) -> None:
        super().__init__("3x3")
        self.share = share

    def run(self, call: Call[Any, ConvInputs]) -> Any:
        inputs = call.inputs
        y, norm = CONVS["3x3"].reference(inputs)
        return (y * self.share).to(inputs.x.dtype), None if norm is None else norm.float()


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Findings on a machine whose one device is a gfx1100 with `work` as its kernel."""

    def examine(work: Callable[..., torch.Tensor], share: float = 1.0) -> dict[str, Any]:
        variants = (Kernel(work), *ATTENTION.variants[1:])
        monkeypatch.setitem(vars(ATTENTION), "variants", variants)
        conv = replace(CONVS["3x3"], variants=(Convolution(share), TorchConv("3x3")))
        monkeypatch.setattr(doctor, "_vae_ops", lambda: (conv,))
        monkeypatch.setattr(device, "identify", lambda place: GFX1100)
        return doctor.examine(engine_of(GFX1100)[0].engine)

    return examine


def torchs_best() -> str:
    """What runs in half precision on this torch's CPU: an old one has no SDPA there."""
    half = torch.ones(1, 1, 8, 8, dtype=torch.float16)
    try:
        torch.nn.functional.scaled_dot_product_attention(half, half, half)
    except RuntimeError:
        return "sliced"
    return "sdpa"


def test_without_a_gpu_nothing_is_broken() -> None:
    findings = doctor.examine()
    assert findings["broken"] == []
    assert findings["torch"]["version"] == torch.__version__
    (row,) = findings["work"]
    assert not row["usable"]
    assert "no supported GPU" in row["status"]
    assert [problem["name"] for problem in row["problems"]] == [name for name, _ in ATTENTION.usual]
    for problem in row["problems"]:
        assert problem["variant"] in ("sdpa", "sliced")
        assert "no GPU" in problem["reasons"]["rocm_sd"][0]
        for test in problem["self_tests"].values():
            assert test["reason"] or test["error"] <= test["tolerance"]
    assert {found["gfx"] for found in findings["compilers"]} == {doctor.EXAMPLE_GFX}
    (kernels,) = findings["kernels"]
    assert set(kernels["ops"]) == {"attention", "vae", "unet"}
    assert kernels["shipped"] == sum(op["shipped"] for op in kernels["ops"].values())
    assert all(op["shipped"] > 0 for op in kernels["ops"].values())


def test_without_a_gpu_the_vae_is_torchs_and_why_is_said() -> None:
    (row,) = doctor.examine()["vae"]
    assert not row["usable"]
    assert row["why"] == ["no GPU: this is the CPU"]
    names = [problem["name"] for problem in row["problems"]]
    assert names[:3] == ["conv 3x3", "conv 3x3 stride 2", "conv upsample"]
    for problem in row["problems"]:
        test = problem["self_tests"]["torch"]
        assert test["reason"] or test["error"] <= test["tolerance"]
        assert problem["variant"] == (None if test["reason"] else "torch")
        if problem["variant"]:
            assert "no GPU" in problem["reasons"]["rocm_sd"][0]
    assert row["problems"][-1]["variant"] == "torch"


def test_a_torch_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    findings = doctor.examine()
    assert findings["broken"] == ["torch 2.0.1 is too old, 2.1 or newer is needed"]
    assert (findings["devices"], findings["work"]) == ([], [])


def test_what_nothing_can_run_is_broken_on_a_known_gpu_only(
    examined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*inputs: Any) -> Any:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(TorchConv, "run", fail)
    findings = doctor.examine()
    assert findings["broken"] == []
    assert "nothing can run this" in doctor.render(findings)
    broken = examined(reference, share=1.1)["broken"]
    assert any("NotSupportedError" in line for line in broken)


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(json=True, self_test=False, out=None, gpu=None)) == 0
    findings = json.loads(capsys.readouterr().out)
    text = doctor.render(findings)
    assert torch.__version__ in text
    assert "sdpa" in text
    assert text.endswith("without a supported GPU our kernel has nothing to run on")
    for found in findings["compilers"]:
        assert f"{found['name']} for {found['gfx']}" in text


def test_a_compiler_that_was_not_verified_is_labelled() -> None:
    findings = doctor.examine()
    about: dict[str, Any] = {"name": "clang", "gfx": "gfx1201", "file": None, "reasons": []}
    about["note"] = "not verified"
    findings["compilers"] = [about, about | {"gfx": "gfx1100", "note": ""}]
    text = doctor.render(findings)
    assert "clang for gfx1201: ready, not verified\n" in text
    assert "clang for gfx1100: ready\n" in text


def test_a_working_kernel_is_healthy(examined: Callable[..., dict[str, Any]]) -> None:
    findings = examined(reference)
    assert findings["broken"] == []
    (row,) = findings["work"]
    assert row["usable"]
    assert {problem["variant"] for problem in row["problems"]} == {"rocm_sd"}
    (vae,) = findings["vae"]
    assert vae["usable"]
    assert {problem["variant"] for problem in vae["problems"]} == {"rocm_sd"}
    text = doctor.render(findings)
    assert "convolutions run on our kernels" in text
    assert "healthy: our kernels run attention and VAE" in text


@needs_half
def test_a_wrong_convolution_is_broken_and_attention_still_ours(
    examined: Callable[..., dict[str, Any]],
) -> None:
    findings = examined(reference, share=1.1)
    (line,) = findings["broken"]
    assert "our convolution cannot be used: self-test failed" in line
    assert findings["work"][0]["usable"]
    assert not findings["vae"][0]["usable"]
    assert findings["vae"][0]["problems"][0]["variant"] == "torch"
    text = doctor.render(findings)
    assert "convolutions run on torch's: self-test failed" in text
    assert "healthy" not in text


def test_who_makes_pictures_by_which_model(
    examined: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"UNet; Auto": Verdict(7.0, 27.0, True), "PixArt; Auto": Verdict(9.9, 5.5, False)}
    monkeypatch.setattr(faster, "verdicts", lambda info: kept)
    text = doctor.render(examined(reference))
    left = text.index("PixArt; Auto: the host's own is used (ours 9.9 ms, the host's 5.5 ms)")
    assert left < text.index("UNet; Auto: ours is used (ours 7.0 ms, the host's 27.0 ms)")


def test_a_wrong_kernel_is_broken(examined: Callable[..., dict[str, Any]]) -> None:
    findings = examined(lambda inputs: reference(inputs) * 1.1)
    assert "our kernel cannot be used: self-test failed" in findings["broken"][0]
    (row,) = findings["work"]
    assert {problem["variant"] for problem in row["problems"]} == {torchs_best()}
    text = doctor.render(findings)
    assert "rocm_sd FAILED 1.0e-01 / 2.0e-03" in text
    assert "broken: cpu: our kernel cannot be used" in text


def test_no_compiler_is_broken_and_says_what_each_said(
    examined: Callable[..., dict[str, Any]],
) -> None:
    def work(*inputs: Any) -> torch.Tensor:
        raise CompileError("no compiler made attention", "\n  comgr: not found\n  clang: too old")

    findings = examined(work)
    assert "CompileError" in findings["broken"][0]
    assert "FAILED (" in doctor.render(findings)


def test_too_little_memory_is_a_finding_not_a_crash(
    examined: Callable[..., dict[str, Any]],
) -> None:
    def work(*inputs: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("HIP out of memory")

    findings = examined(work)
    assert any("HIP out of memory" in line for line in findings["broken"])
    assert doctor.render(findings)


def test_without_torch_it_says_so_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is for another Python')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from lib_rocm_sd.__main__ import main\n"
        "sys.exit(main(['doctor', '--json']))"
    )
    root = arch.KERNELS_DIR.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=False, capture_output=True, text=True
    )
    findings = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert findings["broken"] == [
        "torch cannot be used: ImportError: this torch is for another Python"
    ]
    assert findings["work"] == findings["vae"] == []
    assert findings["compilers"]
    assert "not tried without torch" in doctor.render(findings)


def test_gpus_that_only_the_driver_lists_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kfd_gpus", lambda: ["gfx1201", "gfx906"])
    findings = doctor.examine()
    assert {found["gfx"] for found in findings["compilers"]} == {"gfx1201"}
    text = doctor.render(findings)
    assert "the system's driver lists: gfx1201, gfx906" in text
    assert "is this torch a ROCm build?" in text


def test_switches_of_the_environment_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    monkeypatch.setenv("ROCM_SD_ALLOW_ZLUDA", "1")
    monkeypatch.setenv("AWS_SECRET", "not to be shown")
    findings = doctor.examine()
    assert findings["environment"]["HSA_OVERRIDE_GFX_VERSION"] == "11.0.0"
    assert findings["environment"]["ROCM_SD_ALLOW_ZLUDA"] == "1"
    assert "not to be shown" not in json.dumps(findings)


@pytest.mark.parametrize(
    ("text", "home", "user", "expected"),
    [
        ("/home/ann/x in /home/ann", "/home/ann", "ann", "~/x in ~"),
        ("/home/anna/x", "/home/ann", "ann", "/home/anna/x"),
        ("/mnt/ann/sd/venv", "/home/ann", "ann", "/mnt/USER/sd/venv"),
        (r"C:\Users\Ann\sd", r"C:\Users\Ann", "Ann", r"~\sd"),
        (r"c:\users\ann\sd", r"C:\Users\Ann", "Ann", r"~\sd"),
        (r"D:\Ann\sd", r"C:\Users\Ann", "Ann", r"D:\USER\sd"),
        ("/opt/rocm", "/", "", "/opt/rocm"),
    ],
)
def test_home_and_user_are_hidden(text: str, home: str, user: str, expected: str) -> None:
    assert doctor.anonymous({"a": [text]}, home, user) == {"a": [expected]}


def test_the_findings_hold_neither_home_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path(sys.executable).parent.parent)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("USERPROFILE", home)
    text = json.dumps(doctor.examine())
    assert home not in text
    assert "~" in text
