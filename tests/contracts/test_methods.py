"""Every method keeps what it promises: real ranks, one is killed with its memory, and all start again."""

from __future__ import annotations

import random
import shutil
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ecemb
from baselines.method import Promise, Training
from bench.methods.ledger import account
from bench.methods.life import Failure, live
from bench.methods.registry import METHODS, OF_TORCHREC, Place
from ecemb.engines.internals import INSTALL
from support.guarded_training import bags
from support.killed_child import Moments
from support.processes import RankFailed, launch
from support.torchrec.methods_worker import FAILURE, STEPS
from support.torchrec.runs import forked

RANKS = 3
NEEDS_MORE_RANKS = {name for name in METHODS if "(4, " in name or "(6, " in name}
# A start over, and other rows, for which tests/baselines/check_n_run suffices.
SAME_AS_ANOTHER = {"nothing", "check-n-run full", "check-n-run one-shot", *OF_TORCHREC}
ON_TORCHREC = (
    *("cpr mfu", "float parity (3, 2)", "coded snapshots (3, 2)", "snapshots x2 beside", "full dcp async"),
    *OF_TORCHREC,
)
needs_torchrec = pytest.mark.skipif(find_spec("torchrec") is None, reason=INSTALL)
LONG = {"check-n-run intermittent"}
"""The method with rows of 4 bits takes the same paths."""
UNDER_TEST = [
    pytest.param(name, marks=[pytest.mark.long] * (name in LONG))
    for name in METHODS
    if name not in NEEDS_MORE_RANKS | SAME_AS_ANOTHER
]


@dataclass(frozen=True)
class Cut:
    """The end of a rank before any line of the baselines.

    Attributes:
        rank: which.
        end: line, counted from
        step: this one's body on; None: from the start on.
        with_memory: its machine's memory is lost as well.
    """

    rank: int
    end: int
    step: int | None
    with_memory: bool

    def await_(self, memory: Path) -> None:
        """From here on, lines are counted, but for those that only look at what there is."""
        aside = ("baselines.state", "baselines.packing", "baselines.ring", "baselines.stopwatch")
        baselines = [one for name, one in sys.modules.items() if name.startswith("baselines.")]
        counted = [one for one in baselines if one.__name__ not in aside]
        Moments(self.end, lambda: self._wipe(memory)).watch(counted)

    def _wipe(self, memory: Path) -> None:
        if self.with_memory:
            shutil.rmtree(memory, ignore_errors=True)


def one_life(
    folder: Path, meet: Barrier, name: str, failures: list[Failure], cut: Cut | None = None
) -> tuple[int, dict[str, str]]:
    """The rank, which is not the worker's number, and what its training ends with."""
    for part in ("arenas", "files", "ledgers", "memory"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    ecemb.init_process_group(
        "gloo", job="contract", arena_dir=folder / "arenas", timeout=timedelta(seconds=300)
    )
    script = bags(device="cpu")
    memory = folder / "memory" / str(dist.get_rank())
    method = METHODS[name](Place(folder / "files", memory))

    def body(number: int | None) -> None:
        if cut is not None and (cut.rank, cut.step) == (dist.get_rank(), number):
            cut.await_(memory)
        if number is not None:
            script.body()

    body(None)
    live(
        method,
        Training(script.model, [script.sparse, script.dense], script.tables, [script.progress], samples=12),
        body,
        STEPS,
        rank=dist.get_rank(),
        folder=folder / "ledgers",
        failures=failures,
    )
    return dist.get_rank(), script.snapshot()


def trained(
    folder: Path, name: str, failures: list[Failure], cut: Cut | None = None
) -> dict[int, dict[str, str]]:
    """What each rank ends with."""
    return dict(launch(RANKS, one_life, folder, name, failures, cut))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    return trained(tmp_path_factory.mktemp("nothing"), "nothing", [])


@pytest.mark.parametrize("name", UNDER_TEST)
def test_a_killed_rank(name: str, undisturbed: dict[int, dict[str, str]], tmp_path: Path) -> None:
    promise = METHODS[name](Place(tmp_path, tmp_path / "memory" / "0")).promise
    with pytest.raises(RankFailed):
        trained(tmp_path, name, [FAILURE])
    ended = trained(tmp_path, name, [])
    if promise.bit_identical:
        assert ended == undisturbed
    check_accounts(tmp_path / "ledgers", promise)
    for part in ("arenas", "memory"):
        assert not [path for path in (tmp_path / part).rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["cpr mfu", "float parity (3, 2)", "coded snapshots (3, 2)", "full files"])
def test_killed_wherever_and_again(
    name: str, undisturbed: dict[int, dict[str, str]], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    cuts = (
        Cut(draw.randrange(RANKS), draw.randrange(1, 150), step=3, with_memory=True),  # a save is due
        Cut(draw.randrange(RANKS), draw.randrange(1, 300), step=None, with_memory=False),
    )
    ended: dict[int, dict[str, str]] | None = None
    for cut in (*cuts, None):
        if ended is None:  # else there were fewer lines
            with nullcontext() if cut is None else suppress(RankFailed):
                ended = trained(tmp_path, name, [], cut)
    promise = METHODS[name](Place(tmp_path, tmp_path / "memory" / "0")).promise
    assert ended is not None and (ended == undisturbed or not promise.bit_identical)
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


def check_accounts(ledgers: Path, promise: Promise) -> None:
    for rank in range(RANKS):
        found = account(ledgers, rank)
        assert len(found.started) == 2 and found.started[0] == 0
        if promise.steps_again is not None:
            assert found.steps_again <= promise.steps_again + 1
            assert found.started[1] >= FAILURE.step - promise.steps_again
        assert (found.costs.samples_lost > 0) <= promise.samples_lost
        check_costs(found.costs.__dict__)


def check_costs(costs: dict[str, Any]) -> None:
    assert all(value >= 0 for value in costs.values())
    assert costs["stalled_s"] > 0
    in_memory, on_disk = costs["memory_bytes"] and costs["sent_bytes"], costs["written_bytes"]
    assert in_memory or (on_disk and costs["stored_bytes"])


@pytest.fixture(scope="module")
def on_torchrec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what the methods have come to, tried one after the other, a life of the job each."""
    folder = tmp_path_factory.mktemp("torchrec")
    forked(folder, RANKS, len(ON_TORCHREC), "methods_worker.py", str(folder), *ON_TORCHREC)
    return folder


@needs_torchrec
@pytest.mark.parametrize("name", ON_TORCHREC)
def test_a_killed_rank_of_torchrec(name: str, on_torchrec: Path) -> None:
    promise = METHODS[name](Place(on_torchrec, on_torchrec / "memory" / "0")).promise
    check_accounts(on_torchrec / name / "ledgers", promise)
    if promise.bit_identical:
        for rank in range(RANKS):
            ends = [on_torchrec / one / f"end.{rank}" for one in (name, "nothing")]
            assert ends[0].read_text() == ends[1].read_text()
    assert not [path for path in (on_torchrec / name / "memory").rglob("*") if path.is_file()]
