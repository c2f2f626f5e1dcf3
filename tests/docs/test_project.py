"""The project's own files: YAML that parses, workflows and hooks that call what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "mkdocs.yml",
    ROOT / "CITATION.cff",
]
ACTIONS = {
    "actions/checkout",
    "actions/setup-python",
    "actions/upload-artifact",
    "actions/download-artifact",
    "pypa/gh-action-pypi-publish",
}
"""What workflows may run that is not of this repository."""


def parsed(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict), path
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_yaml_file_parses(path: Path) -> None:
    assert parsed(path)


def test_all_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_the_repository_has(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"} and True in workflow  # `on` is YAML's true
    for name, job in workflow["jobs"].items():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), name
            continue
        assert 0 < job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            action, _, version = step.get("uses", "").partition("@")
            assert not action or (action in ACTIONS and version), step
            command = step.get("run", "")
            for target in re.findall(r"\bmake ([a-z0-9-]+)", command):
                assert target in targets(), target
            for script in re.findall(r"(?<!\S)(\.[\w/.-]+/\w+)", command):
                assert (ROOT / script).is_file(), script


def test_ci_runs_what_contributors_run() -> None:
    runs = [step.get("run") for step in parsed(WORKFLOWS[0])["jobs"]["check"]["steps"]]
    assert ".ci/run" in runs


def test_only_publishing_has_an_identity() -> None:
    jobs = parsed(WORKFLOWS[-1])["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "ci"
    assert not re.search(r"secrets\.|password", "".join(path.read_text() for path in WORKFLOWS))


def test_hooks_use_the_tools_of_the_environment() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for repository in parsed(ROOT / ".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            program, *words = hook["entry"].split()
            assert program.startswith(".venv/bin/") and hook["language"] == "system"
            assert f"$(BIN)/{Path(program).name} {words[0]}" in makefile


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
def test_a_form_has_what_it_needs(path: Path) -> None:
    form = parsed(path)
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() >= {"name", "description", "body"}
    named = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert named and len(named) == len(set(named))
    assert all(part["attributes"]["label"] for part in form["body"] if part["type"] != "markdown")
    for page in re.findall(r"blob/main/([\w/.]+)", path.read_text()):
        assert (ROOT / page).is_file(), page


def test_security_says_what_the_assumptions_say() -> None:
    said, assumed = ((ROOT / name).read_text() for name in ("SECURITY.md", "docs/assumptions.md"))
    for fact in ("0700", "unpickled", "secret", "5 s", "no pickle", "Byzantine", "symbolic links"):
        assert fact.lower() in said.lower() and fact.lower() in assumed.lower(), fact
