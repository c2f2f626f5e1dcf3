"""Quality after failures: parity in one process, going back, and the answer on planted data and on files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import __main__ as command
from bench.harness.result import Arguments, Row, WrongResult, document, write
from bench.questions.quality import question as quality
from bench.questions.quality.coded import Coded
from bench.questions.quality.methods import IDENTICAL, UNDISTURBED, Nothing, Rollback, methods
from bench.questions.quality.question import Size, same, trained
from bench.report import pages, tables
from bench.workloads import planted
from bench.workloads.click_training import Failure, Model, train
from bench.workloads.clicks import Clicks, Data, take
from bench.workloads.criteo import CRITEO
from ecemb.coding.code import Code
from ecemb.errors import CodeError
from support.click_files import criteo, written

SMALL = Size(steps=12, batch=32, held_out=400, seeds=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operators are too small to be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = criteo(784)
    text.insert(5, "nonsense")
    return written(tmp_path_factory.mktemp("data") / "train.txt", text)


@pytest.fixture(scope="module")
def data(file: Path) -> Data:
    return take(file, CRITEO, SMALL.steps, SMALL.batch, SMALL.held_out)[0]


def random_tables(generator: torch.Generator) -> dict[str, dict[str, Tensor]]:
    def floats(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator)

    return {f"table {rows}": {"weight": floats(rows, 4), "sum": floats(rows, 2)} for rows in (1, 3, 17, 40)}


def change(tables: dict[str, dict[str, Tensor]], kept: Coded, generator: torch.Generator) -> None:
    for name, tensors in tables.items():
        rows = (torch.rand(len(tensors["weight"]), generator=generator) < 0.3).nonzero().squeeze(1)
        kept.touch(name, rows)
        for tensor in tensors.values():
            tensor[rows] += torch.randn(len(rows), tensor.shape[1], generator=generator)
    kept.end(0)


def flat(tables: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name} {kind}": tensor.clone() for name, one in tables.items() for kind, tensor in one.items()}


@pytest.mark.parametrize("code", [Code(2, 1), Code(4, 3), Code(6, 4), Code(7, 4)])
def test_parity_gives_back_any_servers_that_the_code_survives(code: Code) -> None:
    generator = torch.Generator().manual_seed(1)
    tables = random_tables(generator)
    kept = Coded(tables, 8, code)
    for lost in (range(code.r), (7, *range(1, code.r)), range(3, 3 + code.r)):
        change(tables, kept, generator)
        before = flat(tables)
        kept.fail(0, tuple(lost))
        assert same(flat(tables), before), lost


def test_more_servers_than_the_code_survives_are_refused() -> None:
    kept = Coded(random_tables(torch.Generator()), 8, Code(4, 3))
    with pytest.raises(CodeError, match="exactly k = 3 available blocks"):
        kept.fail(0, (1, 2))


def test_parity_that_missed_a_change_gives_back_something_else() -> None:
    tables = random_tables(torch.Generator())
    kept = Coded(tables, 8, Code(3, 2))
    tables["table 40"]["weight"][0] += 1
    before = tables["table 40"]["weight"].clone()
    kept.fail(0, (0,))
    assert not torch.equal(tables["table 40"]["weight"], before)


def test_who_goes_back_trains_again_and_ends_the_same(data: Data) -> None:
    calm = Model.of(data, 3)
    assert train(calm, data, Nothing()) == 0
    failures = [Failure(2, (0,)), Failure(7, (1, 2)), Failure(7, (0,)), Failure(11, (3,))]
    model = Model.of(data, 3)
    assert train(model, data, Rollback(model, 4), failures) == 2 + 3 + 3 + 3
    assert same(model.state(), calm.state())
    with pytest.raises(RuntimeError, match=r"servers \[1\] fail after step 5"):
        train(Model.of(data, 3), data, Nothing(), [Failure(5, (1,))])


def test_states_are_compared_by_bytes() -> None:
    zero, minus = {"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}
    nan = {"a": torch.tensor([float("nan")])}
    assert same(zero, zero) and same(nan, nan)
    assert not same(zero, minus) and not same(zero, {}) and not same(zero, zero | nan | {"b": zero["a"]})


def test_methods_are_those_that_are_asked_about() -> None:
    names = list(methods(quality.RESTORES))
    assert names == [
        "ecemb (6, 4)",
        "full, steps run again",
        *(f"check-n-run, {bits} bits" for bits in (8, 4, 2)),
        *(f"cpr {kind}" for kind in ("vanilla", "mfu", "ssu")),
    ]
    assert quality.SETTING.every(quality.FULL.steps) == 40
    failures = quality.SETTING.failures(quality.FULL.steps, 0)
    assert len(failures) == 20 and {len(failure.servers) for failure in failures} == {2}


def of(rows: list[Row], metric: str) -> dict[str, Row]:
    return {str(row.labels["method"]): row for row in rows if row.metric == metric}


def check(rows: list[Row]) -> None:
    for method, row in of(rows, "bit_identical").items():
        auc, loss = (of(rows, metric)[method] for metric in ("auc_lost", "loss_added"))
        if method.startswith(IDENTICAL):
            assert row.value == 1 and auc.low == auc.high == loss.low == loss.high == 0
        elif method.startswith("check"):
            assert row.value == 0 and loss.high > loss.low, method
    assert of(rows, "auc")[quality.NO_MODEL].value == 0.5
    assert {*of(rows, "auc")} == {quality.NO_MODEL, UNDISTURBED, *methods(quality.RESTORES)}
    again, pls = of(rows, "steps_run_again"), of(rows, "pls")
    assert all((row.value > 0) == name.startswith(("full", "check")) for name, row in again.items())
    assert all((row.value > 0) == name.startswith("cpr") for name, row in pls.items())
    assert len({row.value for name, row in pls.items() if name.startswith("cpr")}) == 1


def test_the_answer_on_planted_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quality, "QUICK", SMALL)
    monkeypatch.setattr(planted, "ROWS", (500, 3, 40, 2000))
    rows = quality.run(Arguments(quick=True))
    check(rows)
    assert {row.labels["data"] for row in rows} == {quality.PLANTED}
    write(tmp_path / "quality.json", document("quality", Arguments(), rows))
    page = pages.render(tables.load(tmp_path))["results/quality.md"]
    assert "check-n-run, 2 bits" in page and "`auc_lost`" in page


def test_the_answer_on_a_file(
    monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(quality, "QUICK", SMALL)
    answer = tmp_path / "quality.json"
    command.main(["quality", "--quick", "--verbose", "--data", "criteo", str(file), "--json", str(answer)])
    shown = capsys.readouterr().out
    assert "criteo, train.txt" in shown and "line 6: it has 1 fields, not 40" in shown
    (row,) = (row for row in tables.load(tmp_path)[0]["rows"] if row["metric"] == "malformed_lines")
    assert (row["value"], row["read"]) == (1, 785)


def test_seeds_side_by_side_give_the_same_answer(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(quality, "QUICK", SMALL)
    monkeypatch.setattr(quality, "FULL", SMALL)
    one, other = (quality.run(Arguments(quick=quick, data=("criteo", file))) for quick in (True, False))
    assert one == other


def test_a_model_that_differs_is_no_answer(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "same", lambda one, other: False)
    with pytest.raises(WrongResult, match=r"ecemb \(6, 4\), seed 0: after failures, the model is not"):
        trained(data, 0)


def test_a_model_learns_what_is_in_a_file(data: Data) -> None:
    model = Model.of(data, 0)
    for _ in range(4):
        train(model, data, Nothing())
    assert model.judged(data.held_out).auc > 0.6


def test_what_is_asked_of_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.OF_DATA["quality"] == tuple(quality.FORMATS)
    for words, said in (
        (["drift", "--data", "criteo", "x"], "drift is not asked of data in the format 'criteo': []"),
        (["quality", "--data", "netflix", "x"], "format 'netflix': ['criteo', 'movielens']"),
        (["quality", "--data", "criteo"], "--data: expected 2 arguments"),
        (["quality", "--data", "movielens", str(tmp_path / "u.data")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit):
            command.main(words)
        assert said in capsys.readouterr().err


def test_a_guess() -> None:
    clicks = torch.tensor([1.0, 0.0, 0.0, 0.0])
    known = quality.guess(_data(clicks, clicks))
    assert known.auc == 0.5
    assert known.log_loss == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


def _data(training: Tensor, held_out: Tensor) -> Data:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    return Data(
        Clicks(torch.zeros(4, 1), ids, training), Clicks(torch.zeros(4, 1), ids, held_out), batch=1, rows=(1,)
    )
