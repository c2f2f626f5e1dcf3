"""Runs of run_worker.py under torchrun, and what they end with, compared bit by bit."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support import agents

IMPORTS = "support.torchrec.fork_server_imports"
HERE = Path(__file__).resolve().parent
SHARDINGS = (
    "row_wise",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
FEW = "few_row_wise"
"""By rows, of which the last rank has none; another table of the batch has some there, as FBGEMM needs."""
SEQUENCE_SHARDINGS = ("row_wise", "table_wise", "column_wise")  # FBGEMM pools data-parallel ones on CPU
OFFERED = {
    "bags": SHARDINGS,
    "sequences": SEQUENCE_SHARDINGS,
    "weighted": SHARDINGS,
    "variable": SHARDINGS[:5],  # others fail without ecemb
    "processed": SHARDINGS,
    "averaged": SHARDINGS[:-1],  # data-parallel ones have optimizers of torch
    "lfu": SHARDINGS[:1],  # TorchRec has managed collision row-wise only
    "lru": SHARDINGS[:1],
    "distance": SHARDINGS[:1],
    "mapped": SHARDINGS[:1],
    "hashed": SHARDINGS[:1],
    "groups": ("row_wise", "table_wise", "column_wise", "data_parallel"),  # in groups of two ranks
    "fused": SHARDINGS[:-1],  # DistributedDataParallel refuses the data-parallel ones on CPU
}
"""The sharding types of each kind of collection that run on CPUs."""
KILLED = {
    "plain": ("bags", "sequences"),
    "weighted": ("weighted", "variable"),
    "dense parts": ("processed", "fused"),
    "whole tables": ("bags", "averaged"),
    "managed": ("lfu", "lru", "distance", "mapped", "hashed"),
    "groups": ("groups",),
}
"""The kinds of collections in each test of tests/scenarios/test_torchrec_kills.py."""
OPTIMIZERS = ("sgd", "rowwise-adagrad", "adagrad", "averaging")
DTYPES = ("fp32", "fp16")
WHOLE_EVERY = 4


MEETING = ("body", "evicted", "synced")
"""Places that one rank reaches although another one already waits there: no collective is between them."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """One failure.

    Attributes:
        step: the one that it happens in.
        ranks: that die, at the same time: they wait for one another, so it is at a place of `MEETING`.
        place: "backward", once `part` of this rank's lookups are updated, "body", at the end of it,
            "evicted", once the evicted rows of a collection are drawn again, or "synced", once the tables of
            2D parallelism are averaged.
        part: 0 to 1.
        wipe: whether their arenas go as well.
    """

    step: int
    ranks: tuple[int, ...]
    place: str = "body"
    part: float = 0.0
    wipe: bool = False

    def __post_init__(self) -> None:
        if len(self.ranks) > 1 and self.place not in MEETING:
            raise ValueError(f"ranks {self.ranks} would wait for one another at {self.place!r} for ever")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What ranks train, and what happens to them.

    Attributes:
        tables: kind of collection (`OFFERED`) / dtype / optimizer / sharding, each one.
        warmup: learning rates change, by a WarmupOptimizer over the fused optimizer.
        load: the step that begins with load_state_dict() of the model, halved.
        write: the step in which the script writes all rows of all sharded tables.
        aborts: steps that one rank aborts; unprotected, they are left out.
        groups: of ranks, each with all tables; a DMPCollection averages them in each second step.
        save: the step after which a checkpoint is saved, to saved/ in the folder of the run.
        resume: the checkpoint that a protected run begins from.
        rebuild: whether training waits for lost rows, as `ecemb.protect` takes it; if it doesn't, they come
            when they are looked up, and the others every `WHOLE_EVERY` steps.
        stays: whether `ecemb.run` trains under `ecemb-run`, in processes that stay when others are killed.
    """

    tables: tuple[str, ...]
    steps: int = 8
    ranks: int = 4
    code: tuple[int, int] = (4, 2)
    warmup: bool = True
    pipeline: bool = False
    load: int = -1
    write: int = -1
    aborts: tuple[int, ...] = ()
    groups: int = 1
    save: int = -1
    resume: str = ""
    rebuild: str = "blocking"
    kills: tuple[Kill, ...] = ()
    protected: bool = False
    stays: bool = False
    job: str = "torchrec-kills"


def every_table(*collections: str) -> tuple[str, ...]:
    """Tables of these kinds of collections, in every combination; by default of all kinds."""
    return tuple(
        f"{collection}/{dtype}/{optimizer}/{sharding}"
        for collection in collections or OFFERED
        for dtype in DTYPES
        for optimizer in OPTIMIZERS
        for sharding in OFFERED[collection]
        if (collection == "averaged") == (optimizer == "averaging")
        if (collection, optimizer) != ("variable", "adagrad")  # FBGEMM refuses it
    )


def varied_tables(*collections: str) -> tuple[str, ...]:
    """Tables of these kinds, with every sharding type, optimizer and precision, but not every combination."""
    tables: list[str] = []
    for collection in collections:
        of_one = [table.split("/", 3) for table in every_table(collection)]
        trained = list(dict.fromkeys((dtype, optimizer) for _, dtype, optimizer, _ in of_one))
        offered = OFFERED[collection]
        for number in range(max(len(offered), len(trained))):
            dtype, optimizer = trained[number % len(trained)]
            tables.append(f"{collection}/{dtype}/{optimizer}/{offered[number % len(offered)]}")
    return tuple(tables)


def run(folder: Path, setting: Setting, deadline_s: float = 900) -> list[dict[str, Any]]:
    """Trains under torchrun to the end, whatever happens on the way.

    Returns:
        What each rank ended with, by name.
    """
    (folder / "arenas").mkdir(parents=True, mode=0o700)
    (folder / "setting.json").write_text(json.dumps(dataclasses.asdict(setting)))
    restarts = 0 if setting.stays else len(setting.kills)
    arenas = folder / "arenas" if setting.stays else None
    forked(folder, setting.ranks, restarts, "run_worker.py", str(folder), deadline_s=deadline_s, stays=arenas)
    return [torch.load(folder / f"end.{rank}", weights_only=True) for rank in range(setting.ranks)]


def forked(
    folder: Path,
    ranks: int,
    restarts: int,
    script: str,
    *words: str,
    deadline_s: float = 900,
    stays: Path | None = None,
) -> None:
    """Runs a script of this folder under torchrun to the end, with workers that needn't import TorchRec.

    Args:
        folder: gets the log.
        ranks: number of ranks.
        restarts: by torchrun.
        script: of this folder.
        words: its arguments.
        deadline_s: for the end.
        stays: folder of arenas, if `ecemb-run` starts the workers.
    """
    options = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command = (
        []
        if stays is None
        else ["--no-python", sys.executable, "-m", "ecemb", "run", "--arena-dir", str(stays)]
    )
    process = agents.start(
        IMPORTS,
        [*options, *command, str(HERE / script), *words],
        folder / "log",
        {"PYTHONWARNINGS": "ignore"},
        cwd=folder,
    )
    try:
        code = process.wait(deadline_s)
    except BaseException:
        process.terminate()  # torchrun ends its workers
        process.wait(300)
        raise
    text = (folder / "log").read_text()
    if code:
        raise AssertionError(f"torchrun ended with {code}:\n{text[-6000:]}")


def recoveries(folder: Path) -> list[str]:
    """Kind, step and lost ranks of each start, as rank 0 saw them."""
    return (folder / "recoveries.0").read_text().splitlines()


def rejoined(folder: Path, ranks: int) -> list[int]:
    """How often each rank's last process has stayed after another one's death."""
    return [int((folder / f"rejoined.{rank}").read_text()) for rank in range(ranks)]


def differences(expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[str]:
    """Names of all that is not bit-identical."""
    wrong: list[str] = []
    for rank, (left, right) in enumerate(zip(expected, found, strict=True)):
        for name in sorted({*left, *right}):
            if name not in left or name not in right or not _same(left[name], right[name]):
                wrong.append(f"rank {rank}: {name}")
    return wrong


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
        )
    return type(left) is type(right) and repr(left) == repr(right)
