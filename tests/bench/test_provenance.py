"""Results are of the code that they measure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.report import provenance, tables


@pytest.fixture
def history() -> None:
    try:
        provenance.stale()
    except provenance.NoHistory as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("history")
def test_results_are_clean_and_of_the_code_that_they_measure() -> None:
    assert provenance.refused() == {}, "measure them again, from a clean commit"


@pytest.mark.usefixtures("history")
def test_what_is_stale_is_noted() -> None:
    assert provenance.noted() == provenance.stale(), "run `python -m bench report`"


def test_each_question_has_its_code() -> None:
    assert set(provenance.CODE) == {*command.QUESTIONS, *tables.ELSEWHERE}
    for paths in provenance.CODE.values():
        assert all((provenance.ROOT / path).exists() for path in paths)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_is_refused_and_what_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    results, code = tmp_path / "results", tmp_path / "code"
    results.mkdir()
    code.mkdir()
    monkeypatch.setattr(provenance, "CODE", {"weather": ("code", "other.py")})
    with pytest.raises(provenance.NoHistory):
        provenance.stale(results)

    def commit(content: str) -> str:
        (code / "one.py").write_text(content)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", content)
        return git(tmp_path, "rev-parse", "HEAD")

    def result(name: str, of: str) -> None:
        (results / name).write_text(json.dumps({"question": "weather", "commit": of}))

    git(tmp_path, "init", "-q")
    first = commit("first")
    result("good.json", first)
    result("dirty.json", f"{first}-dirty")
    result("foreign.json", "1" * 40)
    assert provenance.refused(results) == {
        "dirty.json": "made with uncommitted changes",
        "foreign.json": "its commit is not in the history",
    }
    assert provenance.stale(results) == {"foreign.json": "its commit is not in the history"}
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "results")
    commit('"""Says what first is."""\n\nfirst  # of all\n')
    assert "good.json" not in provenance.stale(results)
    commit("second")
    result("late.json", first)
    assert provenance.refused(results)["late.json"] == "older than code when it was committed"
    assert "good.json" not in provenance.refused(results)
    assert provenance.stale(results)["good.json"] == "changed since: code"
    (results / provenance.STALE).write_text(provenance.text(provenance.stale(results)))
    assert provenance.noted(results) == provenance.stale(results)
