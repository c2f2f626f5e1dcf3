"""Mutants of a module."""

from __future__ import annotations

import ast
from argparse import ArgumentTypeError
from collections import Counter
from pathlib import Path

import pytest

from mutants.__main__ import PACKAGES, STAGES, Outcome, sample, stages_of, table
from mutants.changes import mutants

ECEMB = Path(__file__).resolve().parents[2] / "ecemb"


def changed(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "module.py"
    path.write_text(source)
    return [one.apply(source.encode()).decode() for one in mutants(tmp_path, path)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return a < b", ["return (a <= b)"]),
        ("return a and not b", ["return (a or not b)", "return a and (b)"]),
        ("return a + 3", ["return (a - 3)", "return a + 4"]),
        ("if a.b:\n        return", ["if (not a.b):\n        return"]),
        ("return a if b else c", ["return a if (not b) else c"]),
        ("a.b = c", ["pass"]),
        ("a.sync()", ["pass"]),
        ("raise Wrong(f'{a + b}')", ["pass"]),
        ("while True:\n        break", ["while False:\n        break", "while True:\n        continue"]),
        ("logger.info('%d', a + b)", []),
        ('"""Only words."""', []),
        ("a: Left | Right = b", []),
    ],
)
def test_each_change_is_made_alone(tmp_path: Path, before: str, after: list[str]) -> None:
    source = "def act(a, b, c):\n    é = a\n    {}\n"
    assert changed(tmp_path, source.format(before)) == [source.format(one) for one in after]


def test_constants_of_a_module_are_left_alone(tmp_path: Path) -> None:
    assert changed(tmp_path, "LIMIT = 3 + 4\n\n\nclass Box:\n    size: int = 3\n") == []


def test_changes_of_the_same_words_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def act(a):\n    return a[0] + a[0]\n")
    names = [one.name for one in mutants(tmp_path, path)]
    assert len(set(names)) == len(names) == 3


def test_mutants_of_the_product_are_programs() -> None:
    for path in sorted((ECEMB / "step").glob("*.py")):
        source = path.read_bytes()
        for one in mutants(ECEMB.parent, path)[::20]:
            assert ast.dump(ast.parse(one.apply(source))) != ast.dump(ast.parse(source)), one.name


def test_a_package_with_few_mutants_leaves_the_others_theirs() -> None:
    most = 600
    drawn = Counter(Path(one.path).parts[1] for one in sample(most, 1))
    assert min(drawn.values()) < max(drawn.values()) == most
    assert set(drawn) == set(PACKAGES)


def test_stages_that_are_none_are_refused() -> None:
    assert stages_of("near,all") == ("near", "all")
    with pytest.raises(ArgumentTypeError, match=r"there are no stages \['nera'\]; the stages are near, "):
        stages_of("nera,all")


def test_equivalent_mutants_do_not_count_as_missed(capsys: pytest.CaptureFixture[str]) -> None:
    tried = [
        Outcome(name, "step", "logic", stage, STAGES, "")
        for name, stage in (("a", "near"), ("b", "simulator"), ("c", ""), ("d", ""))
    ]
    rows = table({"c": "has no effect"}, tried)
    shares = {row.labels["package"]: row.value for row in rows if row.metric == "noticed"}
    assert shares["step"] == shares["all packages"] == pytest.approx(2 / 3)
    assert [row.labels["change"] for row in rows if row.metric == "survivor"] == ["d"]
    assert "| step | 4 | 1 | 67 % | 1 | 1 | 0 | 0 |" in capsys.readouterr().out
