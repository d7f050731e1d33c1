"""What `pip install .` installs: all of the library and of the kernels, found from anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lib_rocm_sd import __version__, arch
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.runtime import source

pytest.importorskip("setuptools", reason="setuptools, which builds it, is not installed")

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from lib_rocm_sd import __version__, arch
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.runtime import source
from lib_rocm_sd.trials import link
print(json.dumps({
    "version": __version__,
    "kernels": str(arch.KERNELS_DIR),
    "gpus": list(arch.amd_table()),
    "tuned": str(tuned.FOLDER),
    "digest": source.digest(),
    "child": link._command(),
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("lib_rocm_sd", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=tree, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"rocm_sd_optimization-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }


def test_nothing_is_missing_and_nothing_else_is_installed(site: Path) -> None:
    installed = files_of(site / "lib_rocm_sd")
    kernels = {f"kernels/{name}": text for name, text in files_of(ROOT / "kernels").items()}
    assert installed == {**files_of(ROOT / "lib_rocm_sd"), **kernels}
    assert sorted(path.name.partition("-")[0] for path in site.iterdir()) == [
        "lib_rocm_sd",
        "rocm_sd_optimization",
    ]


def test_it_finds_its_own_kernels_from_another_folder(site: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOOK, str(site)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert found["kernels"] == str(site / "lib_rocm_sd" / "kernels")
    assert found["tuned"] == str(site / "lib_rocm_sd" / "kernels" / "tuned")
    assert str(site) in found["child"], "where processes of its own import it from"
    assert found["digest"] == source.digest()
    assert found["gpus"] == list(arch.amd_table())
    assert found["version"] == __version__ and not found["torch"]


def test_the_checkout_uses_the_kernels_beside_the_package() -> None:
    assert ROOT / "kernels" == arch.KERNELS_DIR
    assert tuned.FOLDER == ROOT / "kernels" / "tuned"
