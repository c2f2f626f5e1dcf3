"""Results are of the code that they measure."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench.harness import register, signature
from bench.harness.result import Arguments, document, write
from bench.harness.signature import seal, sources
from bench.questions.simulate import inputs
from bench.questions.simulate.profiles import PROFILES
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
    assert set(signature.CODE) == {*command.QUESTIONS, *tables.ELSEWHERE}
    for paths in signature.CODE.values():
        assert all((provenance.ROOT / path).exists() for path in paths)


def test_the_code_of_a_question_is_what_it_imports() -> None:
    overhead = signature.code("overhead")
    assert {"bench/workloads/models.py", "bench/harness/ranks.py", "baselines/live_copies.py"} < {*overhead}
    assert "baselines/cpr/pls.py" not in overhead
    assert "bench/workloads/pairs.py" in signature.CODE["overhead"] and len({*overhead}) == len(overhead)
    assert not {*signature.WRITERS} & {*overhead}
    assert "bench/harness/svg.py" not in signature.code("simulate"), "pictures are drawn from numbers"


def test_answers_that_a_question_starts_from_are_those_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def rows(path: Path) -> list[Mapping[str, Any]]:
        read.append(path)
        return []

    monkeypatch.setattr(inputs, "_rows", rows)
    inputs.inputs(PROFILES[0], tmp_path)
    assert {path.name for path in read} == {*signature.INPUTS["simulate"]}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is judged instead of the repository, with a folder for results."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(signature, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


def test_what_is_refused_and_what_is_stale(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path, results, code = checkout, checkout / "results", checkout / "code"
    code.mkdir()
    monkeypatch.setattr(signature, "CODE", {"weather": ("code", "other.py")})
    with pytest.raises(provenance.NoHistory):
        provenance.stale(results)

    def commit(content: str) -> str:
        (code / "one.py").write_text(content)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", content)
        return git(tmp_path, "rev-parse", "HEAD")

    def result(name: str, of: str, **more: object) -> None:
        write(results / name, {"question": "weather", "commit": of, "sources": blobs} | more)

    git(tmp_path, "init", "-q")
    first = commit("first")
    blobs = {"code/one.py": git(tmp_path, "rev-parse", "HEAD:code/one.py")}
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
    blob = blobs["code/one.py"]
    result("of-others.json", first, sources={"code/one.py": blob[::-1], "code/two.py": blob})
    result("of-nothing.json", first, sources={})
    result("quick.json", first, quick=True)
    unsealed = (results / "good.json").read_text().replace("seal", "label")
    (results / "unsealed.json").write_text(unsealed)
    found = provenance.refused(results)
    assert found.pop("unsealed.json") == "without a seal: it was not written by bench.harness.result"
    assert found.pop("edited.json") == "not as it was written: its seal does not fit its content"
    assert found.pop("of-others.json").endswith("those of its commit: code/one.py, code/two.py")
    assert found.pop("of-nothing.json") == "names no file of code that it was measured with"
    assert found.pop("quick.json") == "quick: its numbers are not for quoting"
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


def test_what_starts_from_a_stale_result_is_stale(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = checkout / "results"
    code = {"weather": ("one.py",), "sum": ("two.py",), "all": ("three.py",)}
    monkeypatch.setattr(signature, "CODE", code)
    monkeypatch.setattr(signature, "INPUTS", {"sum": ("rain.json",), "all": ("z.json",)})
    for (name,) in code.values():
        (checkout / name).write_text("x = 1\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "code")
    head = git(checkout, "rev-parse", "HEAD")

    def answer(name: str, question: str) -> None:
        write(results / name, {**document(question, Arguments(results=results), []), "commit": head})

    answer("rain.json", "weather")
    answer("z.json", "sum")
    answer("a.json", "all")
    assert provenance.stale(results) == {} == provenance.refused(results)
    (checkout / "one.py").write_text("x = 2\n")
    assert provenance.stale(results) == {
        "a.json": "starts from what is stale: z.json",
        "rain.json": "changed since: one.py",
        "z.json": "starts from what is stale: rain.json",
    }
    (checkout / "one.py").write_text("x = 1\n")
    write(results / "rain.json", {**document("weather", Arguments(seed=1), []), "commit": head})
    assert provenance.stale(results) == {
        "a.json": "starts from what is stale: z.json",
        "z.json": "starts from what is another now: rain.json",
    }


def test_what_a_result_names_counts_as_its_code(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "CODE", {"weather": ("one.py",)})
    for name in ("one.py", "two.py"):
        (checkout / name).write_text("x = 1\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "code")
    blob, head = git(checkout, "rev-parse", "HEAD:one.py"), git(checkout, "rev-parse", "HEAD")
    sources = dict.fromkeys(("one.py", "two.py"), blob)
    write(checkout / "results/rain.json", {"question": "weather", "commit": head, "sources": sources})
    assert provenance.refused(checkout / "results") == provenance.stale(checkout / "results") == {}
    (checkout / "two.py").write_text("x = 2\n")
    assert provenance.stale(checkout / "results") == {"rain.json": "changed since: two.py"}


def test_an_edited_result_is_refused_whatever_its_fields_say(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signature, "CODE", {"weather": ("one.py",)})
    git(checkout, "init", "-q")
    path = checkout / "results/rain.json"
    heads: list[str] = []
    for number in range(2):
        (checkout / "one.py").write_text(f"x = {number}\n")
        git(checkout, "add", "-A")
        git(checkout, "commit", "-qm", "code")
        heads.append(git(checkout, "rev-parse", "HEAD"))
        if not number:
            made = {**document("weather", Arguments(), []), "commit": heads[0], "rows": [{"value": 1.5}]}
            write(path, made)
            git(checkout, "add", "-A")
            git(checkout, "commit", "-qm", "a result")
    signed = json.loads(path.read_text())
    assert provenance.refused(path.parent) == {}
    edits: list[dict[str, object]] = [
        {"commit": heads[1]},
        {"rows": [{"value": 1.25}]},
        {"sources": signed["sources"] | {"one.py": git(checkout, "rev-parse", "HEAD:one.py")}},
        {"seal": "0" * 64},
        {"machine": {}},
    ]
    for edit in edits:
        path.write_text(json.dumps(signed | edit))
        assert provenance.refused(path.parent) == {
            "rain.json": "not as it was written: its seal does not fit its content"
        }
    moved = signed | {"commit": heads[1]}  # with a seal that fits
    path.write_text(json.dumps(moved | {"seal": seal(moved)}))
    assert provenance.refused(path.parent) == {
        "rain.json": "measured with other files than those of its commit: one.py"
    }


def test_a_result_has_its_line_in_the_register(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, runs = checkout / "results", checkout / "results" / register.NAME
    monkeypatch.setattr(signature, "CODE", {"weather": ("one.py",)})
    monkeypatch.setattr(register, "RUNS", runs)
    (checkout / "one.py").write_text("x = 1\n")
    (checkout / "bench/harness").mkdir(parents=True)
    (checkout / "bench/harness/register.py").write_text("")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "code")
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setattr(register, "commit", lambda: head)

    def measure(seed: int) -> None:
        write(results / "rain.json", {**document("weather", Arguments(seed=seed), []), "commit": head})

    with register.registered("weather", "python -m bench weather", results / "rain.json"):
        measure(0)
    assert provenance.refused(results) == {}
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "a result")
    measure(1)
    assert provenance.refused(results) == {"rain.json": "no run in runs.jsonl has kept it"}
    measure(0)
    with register.registered("weather", "python -m bench weather", results / "rain.json"):
        pass
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "a run of which nothing came")
    assert provenance.refused(results) == {}
    runs.write_text("".join(runs.read_text().splitlines(keepends=True)[:2]))
    lost = {register.NAME: "lines were removed or changed: they are only added"}
    assert provenance.refused(results) == lost
    git(checkout, "commit", "-qam", "the run is dropped")
    assert provenance.refused(results) == lost


def test_a_document_names_the_modules_that_it_was_measured_with() -> None:
    blob = git(provenance.ROOT, "hash-object", provenance.__file__)
    found = sources("recovery")
    assert found["bench/report/provenance.py"] == blob
    assert not any(path.startswith(".venv") for path in found)
    assert {"bench/questions/recovery/rank.py", "ecemb/start/opening.py"} < {*found}, "ranks run these"
