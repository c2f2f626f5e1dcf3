"""Checkpoints of real ranks come back in as many ranks and in others, of ecemb.nn and of TorchRec."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baselines.check_n_run.recovery import CheckNRun
from baselines.method import Training
from support import guarded_training
from support.processes import run_ranks
from support.torchrec import checkpoint_runs
from support.torchrec.checkpoint_runs import assert_same


def whole(script: guarded_training.Training) -> dict[str, list[Any]]:
    """Tables and the head, with their optimizer state, put together from all ranks."""
    found: dict[str, list[Any]] = dict(guarded_training.whole_tables(script))
    for number, parameter in enumerate(script.model.head.parameters()):
        state = script.dense.state[parameter]
        found |= {f"head {number} {name}": value.tolist() for name, value in state.items()}
        found[f"head {number}"] = parameter.tolist()
    return found


def life(folder: Path, end: int) -> tuple[int, int, dict[str, list[Any]], dict[str, list[Any]]]:
    """Where it begins, how many losses it knows then, and what there is then and in the end."""
    script = guarded_training.bags(device="cpu")
    method = CheckNRun(folder / "store", folder / "memory", policy="intermittent", every=1, process=False)
    begin = method.prepare(
        Training(script.model, [script.sparse, script.dense], script.tables, [script.progress])
    )
    begins, known = whole(script), len(script.progress.losses)
    for _ in range(begin, end):
        with method.step():
            script.body()
    method.close()
    return begin, known, begins, whole(script)


def test_ecembs_own_tables(tmp_path: Path) -> None:
    ends = run_ranks(2, life, tmp_path, 3)[0][3]
    for ranks, begin in ((3, 3), (1, 5), (2, 7)):
        told = run_ranks(ranks, life, tmp_path, begin + 2)
        for from_, known, begins, _ in told:
            assert (from_, known, begins) == (begin, min(begin, 4), ends)
        ends = told[0][3]


@pytest.mark.long  # test_torchrec_checkpoint.py has a job "differential"
def test_tables_of_torchrec_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    run = partial(checkpoint_runs.run, "check_n_run_worker.py")
    saved = run(3, "first", tmp_path, 2)
    fewer = run(2, "second", tmp_path, 4)
    assert_same(fewer["begins"], saved["ends"])
