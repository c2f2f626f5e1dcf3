"""TorchRec trainings of which ranks are killed under torchrun end as if nothing had happened, bit by bit.

One model has many tables, since starting four ranks of TorchRec takes seconds: bags and sequences of every
sharding type with every optimizer and precision; of other kinds, each of these in some combination.
`support/torchrec/kill_matrix.py` takes them one by one.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.torchrec.runs import (
    FEW,
    KILLED,
    Kill,
    Setting,
    differences,
    every_table,
    recoveries,
    rejoined,
    run,
    varied_tables,
)

pytestmark = [
    pytest.mark.skipif(find_spec("torchrec") is None, reason="needs torchrec (CONTRIBUTING.md)"),
]

WITH_FEW = [f"{kind}/fp32/rowwise-adagrad/{FEW}" for kind in KILLED["plain"]]
"""The first tables of their batches on the last rank, which has no rows of them."""


def check(folder: Path, setting: Setting, kills: tuple[Kill, ...]) -> list[str]:
    """Trains undisturbed and unprotected, and again with kills; returns what the recoveries were."""
    expected = run(folder / "undisturbed", dataclasses.replace(setting, stays=False))
    disturbed = dataclasses.replace(setting, protected=True, kills=kills)
    found = run(folder / "killed", disturbed)
    assert differences(expected, found) == []
    assert all(
        (folder / "killed" / f"killed.{i}.{rank}").exists() for i, k in enumerate(kills) for rank in k.ranks
    )
    return recoveries(folder / "killed")


def test_every_sharding_type_and_optimizer_survives(tmp_path: Path) -> None:
    tables = (*WITH_FEW, *every_table(*KILLED["plain"]), *varied_tables(*KILLED["weighted"]))
    setting = Setting(tables, steps=7, load=2, aborts=(3,))
    process = Kill(1, (2,), "backward", part=0.5)
    memory = Kill(4, (0, 3), wipe=True)
    assert check(tmp_path, setting, (process, memory)) == ["fresh 0", "process 1", "memory 4 0 3"]


@pytest.mark.parametrize(
    ("tables", "settings"),
    [
        pytest.param(varied_tables(*KILLED["plain"]), {"load": 2, "aborts": (3,)}, id="plain"),
        pytest.param(varied_tables(*KILLED["dense parts"]), {}, id="dense parts", marks=pytest.mark.long),
        pytest.param(varied_tables(*KILLED["weighted"]), {}, id="weighted", marks=pytest.mark.long),
        pytest.param(varied_tables(*KILLED["managed"]), {}, id="managed", marks=pytest.mark.long),
        pytest.param(varied_tables(*KILLED["groups"]), {"groups": 2}, id="groups", marks=pytest.mark.long),
        pytest.param(
            varied_tables(*KILLED["plain"]), {"rebuild": "background"}, id="beside", marks=pytest.mark.long
        ),
    ],
)
def test_processes_stay_and_shard_the_model_again(
    tmp_path: Path, tables: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """TorchRec's groups and agreements of once in a process are made again, with the replacement."""
    setting = Setting(tables, steps=7, stays=True, **settings)
    kills = (Kill(1, (2,), "backward", part=0.5), Kill(3, (0, 3), wipe=True), Kill(5, (2,)))
    assert check(tmp_path, setting, kills) == ["fresh 0", "process 1", "memory 3 0 3", "process 5"]
    assert rejoined(tmp_path / "killed", setting.ranks)[1] == len(kills)


@pytest.mark.long
def test_every_sharding_type_trains_on_while_lost_ranks_are_rebuilt(tmp_path: Path) -> None:
    """Rows that a lookup needs come first; with NaN in the place of the others, that shows."""
    tables = (*WITH_FEW, *every_table(*KILLED["plain"]), *varied_tables("weighted", "processed"))
    setting = Setting(tables, steps=11, aborts=(3,), rebuild="background")
    kills = (Kill(1, (0, 3), "body", wipe=True), Kill(5, (2,), "backward", part=0.5, wipe=True))
    more = (Kill(6, (1,), "body"), Kill(9, (1, 2), "body", wipe=True))
    found = ["fresh 0", "memory 1 0 3", "memory 5 2", "memory 6 2", "memory 9 1 2"]
    assert check(tmp_path, setting, (*kills, *more)) == found


@pytest.mark.long
def test_managed_collisions_train_on_while_lost_ranks_are_rebuilt(tmp_path: Path) -> None:
    """Their tables come before the first step, since their lookups can't be announced."""
    setting = Setting(varied_tables(*KILLED["managed"]), steps=7, rebuild="background")
    kills = (Kill(2, (0, 3), "body", wipe=True), Kill(5, (1,), "body", wipe=True))
    assert check(tmp_path, setting, kills) == ["fresh 0", "memory 2 0 3", "memory 5 1"]


R1, R2 = (4, 3), (4, 2)
CODES = [pytest.param(R1, id="r = 1", marks=pytest.mark.long), pytest.param(R2, id="r = 2")]


@pytest.mark.long
def test_weighted_features_and_variable_batches_survive_with_one_parity_block(tmp_path: Path) -> None:
    check_of(tmp_path, KILLED["weighted"], R1)


@pytest.mark.long
@pytest.mark.parametrize("code", CODES)
def test_feature_processors_and_fused_collections_survive(tmp_path: Path, code: tuple[int, int]) -> None:
    check_of(tmp_path, KILLED["dense parts"], code)


@pytest.mark.parametrize("code", CODES)
def test_writes_of_whole_tables_survive(tmp_path: Path, code: tuple[int, int]) -> None:
    """By load_state_dict() in step 2, by the script in step 4, and by FBGEMM's averages in other steps.

    Step 2 loses a process first, and then, when it runs again, memory.
    """
    setting = Setting(
        varied_tables(*KILLED["whole tables"]), code=code, steps=8, load=2, write=4, aborts=(5,)
    )
    lost = (0, 3)[: code[0] - code[1]]
    kills = (
        Kill(2, (1,), "backward", part=0.3),
        Kill(2, lost, "body", wipe=True),
        Kill(4, lost, "body", wipe=True),
        Kill(6, (1,), "body"),
    )
    names = " ".join(map(str, lost))
    memory = [f"memory 2 {names}", f"memory 4 {names}"]
    assert check(tmp_path, setting, kills) == ["fresh 0", "process 2", *memory, "process 6"]


@pytest.mark.long
@pytest.mark.parametrize("code", CODES)
def test_averages_of_2d_parallelism_survive(tmp_path: Path, code: tuple[int, int]) -> None:
    """Two groups of two ranks, averaged in steps 1, 3 and 5; ranks die just after they were."""
    setting = Setting(varied_tables(*KILLED["groups"]), code=code, steps=7, groups=2, aborts=(2,))
    lost = (0, 3)[: code[0] - code[1]]
    kills = (Kill(1, (2,), "synced"), Kill(3, lost, "synced", wipe=True), Kill(6, (1,), "body"))
    memory = f"memory 3 {' '.join(map(str, lost))}"
    assert check(tmp_path, setting, kills) == ["fresh 0", "process 1", memory, "process 6"]


@pytest.mark.parametrize("code", CODES)
def test_managed_collisions_survive(tmp_path: Path, code: tuple[int, int]) -> None:
    """Under each eviction policy; rows go from one id to another before the first kill and after the last.

    A new job that begins from a checkpoint of step 8 ends with the same bits as well.
    """
    setting = Setting(varied_tables(*KILLED["managed"]), code=code, steps=11, aborts=(3,), save=8)
    lost = (0, 3)[: code[0] - code[1]]
    kills = (Kill(4, (2,), "body"), Kill(5, lost, "evicted", wipe=True), Kill(7, (1,), "evicted"))
    memory = f"memory 5 {' '.join(map(str, lost))}"
    assert check(tmp_path, setting, kills) == ["fresh 0", "process 4", memory, "process 7"]
    for rank in range(setting.ranks):
        for name in ("evictions", "reused"):
            lines = (tmp_path / "killed" / f"{name}.{rank}").read_text().splitlines()
            steps = [int(line.split()[0]) for line in lines]
            assert min(steps) < 4 and max(steps) > 7
    if code == R1:
        check_resume(tmp_path, setting)


def check_resume(folder: Path, setting: Setting) -> None:
    """A new job goes on from the checkpoint of the killed one, and ends as the undisturbed training did."""
    resume = dataclasses.replace(
        setting, protected=True, job="resumed", resume=str(folder / "killed" / "saved")
    )
    found = run(folder / "resumed", resume)
    assert recoveries(folder / "resumed") == ["checkpoint 9"]
    expected = [
        torch.load(folder / "undisturbed" / f"end.{rank}", weights_only=True) for rank in range(setting.ranks)
    ]
    assert differences(expected, found) == []


def check_of(folder: Path, collections: tuple[str, ...], code: tuple[int, int]) -> None:
    """Kills a process, then the memory of as many ranks as the code survives."""
    setting = Setting(varied_tables(*collections), code=code, steps=7, load=2, aborts=(3,))
    lost = (0, 3)[: code[0] - code[1]]
    kills = (Kill(1, (2,), "backward", part=0.5), Kill(4, lost, "body", wipe=True))
    names = " ".join(map(str, lost))
    assert check(folder, setting, kills) == ["fresh 0", "process 1", f"memory 4 {names}"]


def test_a_pipeline_survives(tmp_path: Path) -> None:
    tables = (
        "bags/fp32/sgd/row_wise",
        "bags/fp32/adagrad/column_wise",
        "bags/fp16/rowwise-adagrad/table_wise",
        "bags/fp32/rowwise-adagrad/data_parallel",
    )
    setting = Setting(tables, ranks=2, code=(2, 1), steps=7, pipeline=True, aborts=(3,))
    kill = Kill(2, (1,), "backward", part=0.5, wipe=True)
    assert check(tmp_path, setting, (kill,)) == ["fresh 0", "memory 2 1"]
