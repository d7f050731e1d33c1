"""Starts the double, with or without this extension, as often as a test wants, from nothing."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gradio
import pytest
import torch
from fastapi import FastAPI
from gradio import routes
from starts import checked_once, kept, list_once, make_cheaper, remembered

CHECKOUT = Path(__file__).resolve().parents[3]
ROOTS = ("modules", "ldm", "sgm", "lib_rocm_sd")
EXTENSION = "rocm-sd"

# As in tests/conftest.py, which is not read here.
os.environ["ROCM_SD_SPOT_CHECK"] = os.environ["ROCM_SD_COMPARE_SPEED"] = "0"
make_cheaper(ROOTS)
gc.set_threshold(100_000, 50, 100)  # each start makes tens of thousands of objects that stay
torch.set_num_threads(1)  # the tensors are tiny, and the machine may be busy
if hasattr(gradio, "component_meta"):  # gradio 4 writes a .pyi beside each component's source
    gradio.component_meta.create_or_modify_pyi = lambda *args: None


def settle() -> None:
    """What is there now is left out of later garbage collections: gradio and torch keep megabytes
    of each WebUI, and these would take ever longer. For good: at the end pytest collects twice, and
    Python once more, which took a quarter of all the time.
    """
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "double_only(reason): not in a real WebUI, and why not")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("double_only")
        if mark and "ROCM_SD_INSIDE" in os.environ:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def pytest_collection_finish() -> None:
    settle()


def join(name: str) -> None:
    """Threads of this name have ended: by the modules' names they would reach the next start."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(600)


def end_measuring() -> None:
    """What waits to be measured between pictures waits no more."""
    engine = sys.modules.get("lib_rocm_sd.engine.engine")
    if engine is not None:
        engine.engine._measurer.waiting.clear()
    join("rocm_sd measuring")


def forget() -> None:
    """Drop the double and this extension from the process."""
    tables = kept()
    for name in list(sys.modules):
        if name.split(".")[0] in ROOTS and name not in tables:
            del sys.modules[name]


class WebUI:
    """One start of the double. `modules.<name>` of it are attributes."""

    api_fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = data
        self.monkeypatch = monkeypatch
        self._generating = False

    def prepare(self, args: str, cuda: bool) -> None:
        """Before anything of it is imported."""
        self.monkeypatch.setenv("ROCM_SD_DOUBLE_DATA", str(self.data))
        self.monkeypatch.setenv("ROCM_SD_DOUBLE_ARGS", args)
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)

    def load(self, family: str, dtype: torch.dtype, whole: bool) -> None:
        """What its models will be."""
        self.devices.dtype_unet = self.devices.dtype_vae = dtype
        self.sd_models.loaded.update(family=family, whole=whole)

    def begin(self) -> None:
        self.initialize.initialize()

    def start_ui(self) -> None:
        self.initialize.start_ui()

    def forget(self) -> None:
        """Undo what it has changed outside of itself."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"modules.{name}")

    @property
    def errors_reported(self) -> list[str]:
        return self.errors.records

    @property
    def targets(self) -> list[tuple[str, type]]:
        """The four classes whose forward an optimizer replaces."""
        return [
            (f"{family} {name}", getattr(importlib.import_module(f"{family}.modules.{path}"), name))
            for family in ("ldm", "sgm")
            for path, name in (
                ("attention", "CrossAttention"),
                ("diffusionmodules.model", "AttnBlock"),
            )
        ]

    @property
    def forwards(self) -> list[Any]:
        return [cls.forward for _, cls in self.targets]  # type: ignore[attr-defined]

    @property
    def ours(self) -> Any:
        return self.library("hosts.webui.seams").optimizer()

    @property
    def status(self) -> str:
        return self.library("hosts.webui.status").sentences()

    @property
    def applied(self) -> str | None:
        current = self.sd_hijack.current_optimizer
        return None if current is None else current.name

    @staticmethod
    def library(name: str) -> Any:
        return importlib.import_module(f"lib_rocm_sd.{name}")

    def by_api(self, scripts: dict[str, Any] | None = None) -> str:
        """The infotext of a txt2img with these alwayson_scripts."""
        api = importlib.import_module("modules.api.api")
        models = importlib.import_module("modules.api.models")
        request = models.StableDiffusionTxt2ImgProcessingAPI(
            alwayson_scripts=scripts or {}, **self.api_fields
        )
        answer = api.Api(FastAPI(), self.call_queue.queue_lock).text2imgapi(request)
        return str(json.loads(answer.info)["infotexts"][0])

    def is_ours(self) -> bool:
        """Whether all four forwards are this extension's, and do not stand aside."""
        there = all(f.__module__.startswith("lib_rocm_sd.") for f in self.forwards)
        return there and not self.ours.stands_aside

    @property
    def computing(self) -> list[Any]:
        """The four forwards that compute while this extension's stand aside."""
        return [self.ours.hosts_own(cls.__new__(cls)) for _, cls in self.targets]

    def txt2img(self, *args: Any, **fields: Any) -> Any:
        """A generation as the button makes it; `args` are this extension's arguments."""
        kind = self.processing.StableDiffusionProcessingTxt2Img
        return self._generate(kind, self.scripts.scripts_txt2img, args, fields)

    def img2img(self, *args: Any, **fields: Any) -> Any:
        kind = self.processing.StableDiffusionProcessingImg2Img
        return self._generate(kind, self.scripts.scripts_img2img, args, fields)

    def _generate(self, kind: Any, runner: Any, args: tuple[Any, ...], fields: Any) -> Any:
        with self.generating():
            p = self.new_generation(kind, fields)
            p.scripts = runner
            p.script_args = self.script_args(runner, args)
            return self.process(p)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """In the WebUI's queue. What is inside has its lock, as the cells of an X/Y/Z plot do."""
        outermost = not self._generating
        with self.call_queue.queue_lock if outermost else nullcontext():
            self._generating = True
            try:
                yield
            finally:
                self._generating = not outermost

    def new_generation(self, kind: Any, fields: dict[str, Any]) -> Any:
        return kind(sd_model=self.shared.sd_model, **fields)

    def process(self, p: Any) -> Any:
        return self.processing.process_images(p)

    def load_vae(self, weights: dict[str, torch.Tensor]) -> None:
        self.sd_vae.reload_vae_weights(vae_file=weights)

    def paste(self, tab: str, info: str) -> Any:
        """What the paste button does to each component."""
        return self.infotext_utils.paste(tab, info)

    @staticmethod
    def script_args(runner: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values = [0, *(component.value for component in runner.inputs[1:])]
        script = runner.script("rocm sd optimization")
        if script is not None:
            values[script.args_from : script.args_from + len(args)] = args
        return tuple(values)

    def callbacks(self) -> dict[str, list[Any]]:
        return {
            category: [entry.callback for entry in entries]
            for category, entries in self.script_callbacks.callback_map.items()
        }


class FakeGpu:
    """A GPU of ours that is the CPU: an engine whose kernel is a few lines of torch.

    `why_not` are the device's reasons, `wrong` makes the kernel fail its self-test, `floats` says
    whether it takes float32, `convs` that it has convolutions, `norms` that it has layer norms
    (they are torch's). Every kernel is in the cache, but where `builder` says which are, and makes
    the others. Nothing is tried in a child, but where `card` says what becomes of it
    (trial_help.py).
    """

    def __init__(self, why_not: tuple[str, ...] = ()) -> None:
        self.why_not = why_not
        self.wrong = False
        self.floats = True
        self.convs = self.norms = False
        self.builder: Any = None
        self.card: Any = None
        self.seen: list[tuple[torch.Tensor, ...]] = []
        self.kernel: Any = None

    def install(self, folder: Path) -> None:
        """Put the engine in place before the WebUI executes the extension's script."""
        before = sys.path
        sys.path = [str(folder), *before]
        try:
            module = importlib.import_module("lib_rocm_sd.engine.engine")
            attention = importlib.import_module("lib_rocm_sd.ops.attention.ours")
            kinds = importlib.import_module("lib_rocm_sd.ops.attention.op")
            backward = importlib.import_module("lib_rocm_sd.ops.attention_backward.ours")
            graded = importlib.import_module("lib_rocm_sd.ops.attention_backward.op")
            device = importlib.import_module("lib_rocm_sd.device")
            arch = importlib.import_module("lib_rocm_sd.arch")
            build = importlib.import_module("lib_rocm_sd.runtime.build")
            list_once()
        finally:
            sys.path = before
        self.kernel = _kernel(attention.MatrixAttention)(self)
        gradients = _gradients(backward.MatrixBackward)(self)
        for op, ours in (
            (kinds.ATTENTION, self.kernel),
            (kinds.ATTENTION_AND_LSE, _with_lse(self.kernel)(self)),
            (graded.ATTENTION_BACKWARD, gradients),
        ):
            vars(op).update(variants=(ours, *op.variants[1:]), test_problems=_one_test)
        info = device.DeviceInfo(
            0, "AMD Radeon RX 7900 XTX", "hip", "gfx1100", arch.by_gfx("gfx1100"), self.why_not
        )
        module.engine = module.Engine(  # type: ignore[attr-defined]
            identify=lambda asked: info, launcher=lambda asked, row: object()
        )
        device.identify = lambda asked: info  # type: ignore[attr-defined]
        build.is_cached = lambda spec, arch: True  # type: ignore[attr-defined]
        if self.builder is not None:
            build.is_cached, build.build = self.builder.is_cached, self.builder.build  # type: ignore[attr-defined]
        selftest = importlib.import_module("lib_rocm_sd.engine.selftest")
        selftest.reference_of = remembered(selftest.reference_of)  # type: ignore[attr-defined]
        selftest.check = checked_once(selftest.check)  # type: ignore[attr-defined]
        stamp = importlib.import_module("lib_rocm_sd.trials.stamp")
        # To list the system's folders, which stay the same, took a twelfth of a start.
        stamp._runtimes = tuple  # type: ignore[attr-defined]
        usable = module.engine.usable

        def usable_here(asked: torch.device, op: Any = kinds.ATTENTION, *session: Any) -> list[str]:
            if not op.name.startswith(("conv", "layer norm")):
                return list(usable(asked, op, *session))
            pending = module.engine.pending(op.name)
            there = self.convs if op.name.startswith("conv") else self.norms
            if there and pending:
                return [pending]
            return [] if there else [*self.why_not, f"there is no {op.name}"]

        module.engine.usable = usable_here
        self._keep_blocks(folder)
        if self.card is not None:
            self.card.install()

    def _keep_blocks(self, folder: Path) -> None:
        """A UNet's blocks stay ours although their convolutions are torch's."""
        before, sys.path = sys.path, [str(folder), *sys.path]
        try:
            stand_in = importlib.import_module("lib_rocm_sd.unet.stand_in")
        finally:
            sys.path = before
        stand_in.BlockStandIn.obstacle = lambda block, routes: ""  # type: ignore[attr-defined]


def _one_test(problem: Any) -> tuple[Any, ...]:
    return (replace(problem, batch=1, heads=1, seq_q=5, seq_k=7),)


def _gradients(base: Any) -> Any:
    formula = importlib.import_module("lib_rocm_sd.ops.attention_backward.formula").formula
    kernel = importlib.import_module("lib_rocm_sd.ops.attention_backward.kernel")

    class Gradients(base):  # type: ignore[misc]
        """Ours by name, as the kernel below."""

        def __init__(self, gpu: FakeGpu) -> None:
            self.gpu = gpu

        def refusals(self, arch: Any, problem: Any) -> list[str]:
            if problem.dtype == "float32" and not self.gpu.floats:
                return ["float32: the kernel takes fp16 and bf16"]
            return list(kernel.head_dim_refusals(problem.head_dim))

        def configs(self, arch: Any, problem: Any) -> Any:
            return (None,)

        def specs(self, arch: Any, problem: Any, config: Any) -> Any:
            return ()

        def run(self, call: Any) -> Any:
            inputs = call.inputs
            made = formula(inputs, torch.float32)
            return tuple(t.to(inputs.q.dtype).contiguous() for t in made)

    return Gradients


def _kernel(base: Any) -> Any:
    class Kernel(base):  # type: ignore[misc]
        """Ours by name. Its pictures differ from the WebUI's by rounding."""

        def __init__(self, gpu: FakeGpu) -> None:
            self.gpu = gpu

        def refusals(self, arch: Any, problem: Any) -> list[str]:
            if problem.dtype == "float32" and not self.gpu.floats:
                return ["float32: the kernel takes fp16 and bf16"]
            return []

        def configs(self, arch: Any, problem: Any) -> Any:
            return (None,)

        def specs(self, arch: Any, problem: Any, config: Any) -> Any:
            return ()

        def run(self, call: Any) -> torch.Tensor:
            q, k, v, mask, scale = call.inputs
            self.gpu.seen.append((q, k, v))
            scale = q.shape[3] ** -0.5 if scale is None else scale
            scores = torch.einsum("bihd,bjhd->bhij", q.float() * (scale * 1.0000001), k.float())
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, float("-inf"))
            elif mask is not None:
                scores = scores + mask.float()
            empty = (scores == float("-inf")).all(-1, keepdim=True)
            weights = scores.softmax(-1).masked_fill(empty, 0.0)
            out = torch.einsum("bhij,bjhd->bihd", weights, v.float()).flatten(2)
            return (out * (2.0 if self.gpu.wrong else 1.0)).to(q.dtype)

    return Kernel


def _with_lse(kernel: Any) -> Any:
    lse_of = importlib.import_module("lib_rocm_sd.ops.attention.with_lse").lse_of

    class KernelWithLse(type(kernel)):  # type: ignore[misc]
        """Of a picture that autograd follows."""

        def run(self, call: Any) -> Any:
            return super().run(call), lse_of(call.inputs, call.problem)

    return KernelWithLse


Start = Callable[..., WebUI]


def _kind() -> type[WebUI]:
    if "ROCM_SD_INSIDE" not in os.environ:
        return WebUI
    return importlib.import_module("real_webui").RealWebUI  # type: ignore[no-any-return]


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a WebUI: `extension` linked into its extensions folder, on `gpu` (None: the real CPU).

    `cuda` is what torch.cuda.is_available() says, on which the WebUI's own priorities hang.
    `before` is called with the WebUI before its scripts are loaded. `whole`: the model's UNet has
    all kinds of blocks. `serve`: with gradio's web server, which gradio 4 takes a second to make.
    """
    started: list[WebUI] = []

    def clear() -> None:
        for webui in started[-1:]:
            webui.forget()
        forget()

    def begin(
        *,
        extension: bool = True,
        gpu: FakeGpu | None = None,
        cuda: bool = True,
        args: str = "",
        family: str = "ldm",
        dtype: torch.dtype = torch.float32,
        whole: bool = False,
        before: Callable[[WebUI], None] = lambda webui: None,
        ui: bool = True,
        serve: bool = False,
    ) -> WebUI:
        join("rocm_sd settling")
        end_measuring()
        clear()
        data = tmp_path / f"webui-{len(started)}"
        folder = data / "extensions" / EXTENSION
        folder.parent.mkdir(parents=True)
        if extension:
            folder.symlink_to(CHECKOUT, target_is_directory=True)
        if not serve:
            monkeypatch.setattr(routes.App, "create_app", lambda *args, **kwargs: object())
        webui = _kind()(data, monkeypatch)
        started.append(webui)
        webui.prepare(args, cuda)
        if gpu is not None and extension:
            gpu.install(folder)
        webui.load(family, dtype, whole)
        before(webui)
        webui.begin()
        if ui:
            webui.start_ui()
        return webui

    yield begin
    join("rocm_sd compiling")
    join("rocm_sd settling")
    end_measuring()
    clear()
    settle()
