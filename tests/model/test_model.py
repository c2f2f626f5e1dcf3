"""The bounded form of the model: small jobs completely, and the counterexamples that few states show.

`make model` searches the larger jobs, and looks for every rule's counterexample.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from model.rules import ALL, Config, Rules
from model.run import ALL_ENTRIES, ALL_FULL, ALL_QUICK, TABLES, searched
from model.search import Searched, search
from model.table import Entry

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text().splitlines()
FEW_STATES = 65_000
FURTHER = {
    "old_join_the_move",
    "live_before_join",
    "leftovers_after_open",
    "joined_is_not_opened",
}
"""Rules whose counterexamples lie beyond `FEW_STATES`: `make model` looks for these."""
SHOWN = [entry for entry in ALL_ENTRIES if entry.rule not in FURTHER]


@pytest.mark.slow
@pytest.mark.parametrize("config", ALL_QUICK, ids=str)
def test_the_protocol_holds(config: Searched) -> None:
    result = search(config)
    assert result.complete, "\n".join(result.trace)
    assert searched(config, result.states) in DOCUMENT, "python tests/model --searched prints the lines"


@pytest.mark.slow
@pytest.mark.parametrize("entry", SHOWN, ids=lambda entry: f"{entry.rule}-{entry.config}")
def test_a_rule_that_is_switched_off_shows_why_it_is_there(entry: Entry) -> None:
    result = search(entry.config, ALL.without(entry.rule), limit=FEW_STATES)
    assert result.broken.partition(":")[0] == entry.kind, "\n".join(result.trace)


def test_more_losses_than_parity_are_always_refused() -> None:
    result = search(Config(n=2, k=1, size=2, steps=1, crashes=1, losses=2))
    assert result.complete, "\n".join(result.trace)


def test_every_rule_is_in_a_table() -> None:
    for entries in TABLES:
        assert len({entry.rule for entry in entries}) == len(entries)
    assert {entry.rule for entry in ALL_ENTRIES} == {field.name for field in dataclasses.fields(Rules)}
    assert len(SHOWN) + len(FURTHER) == len(ALL_ENTRIES)


def test_the_document_has_every_search() -> None:
    lines = [line.rsplit("|", 3)[0] for line in DOCUMENT if line.endswith("| fine |")]
    assert sorted(lines) == sorted(searched(config, 0).rsplit("|", 3)[0] for config in ALL_FULL)


def test_the_document_has_the_tables() -> None:
    lines = DOCUMENT
    shown = [
        line for line in lines if line.startswith("| `") and line.split("`")[1] in Rules.__dataclass_fields__
    ]
    assert [line.rpartition(" N=")[0] for line in shown] == [entry.text() for entry in ALL_ENTRIES]
