"""Results are of the code that they measure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.harness.result import sources, write
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

    def result(name: str, of: str, **more: object) -> None:
        write(results / name, {"question": "weather", "commit": of, **more})

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
    result("edited.json", first, value=1.5)
    edited = (results / "edited.json").read_text().replace("1.5", "1.25")
    (results / "edited.json").write_text(edited)
    blob = git(tmp_path, "rev-parse", "HEAD:code/one.py")
    result("of-its-sources.json", first, sources={"code/one.py": blob})
    result("of-others.json", first, sources={"code/one.py": blob[::-1], "code/two.py": blob})
    unsealed = (results / "good.json").read_text().replace("seal", "label")
    (results / "unsealed.json").write_text(unsealed)
    found = provenance.refused(results)
    assert found.pop("unsealed.json") == "without a seal: it was not written by bench.harness.result"
    assert found.pop("edited.json") == "not as it was written: its seal does not fit its content"
    assert found.pop("of-others.json").endswith("those of its commit: code/one.py, code/two.py")
    assert found.keys() == {"dirty.json", "foreign.json"}
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


def test_what_starts_from_a_stale_result_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "CODE", {"weather": ("one.py",), "sum": ("results/rain.json",)})
    (tmp_path / "results").mkdir()
    (tmp_path / "one.py").write_text("one")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "code")
    write(
        tmp_path / "results/rain.json", {"question": "weather", "commit": git(tmp_path, "rev-parse", "HEAD")}
    )
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "an answer")
    write(tmp_path / "results/all.json", {"question": "sum", "commit": git(tmp_path, "rev-parse", "HEAD")})
    assert provenance.stale(tmp_path / "results") == {}
    (tmp_path / "one.py").write_text("two")
    assert provenance.stale(tmp_path / "results") == {
        "all.json": "starts from what is stale: rain.json",
        "rain.json": "changed since: one.py",
    }


def test_a_document_names_the_modules_that_it_was_measured_with() -> None:
    blob = git(provenance.ROOT, "hash-object", provenance.__file__)
    assert sources()["bench/report/provenance.py"] == blob
    assert not any(path.startswith(".venv") for path in sources())
