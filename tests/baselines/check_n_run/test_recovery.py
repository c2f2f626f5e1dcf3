"""Check-N-Run as a method, on one rank: training goes on bit by bit, with every policy.

Real ranks that are killed are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import ecemb
from baselines.check_n_run.codec import schemes_of
from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.quantize_scheme import EXACT, Scheme
from baselines.check_n_run.recovery import CheckNRun
from baselines.check_n_run.restoring import whole
from baselines.check_n_run.store import store_at
from baselines.method import Training
from support.one_rank_training import QUIET, OnBags, OnTorchRec, equal

pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]


def protected(training: Training, target: str | Path, memory: Path, **options: Any) -> tuple[CheckNRun, int]:
    method = CheckNRun(target, memory, **{"every": 2, "process": False, **options})
    return method, method.prepare(training)


def trained(script: Any, method: CheckNRun, begin: int, end: int) -> None:
    for _ in range(begin, end):
        with method.step():
            script.step()
    method.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [OnBags, OnTorchRec])
def test_training_goes_on_bit_by_bit(make: Any, policy: str, tmp_path: Path) -> None:
    target = f"memory://{secrets.token_hex(8)}"
    script = make()
    torch.manual_seed(5)
    method, begin = protected(script.training, target, tmp_path, policy=policy)
    assert begin == 0 and method.promise.bit_identical and method.promise.steps_again == 3
    trained(script, method, begin, 5)
    costs = method.costs()
    assert costs.written_bytes >= costs.stored_bytes > 0 and costs.stalled_s > 0 and costs.memory_bytes > 0
    assert not method.memory() and not [path for path in tmp_path.rglob("*") if path.is_file()]
    for last, end in ((4, 7), (6, 10)):
        again = make()
        again.step()  # all of it is overwritten
        torch.manual_seed(6)
        method, begin = protected(again.training, target, tmp_path, policy=policy)
        assert begin == last
        trained(again, method, begin, end)
        undisturbed = make()
        torch.manual_seed(5)
        for _ in range(end):
            undisturbed.step()
        assert equal(again.end(), undisturbed.end())


def test_a_process_writes_as_a_thread_does(tmp_path: Path) -> None:
    found: list[list[tuple[str, int, int]]] = []
    for process in (False, True):
        target, script = tmp_path / str(process), OnBags()
        torch.manual_seed(5)
        method, begin = protected(script.training, target, tmp_path, process=process, keep=3)
        trained(script, method, begin, 5)
        manifests = whole(store_at(target))
        found.append(
            [(chunk.table, chunk.size_bytes, chunk.crc) for one in manifests for chunk in one.chunks]
        )
    assert found[0] == found[1] and len(found[0]) > 9


def test_quantized_rows_come_back_as_near_as_their_scheme_says(tmp_path: Path) -> None:
    target, script = f"memory://{secrets.token_hex(8)}", OnBags()
    method, begin = protected(
        script.training, target, tmp_path, weights=Scheme("asymmetric", 8), states=EXACT, policy="consecutive"
    )
    assert not method.promise.bit_identical
    trained(script, method, begin, 4)
    before = {table.name: table.tensors for table in ecemb.tables(script.model, optimizers=script.adagrad)}
    again = OnBags()
    method, begin = protected(again.training, target, tmp_path, weights=1)
    assert begin == 4
    after = {table.name: table.tensors for table in ecemb.tables(again.model, optimizers=again.adagrad)}
    then, now = before["user"]["weight"].detach(), after["user"]["weight"].detach()
    steps = (then.max(dim=1).values - then.min(dim=1).values) / 255
    assert ((then - now).abs() <= 1.01 * steps[:, None]).all() and not torch.equal(then, now)
    assert torch.equal(before["user"]["sum"], after["user"]["sum"])
    with method.step():  # another policy: the next one is full, and with few restores planned, of few bits
        again.step()
    with method.step():
        again.step()
    method.close()
    (last,) = whole(store_at(target))
    assert last.facts.step == 6 and not last.facts.needs and last.facts.restores == 1
    assert last.facts.schemes["weight"]["bits"] == 2 and last.facts.schemes["state"]["method"] == "none"
    method, begin = protected(OnBags().training, target, tmp_path, weights=1)
    assert schemes_of(1, EXACT, method._restores)["weight"]["bits"] == 8  # more restores than planned
    method.close()
