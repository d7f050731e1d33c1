"""The nodes as ComfyUI calls them, the status, the start option, and the checkout's __init__.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import cache
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.comfyui import everywhere, nodes, status
from lib_rocm_sd.hosts.comfyui.attention import KEY
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.policy import LEVELS
from lib_rocm_sd.trials.gate import GateState
from tests.comfyui.conftest import DOUBLE, left
from tests.comfyui.play import Engine
from tests.vae.vae_models import error, fill

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, **given: Any) -> Any:
    """A node with its inputs' defaults, as ComfyUI makes and calls it."""
    kind: Any = nodes.CLASSES[name]
    asked = kind.INPUT_TYPES()
    every = {**asked["required"], **asked.get("optional", {})}
    assert set(given) <= set(every)
    values = {key: row[1]["default"] for key, row in every.items() if "default" in dict(*row[1:])}
    made = kind()
    return getattr(made, kind.FUNCTION)(**{**values, **given})


def model_of(comfy: Any) -> Any:
    torch.manual_seed(0)
    base = comfy.base.BaseModel({"query_dim": 32, "heads": 4, "dim_head": 8})
    return comfy.patcher.ModelPatcher(base, None, None)


def vae_of(comfy: Any) -> Any:
    weights = fill(comfy.sd.AutoencoderKL(ddconfig=comfy.sd.CONFIG, embed_dim=4)).state_dict()
    return comfy.sd.VAE(sd=weights)


def test_each_node_is_whole() -> None:
    assert set(nodes.CLASSES) == set(nodes.NAMES)
    for kind in nodes.CLASSES.values():
        made: Any = kind
        assert callable(getattr(made, made.FUNCTION)) and made.CATEGORY and made.DESCRIPTION
        assert isinstance(made.RETURN_TYPES, tuple)
        for inputs in made.INPUT_TYPES().values():
            for choices, *rows in inputs.values():
                default = rows[0].get("default")
                assert not isinstance(choices, list) or default in choices
                assert rows[0]["tooltip"]


def test_the_levels_are_the_engines() -> None:
    choices = nodes.RocmSdModel.INPUT_TYPES()["required"]["level"][0]
    assert choices == list(LEVELS)


@torch.no_grad()
def test_model_node(comfy: Any, card: Engine) -> None:
    given = model_of(comfy)
    (made,) = run("RocmSdModel", model=given, level="Memory")
    assert made is not given and made.model is given.model
    x = torch.randn(2, 9, 32)
    expected = given.model.apply_model(x, None, **given.model_options)
    options = made.model_options["transformer_options"]
    torch.testing.assert_close(
        given.model.apply_model(x, None, transformer_options=options), expected
    )
    assert [session.level for _, session in card.seen] == ["Memory"]
    (off,) = run("RocmSdModel", model=made, attention=False)
    assert KEY not in off.model_options["transformer_options"]


@torch.no_grad()
@pytest.mark.parametrize("mode", nodes.MODES)
def test_vae_node(comfy: Any, card: Engine, mode: str) -> None:
    given = vae_of(comfy)
    z = torch.randn(1, 4, 32, 32)
    decoded = given.decode(z)
    (made,) = run("RocmSdVae", vae=given, mode=mode, encode=False)
    assert error(made.decode(z), decoded) < 1e-5
    made.encode(decoded)
    assert dict(tally.ours) == {"VAE decode": 1}
    wish = made.first_stage_model.rocm_sd_wish
    assert (wish.mode, wish.budget_bytes) == (nodes.MODES[mode], None)
    (small,) = run("RocmSdVae", vae=given, budget_mib=3)
    assert small.first_stage_model.rocm_sd_wish.budget_bytes == 3 << 20


# --- what fails is no failed workflow

WRONG: dict[str, tuple[str, Any, str]] = {
    "level": ("RocmSdVae", "Fast", "no optimization level 'Fast'"),
    "no level": ("RocmSdVae", None, "no optimization level None"),
    "level of a model": ("RocmSdModel", "Fast", "no optimization level 'Fast'"),
    "mode": ("RocmSdVae", "auto", "mode is 'auto', none of Auto, Always banded"),
    "unet": ("RocmSdModel", "On", "unet is 'On', none of Off, Auto"),
    "unhashable unet": ("RocmSdModel", ["Auto"], "unhashable type: 'list'"),
    "budget_mib": ("RocmSdVae", "3", "TypeError: "),
}


@pytest.mark.parametrize("which", WRONG)
def test_any_value_from_another_node_gives_back_what_came(comfy: Any, which: str) -> None:
    name, value, why = WRONG[which]
    key = {"no level": "level", "level of a model": "level", "unhashable unet": "unet"}
    own = name == "RocmSdVae"
    given = vae_of(comfy) if own else model_of(comfy)
    (made,) = run(name, **{"vae" if own else "model": given, key.get(which, which): value})
    assert made is given
    (told,) = left()
    assert told.startswith("VAE: " if own else "attention: ") and why in told


MISSING: dict[str, tuple[str, str]] = {
    "RocmSdModel": ("model", "model"),
    "RocmSdVae": ("vae", "vae"),
    "RocmSdStatus": ("after", "status"),
    "RocmSdSpeedTest": ("model", "speedtest"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_cannot_be_imported_is_said(
    comfy: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, module = MISSING[name]
    from lib_rocm_sd.hosts import comfyui

    monkeypatch.setitem(sys.modules, f"lib_rocm_sd.hosts.comfyui.{module}", None)
    monkeypatch.delattr(comfyui, module, raising=False)
    given = object()
    made = run(name, **{key: given})
    why = "ModuleNotFoundError: import of lib_rocm_sd.hosts.comfyui"
    if isinstance(made, tuple):
        assert made == (given,) and why in next(iter(left()))
    else:
        assert why in made["ui"]["text"][0] and made["ui"]["text"][0] == made["result"][-1]


def test_a_library_that_cannot_be_imported_at_all_is_logged(
    comfy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lib_rocm_sd import hosts
    from lib_rocm_sd.hosts import comfyui

    for owner, module in ((hosts, "trouble"), (comfyui, "host"), (comfyui, "vae")):
        monkeypatch.setitem(sys.modules, f"{owner.__name__}.{module}", None)
        monkeypatch.delattr(owner, module, raising=False)
    given = object()
    assert run("RocmSdVae", vae=given) == (given,)
    assert "VAE: the node failed: ModuleNotFoundError: import of" in caplog.text


# --- status


def test_the_status_says_what_runs_and_why_not(comfy: Any) -> None:
    (made,) = run("RocmSdModel", model=model_of(comfy), unet="Off")
    x = torch.zeros(1, 4, 32)
    made.model.apply_model(x, None, **made.model_options)
    made.model.apply_model(x, None, **made.model_options)
    tally.served("VAE decode")
    shown = run("RocmSdStatus", after=object())
    (said,) = shown["result"]
    assert shown["ui"] == {"text": [said]}
    assert said.splitlines()[0] == (
        "Not active: no supported GPU (this is the CPU); ComfyUI computes everything by itself."
    )
    assert said.splitlines()[2:6] == [
        "The last workflow:",
        "VAE decode: 1 of 1 call ours",
        "attention: 0 of 2 calls ours",
        "  ComfyUI's own, 2 calls: no GPU: this is the CPU",
    ]
    assert "Event: left to ComfyUI's own code" not in said  # it would say no more


def test_the_status_tells_of_the_last_workflow_then_of_earlier_ones(
    comfy: Any, prompt: SimpleNamespace
) -> None:
    assert status.text().endswith(status.NOTHING)
    (made,) = run("RocmSdModel", model=model_of(comfy), unet="Off")
    x = torch.zeros(1, 4, 32)
    made.model.apply_model(x, None, **made.model_options)
    tally.leave("UNet, transformer blocks", "another node changes them (attn1_patch)")
    prompt.last_prompt_id = "second"
    said = status.text()  # nothing was computed since
    assert "Before it" not in said and "The last workflow:" not in said
    nothing, last = said.split("\n\n")[1:]
    assert nothing == status.HERE_NOTHING
    assert last.startswith("The last one in which something did:\nattention: 0 of 1 call ours")
    for _ in range(2):
        made.model.apply_model(x, None, **made.model_options)
    assert status.HERE_NOTHING not in status.text()
    last, before = status.text().split("\n\nBefore it, since ComfyUI's start:\n")
    own = "ComfyUI's own, {}: no GPU: this is the CPU"
    assert last.endswith(f"attention: 0 of 2 calls ours\n  {own.format('2 calls')}")
    assert before.splitlines()[:4] == [
        "attention: 0 of 1 call ours",
        f"  {own.format('1 call')}",
        "UNet, transformer blocks: 0 of 1 call ours",
        "  ComfyUI's own, 1 call: another node changes them (attn1_patch)",
    ]


@pytest.mark.parametrize("unet", ["Off", "Auto"])
def test_what_a_node_said_when_it_ran_holds_for_each_workflow_with_its_model(
    comfy: Any, prompt: SimpleNamespace, unet: str
) -> None:
    """ComfyUI keeps what a node gave, and runs it no more."""
    given = model_of(comfy)
    given.model_options["transformer_options"][KEY] = lambda theirs, *args, **kwargs: theirs(*args)
    (made,) = run("RocmSdModel", model=given, unet=unet)
    why = "the model has another override already (<lambda> of test_comfyui_nodes.py)"
    for workflow in ("first", "second"):
        prompt.last_prompt_id = workflow
        for _ in range(2):
            made.model.apply_model(torch.zeros(1, 4, 32), None, **made.model_options)
        last = status.text().split("Before it")[0]
        assert f"attention: 0 of 1 call ours\n  ComfyUI's own, 1 call: {why}" in last
    assert ("UNet: 0 of 2 calls ours" in last) == (unet == "Auto")


def test_the_status_while_a_kernel_is_tried_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SDXL's attention is ours, and the status asks for SD 1.5's."""
    trying = "not active: the kernel for gfx1100 is being tried; ComfyUI computes everything"
    fake = SimpleNamespace(
        status_line=lambda *given: trying,
        waits=lambda device: True,
        usable=lambda *given: [],
        unmeasured=0,
    )
    monkeypatch.setattr(status, "engine", fake)
    monkeypatch.setattr(status, "identify", lambda device: SimpleNamespace(gfx="gfx1100"))
    assert status.text().startswith("Not active: the kernel for gfx1100")
    tally.served("attention")
    assert status.text().startswith("Some calls have run on our kernels (gfx1100); others are")


def test_the_status_says_why_no_kernel_can_be_kept(
    comfy: Any, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", "~nosuchuser/x")
    cache.reset()
    assert "again" not in status.text()
    cache.write("code", cache.key_of("a kernel"), b"code")
    again = "The next start compiles the kernels again: ~nosuchuser/x is not used: "
    assert again in status.text()


def test_the_status_says_that_kernels_are_being_tested(
    comfy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "gate", SimpleNamespace(state=lambda: GateState(True, 3, 7)))
    assert "\nKernels are being tested (3 of 7).\n" in f"{status.text()}\n"
    monkeypatch.setattr(engine, "gate", SimpleNamespace(state=lambda: GateState(False, 7, 7)))
    assert "being tested" not in status.text()


def test_the_status_never_fails(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_lines", lambda: 1 // 0)
    assert status.text() == "Not active: ZeroDivisionError: integer division or modulo by zero"


def test_the_status_is_asked_each_time_and_after_anything() -> None:
    changed = nodes.RocmSdStatus.IS_CHANGED()
    assert changed != changed
    (after, _), *_ = nodes.RocmSdStatus.INPUT_TYPES()["optional"].values()
    assert after == "*" and hash(after) == hash("*")
    assert not after.__ne__("IMAGE")


# --- the start option


@pytest.mark.parametrize(
    ("value", "level"), [("", ""), ("0", ""), ("1", "Auto"), ("Memory", "Memory"), ("x", "x")]
)
def test_what_the_variable_asks_for(value: str, level: str) -> None:
    assert everywhere.level_asked({everywhere.VARIABLE: value}) == level
    assert everywhere.level_asked({}) == ""


@torch.no_grad()
@pytest.mark.parametrize("positional", [False, True])
def test_every_model_and_vae_without_a_node(comfy: Any, card: Engine, positional: bool) -> None:
    before = model_of(comfy), vars(comfy.base.BaseModel)["apply_model"], comfy.sd.VAE.__init__
    x, options = torch.randn(2, 9, 32), {"block": 1}
    expected = before[0].model.apply_model(x, None, transformer_options=options)
    assert everywhere.begin("Auto") and everywhere.begin("Auto")
    model = before[0].model
    if positional:
        made = model.apply_model(x, None, None, None, None, options)
    else:
        made = model.apply_model(x, None, transformer_options=options)
    torch.testing.assert_close(made, expected)
    model.apply_model(x, None)
    assert len(card.seen) == 2 and options == {"block": 1}

    (own,) = run("RocmSdModel", model=before[0], level="Memory")
    model.apply_model(x, None, **own.model_options)
    assert card.seen[-1][1].level == "Memory"  # a node's word counts

    vae = vae_of(comfy)
    vae.decode(torch.randn(1, 4, 8, 8))
    assert tally.ours["VAE decode"] == 1
    assert comfy.sd.VAE().first_stage_model is None
    everywhere.end()
    assert (vars(comfy.base.BaseModel)["apply_model"], comfy.sd.VAE.__init__) == before[1:]


def test_it_steps_aside_with_a_line_in_the_log(
    comfy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rocm_sd.comfyui")
    assert not everywhere.begin("Fast")
    assert "ROCM_SD_COMFYUI_ALL=Fast is none of 1, Auto" in caplog.text
    for owner, name in ((comfy.sd, "VAE"), (comfy.base.BaseModel, "apply_model")):
        delattr(owner, name)
        caplog.clear()
        assert not everywhere.begin("Auto")
        assert "this ComfyUI is made otherwise; nothing is set" in caplog.text


@torch.no_grad()
def test_without_a_card_it_changes_no_bit(comfy: Any) -> None:
    model, x = model_of(comfy).model, torch.randn(2, 9, 32)
    expected = model.apply_model(x, None)
    everywhere.begin("Auto")
    assert torch.equal(model.apply_model(x, None), expected)
    assert left() == {"attention: no GPU: this is the CPU": 1}


# --- the checkout as a custom node

HEAVY = ("engine", "functional", "vae", "ops", "hosts.comfyui.attention", "hosts.comfyui.vae")


def executed(before: str) -> dict[str, Any]:
    """What a Python has after it has executed __init__.py as ComfyUI does."""
    script = f"""
import importlib.util, json, sys
{before}
path = list(sys.path)
spec = importlib.util.spec_from_file_location("/a/custom_nodes/rocm_x_sd", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
print(json.dumps([
    sorted(module.NODE_CLASS_MAPPINGS), module.NODE_DISPLAY_NAME_MAPPINGS, sys.path == path,
    sorted(name for name in sys.modules if name.startswith("lib_rocm_sd")), "torch" in sys.modules,
    module.WEB_DIRECTORY,
]))
"""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ROCM_SD_COMFYUI_ALL")
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "__init__.py")],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        cwd=DOUBLE,
    )
    keys = ("nodes", "names", "path_as_before", "ours", "torch", "page")
    *said, answer = done.stdout.splitlines()
    return {**dict(zip(keys, json.loads(answer), strict=True)), "said": "\n".join(said)}


def test_comfyui_finds_the_nodes_and_nothing_heavy_is_imported() -> None:
    found = executed("import types; sys.modules['comfy.model_management'] = types.ModuleType('x')")
    assert found["nodes"] == sorted(nodes.CLASSES) and found["names"] == nodes.NAMES
    assert found["path_as_before"] and not found["torch"]
    assert "lib_rocm_sd.hosts.comfyui.nodes" in found["ours"]
    assert not [name for name in found["ours"] if name[12:].startswith(HEAVY)]
    assert [file.name for file in (ROOT / found["page"]).iterdir()] == ["rocm_sd.js"]


def test_with_a_torch_that_is_too_old_there_is_no_node() -> None:
    found = executed(
        "import types\n"
        "sys.modules['comfy.model_management'] = types.ModuleType('x')\n"
        "sys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "torch.__version__ = '2.0.1'\n"
    )
    assert (found["nodes"], found["names"]) == ([], {})
    assert "torch 2.0.1 is too old, 2.1 or newer is needed" in found["said"]


def test_elsewhere_nothing_is_imported() -> None:
    found = executed("")
    del found["page"]
    nothing = {"nodes": [], "names": {}, "ours": [], "torch": False, "said": ""}
    assert found == {**nothing, "path_as_before": True}


def test_pytest_makes_no_package_of_the_checkout() -> None:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    assert str(ROOT / "__init__.py") not in files
