"""The bench of quantization: every figure that is asked for, and none of what is wrong."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from bench.harness.result import Arguments, Row, WrongResult, document
from bench.questions.quantization import picture as quantization_picture
from bench.questions.quantization import question as quantization
from bench.questions.quantization import rivals as quantization_rivals
from bench.questions.quantization.rivals import FBGEMM, SCIKIT_LEARN, TORCH, TORCHAO, scikit_learn
from bench.questions.quantization.tables import MET, trained
from bench.report import pages


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return quantization.run(Arguments(quick=True))


def of(rows: list[Row], metric: str, **labels: object) -> dict[object, float]:
    """Method -> value."""
    chosen = [row for row in rows if row.metric == metric and labels.items() <= row.labels.items()]
    return {row.labels.get("method"): row.value for row in chosen}


def test_errors_are_in_the_published_order(rows: list[Row]) -> None:
    for table in ("trained", "normal", "uniform"):
        for bits in (2, 3, 4):
            lost = of(rows, "l2_error", table=table, bits=bits)
            ordered = [lost[name] for name in ("symmetric", "asymmetric", "adaptive", SCIKIT_LEARN)]
            assert ordered == sorted(ordered, reverse=True), (table, bits)
            over = of(rows, "error_over_kmeans", table=table, bits=bits)
            assert over["adaptive"] == pytest.approx(lost["adaptive"] / lost[SCIKIT_LEARN])
            assert over["kmeans"] < 1.02
        lost = of(rows, "l2_error", table=table, bits=8)
        assert lost[FBGEMM] == pytest.approx(lost["asymmetric"], rel=0.01)
    torchs = [row for row in rows if row.metric == "error_over_torchs_search"]
    assert len(torchs) == 12 and all(row.high < 1.0001 for row in torchs)


def test_all_rivals_are_timed(rows: list[Row]) -> None:
    own = {"symmetric", "asymmetric", "adaptive"}
    expected = {
        2: own | {"kmeans", SCIKIT_LEARN, TORCH, FBGEMM, TORCHAO},
        3: own | {"kmeans", SCIKIT_LEARN, TORCHAO},
        4: own | {"kmeans", SCIKIT_LEARN, TORCH, FBGEMM, TORCHAO},
        8: own | {FBGEMM, TORCHAO},
    }
    for bits, names in expected.items():
        rate = of(rows, "rows_per_s", bits=bits)
        assert set(rate) == names
        gigabytes = of(rows, "encode_gb_per_s", bits=bits)
        assert gigabytes == pytest.approx({name: 128e-9 * value for name, value in rate.items()})
        assert set(of(rows, "decode_gb_per_s", bits=bits)) == names - {SCIKIT_LEARN}
        faster = of(rows, "times_faster_than", bits=bits)
        assert set(faster) == names & {"kmeans", SCIKIT_LEARN, TORCH}
        assert bits == 8 or faster[SCIKIT_LEARN] > 100


def test_rows_are_as_much_smaller_as_their_bits_say(rows: list[Row]) -> None:
    assert of(rows, "compression", bits=2, metadata="float32")["adaptive"] == 128 / (8 + 8)
    assert of(rows, "compression", bits=4, metadata="float16")["kmeans"] == 128 / (16 + 32)


def test_what_is_too_far_off_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(5, 16)
    few, many = torch.ones(5), torch.full((5,), 1.001)
    quantization.check(given, 4, few, few, few, few)
    with pytest.raises(WrongResult, match=r"4 bits is worse than asymmetric on row 0: 1\.00"):
        quantization.check(given, 4, many, few, few, few)
    with pytest.raises(WrongResult, match="worse than PyTorch's search"):
        quantization.check(given, 4, few, few, many, few)
    monkeypatch.setattr(quantization, "decode", lambda encoded, scheme, width: given + 1)
    with pytest.raises(WrongResult, match="further off than one step"):
        quantization.check(given, 4, few, few, few, few)


def test_rivals_that_are_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_rivals.importlib.util, "find_spec", lambda name: None)
    assert set(quantization_rivals.rivals(2)) == {FBGEMM, TORCH}


def test_scikit_learns_errors_are_those_of_its_centroids() -> None:
    row = torch.tensor([[0.0, 0.1, 1.0, 1.2, 5.0, 5.0, 9.0, 9.4]])
    expected = (2 * 0.05**2 + 2 * 0.1**2 + 2 * 0.2**2) ** 0.5
    assert scikit_learn(row, 2).item() == pytest.approx(expected, rel=1e-5)
    assert scikit_learn(torch.ones(1, 4), 2).item() == 0


def test_trained_rows_are_trained() -> None:
    found = trained(50, 8, 3, steps=20, batch=MET * 2)
    assert found.shape == (50, 8) and found.isfinite().all()
    assert found.equal(trained(50, 8, 3, steps=20, batch=MET * 2))
    assert found.abs().max() > 8**-0.5  # where they began


def test_the_picture_has_a_panel_for_each_table(rows: list[Row]) -> None:
    ((file, _, draw),) = pages.PICTURES["quantization"]
    drawn = draw(document("quantization", Arguments(), rows)["rows"])
    assert draw is quantization_picture.draw and file.endswith(".svg")
    assert drawn == draw(document("quantization", Arguments(), rows)["rows"])
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    for table in ("trained", "normal", "uniform"):
        assert texts.count(f"rows: {table}") == 1
    assert {name.partition(" ")[0] for name in quantization_picture.LOOKS} <= set(texts)
    assert "bits, adaptive ranges leave" in drawn
