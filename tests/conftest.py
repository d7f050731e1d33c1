"""Shared by all tests: nothing is written outside of pytest's folders.

GPU tests skip with the engine's reason.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

import pytest

from tests import ledger, sweeps, workers
from tests.clock import Clock

gc.set_threshold(100_000, 50, 100)  # what is collected stays, and took a quarter longer to collect
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and the workers fill the cores

ROOT = Path(__file__).resolve().parents[1]
OWN_CACHES = Path(tempfile.mkdtemp(prefix="rocm_sd_tests_"))
"""The user's cache folder, for this process and those that it starts, and one for each worker; a
test may name another. Set here, since collecting already looks for compilers and keeps what they
say.
"""
FIRST_CACHE = OWN_CACHES / "first"
FIRST_CACHE.mkdir(mode=0o700)
os.environ.pop("ROCM_SD_CACHE_DIR", None)
# What is ours shall be ours in each call; some tests set these.
os.environ["ROCM_SD_SPOT_CHECK"] = os.environ["ROCM_SD_COMPARE_SPEED"] = "0"
os.environ.update(XDG_CACHE_HOME=str(FIRST_CACHE), LOCALAPPDATA=str(FIRST_CACHE))

LONGEST = (
    *("test_browser_speed", "test_browser_looks", "test_browser_accordion", "test_browser_reload"),
    *("test_webui_a1111", "test_forge_host", "test_distributed_blocks", "test_webui_forge"),
    *("test_webui_a1111_unet", "test_machine_code", "test_tiny_model", "test_demo_page"),
    *("test_update", "test_pytorch_md", "test_diffusers_lora", "test_real_compilers"),
    *("test_paper_card", "test_suite", "test_link"),
    *("test_doctor", "test_amdgpu_host", "test_no_device", "test_decoding", "test_team"),
    *("test_comfyui_vae", "test_bench_vae", "test_unet_ahead", "test_upscaler", "test_vae_bands"),
    *("test_unet_accuracy", "test_torch_ops_compiled", "test_unet_graphs", "test_unet_prompts"),
    *("test_first_trials", "test_wine", "test_bench_tables", "test_diffusers_faster", "test_gate"),
)
"""Files whose tests stay together and take longest, the longest first: one that began last would be
waited for by all workers.
"""
APART = (
    "test_changes",
    *("test_amdgpu_kernels", "test_amdgpu_planted", "test_simt_attention", "test_simt_planted"),
    "test_amdgpu_schedules",
    *("test_attention_random", "test_attention_resources", "test_simt_conv_places"),
    *("test_simt_conv_bands", "test_simt_conv", "test_simt_group_norm", "test_simt_layer_norm"),
)
"""Files of many tests that share nothing: workers take them one by one, last. Most of the machine
code's are known, so that the changes of a diffusers' UNet are what fills the workers in the end.
"""
COMPILING = tuple(f"tests/{name}/" for name in ("verify/amdgpu", "machine", "ops", "tune"))
"""Folders whose tests start compilers by the hundred."""
TOGETHER = "tests/browser/"
"""One worker takes all of its files for a gradio: they share a server and a browser."""
FORKED = "tests/distributed/"
"""One worker takes all of its files: the server that forks their ranks takes 5 CPU seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    ledger.add_options(parser)
    workers.add_option(parser)
    parser.addoption("--schedules", type=int, help="draw so many orders of waves for each case")


class Root:
    """The checkout's __init__.py is ComfyUI's. As a package of pytest's the checkout would be
    imported, and its parent folder put first on sys.path.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> Any:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    chooser = ledger.Ledger(config)
    config.pluginmanager.register(chooser, "ledger")
    os.environ[sweeps.VARIABLE] = "1" if chooser.thinned else ""
    config.pluginmanager.register(Root(), "root")
    if config.option.workers and "fork" in get_all_start_methods():
        config.pluginmanager.register(workers.Workers(scope_of, begin_worker), "workers")


def begin_worker(config: pytest.Config) -> None:
    """What a worker has for itself."""
    from lib_rocm_sd import cache

    chooser: Any = config.pluginmanager.get_plugin("ledger")
    chooser.worker = True
    folder = OWN_CACHES / str(os.getpid())
    shutil.copytree(FIRST_CACHE, folder)
    os.environ.update(XDG_CACHE_HOME=str(folder), LOCALAPPDATA=str(folder))
    cache.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a default run has, by files in the order in which they are given to workers."""
    chooser: Any = config.pluginmanager.get_plugin("ledger")
    if chooser.thinned:
        items[:], left_out = sweeps.split(items)
        config.hook.pytest_deselected(items=left_out)
    place = {name: number for number, name in enumerate(LONGEST)}
    place |= {name: len(LONGEST) + 1 + number for number, name in enumerate(APART)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    scopes = list(dict.fromkeys(scope_of(item.nodeid) for item in items))
    order = {scope: number for number, scope in enumerate(scopes)}
    items.sort(key=lambda item: order[scope_of(item.nodeid)])


def scope_of(nodeid: str) -> str:
    """What one worker has: a file's tests, each of `APART` by itself, `TOGETHER` for a gradio, all
    of `FORKED`.
    """
    file = nodeid.partition("::")[0]
    if file.startswith(FORKED):
        return FORKED
    if file.startswith(TOGETHER):
        return TOGETHER + nodeid.rpartition("[")[2].partition("-")[0].rstrip("]")
    return nodeid if Path(file).stem in APART else file


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """Garbage collections look at nothing that was there before a file: the modules of torch and
    diffusers and the list of tests took each a third of a second, what files leave behind more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # the executor makes a few closures of each instruction


@pytest.fixture(scope="module", autouse=True)
def _compilers_start_at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """In `COMPILING` not by way of a Python that has them end with this process: three of these are
    a tenth of a compilation.
    """
    from lib_rocm_sd.runtime import process

    with pytest.MonkeyPatch.context() as patch:
        inside = request.path.is_relative_to(ROOT)
        if inside and request.path.relative_to(ROOT).as_posix().startswith(COMPILING):
            patch.setattr(process, "_bound", list)
        yield


@pytest.fixture(scope="session", autouse=True)
def _references() -> None:
    """Tests make engines by the hundred, and each tests itself with the same small problems."""
    module: Any = sys.modules.get("lib_rocm_sd.engine.selftest")
    if module is not None:
        module.reference_of = lru_cache(maxsize=256)(module.reference_of.__wrapped__)


def pytest_unconfigure() -> None:
    """What is still frozen when Python ends counts as leaked for some libraries. Not earlier: when
    it ends, pytest collects twice.
    """
    atexit.register(gc.unfreeze)
    shutil.rmtree(OWN_CACHES, ignore_errors=True)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder for one test only."""
    from lib_rocm_sd import cache

    folder = tmp_path / "cache"
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(folder))
    cache.reset()
    yield folder
    monkeypatch.undo()
    cache.reset()


@pytest.fixture
def brief_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Performance measures for a tenth of a second per problem only."""
    from lib_rocm_sd.engine import measure as tune

    monkeypatch.setattr(tune, "BUDGET_S", 0.1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What is measured takes as long as it tells this clock, however busy the machine is."""
    from lib_rocm_sd.engine import measure

    made = Clock()
    monkeypatch.setattr(measure, "perf_counter", made)
    return made


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The next test finds the process's engine without the gate that a host has put before it."""
    module: Any = sys.modules.get("lib_rocm_sd.engine.engine")
    if module is not None and module.engine.gate is not None:
        module.engine.gate = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where the engine cannot use one, for the reason it gives."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    from lib_rocm_sd.engine.engine import engine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = engine.usable(device)
    if reasons:
        pytest.skip("; ".join(reasons))
