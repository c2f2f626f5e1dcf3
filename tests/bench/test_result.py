from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import __main__ as command
from bench.harness.result import Arguments, Row, document, once, summary, table, write
from bench.harness.signature import seal

ROWS = [
    summary("update_ns_per_row", "ns", [3.0, 1.0, 2.5], kernel="cpu", r=2),
    summary("update_ns_per_row", "ns", [9.0], kernel="zfec", r=2),
    once("arena_over_tables", "ratio", 1.34, code="(4, 3)"),
]


def test_a_row_is_the_median_with_its_spread_and_its_labels() -> None:
    assert ROWS[0].to_json() == {
        "metric": "update_ns_per_row",
        "value": 2.5,
        "unit": "ns",
        "low": 1.0,
        "high": 3.0,
        "repeats": 3,
        "kernel": "cpu",
        "r": 2,
    }
    assert ROWS[2].repeats == 1


def test_a_row_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"labels \['value'\] have the name of a row's own key"):
        summary("x", "ns", [1.0], value=3)
    with pytest.raises(ValueError, match=r"4 is not within 1\.\.3"):
        Row("x", 4, "ns", 1, 3, 2)


def test_the_document_has_the_keys_of_the_form(tmp_path: Path) -> None:
    content = document("kernels", Arguments(seed=7), ROWS)
    assert list(content) == ["question", "commit", "machine", "versions", "seed", "sources", "rows"]
    assert content["seed"] == 7
    assert {"processor", "cores", "memory_bytes", "system"} == set(content["machine"])
    assert {"python", "numpy"} <= set(content["versions"])
    path = tmp_path / "raw.json"
    write(path, content)
    assert json.loads(path.read_text()) == {**content, "seal": seal(content)}
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_says_how_it_was_made() -> None:
    arguments = Arguments(True, 3, "sparse", "dlrm", (Path("a/b.json"),), "2", ("criteo", Path("c/d")))
    content = document("overhead", arguments, ROWS, 1.234)
    assert list(content)[4:] == ["seed", "command", "minutes", "quick", "sources", "rows"]
    assert content["command"] == (
        "python -m bench overhead --engine sparse --setting dlrm --trace b.json --system 2 --data criteo d "
        "--seed 3 --quick"
    )
    assert content["minutes"] == 1.23


def test_the_table_has_one_part_for_each_metric() -> None:
    assert table(ROWS).splitlines() == [
        "update_ns_per_row",
        "  kernel  r   ns  low  high  repeats",
        "  cpu     2  2.5    1     3        3",
        "  zfec    2    9    9     9        1",
        "",
        "arena_over_tables",
        "  code    ratio   low  high  repeats",
        "  (4, 3)   1.34  1.34  1.34        1",
    ]


def test_the_command_asks_the_question_and_writes_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Arguments] = []

    def run(arguments: Arguments) -> list[Row]:
        asked.append(arguments)
        return ROWS

    module = ModuleType("bench.questions.weather.question")
    monkeypatch.setattr(module, "run", run, raising=False)
    monkeypatch.setitem(sys.modules, "bench.questions.weather.question", module)
    monkeypatch.setitem(command.QUESTIONS, "weather", "whether it rains")
    command.main(["weather", "--quick", "--seed", "3", "--json", str(tmp_path / "raw.json")])
    assert asked == [Arguments(quick=True, seed=3)]
    said = "update_ns_per_row 2.5 to 9 ns; arena_over_tables 1.34 ratio"
    last = f"3 figures: {tmp_path / 'raw.json'}; --verbose prints them all"
    assert capsys.readouterr().out.splitlines() == [said, last]
    command.main(["weather", "--quick", "--verbose", "--json", str(tmp_path / "raw.json")])
    assert capsys.readouterr().out.startswith(table(ROWS) + "\n")
    assert json.loads((tmp_path / "raw.json").read_text())["question"] == "weather"


def test_an_engine_that_the_question_is_not_asked_of(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["overhead", "--engine", "steam"], ["kernels", "--engine", "sparse"]):
        with pytest.raises(SystemExit):
            command.main(words)
        assert "is not asked of the engine" in capsys.readouterr().err


def test_a_setting_that_the_question_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["overhead", "--setting", "steam"], ["kernels", "--setting", "dlrm"]):
        with pytest.raises(SystemExit):
            command.main(words)
        assert "has no setting" in capsys.readouterr().err


def test_a_question_that_nobody_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["astrology"])
    assert "invalid choice: 'astrology'" in capsys.readouterr().err
