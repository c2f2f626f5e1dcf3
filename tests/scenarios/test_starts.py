"""Starts and restarts, with real ranks: what a job is given back, and when it must not go on.

All scenarios run one after another in the same three processes, because starting them takes longer than
all else; each scenario is a job of its own, with several lives (see three_hosts.py). torchrun gives a
worker another RANK in every life, and its store, with the job's marks, outlives them.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ecemb
from ecemb.coding.placement import Placement
from ecemb.coding.rows import WORD_BYTES, Column, TableLayout
from ecemb.errors import (
    ConfigurationError,
    JobFinished,
    LayoutMismatch,
    NotEnoughSpace,
    PeerFailure,
    PlacementError,
    RendezvousError,
    StateLost,
    TooManyErasures,
    UnsupportedTable,
)
from ecemb.memory import capacity
from ecemb.start import create, opening, placement_choice
from ecemb.start.request import Request, examine_training
from ecemb.step.window import Window
from support.processes import run_ranks
from support.refusals import matching
from support.simulation import Job, Machines
from support.three_hosts import ROWS, WORLD, Place, Training, life, unguarded
from support.training_lives import CODE, DIM, STEPS, launched

DEADLINE_S = 1000


# --- what is given back -------------------------------------------------------------------------


def protection_changes_no_bit_and_a_restart_goes_on(place: Place) -> None:
    expected = unguarded(place)
    with life(place):
        rank = dist.get_rank()
        training = Training()
        guard = training.protect()
        assert (guard.recovery.kind, guard.next_step) == ("fresh", 0)
        training.run(guard, 2)
        middle = training.bits()
    for until in (3, STEPS):
        with life(place):
            assert dist.get_rank() == rank  # although torchrun's RANK is another
            training = Training()
            guard = training.protect()
            assert guard.recovery.kind == "process"
            assert training.bits() == middle
            training.run(guard, until)
            middle = training.bits()
    assert middle == expected


def each_host_is_lost_in_turn(place: Place) -> None:
    expected = unguarded(place, kind="adam")
    for lost in range(WORLD):
        with life(place):
            training = Training(kind="adam")
            guard = training.protect()
            if lost:
                assert guard.recovery.kind == "memory"
                assert guard.recovery.lost == (lost - 1,)
                assert (guard.recovery.rebuilt_bytes > 0) == (place.index == lost - 1)
            training.run(guard, lost + 2)
        place.lose(lost)
    with life(place):
        training = Training(kind="adam")
        training.run(training.protect())
        assert training.bits() == expected


def tables_on_the_meta_device_begin_as_others_do(place: Place) -> None:
    expected = unguarded(place, kind="sgd")
    for until in (2, STEPS):
        with life(place):
            training = Training(kind="sgd", device="meta")
            training.run(training.protect(), until)
            bits = training.bits()
    assert bits == expected


def ranks_may_have_tables_and_optimizers_that_others_have_not(place: Place) -> None:
    """Four rows on three ranks leave rank 2 none; ranks 1 and 2 have tables of their own."""

    def build() -> tuple[Training, ecemb.Guard, nn.Embedding | None, torch.optim.Optimizer | None]:
        rank, training = dist.get_rank(), Training(rows=4)
        assert len(training.bag.rows) == (2, 2, 0)[rank]
        if rank == 0:
            return training, training.protect(), None, None
        own = nn.Embedding(3 * rank, 5, sparse=True, dtype=torch.float64)
        optimizer = torch.optim.SparseAdam(own.parameters(), lr=0.5)
        optimizers = [training.sparse, training.dense, optimizer]
        return training, training.protect(optimizers=optimizers, tables={"own": own}), own, optimizer

    def bits(training: Training, own: nn.Embedding | None) -> str:
        return training.bits() + ("" if own is None else repr(own.weight.tolist()))

    with life(place):
        training, guard, own, optimizer = build()
        assert guard.tables == (["bag"] if own is None else ["bag", "own"])
        for number in range(3):
            with guard.step():
                training.step(number)
                if own is not None and optimizer is not None:  # all rows: as much as a step can change
                    optimizer.zero_grad()
                    own(torch.arange(own.num_embeddings)).sum().backward()
                    optimizer.param_groups[0]["lr"] /= 2
                    optimizer.step()
        expected = bits(training, own)
    place.lose(1)
    with life(place):
        training, guard, own, optimizer = build()
        assert guard.recovery.kind == "memory"
        assert bits(training, own) == expected
        assert optimizer is None or optimizer.param_groups[0]["lr"] == 0.5 / 8


# --- when it must not go on ---------------------------------------------------------------------


def a_finished_job_does_not_train_again_from_step_0(place: Place) -> None:
    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, 1)
        guard.close()
        assert not place.arenas()
    with life(place):
        with matching(JobFinished, "the job is finished", "job="):
            Training().protect()
        assert not place.arenas()


def a_job_that_lost_too_much_says_so_and_touches_nothing(place: Place) -> None:
    with life(place):
        training = Training()
        training.run(training.protect(), 2)
        bits = training.bits()
    (mine,) = place.arenas()
    if place.index != 2:
        mine.rename(mine.with_suffix(".aside"))
    with life(place):
        with matching(TooManyErasures, "ranks 0 and 1 is lost", "rank 2 is untouched"):
            Training().protect()
        assert place.arenas() == ([mine] if place.index == 2 else [])
    if place.index != 2:  # the hosts are back
        mine.with_suffix(".aside").rename(mine)
    with life(place):
        training = Training()
        assert training.protect().next_step == 2
        assert training.bits() == bits


def a_job_whose_memory_is_all_gone_does_not_begin_again(place: Place) -> None:
    """The `started` mark stands in torchrun's store."""
    with life(place):
        Training().protect()
    place.lose(place.index)
    with life(place):
        with matching(StateLost, "no arena of it is left"):
            Training().protect()
        assert not place.arenas()


def another_script_is_refused_and_the_first_goes_on(place: Place) -> None:
    with life(place):
        training = Training()
        training.run(training.protect(), 2)
        bits = training.bits()
    for arguments, changes, text in (
        (
            {"rows": ROWS + 1},
            {},
            r"(table 'bag': it has \d+ rows on this rank now, and had \d+|tables of other ranks differ)",
        ),
        (
            {"kind": "sgd"},
            {},
            r"its rows hold weight \(float32, 12 bytes\) now, and held weight .* and sum .* then",
        ),
        ({}, {"code": ecemb.Code(3, 1)}, r"\(3, 2\) then and \(3, 1\) now"),
        (
            {"rows": ROWS + 1},
            {"resume": Path(place.root) / "nowhere"},
            r"another job=\. With resume= as it is, .* the newest checkpoint in .*nowhere, if there is one",
        ),
        ({}, {"tables": {"more": nn.Embedding(2, 2, sparse=True).requires_grad_(False)}}, "more"),
    ):
        with life(place), matching(LayoutMismatch, "another model", text):
            Training(**arguments).protect(**changes)
    with life(place), matching(LayoutMismatch, "objects in state= is 0, and was 1"):
        Training().protect(state=None)
    with life(place):
        training = Training()
        assert training.protect().next_step == 2
        assert training.bits() == bits


def replicas_that_differ_are_refused_and_leave_no_trace(place: Place) -> None:
    with life(place):
        training = Training()
        with torch.no_grad():
            training.head.bias.add_(dist.get_rank())
        with matching(ConfigurationError, "differ between ranks", "head.bias is the first", "seed all ranks"):
            training.protect()
    with life(place):  # the script was mended
        training = Training()
        assert training.protect().recovery.kind == "fresh"


def one_ranks_bad_argument_is_every_ranks_error(place: Place) -> None:
    with life(place):
        bad = dist.get_rank() == 2
        table = nn.Embedding(2, 2, sparse=True, max_norm=1.0 if bad else None)
        with matching(UnsupportedTable if bad else PeerFailure, "max_norm=1.0"):
            Training().protect(tables={"more": table.requires_grad_(False)})
        assert not place.arenas()
    gone, here = Path(place.root) / f"{place.job}-{place.index}", os.open(".", os.O_RDONLY)
    gone.mkdir()
    for given in ({"resume": "checkpoints"}, {"transfer": ecemb.checkpoint.Transfer("checkpoints")}):
        with life(place):
            bad = dist.get_rank() == 2
            if bad:
                os.chdir(gone)
                gone.rmdir()
            try:
                with matching(ConfigurationError if bad else PeerFailure, "no working directory"):
                    Training().protect(**given)
            finally:
                os.fchdir(here)
                gone.mkdir(exist_ok=True)
            assert not place.arenas()
    os.close(here)


def an_arena_that_does_not_fit_on_one_rank_leaves_none_on_the_others(place: Place) -> None:
    with life(place):
        full = capacity.Limit("this test", 1000 if dist.get_rank() == 2 else 2**40, "Make room.")
        with mock.patch.object(capacity, "limits", return_value=[full]):
            training = Training()
            with matching(NotEnoughSpace if dist.get_rank() == 2 else PeerFailure, "this test leaves 1000"):
                training.protect()
        dist.barrier()
        assert not place.arenas()
        assert training.protect().recovery.kind == "fresh"  # room was made


def noisy_head() -> nn.Module:
    """Hooks add noise to its gradients, less and less of it, which DistributedDataParallel averages."""
    head = nn.Linear(DIM, 1)
    head.register_buffer("seen", torch.zeros(()))

    def noisy(gradient: torch.Tensor) -> torch.Tensor:
        head.seen += 1
        return gradient + torch.rand_like(gradient) / head.seen

    for parameter in head.parameters():
        parameter.register_hook(noisy)
    return DistributedDataParallel(head)


def hooks_of_gradients_that_draw_and_count_leave_no_trace_at_a_restart(place: Place) -> None:
    """The rehearsal of DistributedDataParallel's buckets goes through them."""
    expected = unguarded(place, head=noisy_head)
    for until in (2, STEPS):
        with life(place):
            training = Training(head=noisy_head)
            training.run(training.protect(), until)
            bits = training.bits()
    assert bits == expected


def hosts_of_one_name_without_a_common_folder_are_refused_and_leave_no_trace(place: Place) -> None:
    """As containers that have a hostname in common, and a /dev/shm each."""
    os.environ["RANK"] = str(place.index)
    for folders, apart in (("abc", "ranks 1 and 2"), ("aab", "rank 2"), ("aba", "rank 1")):
        own = Path(place.root) / f"{place.job}-{folders}" / folders[place.index]
        own.mkdir(parents=True, exist_ok=True)
        text = f"{apart} can't see the folder of rank 0"
        with (
            launched(place.job + folders, own, "same"),
            matching(RendezvousError, "ranks 0, 1 and 2 have the host name 'same'", text, "host="),
        ):
            Training().protect(failure_domain="rank")
        assert not [path for path in own.rglob("*") if not path.is_dir()]
    for _ in range(2):
        with launched(place.job, place.root, "same"):
            Training().protect(failure_domain="rank")


def another_head_is_refused_before_its_gradients_are_rehearsed(place: Place) -> None:
    """What is known of the buckets of one is nothing to the other."""
    with life(place):
        training = Training(head=lambda: DistributedDataParallel(nn.Linear(DIM, 1)))
        training.run(training.protect(), 2)
        bits = training.bits()
    for head, text in (
        (lambda: nn.Linear(DIM, 1, bias=False), r"\(head.module.bias only then, none only now\)"),
        (
            lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 1)),
            r"only then, head.module.0.bias, .* only now\)",
        ),
        (lambda: nn.Linear(DIM, 2), r"head.module.weight is .*, and was"),
    ):
        with life(place), matching(LayoutMismatch, text):
            Training(head=lambda head=head: DistributedDataParallel(head())).protect()
    with life(place):
        training = Training(head=lambda: DistributedDataParallel(nn.Linear(DIM, 1)))
        assert training.protect().next_step == 2
        assert training.bits() == bits


SCENARIOS: dict[str, Callable[[Place], None]] = {
    scenario.__name__: scenario
    for scenario in (
        protection_changes_no_bit_and_a_restart_goes_on,
        each_host_is_lost_in_turn,
        tables_on_the_meta_device_begin_as_others_do,
        ranks_may_have_tables_and_optimizers_that_others_have_not,
        a_finished_job_does_not_train_again_from_step_0,
        a_job_that_lost_too_much_says_so_and_touches_nothing,
        a_job_whose_memory_is_all_gone_does_not_begin_again,
        another_script_is_refused_and_the_first_goes_on,
        replicas_that_differ_are_refused_and_leave_no_trace,
        one_ranks_bad_argument_is_every_ranks_error,
        an_arena_that_does_not_fit_on_one_rank_leaves_none_on_the_others,
        hooks_of_gradients_that_draw_and_count_leave_no_trace_at_a_restart,
        hosts_of_one_name_without_a_common_folder_are_refused_and_leave_no_trace,
        another_head_is_refused_before_its_gradients_are_rehearsed,
    )
}


def play(index: int, port: int, root: str) -> dict[str, str]:
    """Runs all scenarios in this process; scenario -> traceback of what failed."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    os.environ.update(
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    failures: dict[str, str] = {}
    for name, scenario in SCENARIOS.items():
        try:
            scenario(Place(index, root, name[:40].rstrip("_")))
        except BaseException:  # noqa: BLE001 - the scenario's test raises it
            failures[name] = traceback.format_exc()
        store.set(f"{name}/{index}", "ended")  # whoever failed waits for those that it left waiting
        store.wait([f"{name}/{other}" for other in range(WORLD)], timedelta(seconds=DEADLINE_S))
    return failures


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What failed in each process. The store is kept here, as torchrun's agent does."""
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    root = str(tmp_path_factory.mktemp("arenas"))
    return run_ranks(WORLD, play, store.port, root, deadline_s=DEADLINE_S, group=False)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, played: list[dict[str, str]]) -> None:
    for index, failures in enumerate(played):
        if name in failures:
            pytest.fail(f"process {index}:\n{failures[name]}", pytrace=False)


# --- what the loss of a host would be -------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "warned_of"),
    [
        ("aabbcc", []),
        ("aaddcc", []),  # d in b's place
        ("aabbab", ["a (ranks 0, 1 and 4)", "b (ranks 2, 3 and 5)"]),  # c's ranks on the other two
        ("aabbaa", ["a (ranks 0, 1, 4 and 5)"]),
        ("aaaaaa", ["a (ranks 0, 1, 2, 3, 4 and 5)"]),
    ],
)
def test_after_a_recovery_hosts_present_now_that_may_not_be_lost_are_named(
    hosts: str, warned_of: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = SimpleNamespace(
        placement=Placement.plan(3, 2, "aabbcc"), constants=SimpleNamespace(domains=tuple("aabbcc"))
    )
    opening._warn_of_next_loss(SimpleNamespace(rank=0, hosts=tuple(hosts)), world)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"the loss of host {one} would be more than the code survives" for one in warned_of]


def test_ranks_other_than_0_and_layouts_that_never_survived_a_host_warn_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks, domains = Placement.ranks(3, 2, 6), tuple("aaabbb")
    world = SimpleNamespace(placement=ranks, constants=SimpleNamespace(domains=domains))
    opening._warn_of_next_loss(SimpleNamespace(rank=0, hosts=domains), world)
    world = SimpleNamespace(
        placement=Placement.plan(3, 2, "aabbcc"), constants=SimpleNamespace(domains=tuple("aabbcc"))
    )
    opening._warn_of_next_loss(SimpleNamespace(rank=1, hosts=domains), world)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("code", "hosts", "says"),
    [
        (ecemb.Code(3, 2), "aabbcc", ""),
        (
            ecemb.Code(6, 4),
            "aabbcc",
            "the loss of any one host is survived, but not that of any r = 2 at once",
        ),
        (
            ecemb.Code(4, 3),
            "aabbcc",
            "host 'a' alone would be more than the code survives, and so for 2 other",
        ),
        (ecemb.Code(4, 2), "aaaabc", "host 'a' alone would be more than the code survives; "),
    ],
)
def test_without_enough_hosts_auto_says_what_is_survived(
    code: ecemb.Code, hosts: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    placement = placement_choice.placed(code, tuple(hosts), "auto", first=True)
    said = "; ".join(record.getMessage() for record in caplog.records)
    assert says in said
    assert bool(says) == bool(said)
    assert placement == Placement.interleaved(code.n, code.k, hosts)
    assert placement_choice.placed(code, tuple(hosts), "rank", first=True) == Placement.ranks(
        code.n, code.k, len(hosts)
    )
    if says:
        with pytest.raises(PlacementError, match=rf"fits? here.*; \({code.n}, {code.k}\) fits on"):
            placement_choice.placed(code, tuple(hosts), "host", first=True)
    else:
        assert placement_choice.placed(code, tuple(hosts), "host", first=True) == placement


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("model", r"state= object 1 \(ModuleDict\) .* leave it out, model= is saved anyway"),
        ("bag", r"state= object 1 \(EmbeddingBag\) .* leave it out, model= is saved anyway"),
        ("sparse", r"state= object 1 \(SGD\) .* name it in optimizers= alone"),
    ],
)
def test_what_holds_a_table_is_refused_in_state(given: str, text: str) -> None:
    """Its load_state_dict() would raise at every restart."""
    bag, head = nn.EmbeddingBag(5, 2, sparse=True), nn.Linear(2, 1)
    model, sparse = nn.ModuleDict({"bag": bag, "head": head}), torch.optim.SGD(bag.parameters(), lr=0.1)
    item = {"model": model, "bag": bag, "sparse": sparse}[given]
    request = Request(
        model=model,
        optimizers=[sparse],
        modules={"bag": bag},
        code=CODE,
        state=[head, item],
        window=Window(1, None),
        overlap=False,
        failure_domain="auto",
        without=[head],
    )
    with matching(ConfigurationError, text):
        examine_training(request)
    examine_training(dataclasses.replace(request, state=[head]))


@pytest.mark.parametrize(("n", "k", "size"), [(2, 1, 2), (4, 2, 5), (4, 1, 4), (6, 5, 6)])
def test_there_is_room_for_every_row_changed_alone(
    n: int, k: int, size: int, tmp_path: Path, seed: int
) -> None:
    """The worst that a window can come to: each row of a word or less has a message's head of its own."""
    narrow = tuple(
        TableLayout(f"t{i}", rows, (Column("weight", "uint8", width),))
        for i, (rows, width) in enumerate([(50, 8), (30, 1), (20, 0), (0, 4)])
    )
    job = Job(Placement(n, k, tuple(range(size))), (narrow,) * size, seed)
    machines = Machines(tmp_path / "job", job)
    assert not machines.run(0).failures
    with machines.memories("cpu") as memories:
        lengths: list[list[int]] = [[0] * size for _ in memories]
        for memory in memories:
            memory.journal.arm(1)
            for index, table in enumerate(memory.space.tables):
                for row in range(table.layout.rows):
                    memory.journal.capture(index, np.array([row]))
                    table.columns[0][row] ^= 255
            for keeper, message in memory.lay_out(memory.outbox()).items():
                lengths[keeper][memory.rank] = len(message)
        for memory, incoming in zip(memories, lengths, strict=True):
            world = SimpleNamespace(
                placement=job.placement,
                layouts=job.layouts(memory.rank),
                block_words=job.geometry.block_words,
                constants=memory.arena.constants,
                slot_bytes=0,
                parity_bytes=0,
                dense_bytes=lambda _: 0,
            )
            start: Any = SimpleNamespace(
                session=SimpleNamespace(rank=memory.rank),
                request=SimpleNamespace(code=job.placement),
                training=SimpleNamespace(replicated=None),
                world=world,
            )
            most = dict(create._laid_out(start)[0].regions)
            assert memory.arena.get("rows_bytes") <= most["row_journal"]
            assert (2 * n + sum(incoming)) * WORD_BYTES <= most["inbox"]
            assert memory.arena.reserved("parity_journal") <= most["parity_journal"]
