"""The guard on real ranks: what each call order gives, what a failed step and a restart leave behind.

Every start of processes is shared by many facts, since it takes seconds. Recoveries from deaths at every
moment are in tests/failures; here the starts are few, and what the user sees is looked at closely.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from ecemb.errors import (
    ConfigurationError,
    LayoutMismatch,
    NotInitialized,
    PeerFailure,
    PlacementError,
    RendezvousError,
    StepFailed,
    UndeclaredWrite,
    UsageError,
)
from ecemb.memory.header import State
from ecemb.memory.scan import arenas
from ecemb.recovery import scrub, verify
from ecemb.recovery.execute import details
from ecemb.start import opening
from ecemb.state.rank_state import NAME as RANK_STATE
from support.guarded_training import TIMEOUT_S, Bags, Training, bags, headers, initialise
from support.own_classes import Quotients, RowWise
from support.processes import RankFailed, launch
from support.refusals import refused


class Broken(Exception):
    """Raised by a training script."""


def differing_tables() -> Training:
    """Tables by hand: rank 0 has two, rank 1 another one, rank 2 none, rank 3 one without rows."""
    torch.manual_seed(1)
    model = nn.Module()
    model.head = nn.Linear(3, 1)
    shards = {
        0: {"a": nn.EmbeddingBag(9, 3, sparse=True), "b": nn.EmbeddingBag(4, 3, sparse=True)},
        1: {"c": nn.EmbeddingBag(30, 3, sparse=True, dtype=torch.float64, device="meta")},
        2: {},
        3: {"a": nn.EmbeddingBag(0, 3, sparse=True)},
    }
    tables: dict[str, nn.Module] = dict(shards[dist.get_rank()])

    def look_up() -> Tensor:
        features = torch.rand(4, 3)
        for table in tables.values():
            if rows := table.weight.shape[0]:
                features = features + table(torch.randint(rows, (4, 2))).float()
        return features

    return Training(model, tables, [table.weight for table in tables.values()], look_up)


def parity_fits(guard: ecemb.Guard) -> bool:
    """Whether all parity kept here is what the rows give. All ranks."""
    longest = scrub.longest_block(guard._memory)
    return not scrub.compare_parity(guard._memory, guard._transport, 0, longest, "comparing parity with rows")


# --- tables that are not the same on all ranks ---------------------------------------------------


def different_tables(folder: Path, meet: Barrier) -> None:
    initialise(folder)
    is_second = dist.get_rank() == 1
    for first, second, words in (
        ({"users": 9}, {"users": 12}, ("'table.users'", "num_embeddings is 9 on rank 0 and 12 on rank 1")),
        ({}, {"name": "people"}, ("'table.", "ranks 0 and 1", "rank 1 has no table", "the same names")),
    ):
        with refused(ConfigurationError, *words):
            bags(**(second if is_second else first)).protect(2, 1)
    training = bags()
    own = training.sparse if is_second else torch.optim.SGD(training.weights, lr=0.1)
    with refused(ConfigurationError, "its optimizer is 'SGD' on rank 0 and 'Adagrad' on rank 1"):
        training.protect(2, 1, optimizers=[own, training.dense])
    hand = nn.Embedding(3 + dist.get_rank(), 2, sparse=True)  # of which ranks may have different ones
    hand.weight.requires_grad_(False)
    guard = training.protect(2, 1, tables={"hand": hand})
    guard.close()


def test_tables_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    launch(2, different_tables, tmp_path)
    assert headers(tmp_path) == {}


# --- one rank: every call order ------------------------------------------------------------------


def call_orders(folder: Path, meet: Barrier) -> dict[str, str]:
    model = nn.Linear(2, 2)
    table = nn.Embedding(6, 2, sparse=True)
    with refused(NotInitialized, "ecemb.init_process_group"):
        ecemb.protect(model, tables={"user": table}, code=ecemb.Code(2, 1))
    initialise(folder)
    with refused(UsageError, "initialised already"):
        initialise(folder)

    given: dict[str, Any] = {
        "tables": {"user": table},
        "code": ecemb.Code(2, 1),
        "without_optimizer": [model, table],
    }
    for options, words in (
        ({"code": (2, 1)}, ("code=", "Code(n=4, k=3)", "(2, 1)")),
        ({"failure_domain": "rack"}, ("failure_domain", "'host'", "'rank'", "'rack'")),
        ({"overlap": "no"}, ("overlap=", "True or False", "'no'")),
        ({"verify": 1.5}, ("verify=", "from 0 (never) to 1", "1.5")),
        ({"verify": True}, ("verify=", "True")),
        ({"parity_backend": "mpi"}, ("parity_backend", "'tcp'", "'nccl'", "'mpi'")),
        ({"parity_backend": "nccl", "overlap": True}, ("overlap=True", "wait for each other", "over TCP")),
        ({"optimizers": [model]}, ("optimizers=", "Linear")),
        ({"tables": {}}, ("no table", "ShardedEmbeddingBag", "tables=")),
        ({"tables": [table]}, ("tables=", "a mapping", "list")),
        ({"tables": {7: table}}, ("tables=", "strings", "7 is a int")),
        ({"window": "auto", "mtbf": 3600}, ("mtbf", "timedelta(hours=3)", "3600")),
        ({"state": [object()]}, ("state=", "object", "load_state_dict")),
    ):
        with refused(ConfigurationError, *words):
            ecemb.protect(model, **{**given, **options})
    with refused(ConfigurationError, "repeats keys", "'table.tiny'"):
        ecemb.protect(Bags(), **{**given, "tables": {"table.tiny": table}})
    with refused(
        ConfigurationError, "DistributedDataParallel holds", "table.tiny", "wrap only its dense parts"
    ):
        ecemb.protect(nn.parallel.DistributedDataParallel(Bags(device="cpu")), code=ecemb.Code(2, 1))
    assert headers(folder) == {}

    training = bags()
    guard = training.protect(4, 3)  # one rank needs none of the code
    with refused(UsageError, "a guard already", "once"):
        training.protect(4, 3)
    assert guard.recovery.kind == "fresh" and guard.recovery.step == guard.next_step == 0
    assert guard.recovery.lost == () and guard.recovery.undone_rows == guard.recovery.rebuilt_bytes == 0
    assert not guard.recovery.redone
    assert guard.tables == ["table.users", "table.tiny"]

    with refused(UsageError, "outside of a step"):
        training.body()
    with refused(UsageError, "'table.users'", "inside `with guard.step():`"):
        guard.touch("table.users", torch.tensor([0]))
    with guard.step() as step:
        assert step.number == 0
        with refused(UsageError, "inside guard.step()", "step 0 is still open"), guard.step():
            pass
        with refused(UsageError, "guard.close()", "inside guard.step()"):
            guard.close()
        with refused(UsageError, "'users'", "'table.users'"):
            guard.touch("users", torch.tensor([0]))
        guard.touch("table.users", torch.tensor([8, 0]))
        with torch.no_grad():
            training.weights[0][torch.tensor([0, 8])] = 4.0
        training.body()
    for _ in range(2):
        with pytest.raises(StopIteration), guard.step() as step:
            next(iter(()))  # the script's data have ended: as if the step had not begun
        assert (step.number, guard.next_step) == (1, 1)
    for total in (-1, 2.0):
        with refused(ConfigurationError, "guard.steps()", "number of steps", repr(total)):
            guard.steps(total)
    with refused(UsageError, "step 1 was not run", "`with step:`"):
        list(guard.steps(2))
    assert not list(guard.steps(1))
    with refused(UsageError, "step 1 was run", "guard.step()"):
        step.__enter__()
    assert (training.weights[0][8] == 4.0).all()

    stats = guard.stats()
    assert (stats["job"], stats["rank"]) == ("guard", 0)
    assert (stats["next_step"], stats["steps"], stats["sent_bytes"]) == (1, 1, 0)
    assert 2 <= stats["captured_rows"] <= 9 + 1 + 1
    phases = {"compare", "capture", "state", "delta", "status", "exchange", "agree", "apply"}
    assert set(stats["seconds"]) == phases
    assert stats["bytes"]["tables"] == 9 * (12 + 12) + 1 * (24 + 24)
    assert set(stats["bytes"]) >= {"rows", "row_journal", "parity", "inbox", "slot0", "slot1"}
    assert stats["bytes"]["rows"] > stats["bytes"]["tables"] and stats["bytes"]["parity"] == 0

    before, kept = training.snapshot(), training.undone()
    with pytest.raises(StopIteration), guard.step():  # noqa: PT012
        training.body()
        raise StopIteration("two\nlines")  # after rows have changed: a failure like any other
    assert training.undone() == kept
    for call in (guard.close, lambda: guard.step().__enter__()):
        with refused(StepFailed, "step 1 failed", "StopIteration: two)", "from step 1"):
            call()
    with refused(StepFailed, "step 1 failed"):  # also in a loop that goes on after errors
        for step in guard.steps(3):
            with suppress(StepFailed), step:
                raise AssertionError
    assert headers(folder)[0].state is State.LIVE
    return before


def call_orders_again(folder: Path, meet: Barrier, before: dict[str, str]) -> None:
    initialise(folder)
    training = bags()
    guard = training.protect(4, 3)
    assert (guard.recovery.kind, guard.recovery.step, guard.next_step) == ("process", 1, 1)
    assert training.snapshot() == before
    with guard.step():
        training.body()
    assert guard.next_step == 2 and guard.stats()["steps"] == 1
    weight = training.weights[0].detach().clone()
    guard.close()
    guard.close()
    assert headers(folder) == {}
    for call in (lambda: guard.step().__enter__(), lambda: guard.touch("table.users", torch.tensor([0]))):
        with pytest.raises(UsageError):
            call()
    assert torch.equal(training.weights[0], weight)
    training.body()  # nothing is watched any more


def test_every_call_order_on_one_rank(tmp_path: Path) -> None:
    [before] = launch(1, call_orders, tmp_path)
    launch(1, call_orders_again, tmp_path, before)


def look_at_the_guard(folder: Path, meet: Barrier, fails: bool) -> list[str]:
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1, window=3)
    shown = [repr(guard)]
    with suppress(Broken), guard.step():
        training.body()
        shown.append(repr(guard))
        if fails:
            raise Broken("one\ntwo")
    if fails:
        return [*shown, repr(guard)]
    guard.close()
    return [*shown, repr(guard)]


def test_a_guard_shows_itself_in_a_line(tmp_path: Path) -> None:
    for fails, end in ((False, "the job is finished"), (True, "step 0 failed (Broken: one)")):
        folder = tmp_path / str(fails)
        folder.mkdir()
        found = launch(2, look_at_the_guard, folder, fails)
        for rank, shown in enumerate(found):
            head = f"<Guard of job 'guard', rank {rank} of 2: next step"
            rest = "window 3, Code(n=2, k=1)"
            assert shown[:2] == [f"{head} 0, {rest}, between steps>", f"{head} 0, {rest}, in a step>"]
            assert shown[2] == f"{head} {0 if fails else 1}, {rest}, {end}>"


# --- a step that fails on one of several ranks ---------------------------------------------------


def count_kernel_threads(folder: Path, meet: Barrier) -> int:
    torch.set_num_threads(1)
    initialise(folder)
    with mock.patch.object(os, "sched_getaffinity", return_value=set(range(7))):
        guard = bags(users=12).protect(2, 1)
    threads = guard._memory.kernels._team.threads
    guard.close()
    return threads


def test_ranks_share_the_processors_of_their_host_whatever_torch_takes(tmp_path: Path) -> None:
    assert launch(2, count_kernel_threads, tmp_path) == [3, 3]


def fail_on_rank_1(folder: Path, meet: Barrier) -> tuple[int, dict[str, str]]:
    initialise(folder)
    rank = dist.get_rank()
    training = differing_tables()
    guard = training.protect(3, 2)
    assert guard.tables == [["a", "b"], ["c"], [], ["a"]][rank]
    for number in range(2):
        with guard.step() as step:
            assert step.number == number == guard.next_step
            training.body()
    assert parity_fits(guard)
    before, kept = training.snapshot(), training.undone()
    if rank == 1:
        with pytest.raises(Broken), guard.step():  # noqa: PT012
            training.body()
            guard.touch("c", torch.tensor([3]))
            with torch.no_grad():
                training.weights[0][3] = -1.0
            assert training.undone() != kept
            raise Broken("two\nlines")
    else:
        with refused(StepFailed, "step 2 failed on ranks [1]", "from step 2"), guard.step():
            training.body()
    assert training.undone() == kept
    assert guard.next_step == 2 and guard.stats()["steps"] == 2
    for call in (lambda: guard.step().__enter__(), guard.close):
        with refused(
            StepFailed, "step 2 failed", "Broken: two)" if rank == 1 else "StepFailed", "goes on from step"
        ):
            call()
    assert training.undone() == kept
    return rank, before


def go_on_without_rank_0s_memory(folder: Path, meet: Barrier, before: dict[int, dict[str, str]]) -> None:
    initialise(folder)
    rank = dist.get_rank()
    training = differing_tables()
    guard = training.protect(3, 2)
    report = guard.recovery
    assert (report.kind, report.step, report.lost) == ("memory", 2, (0,))
    assert (report.rebuilt_bytes > 0) is (rank == 0)
    assert {"agree", "attach", "decide", "rebuild", "replicated", "verify", "restore"} <= set(report.seconds)
    assert [*report.before_s] == ["script", "rendezvous"] and min(report.before_s.values()) >= 0
    assert "the memory of rank 0 was lost" in str(report) and "from step 2" in str(report)
    assert str(report).endswith(f" ({report.total_s:.2f} s)")
    assert f"({report.total_s:.2f} s; this rank: " in (whole := details(report))
    assert all(f"{phase} {seconds:.3f} s" in whole for phase, seconds in report.seconds.items())
    word = guard._memory.arena.get
    assert (word("recovery_kind"), word("recovery_step")) == (3, 2)
    assert word("recovery_us") == round(report.total_s * 1e6)
    assert word("recovered_ns") > word("committed_ns") > 0
    assert training.snapshot() == before[rank]
    with guard.step() as step:
        assert step.number == 2
        training.body()
    assert parity_fits(guard)
    abort_a_step(guard, training)
    guard.close()
    assert torch.isfinite(training.model.head.weight).all()


def go_back(folder: Path, meet: Barrier, window: int, overlap: bool) -> tuple[list[int], Any, int]:
    """Steps are aborted in the middle of a window, and in the last one, which is not full."""
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1, window=window, overlap=overlap)
    ended: list[int] = []
    data_end = True
    for step in guard.steps(8):
        try:
            with step:
                if step.number == 2 and data_end:
                    data_end = False
                    next(iter(()))
                training.body()
                if (step.number, dist.get_rank()) in ((4, 1), (3, 0), (7, 1)):
                    step.abort("the loss is NaN")
            if step.aborted:
                ended.append(step.number)
        except StopIteration:
            assert step.number == guard.next_step == 2
    assert guard.next_step == guard.stats()["next_step"] == 8
    assert parity_fits(guard)
    found = ended, training.snapshot(), guard.stats()["aborted_steps"]
    guard.close()
    return found


def test_a_loop_over_steps_goes_back(tmp_path: Path) -> None:
    """Behind an aborted step: to the same bits as if each step were a transaction."""
    found: list[Any] = []
    for window, overlap in ((1, False), (3, True)):
        folder = tmp_path / str(window)
        folder.mkdir()
        found.append(launch(2, go_back, folder, window, overlap))
    assert found[0] == found[1]
    assert [(ended, count) for ended, _, count in found[1]] == [([3, 4, 7], 3)] * 2


def train_at_the_scripts_word(folder: Path, meet: Barrier, deaths: dict[int, int]) -> tuple[Any, ...]:
    """An optimizer and modules that ecemb doesn't know; each rank has tables of its own."""
    initialise(folder)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Quotients()
    optimizer = RowWise(model.parameters())
    tables = {f"{name}{rank}": one for name, one in model.named_parameters()}
    guard = ecemb.protect(model, optimizers=optimizer, tables=tables, code=ecemb.Code(2, 1))
    for step in guard.steps(6):
        with step:
            optimizer.zero_grad()
            model(torch.randint(12, (3,))).square().sum().backward()
            optimizer.step()
            if deaths.get(step.number) == rank:
                Path(guard._memory.arena.path).unlink()
                os.kill(os.getpid(), signal.SIGKILL)
    assert parity_fits(guard)
    moments = [optimizer.state[one]["moment"].tolist() for one in model.parameters()]
    found = [one.tolist() for one in model.parameters()], moments, guard.recovery.lost
    guard.close()
    return found


def test_rows_come_back_of_an_optimizer_and_modules_that_the_script_vouches_for(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = launch(2, train_at_the_scripts_word, tmp_path / "whole", {})
    with pytest.raises(RankFailed):
        launch(2, train_at_the_scripts_word, tmp_path / "killed", {3: 1})
    killed = launch(2, train_at_the_scripts_word, tmp_path / "killed", {})
    assert [one[:2] for one in killed] == [one[:2] for one in whole]
    assert {one[2] for one in killed} == {(1,)}


def test_an_abort_that_is_interrupted_ends_the_guard() -> None:
    """Tables on a device are put back after the commit; what fails there may not go on with them."""
    tables = mock.Mock(**{"take_back.side_effect": [KeyboardInterrupt, None]})
    guard = mock.Mock(_tables=tables, _aborted=0, _failed=None, _session=mock.Mock(rank=1))
    guard._transactions.next_step = 9
    with pytest.raises(KeyboardInterrupt):
        ecemb.Guard._undone(guard, 7, [0])
    assert guard._failed == "the abort of step 7 was interrupted"
    assert ecemb.Guard._undone(guard, 8, [0])
    assert guard._failed is None and guard._aborted == 1


def test_a_device_that_fails_does_not_hide_why_the_step_failed(caplog: pytest.LogCaptureFixture) -> None:
    """As after a CUDA error: nothing can be copied to that device any more."""
    tables = mock.Mock(
        **{"put.side_effect": RuntimeError("CUDA"), "put_back.side_effect": RuntimeError("CUDA")}
    )
    guard = mock.Mock(_tables=tables, _session=mock.Mock(rank=1), **{"_is_open.return_value": True})
    cause = PeerFailure("rank 2 has ended")
    ecemb.Guard._fail(guard, 7, cause)
    guard._transactions.undo.assert_called_once_with(cause)
    assert "step 7 failed (PeerFailure: rank 2" in guard._failed
    assert "rank 1: rows on a device are not as before step 7 (RuntimeError: CUDA)" in caplog.text
    assert not tables.put.called, "all rows take too long"
    ecemb.Guard._fail(guard, 7, UndeclaredWrite("table 't' has changed"))
    assert tables.put.called, "it may have been any row"


def abort_a_step(guard: ecemb.Guard, training: Training) -> None:
    """One rank's loss is NaN: the step is as if it had not been, but for its number."""
    before, number = training.snapshot(), guard.next_step
    with guard.step() as step:
        training.body()
        if dist.get_rank() == 1:
            with torch.no_grad():
                training.model.head.weight.fill_(torch.nan)
            step.abort("the loss is NaN")
        assert not step.aborted
    assert step.aborted and (step.number, guard.next_step) == (number, number + 1)
    assert training.snapshot() == before
    assert parity_fits(guard)
    with refused(UsageError, f"step {number} has ended", "step.abort()"):
        step.abort()
    with guard.step() as step:
        training.body()
    assert not step.aborted and guard.next_step == number + 2
    assert guard.stats()["aborted_steps"] == 1
    assert parity_fits(guard)


def test_a_step_that_fails_on_one_rank_and_ranks_whose_tables_differ(tmp_path: Path) -> None:
    before = dict(launch(4, fail_on_rank_1, tmp_path))
    assert {rank: header.committed for rank, header in headers(tmp_path).items()} == dict.fromkeys(
        range(4), 2
    )
    for one in arenas(tmp_path):
        if one.header is not None and one.header.constants.rank == 0:
            one.path.unlink()
    launch(4, go_on_without_rank_0s_memory, tmp_path, before)
    assert headers(tmp_path) == {}


# --- restarts -----------------------------------------------------------------------------------


def be_killed_in_step_3(folder: Path, meet: Barrier) -> None:
    initialise(folder)
    rank = dist.get_rank()
    training = bags()
    guard = training.protect(2, 1)
    for _ in range(3):
        with guard.step():
            training.body()
    stats = guard.stats()
    assert (stats["next_step"], stats["steps"]) == (3, 3)
    assert stats["sent_bytes"] > 0 and stats["bytes"]["parity"] > 0
    (folder / f"{rank}.json").write_text(json.dumps([training.snapshot(), training.progress.losses]))
    with guard.step():
        training.body()
        guard.touch("table.users", torch.tensor([1]))
        with torch.no_grad():
            training.weights[0][1] = -1.0
        meet.wait(TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)


def start_as_one(folder: Path, meet: Barrier) -> None:
    initialise(folder)
    with refused(
        RendezvousError, "'guard'", "had 2 ranks", "has 1 in this launch", "launch 2", "elastic=True"
    ):
        bags().protect(2, 1)


def write_undeclared(folder: Path, meet: Barrier, before: dict[int, Any]) -> None:
    initialise(folder)
    rank = dist.get_rank()
    for other, words in (
        ({"users": 11}, ("table 'table.users': it has", "rows on this rank now, and had", "then")),
        ({"name": "people"}, ("'table.people'", "'table.users'")),
    ):
        with refused(LayoutMismatch, "'guard'", "another job=", *words):
            bags(**other).protect(2, 1)
    with refused(LayoutMismatch, "code (2, 1) then and (3, 2) now"):
        bags().protect(3, 2)

    training = bags()
    guard = training.protect(2, 1)
    report = guard.recovery
    assert (report.kind, report.step, report.lost, guard.next_step) == ("process", 3, (), 3)
    assert report.undone_rows > 0 and report.rebuilt_bytes == 0 and not report.redone
    assert "encode" not in report.seconds
    assert [training.snapshot(), training.progress.losses] == before[rank]
    assert parity_fits(guard)

    if rank == 1:
        with refused(UndeclaredWrite, "'table.users'", "guard.touch('table.users', rows)"), guard.step():
            training.body()
            with torch.no_grad():
                training.weights[0][3] = 7.0  # the last user
    else:
        with refused(StepFailed, "failed on ranks [1]"), guard.step():
            training.body()
    meet.wait(TIMEOUT_S)
    assert {rank: header.undeclared for rank, header in headers(folder).items()} == {0: 0, 1: 1}
    meet.wait(TIMEOUT_S)


def make_parity_anew(folder: Path, meet: Barrier, before: dict[int, Any]) -> None:
    initialise(folder)
    rank = dist.get_rank()
    training = bags()
    guard = training.protect(2, 1)
    report = guard.recovery
    assert (report.kind, report.step) == ("process", 3)
    assert "encode" in report.seconds
    assert guard._memory.arena.get("undeclared") == 0
    assert parity_fits(guard)
    differing = {name for name, value in training.snapshot().items() if before[rank][0][name] != value}
    assert differing == ({"table 0"} if rank == 1 else set())
    if rank == 1:
        assert (training.weights[0][3] == 7.0).all()
    with guard.step():
        training.body()
    assert parity_fits(guard)
    guard.close()


def part_in_step_1(folder: Path, meet: Barrier) -> None:
    """`compare_every=2` compares the first commit and the third."""
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1, compare_every=2)
    for number in range(2):
        with guard.step():
            training.body()
            if number == 1 and dist.get_rank() == 1:
                with torch.no_grad():
                    training.model.head.weight.add_(1)
    with refused(StepFailed, "differs between ranks in step 2", "on rank [1]"), guard.step():
        training.body()


def test_replicas_that_part_are_noticed_within_compare_every_commits(tmp_path: Path) -> None:
    launch(4, part_in_step_1, tmp_path)


def two_schedules(folder: Path, meet: Barrier, given: str) -> tuple[int, list[dict[str, Any]]]:
    """A launch that ends amid the job; later ones swap its two schedules, or leave one out."""
    initialise(folder)
    training = bags()
    schedule = torch.optim.lr_scheduler.StepLR
    warmup, decay = schedule(training.sparse, 2, 0.5), schedule(training.dense, 3, 0.9)
    objects = [("warmup", warmup), ("decay", decay), ("progress", training.progress)]
    if given == "one":
        with refused(LayoutMismatch, "state= has no object 'decay', and had one", "'warmup', 'decay'"):
            training.protect(2, 1, state=dict(objects[::2]))
        return -1, []
    if given == "swapped":
        objects.reverse()
        with refused(ConfigurationError, "both have the class StepLR", 'state={"warmup": ..., "decay": ...}'):
            training.protect(2, 1, state=[item for _, item in objects])
    guard = training.protect(2, 1, state=dict(objects))
    began = [warmup.state_dict(), decay.state_dict()]
    while given == "both" and guard.next_step < 4:
        with guard.step():
            training.body()
            warmup.step()
            if guard.next_step % 2:
                decay.step()
    if given == "swapped":
        guard.close()
        return guard.next_step, began
    return guard.next_step, [warmup.state_dict(), decay.state_dict()]


def test_schedules_of_one_class_come_back_by_name(tmp_path: Path) -> None:
    before = launch(2, two_schedules, tmp_path, "both")
    assert before[0][1][0] != before[0][1][1]
    launch(2, two_schedules, tmp_path, "one")
    assert launch(2, two_schedules, tmp_path, "swapped") == before


def test_restarts_of_a_killed_job(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died"):
        launch(2, be_killed_in_step_3, tmp_path)
    before = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)}
    left = headers(tmp_path)
    assert {rank: (header.state, header.prepared) for rank, header in left.items()} == {
        0: (State.LIVE, 3),
        1: (State.LIVE, 3),
    }
    launch(1, start_as_one, tmp_path)
    assert headers(tmp_path) == left
    launch(2, write_undeclared, tmp_path, before)
    assert {rank: header.undeclared for rank, header in headers(tmp_path).items()} == {0: 0, 1: 1}
    launch(2, make_parity_anew, tmp_path, before)
    assert headers(tmp_path) == {}


# --- deltas over another backend ----------------------------------------------------------------


@contextmanager
def as_if_ranks_had_devices(name: str = "") -> Iterator[None]:
    """Ranks send from host memory over gloo where they would over NCCL; devices are distinguished by name."""
    device = torch.device("cpu"), (name or str(dist.get_rank())).encode()
    with (
        mock.patch.object(opening, "_device", return_value=device),
        mock.patch.object(dist, "new_group", functools.partial(_over_gloo, dist.new_group)),
    ):
        yield


def _over_gloo(new_group: Callable[..., Any], backend: str, timeout: timedelta) -> Any:
    return new_group(backend="gloo", timeout=timeout)


def train_over_a_fabric(folder: Path, meet: Barrier, backend: str) -> tuple[dict[str, str], int, bool]:
    initialise(folder)
    training = bags()
    with as_if_ranks_had_devices():
        guard = training.protect(4, 2, parity_backend=backend)
    assert (guard._transport.fabric is not None) == (backend == "nccl")
    assert ("fabric" in guard.stats()["bytes"]) == (backend == "nccl")
    for number in range(4):
        with guard.step() as step:
            training.body()
            if number == 2 and dist.get_rank() == 1:
                step.abort()
    found = training.snapshot(), guard.stats()["sent_bytes"], parity_fits(guard)
    guard.close()
    return found


def test_deltas_over_a_fabric_are_those_over_a_mesh(tmp_path: Path) -> None:
    found: list[Any] = []
    for backend in ("nccl", "tcp"):
        (tmp_path / backend).mkdir()
        found.append(launch(4, train_over_a_fabric, tmp_path / backend, backend))
    over_fabric, over_gloo = found
    assert [one[0] for one in over_fabric] == [one[0] for one in over_gloo]
    for (_, with_heads, _), (_, deltas, _) in zip(over_fabric, over_gloo, strict=True):
        assert deltas < with_heads < 2 * deltas  # heads go over the mesh first
    assert all(fits for _, _, fits in (*over_fabric, *over_gloo))


# --- memory that rots ---------------------------------------------------------------------------


def train_on_rotting_memory(folder: Path, meet: Barrier, rot: bool) -> dict[str, str]:
    initialise(folder)
    rank = dist.get_rank()
    training = bags(users=12)
    guard = training.protect(4, 2)

    def train() -> None:
        with guard.step():
            training.body()

    if rot:
        for wrong in (0, 1.5):
            with refused(ConfigurationError, "fraction=", repr(wrong)):
                guard.scrub(wrong)
    for _ in range(2):
        train()
    if rot:
        before = training.snapshot()
        users, _ = training.weights
        if rank == 1:
            users.data[1] = 7.0  # unnoticed
            assert training.snapshot() != before
        if rank == 2:
            guard._memory.rank_state[100] ^= 1
            guard._memory.arena.region("parity")[11] ^= 4
        if rank == 3:
            training.sparse.state[users]["sum"].numpy()[0, 2] += 1  # unnoticed, too
        report = guard.scrub()
        assert report.complete and report.checked_words == report.total_words
        assert report.wrong_words == report.repaired_words >= 4
        assert {one.rank for one in report.findings} == {1, 2, 3}
        held = {
            (one.rank, name, row)
            for one in report.findings
            for name, rows in one.suspects[0].rows
            for row in rows
        }
        assert held == {(1, "table.users", 1), (2, RANK_STATE, 0), (3, "table.users", 0)}
        assert training.snapshot() == before
        again = guard.scrub()
        assert again.wrong_words == 0 and again.findings == ()
        stats = guard.stats()
        assert stats["scrubbed_words"] == report.checked_words + again.checked_words
        assert stats["wrong_words"] == stats["repaired_words"] == report.wrong_words
    train()
    if rot:
        with guard.step():
            with refused(UsageError, "guard.scrub() inside guard.step()"):
                guard.scrub()
            training.body()
        for _ in range(4):
            assert guard.scrub(0.25).wrong_words == 0
    else:
        train()
    train()
    if rot:
        assert guard.scrub().wrong_words == 0
    result = training.snapshot()
    if rot:
        with torch.no_grad():
            if rank == 0:
                users[1] = 1.0  # noticed: not taken back, but refused
        if rank == 0:
            with refused(UndeclaredWrite, "'table.users'", "guard.touch"):
                guard.scrub()
        else:
            with refused(PeerFailure, "rank 0", "'table.users'"):
                guard.scrub()
    return result


def test_training_goes_on_bit_identically_after_a_scrub(tmp_path: Path) -> None:
    for name in ("disturbed", "undisturbed"):
        (tmp_path / name).mkdir()
    disturbed = launch(4, train_on_rotting_memory, tmp_path / "disturbed", True)
    undisturbed = launch(4, train_on_rotting_memory, tmp_path / "undisturbed", False)
    assert disturbed == undisturbed


# --- parity is compared beside training ------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps the texts of warnings that begin with a word of the verification."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "parity does not fit rows" in record.getMessage():
            self.texts.append(record.getMessage())


def write_past_torch(folder: Path, meet: Barrier, code: tuple[int, int], options: dict[str, Any]) -> Any:
    """Rank 2 writes a row that no step meets past torch, after step 40.

    A look at the clock takes 0.1 ms, and a step 0.1 s.
    """
    initialise(folder)
    rank, (n, k) = dist.get_rank(), code
    lines, ticks = Lines(), itertools.count()
    logging.getLogger("ecemb").addHandler(lines)

    def clock() -> float:
        return next(ticks) * 1e-4

    with mock.patch.object(verify, "_clock", clock):
        training = bags(users=12)
        guard = training.protect(n, k, **options)
        ages: list[float | None] = []
        for number in range(500):
            with guard.step() as step:
                ticks = itertools.count(next(ticks) + 1000)
                training.body()
                if number == 30 and rank == 0 and options.get("window", 1) == 1:
                    step.abort()
            ages.append(guard.stats()["verified_age_s"])
            if number == 40 and rank == 2:
                training.weights[0].data[1] = 7.0
            if number == 20:
                guard.save(folder / "saved")
            if guard.stats()["wrong_words"]:
                break
        found = guard.stats()
        assert found["seconds"]["verify"] > 0
        assert ages[-1] is None, "not all stripes fit any more"
        report = guard.scrub()
        guard.close()
    return lines.texts, found["wrong_words"], report.wrong_words, found["next_step"], ages[39]


@pytest.mark.parametrize(
    ("code", "options"),
    [((3, 1), {}), ((3, 2), {"overlap": True, "window": 3})],
    ids=str,
)
def test_a_write_past_torch_is_found_beside_training(
    tmp_path: Path, code: tuple[int, int], options: dict[str, Any]
) -> None:
    """Within 500 steps, with the table's name and the row; a scrub finds the same words."""
    found = launch(3, write_past_torch, tmp_path, code, options)
    texts = [text for lines, *_ in found for text in lines]
    assert "row 1 of 'table.users'" in texts[0] and "guard.touch(table, rows)" in texts[0]
    assert {text.partition(":")[0] for text in texts} >= {"rank 0", "rank 2"}
    for _, wrong_words, scrubbed, next_step, age_s in found:
        assert 0 < wrong_words == scrubbed and next_step < 500
        assert age_s is not None and age_s > 0, "the first pass ends in the first 40 steps"


# --- starts that are refused --------------------------------------------------------------------


def refusals(folder: Path, meet: Barrier) -> None:
    initialise(folder)
    rank = dist.get_rank()
    with refused(PlacementError, "code (4, 3)", "there are 2", "(2, 1)"):
        bags().protect(4, 3)
    with refused(PlacementError, "code (2, 1)", "failure domains"):
        bags().protect(2, 1, failure_domain="host")
    with refused(ConfigurationError, "different arguments", "0: {'code': [2, 1]", "1: {'code': [3, 1]"):
        bags().protect(2 + rank, 1)
    with refused(ConfigurationError, "different arguments", "'verify': 0.01", "'verify': 0,"):
        bags().protect(2, 1, verify=0 if rank else 0.01)
    with refused(ConfigurationError, "no table to protect on any rank"):
        ecemb.protect(nn.Linear(2, 2).requires_grad_(False), code=ecemb.Code(2, 1))
    with refused(ConfigurationError, "different arguments", "nccl", "'parity_backend': 'tcp'"):
        bags().protect(2, 1, parity_backend="tcp" if rank else "nccl")
    with refused(ConfigurationError, "parity_backend='nccl' needs a CUDA device", "leave parity_backend out"):
        bags().protect(2, 1, parity_backend="nccl")
    shared = refused(ConfigurationError, "ranks [0, 1] share theirs", "torch.cuda.set_device")
    with as_if_ranks_had_devices("one for both"), shared:
        bags().protect(2, 1, parity_backend="nccl")
    training = bags()
    if rank == 1:
        with refused(ConfigurationError, "state=", "object"):
            training.protect(2, 1, state=object())
    else:
        with refused(PeerFailure, "1"):
            training.protect(2, 1)
    assert headers(folder) == {}

    training = bags()
    with torch.no_grad():
        training.model.head.weight += rank
    words = (
        "dense parameters",
        "differ between ranks",
        "head.weight is the first",
        "seed all ranks alike",
        "ecemb.protect()",
    )
    with refused(ConfigurationError, *words):
        training.protect(2, 1)
    meet.wait(TIMEOUT_S)
    assert list(arenas(folder)) == []


def test_starts_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    launch(2, refusals, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
