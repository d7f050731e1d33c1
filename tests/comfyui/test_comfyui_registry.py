"""What ComfyUI's registry, its Manager and its template browser read of this repository.

Read in Comfy-Org/comfy-cli e805d26b (1.17.0), comfy_cli/registry/config_parser.py;
Comfy-Org/ComfyUI-Manager f39cbd56, glob/cnr_utils.py (read_cnr_info);
Comfy-Org/ComfyUI a125cd84 (0.3.64), app/custom_node_manager.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import __version__
from lib_rocm_sd.hosts.comfyui import nodes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "example_workflows" / "rocm-sd-text-to-image.json"
OURS = ("RocmSdModel", "RocmSdVae", "RocmSdStatus")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def test_the_registry_and_the_manager_can_read_who_we_are(project: dict[str, Any]) -> None:
    about, comfy = project["project"], project["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", about["name"])
    assert len(about["name"]) < 100 and "comfyui" not in about["name"]
    assert about["version"] == __version__ and re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert set(about["license"]) <= {"file", "text"} and about["description"]
    systems = ("Operating System :: Microsoft", "Operating System :: POSIX")
    assert all(name.startswith(systems) for name in about["classifiers"])
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"]) and comfy["DisplayName"]


def test_the_manager_installs_no_package() -> None:
    assert not (ROOT / "requirements.txt").exists()


def test_the_example_is_a_graph_with_our_nodes_as_they_are_now() -> None:
    graph = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    by_id = {node["id"]: node for node in graph["nodes"]}
    for link, source, out, target, place, wanted in graph["links"]:
        assert link in by_id[source]["outputs"][out]["links"]
        entry = by_id[target]["inputs"][place]
        assert entry["link"] == link and entry["type"] in (wanted, "*")
    found = {node["type"]: node for node in graph["nodes"]}
    for name in OURS:
        kind: Any = nodes.CLASSES[name]
        asked = kind.INPUT_TYPES()
        rows = {**asked["required"], **asked.get("optional", {})}
        values = [row[1]["default"] for row in rows.values() if "default" in row[1]]
        assert found[name]["widgets_values"] == values
        plugs = {key: row[0] for key, row in rows.items() if "default" not in row[1]}
        assert {each["name"]: each["type"] for each in found[name]["inputs"]} == plugs
    assert EXAMPLE.with_suffix(".jpg").is_file(), "its thumbnail"
