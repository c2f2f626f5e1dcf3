"""Checkpoints on real ranks: what is saved, what comes back, in which world, and when nothing does.

As in test_starts, all scenarios run one after another in the same processes, each as a job of its own, with
several lives (see training_lives.py). A job may be launched by another torchrun (another store, without the
job's marks), and with fewer processes than there are: the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb.checkpoint import contents
from ecemb.checkpoint.folder_store import CheckpointFolder
from ecemb.engines.discover import Tables
from ecemb.errors import (
    CheckpointFailed,
    CheckpointInsecure,
    CheckpointMismatch,
    ConfigurationError,
    JobFinished,
    LayoutMismatch,
    PeerFailure,
    StateLost,
    TooManyErasures,
    UsageError,
)
from ecemb.memory import scan
from ecemb.net import replacement
from ecemb.net.collectives import Transport
from ecemb.net.replacement import End
from ecemb.recovery import scrub
from support import training_lives
from support.processes import run_ranks
from support.refusals import matching
from support.training_lives import DIM, STEPS

PROCESSES, WORLD = 6, 4
DEADLINE_S = 1000
ROWS = 17  # shards of 5, 5, 5, 2 in a world of 4; of 9, 8 in one of 2; of 3 .. 2 in one of 6

Bits = dict[str, str]


# --- lives --------------------------------------------------------------------------------------


@dataclass
class Place:
    """Where a process is: which host it stands for, and where arenas and checkpoints lie."""

    index: int
    root: Path
    job: str
    ports: tuple[int, ...]
    meetings: int = 0

    @property
    def host(self) -> str:
        return f"host{self.index}"

    @property
    def checkpoints(self) -> Path:
        return self.root / f"checkpoints-{self.job}"

    def arenas(self) -> list[Path]:
        """Of this host."""
        return list(self.root.glob(f"*/{self.job}/{self.host}/*.arena"))

    def meet(self) -> None:
        """Returns when all processes are here."""
        self.meetings += 1
        store = dist.TCPStore("127.0.0.1", self.ports[0], is_master=False)
        store.set(f"{self.job}/{self.meetings}/{self.index}", "here")
        names = [f"{self.job}/{self.meetings}/{other}" for other in range(PROCESSES)]
        store.wait(names, timedelta(seconds=DEADLINE_S))

    def lose(self, *hosts: int) -> None:
        """The memory of hosts is gone; of all when none is named. Between two lives."""
        self.meet()
        if self.index in (hosts or range(PROCESSES)):
            for path in self.arenas():
                path.unlink()
        self.meet()


@contextmanager
def life(place: Place, *, world: int = WORLD, launch: int = 0, job: str | None = None) -> Iterator[None]:
    """One launch of the job, by the launch's torchrun. For processes that are in this world."""
    os.environ.update(
        RANK=str(place.index), WORLD_SIZE=str(world), MASTER_PORT=str(place.ports[launch % len(place.ports)])
    )
    with training_lives.launched(job or place.job, place.root, place.host):
        yield


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1))


class Training(training_lives.Training):
    """The small training, with buffers."""

    def __init__(self, *, kind: str = "adagrad", rows: int = ROWS, device: str | None = "meta") -> None:
        super().__init__(head, rows=rows, device=device, kind=kind)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the ranks hold, by its name in a checkpoint; tables as wholes."""
        found = {"bag.weight": whole(self.bag, self.bag.weight)}
        state = self.sparse.state[self.bag.weight]
        found |= {f"bag.{name}": whole(self.bag, state[name]) for name in sorted(state) if name != "step"}
        found |= {f"head.{name}": value for name, value in self.head.state_dict().items()}
        for index, parameter in enumerate(self.head.parameters()):
            for name, value in self.dense.state[parameter].items():
                found[f"optimizers.0.state.{index}.{name}"] = value
        return {name: torch.as_tensor(value).detach().clone() for name, value in found.items()}

    def bits(self) -> Bits:
        """Digests of everything that must come back: all tensors, and what would be drawn next."""
        values: dict[str, Any] = {name: value.numpy().tobytes() for name, value in self.tensors().items()}
        values["table step"] = repr(self.sparse.state[self.bag.weight].get("step")).encode()
        values["generator"] = torch.get_rng_state().numpy().tobytes()
        values["schedule"] = repr(self.schedule.state_dict()).encode()
        return {name: hashlib.sha256(value).hexdigest() for name, value in values.items()}


def whole(bag: ecemb.nn.ShardedEmbeddingBag, shard: torch.Tensor) -> torch.Tensor:
    """The table of which each rank has a shard."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (bag.rows, shard.detach().clone()))
    table = torch.zeros(bag.num_embeddings, shard.shape[1], dtype=shard.dtype)
    for rows, values in parts:
        table[rows.start : rows.stop] = values
    return table


def unguarded(place: Place, **arguments: Any) -> Bits:
    """What all steps without a guard come to."""
    with life(place, job=place.job + "-unguarded"):
        training = Training(device=None, **arguments)
        for number in range(STEPS):
            training.step(number)
        return training.bits()


def parity_fits(guard: ecemb.Guard) -> bool:
    longest = scrub.longest_block(guard._memory)
    return not scrub.compare_parity(guard._memory, guard._transport, 0, longest, "comparing parity with rows")


@contextmanager
def logged(*texts: str, also: Callable[[logging.LogRecord], None] = lambda _: None) -> Iterator[None]:
    """The body logs a line with all these texts, on rank 0; `also` is called with each line on all ranks."""
    lines: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        lines.append(f"{record.levelname} {record.getMessage()}")
        also(record)

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("ecemb")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if dist.get_rank() == 0:
        assert any(all(text in line for text in texts) for line in lines), lines


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only(world: int) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """The scenario is for the first processes alone."""

    def restrict(scenario: Callable[[Place], None]) -> Callable[[Place], None]:
        def restricted(place: Place) -> None:
            if place.index < world:
                scenario(place)

        restricted.__name__ = scenario.__name__
        return restricted

    return restrict


# --- what comes back ----------------------------------------------------------------------------


def a_planned_move_changes_no_bit(place: Place) -> None:
    """Saved here, resumed elsewhere; then a host is lost, and is rebuilt from parity as ever."""
    for kind in ("adagrad", "adam"):
        folder = place.checkpoints / kind
        if place.index < WORLD:
            expected = unguarded(place, kind=kind)
            with life(place, launch=0, job=f"{place.job}-{kind}"):
                training = Training(kind=kind)
                guard = training.protect(resume=folder)  # nothing there yet
                assert (guard.recovery.kind, guard.next_step) == ("fresh", 0)
                training.run(guard, 3)
                with mock.patch.object(contents, "CHUNK_BYTES", 2 * DIM * 4):  # two rows
                    guard.save(folder)
                middle = training.bits()
            with life(place, launch=1, job=f"{place.job}-moved-{kind}"):
                training = Training(kind=kind)
                guard = training.protect(resume=folder)
                assert (guard.recovery.kind, guard.recovery.step, guard.next_step) == ("checkpoint", 3, 3)
                assert training.bits() == middle
                assert parity_fits(guard)
                training.run(guard, 4)
                assert parity_fits(guard)
            moved = Place(place.index, place.root, f"{place.job}-moved-{kind}", place.ports)
            if place.index == 2:
                for path in moved.arenas():
                    path.unlink()
            with life(moved, launch=1):
                training = Training(kind=kind)
                guard = training.protect(resume=folder)
                assert (guard.recovery.kind, guard.recovery.lost, guard.next_step) == ("memory", (2,), 4)
                training.run(guard)
                assert training.bits() == expected


def more_is_lost_than_the_code_survives(place: Place) -> None:
    """Training goes on from the checkpoint, as a run does that resumed from it without any failure."""
    if place.index < WORLD:
        expected = unguarded(place)
        with life(place):
            training = Training()
            guard = training.protect(resume=place.checkpoints)
            training.run(guard, 2)
            guard.save(place.checkpoints)
            middle = training.bits()
            training.run(guard, 4)
    place.lose(0, 3)
    if place.index < WORLD:
        survivors = place.arenas()
        with life(place), matching(TooManyErasures, "ranks 0 and 3 is lost", "resume"):
            Training().protect()
        with life(place), matching(TooManyErasures, "ranks 0 and 3", "no complete checkpoint"):
            Training().protect(resume=place.root / "nowhere")
        assert place.arenas() == survivors
        with life(place):
            training = Training()
            with logged("WARNING", "ranks 0 and 3 is lost", "steps 2 to 3 are lost, and are run again"):
                guard = training.protect(resume=place.checkpoints)
            assert (guard.recovery.kind, guard.next_step) == ("checkpoint", 2)
            assert training.bits() == middle
            assert len(place.arenas()) == 1 and place.arenas() != survivors
            assert parity_fits(guard)
        with life(place):  # memory wins again
            training = Training()
            guard = training.protect(resume=place.root / "nowhere")
            assert guard.recovery.kind == "process"
            training.run(guard)
            assert training.bits() == expected


def saved(place: Place, step: int, end: int | None = None) -> Bits:
    """One life with a checkpoint before a step, where it ends, or before a later one; the bits at its end."""
    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, step)
        guard.save(place.checkpoints)
        training.run(guard, step if end is None else end)
        return training.bits()


def memory_from_before_the_job_went_on(place: Place) -> None:
    """Hosts that were cut off come back beside a new one, after the job has gone on without them and left."""
    if place.index < WORLD:
        with life(place):
            training = Training()
            training.run(training.protect(), 2)
        [arena] = place.arenas()
        before = arena.read_bytes()
        last = saved(place, 4)
    place.lose()
    if place.index < WORLD:
        if place.index != 3:
            arena.touch(0o600)
            arena.write_bytes(before)
        with life(place, launch=1):
            training = Training()
            with logged("WARNING", "is of step 2, and the job went on without it", "no step is lost"):
                guard = training.protect(resume=place.checkpoints)
            assert (guard.recovery.kind, guard.next_step) == ("checkpoint", 4)
            assert training.bits() == last


def a_checkpoint_that_cannot_be_read_stops_no_recovery(place: Place) -> None:
    """Memory is enough; only a start that is another launch's looks whether the checkpoint is newer."""
    if place.index < WORLD:
        last = saved(place, 2, 3)
    place.lose(3)
    if place.index < WORLD:
        [folder] = place.checkpoints.glob("step-*")
        (folder / "ecemb.json").unlink(missing_ok=True)
        with life(place, launch=1):
            training = Training()
            with logged("WARNING", "no checkpoint is compared with memory", "ecemb.json is missing"):
                guard = training.protect(resume=place.checkpoints)
            assert (guard.recovery.kind, guard.next_step) == ("memory", 3)
            assert training.bits() == last


def all_memory_is_lost(place: Place) -> None:
    """The `started` mark stands in torchrun's store, or in the folder."""
    if place.index < WORLD:
        middle = saved(place, 3)
    for launch in (0, 1):
        place.lose()
        if place.index < WORLD:
            with life(place, launch=launch):
                training = Training()
                if launch == 0:
                    with matching(StateLost, "no arena of it is left", "no complete checkpoint"):
                        training.protect(resume=place.root / "nowhere")
            with life(place, launch=launch):
                training = Training()
                guard = training.protect(resume=place.checkpoints)
                assert (guard.recovery.kind, guard.next_step) == ("checkpoint", 3)
                assert training.bits() == middle


def another_number_of_ranks(place: Place) -> None:
    """4 to 2 to 6 to 4: tables are sharded again, and the rest carries over, but for what is a rank's own."""
    before: dict[str, Any] = {}
    generators: dict[int, torch.Tensor] = {}
    last = 0
    for launch, world in enumerate((4, 2, 6, 4)):
        place.meet()
        if place.index < world:
            with life(place, world=world, launch=launch, job=f"{place.job}-{launch}"):
                training = Training()
                own = torch.get_rng_state()
                options = {"code": ecemb.Code(2, 1), "failure_domain": "rank"}
                if launch == 0:
                    guard = training.protect(**options)
                    training.run(guard, 2)
                else:
                    words = (
                        (f"this job has {world}", "data positions begin again")
                        if launch < 3
                        else ("WARNING",)
                    )
                    with logged(*words):
                        guard = training.protect(resume=place.checkpoints, **options)
                    assert (guard.recovery.kind, guard.next_step) == ("checkpoint", 2 * launch)
                    for name, tensor in training.tensors().items():
                        assert torch.equal(tensor, before[name]), name
                    generator = generators[place.index] if place.index < last else own
                    assert torch.equal(torch.get_rng_state(), generator)
                    assert training.schedule.last_epoch == 2 * launch  # it was the same on all ranks
                    assert training.sparse.state[training.bag.weight]["step"] == 2 * launch
                    assert parity_fits(guard)
                    training.run(guard, guard.next_step + 2)
                guard.save(place.checkpoints, keep=9)
                generators[place.index] = torch.get_rng_state()
        place.meet()
        last = world
        before = plainly_loaded(place.checkpoints / f"step-{2 * launch + 2:012d}")


def plainly_loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What plain DCP reads, into tensors of the whole shapes."""
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in metadata.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@only(WORLD)
def tables_by_hand_come_back_to_as_many_ranks(place: Place) -> None:
    def build() -> tuple[Training, nn.Embedding, dict[str, Any]]:
        training = Training()
        own = nn.Embedding(3 * place.index, 2, sparse=True, dtype=torch.float64)  # rank 0 has no row
        return training, own, {"tables": {"own": own.requires_grad_(False)}, "failure_domain": "rank"}

    with life(place):
        training, own, options = build()
        guard = training.protect(**options)
        training.run(guard, 2)
        guard.save(place.checkpoints)
        rows = own.weight.detach().clone()
    folder = place.checkpoints / "step-000000000002"
    stored = plainly_loaded(folder)[f"own/rank{place.index}.weight"]
    assert torch.equal(stored, rows)
    with life(place, launch=1, job=place.job + "-again"):
        training, own, options = build()
        with torch.no_grad():
            own.weight.zero_()
        assert training.protect(resume=place.checkpoints, **options).next_step == 2
        assert torch.equal(own.weight, rows)
    if place.index < 3:
        with life(place, world=3, launch=1, job=place.job + "-fewer"):
            training, own, options = build()
            with matching(CheckpointMismatch, "saved by 4 ranks, and these are 3", "own.*sharded by hand"):
                training.protect(resume=place.checkpoints, **options)
            assert not Place(place.index, place.root, place.job + "-fewer", place.ports).arenas()


@only(WORLD)
def another_model_is_refused_and_nothing_is_lost(place: Place) -> None:
    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, 1)
        guard.save(place.checkpoints)
    for arguments, changes, error, text in (
        ({"rows": ROWS + 1}, {}, CheckpointMismatch, "other tables than this model"),
        ({"kind": "adam"}, {}, CheckpointMismatch, "exp_avg"),
        ({}, {"state": []}, LayoutMismatch, "objects in state= is 0"),
        ({}, {"optimizers": ["sparse"]}, LayoutMismatch, "optimizers= has 0 with dense parameters"),
    ):
        with life(place, launch=1, job=place.job + "-other"):
            training = Training(**arguments)
            if "optimizers" in changes:
                changes = {"optimizers": [training.sparse], "without_optimizer": training.head}
            with matching(error, text):
                training.protect(resume=place.checkpoints, **changes)
            assert not Place(place.index, place.root, place.job + "-other", place.ports).arenas()
    with life(place, launch=1, job=place.job + "-fresh"):  # another training doesn't mix with it
        training = Training()
        guard = training.protect()
        training.run(guard, 1)
        with matching(CheckpointMismatch, "another training", "save to another folder"):
            guard.save(place.checkpoints)
        training.run(guard, 2)


@only(WORLD)
def a_finished_job_stays_finished(place: Place) -> None:
    with life(place):
        training = Training()
        guard = training.protect(resume=place.checkpoints)
        training.run(guard, 2)
        guard.save(place.checkpoints)
        guard.close()
    assert (place.checkpoints / f"finished-{place.job}").exists()
    with life(place, launch=1), matching(JobFinished, "finished-", "another name", "remove that file"):
        Training().protect(resume=place.checkpoints)
    with life(place, launch=1, job=place.job + "-on"):
        assert Training().protect(resume=place.checkpoints).next_step == 2


@only(WORLD)
def a_job_that_has_left_goes_on_in_another_launch(place: Place) -> None:
    """Another torchrun's: the one that it has left must not train beside it."""
    with life(place):
        training = Training()
        guard = training.protect(resume=place.checkpoints)
        training.run(guard, 2)
        assert not guard.asked_to_leave()
        dist.barrier()
        asker = contextlib.ExitStack()
        if place.index == 1:
            asker.enter_context(scan.asking_to_leave(guard._session.directory))
        dist.barrier()
        with pytest.raises(UsageError, match="inside guard.step"), guard.step():
            guard.asked_to_leave()
    with life(place):
        training = Training()
        guard = training.protect(resume=place.checkpoints)
        assert guard.asked_to_leave()
        with matching(CheckpointFailed, "Not a directory|File exists"):
            guard.leave(__file__ + "/below")
        assert place.arenas()
        middle = training.bits()
        guard.leave(place.checkpoints)
        guard.leave(place.checkpoints)
        guard.close()
        asker.close()
        assert not place.arenas() and not list(place.root.rglob(f"{place.job}/*/leave"))
        with matching(UsageError, "the job has left", "resume="):
            guard.save(place.checkpoints)
    with life(place), matching(JobFinished, "has left this launch", str(place.checkpoints)):
        Training().protect(resume=place.checkpoints)
    with life(place, launch=1):
        training = Training()
        guard = training.protect(resume=place.checkpoints)
        assert (guard.recovery.kind, guard.next_step) == ("checkpoint", 2)
        assert training.bits() == middle and not guard.asked_to_leave()


@only(WORLD)
def a_death_is_replaced_until_the_job_ends(place: Place) -> None:
    """Only a committed step counts as progress: a worker may die in the first window of each start."""
    page, barrier, seen = replacement.new_page(), Transport.barrier, list[tuple[End, bool]]()

    def wait(self: Transport, what: str) -> None:
        seen.append(replacement.read_page(page))
        barrier(self, what)

    for job in ("closes", "leaves"):
        with life(place, job=f"{place.job}-{job}"):
            page[:] = bytes(len(page))
            replacement.begin(page, 0)
            replacement.join()
            training = Training()
            guard = training.protect(window=2)
            training.run(guard, 1)
            assert replacement.read_page(page) == (End.IF_KILLED, False)
            training.run(guard, 2)
            assert replacement.read_page(page) == (End.IF_KILLED, True)
            seen.clear()
            with mock.patch.object(Transport, "barrier", wait):
                guard.close() if job == "closes" else guard.leave(place.checkpoints)
            assert set(seen[-2:]) == {(End.FINAL, True)}
            replacement.begin(None, 0)


def a_close_that_is_cut_off_leaves_no_mark_beside_live_arenas(place: Place) -> None:
    """Else a job that goes on from memory would count as finished, once that memory is lost."""
    mark, barrier = place.checkpoints / f"finished-{place.job}", Transport.barrier

    def begin(until: int) -> ecemb.Guard:
        training = Training()
        guard = training.protect(resume=place.checkpoints)
        training.run(guard, until)
        return guard

    def cut_off(guard: ecemb.Guard, at: str) -> None:
        def failing(self: Transport, what: str) -> None:
            if what == at:
                raise PeerFailure("a peer died")
            barrier(self, what)

        with mock.patch.object(Transport, "barrier", failing):
            guard.close()

    if place.index < WORLD:
        with life(place):
            guard = begin(1)
            guard.save(place.checkpoints)
            with matching(PeerFailure, "a peer died"):
                cut_off(guard, "closing the job")
            assert not mark.exists()
    place.lose()
    if place.index < WORLD:
        with life(place, launch=1):
            guard = begin(2)
            assert guard.recovery.kind == "checkpoint"
            cut_off(guard, "the end of the job")
            assert place.arenas()
            assert not mark.exists()
    place.meet()
    if place.index < WORLD:
        with life(place), matching(JobFinished, "the job is finished", "job="):
            begin(3)
    place.meet()
    assert mark.exists()
    place.lose()
    if place.index < WORLD:
        with life(place), matching(JobFinished, "finished-", "another name", "remove that file"):
            begin(3)


def a_start_that_fails_while_it_reads_is_begun_again(place: Place) -> None:
    """What memory survives is touched only when the new is whole."""
    if place.index < WORLD:
        with life(place):
            training = Training()
            guard = training.protect()
            training.run(guard, 2)
            guard.save(place.checkpoints)
            middle = training.bits()
    place.lose(0, 1)
    if place.index < WORLD:
        survivors = place.arenas()
        file = place.checkpoints / "step-000000000002" / "__1_0.distcp"
        content = file.read_bytes()
        with life(place):
            if place.index == 0:
                file.write_bytes(content[: len(content) // 2])
            with matching(CheckpointFailed, "step-000000000002"):
                Training().protect(resume=place.checkpoints)
            assert place.arenas() == survivors
            dist.barrier()
            if place.index == 0:
                file.write_bytes(content)
        with life(place), mock.patch.object(Tables, "place", side_effect=MemoryError("no memory for tables")):
            with pytest.raises((MemoryError, CheckpointFailed), match="no memory for tables"):
                Training().protect(resume=place.checkpoints)
            assert place.arenas() == survivors
        with life(place):
            training = Training()
            guard = training.protect(resume=place.checkpoints)
            assert training.bits() == middle and len(place.arenas()) == 1


# --- saving -------------------------------------------------------------------------------------


@only(WORLD)
def every_call_at_the_wrong_time_is_an_error(place: Place) -> None:
    folder = place.checkpoints
    with life(place):
        training = Training()
        guard = training.protect()
        with pytest.raises(UsageError, match="inside guard.step"), guard.step():
            guard.save(folder)


@only(WORLD)
def a_save_that_cannot_be_leaves_all_as_it_was(place: Place) -> None:
    folder = place.checkpoints
    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, 1)
        guard.save(folder)
        training.run(guard, 2)
        for wrong in (0, -1, True):
            with matching(ConfigurationError, "keep="):
                guard.save(folder, keep=wrong)
        with matching(ConfigurationError, "differs between ranks", "path"):
            guard.save(place.root / f"mine-{place.index}")
        with matching(ConfigurationError, "CheckpointWriter"):
            guard.save(3)  # type: ignore[arg-type]
        with matching(CheckpointFailed, "Not a directory|File exists"):
            guard.save(__file__ + "/below")
        with matching(CheckpointInsecure, "pickle|folder"):
            guard.save(__file__)
        here = os.getcwd()
        if place.index == 1:  # its working directory is gone, and the others don't wait for it
            (place.root / "gone").mkdir()
            os.chdir(place.root / "gone")
            (place.root / "gone").rmdir()
        with matching(ConfigurationError, "relative path", "pass an absolute path"):
            guard.save("checkpoints")
        os.chdir(here)

        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if place.index == 2:  # its disk is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with matching(CheckpointFailed, "can't be written", "untouched"):
                guard.save(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        dist.barrier()
        assert names(folder) == ["step-000000000001"]

        hidden = CheckpointFolder._await_sight
        elsewhere = mock.patch.object(
            CheckpointFolder, "_await_sight", lambda self, token: hidden(self, f"{token}-elsewhere")
        )
        with mock.patch("ecemb.checkpoint.folder_store.SIGHT_S", 0.01):
            if place.index == 1:
                with elsewhere, matching(CheckpointFailed, "not there on this rank", "all ranks share"):
                    guard.save(folder)
            else:
                with matching(CheckpointFailed, "rank 1", "all ranks share"):
                    guard.save(folder)
        dist.barrier()
        assert names(folder) == ["step-000000000001"]
        training.run(guard, 3)
        guard.save(folder)
        guard.save(folder)  # it is there already
        assert names(folder) == ["step-000000000001", "step-000000000003"]
        training.run(guard, 4)
        guard.save(folder, keep=1)
        assert names(folder) == ["step-000000000004"]


@only(WORLD)
def a_save_in_the_background_is_of_the_step_at_its_call(place: Place) -> None:
    """Training goes on while the writing is held up; what is saved is what was there at the call."""
    folder, go = place.checkpoints, threading.Event()
    write = CheckpointFolder.write

    def late(*arguments: Any) -> str:
        assert go.wait(DEADLINE_S)
        return write(*arguments)

    def emit(record: logging.LogRecord) -> None:
        if "waiting for the checkpoint" in record.getMessage():
            go.set()

    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, 2)
        middle = training.bits()
        with mock.patch.object(CheckpointFolder, "write", late):
            guard.save(folder, asynchronous=True)
            training.run(guard, 4)
            assert not [name for name in names(folder) if name.startswith("step")]
            with logged("waiting for the checkpoint", also=emit):
                guard.save(folder, asynchronous=True)
        guard._saver.drain()
        dist.barrier()
        assert names(folder) == ["step-000000000002", "step-000000000004"]
        full = mock.patch.object(
            CheckpointFolder, "write", side_effect=OSError(28, "No space left on device")
        )
        training.run(guard, STEPS)
        for _ in range(2):
            with full if place.index == 3 else mock.MagicMock():
                guard.save(folder, asynchronous=True)
                with logged("ERROR", "No space left"):
                    guard._saver._thread.join()
            with matching(CheckpointFailed, "in the background failed", "No space left"):
                guard.save(folder) if _ else guard.close()
        guard.save(folder, asynchronous=True, keep=3)
        shutil.copytree(
            folder / "step-000000000002", place.root / f"{place.job}-{place.index}" / "step-000000000002"
        )
        final = training.bits()
        guard.close()
    assert names(folder) == [
        f"finished-{place.job}",
        "step-000000000002",
        "step-000000000004",
        "step-000000000005",
    ]
    for path, bits in ((place.root / f"{place.job}-0", middle), (folder, final)):
        with life(place, launch=1, job=f"{place.job}-{path.name}"):
            training = Training()
            training.protect(resume=path)
            assert training.bits() == bits


SCENARIOS: dict[str, Callable[[Place], None]] = {
    scenario.__name__: scenario
    for scenario in (
        a_planned_move_changes_no_bit,
        more_is_lost_than_the_code_survives,
        memory_from_before_the_job_went_on,
        a_checkpoint_that_cannot_be_read_stops_no_recovery,
        all_memory_is_lost,
        another_number_of_ranks,
        tables_by_hand_come_back_to_as_many_ranks,
        another_model_is_refused_and_nothing_is_lost,
        a_finished_job_stays_finished,
        a_job_that_has_left_goes_on_in_another_launch,
        a_death_is_replaced_until_the_job_ends,
        a_close_that_is_cut_off_leaves_no_mark_beside_live_arenas,
        a_start_that_fails_while_it_reads_is_begun_again,
        every_call_at_the_wrong_time_is_an_error,
        a_save_that_cannot_be_leaves_all_as_it_was,
        a_save_in_the_background_is_of_the_step_at_its_call,
    )
}


def play(index: int, ports: tuple[int, ...], root: str, chosen: list[str]) -> dict[str, str]:
    """Runs the scenarios in this process; scenario -> traceback of what failed."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    logging.getLogger("ecemb").setLevel(logging.DEBUG)
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    failures: dict[str, str] = {}
    for number, name in enumerate(chosen):
        try:
            SCENARIOS[name](Place(index, Path(root), f"job{number}", ports))
        except BaseException:  # noqa: BLE001 - the scenario's test raises it
            failures[name] = traceback.format_exc()
            for meeting in range(99):  # nobody waits for this process
                store.set(f"job{number}/{meeting}/{index}", "failed")
        store.set(f"{name}/{index}", "ended")
        store.wait([f"{name}/{other}" for other in range(PROCESSES)], timedelta(seconds=DEADLINE_S))
    return failures


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What failed in each process. The stores are kept here, as torchrun's agents do."""
    timeout = timedelta(seconds=DEADLINE_S)
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        for _ in range(2)
    ]
    items = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    chosen = [name for name in SCENARIOS if name in items]
    root = str(tmp_path_factory.mktemp("arenas"))
    ports = tuple(store.port for store in stores)
    return run_ranks(PROCESSES, play, ports, root, chosen, deadline_s=DEADLINE_S, group=False)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, played: list[dict[str, str]]) -> None:
    failed = [(index, one[name]) for index, one in enumerate(played) if name in one]
    if failed:  # who waited for another to fail tells less than the other
        failed.sort(key=lambda pair: "PeerFailure" in pair[1] or "gloo" in pair[1])
        texts = [f"process {index}:\n{text}" for index, text in failed]
        pytest.fail("\n".join(texts), pytrace=False)
