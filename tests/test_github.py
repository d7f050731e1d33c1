"""What .github asks of GitHub: it parses, and what it names is there."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd.commands import suite
from lib_rocm_sd.lab.suite.workloads import PRESETS

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
FORMS = [
    path for path in sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")) if path.stem != "config"
]


def _read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def _jobs() -> dict[str, Any]:
    return dict(_read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"])


def _commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_linux_runs_what_ci_runs_here() -> None:
    job = _jobs()["linux"]
    assert ".ci/run --sweeps" in _commands(job).splitlines()
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.12"]
    assert job["runs-on"].startswith("ubuntu-")
    assert job["container"]["image"] == "python:${{ matrix.python }}-bookworm"


def test_windows_runs_files_that_are_here() -> None:
    """Folders whose tests need a compiler or a WebUI are not among them."""
    job = _jobs()["windows"]
    named = re.findall(r"\btests/[\w./]+", _commands(job))
    assert len(named) > 5 and [name for name in named if not (ROOT / name).exists()] == []
    others = ("webui", "browser", "amdgpu", "simt", "hip_library")
    assert [name for name in named if name.split("/")[1] in others] == []
    files = [path for path in re.findall(r"-r (\S+)", _commands(job)) if path]
    assert all((ROOT / path).is_file() for path in files)


def test_versions_of_python_are_text() -> None:
    """Unquoted, 3.10 is the number 3.1."""
    for job in _jobs().values():
        assert all(isinstance(each, str) for each in job["strategy"]["matrix"]["python"])


@pytest.mark.parametrize("form", FORMS, ids=lambda path: str(path.stem))
def test_a_form_is_one_that_github_takes(form: Path) -> None:
    content = _read(form)
    assert {"name", "description", "body"} <= set(content)
    identifiers = []
    for part in content["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        if part["type"] != "markdown":
            identifiers.append(part["id"])
            assert part["attributes"]["label"]
    assert len(identifiers) == len(set(identifiers)) > 0


def test_the_forms_ask_for_what_helps() -> None:
    asked = {form.stem: form.read_text(encoding="utf-8") for form in FORMS}
    assert set(asked) == {"bug", "card"}
    assert "-m lib_rocm_sd doctor`" in asked["bug"]
    assert "doctor --self-test`" in asked["card"]


def test_the_suites_workflow_asks_for_what_is_there() -> None:
    workflow = _read(ROOT / ".github" / "workflows" / "suite.yml")
    command = _commands(workflow["jobs"]["suite"])
    options = set(re.findall(r"--(\w+)", command))
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    assert options <= {option.lstrip("-") for option in parser._option_string_actions}
    (started,) = (workflow[key] for key in workflow if key in (True, "on"))  # YAML reads on as true
    presets = started["workflow_dispatch"]["inputs"]["preset"]["options"]
    assert set(presets) <= set(PRESETS) and list(started) == ["workflow_dispatch"]
