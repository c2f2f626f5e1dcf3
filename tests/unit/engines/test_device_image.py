"""Tables that lie apart from the arena: their images, and the guard on real ranks with nothing but images.

What is true of any device is tried on the CPU, whose tensors are taken for a device's; the same on CUDA,
where there is such a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from ecemb.coding.rows import Column, RowSpace, Table, TableLayout, arrange
from ecemb.engines import device_image as image_module
from ecemb.engines.device_image import Image, Images, StagedRows, Uploader, _Lane
from ecemb.errors import PeerFailure, UndeclaredWrite, UnsupportedTable
from ecemb.kernels import contract
from ecemb.memory.scan import arenas
from support.guarded_training import Training, headers, initialise
from support.processes import DEADLINE_S, RankFailed, launch
from support.refusals import refused

DEVICES = (
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    ),
)
STEPS = 6


# --- one image -----------------------------------------------------------------------------------


def made(
    device: str, rows: int, *columns: tuple[torch.dtype, int], name: str = "t"
) -> tuple[Image, Table, list[Tensor]]:
    """An image, the memory that it writes to, and the tensors that it is of."""
    tensors = [
        torch.arange(rows * width, dtype=torch.float64).reshape(rows, width).to(dtype).to(device)
        for dtype, width in columns
    ]
    sizes = [width * dtype.itemsize for dtype, width in columns]
    layout = TableLayout(name, rows, tuple(Column(str(i), "any", size) for i, size in enumerate(sizes)))
    (starts,), size = arrange([layout])
    table = Table(layout, np.zeros(size, np.uint8), starts, contract.get_kernels("reference"))
    return Image(table, tensors), table, tensors


def equal(table: Table, tensors: list[Tensor]) -> bool:
    return all(
        column.tobytes() == tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for column, tensor in zip(table.columns, tensors, strict=True)
        if column.size
    )


class Told:
    """Learns which rows are about to be overwritten, and looks whether they have been."""

    def __init__(self, *tables: Table) -> None:
        self._before = [[column.copy() for column in table.columns] for table in tables]
        self._tables = tables
        self.rows: dict[int, list[int]] = {}
        self.were_old = True

    def __call__(self, table: int, ids: Any) -> None:
        self.rows.setdefault(table, []).extend(ids.tolist())
        for one, before in zip(self._tables, self._before, strict=True) if len(self._tables) == 1 else ():
            for column, old in zip(one.columns, before, strict=True):
                self.were_old &= bool((column[ids] == old[ids]).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "columns",
    [
        ((torch.float32, 3),),  # a record is padded
        ((torch.float32, 4), (torch.float32, 4)),
        ((torch.float16, 5), (torch.float32, 1), (torch.float64, 2)),
        ((torch.bfloat16, 1),),
    ],
)
def test_rows_come_and_go(device: str, columns: tuple[tuple[torch.dtype, int], ...]) -> None:
    image, table, tensors = made(device, 7, *columns)
    image.fill()
    assert equal(table, tensors)
    images, told = Images({3: image}), Told(table)
    images.mark(3, torch.tensor([5, 2, 5], device=device))
    images.mark(3, torch.tensor([2, 0]))  # of the CPU
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor[[0, 2, 5]] += 1
        tensor[3] += 1  # not marked
    staged = images.take()
    assert staged.is_held and staged.size_bytes == 3 * (8 + image.record_bytes)
    after = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor += 1  # the next step, before the rows are stored
    staged.store(told)
    assert told.rows == {3: [0, 2, 5]} and told.were_old
    for tensor, new, old in zip(tensors, after, before, strict=True):
        tensor.copy_(new)
        tensor[3] = old[3]
    assert equal(table, tensors)
    for column in table.columns:
        column[[0, 1, 5]] ^= 255
    images.take_back()
    for column in table.columns:
        column[1] ^= 255
    assert equal(table, tensors)
    images.mark(3, torch.tensor([2]))
    images.take().store(again := Told(table))
    assert again.rows == {3: [2]}
    images.take().store(never := Told(table))
    assert never.rows == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_bytes", [1, 16 << 20])
def test_after_an_undo_rows_that_may_differ_are_put_back_and_no_others(
    device: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the last transaction, which are in the arena, and the open step's."""
    monkeypatch.setattr(image_module, "_CHUNK_BYTES", chunk_bytes)
    image, table, (tensor,) = made(device, 12, (torch.float32, 3))
    images, old = Images({0: image}), tensor.clone()
    image.fill()

    def step(*rows: int) -> None:
        images.mark(0, torch.tensor(rows))
        tensor[[*rows]] += 1

    step(9)
    images.take().store(Told(table))  # committed: the next `take` is of another transaction
    old[9] = tensor[9]
    held = [column.copy() for column in table.columns]
    step(1, 2)
    images.take().store(Told(table))
    step(2, 4)
    for column, before in zip(table.columns, held, strict=True):
        column[:] = before  # the undo
    tensor[7] = 5  # never marked: nothing reads or writes it
    with mock.patch.object(image, "put", mock.Mock(side_effect=AssertionError("all rows"))):
        images.put_back()
    old[7] = 5
    assert torch.equal(tensor, old)
    images.take().store(told := Told(table))
    assert told.rows == {}, "marks are cleared"


def test_after_an_interrupted_take_all_rows_are_put_back() -> None:
    """It is not known then which rows have changed."""
    image, table, (tensor,) = made("cpu", 12, (torch.float32, 3))
    images = Images({0: image})
    image.fill()
    tensor[3] += 1
    images.mark(0, torch.tensor([3]))
    with (
        mock.patch.object(image_module, "finish_all", mock.Mock(side_effect=[None, KeyboardInterrupt])),
        pytest.raises(KeyboardInterrupt),
    ):
        images.take()
    images.put_back()
    assert equal(table, [tensor])


def test_a_device_that_fails_keeps_no_other_from_its_rows() -> None:
    several = [made("cpu", rows, (torch.float32, 3), name=f"t{rows}") for rows in (6, 9, 4)]
    images = Images({i: image for i, (image, _, _) in enumerate(several)})
    for i, (image, _, (tensor,)) in enumerate(several):
        image.fill()
        images.mark(i, torch.tensor([2]))
        tensor[2] += 1
    images.take()
    failing = mock.Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered"))
    with (
        mock.patch.object(several[0][0], "put_rows", failing),
        pytest.raises(RuntimeError, match="CUDA error"),
    ):
        images.put_back()
    assert [equal(table, tensors) for _, table, tensors in several] == [False, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_whole_tables_come_and_go_in_pieces(device: str) -> None:
    with mock.patch("ecemb.engines.device_image._CHUNK_BYTES", 1000):
        image, table, tensors = made(device, 777, (torch.float32, 3), (torch.float16, 1))
        image.fill()
        assert equal(table, tensors)
        for column in table.columns:
            column ^= 255
        image.put()
        assert equal(table, tensors)


def test_a_lane_waits_for_the_device_that_copies() -> None:
    """Which need not be the current one, whose stream has nothing to do with the copy."""
    held, own = (torch.zeros(5, dtype=torch.uint8) for _ in range(2))
    with (
        mock.patch(
            "ecemb.engines.device_image._staging", lambda size, _: torch.empty(size, dtype=torch.uint8)
        ),
        mock.patch("torch.cuda.Event") as event,
        mock.patch("torch.cuda.current_stream", lambda device=None: f"the stream of {device}"),
    ):
        lane = _Lane(torch.device("cuda", 1), 5)
        for begin in (partial(lane.send, lambda out: None), partial(lane.receive, held)):
            begin(own)
            event().record.assert_called_once_with("the stream of cuda:1")
            event().record.reset_mock()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_put_as_they_are_ready(device: str) -> None:
    columns = (torch.float32, 3), (torch.float16, 1)
    several = [made(device, rows, *columns, name=f"t{rows}") for rows in (6, 9, 4)]
    space = RowSpace([table for _, table, _ in several], 2, [table for _, table, _ in several])
    images = {i: several[i][0] for i in (0, 2)}
    untouched = [[tensor.clone() for tensor in tensors] for _, _, tensors in several]
    for image, _, _ in several:
        image.fill()
    for _, table, _ in several:
        for column in table.columns:
            column ^= 255
    with Uploader(images, space) as uploader:
        for at in range(0, space.words, 5):  # a record has two words
            uploader.ready(at, min(at + 5, space.words))
            if at == 5:
                uploader.finish()
                assert torch.equal(several[0][2][1][5], untouched[0][1][5])  # not yet
        uploader.finish()
    for i, (_, table, tensors) in enumerate(several):
        assert equal(table, tensors) == (i in images)


class Streams:
    """Stands in for a CUDA device with a stream of its own: what is begun ends when all is waited for."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], object]] = []
        self.waited: list[torch.device] = []

    def synchronize(self, device: torch.device) -> None:
        self.waited.append(device)
        while self.begun:
            self.begun.pop(0)()

    def __enter__(self) -> Streams:
        real = image_module.finish_all

        def finish_all(device: torch.device) -> None:  # as if the CPU's tensors were a device's
            real(torch.device("cuda", 1) if device.type == "cpu" else device)

        self._patches = (
            mock.patch("torch.cuda.synchronize", self.synchronize),
            mock.patch.object(image_module, "finish_all", finish_all),
        )
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def test_work_on_other_streams_is_waited_for() -> None:
    """Which the current stream does not wait for."""
    image, table, (tensor,) = made("cpu", 7, (torch.float32, 3))
    with Streams() as streams:
        streams.begun.append(lambda: tensor.mul_(2))
        image.fill()
        assert equal(table, [tensor]) and not streams.begun
        images = Images({0: image})
        images.mark(0, torch.tensor([2, 5]))
        streams.begun.append(lambda: tensor[2].fill_(9))
        images.take().store(Told(table))
        assert equal(table, [tensor]) and not streams.begun
        streams.begun.append(lambda: tensor[5].fill_(9))  # of a body that has failed
        images.take_back()
        assert equal(table, [tensor]) and not streams.begun
        streams.begun.append(lambda: tensor[5].fill_(9))
        image.put()
        assert equal(table, [tensor]) and not streams.begun
        streams.begun.append(lambda: tensor[5].fill_(9))
        assert image.differing(range(7)).tolist() == [5] and not streams.begun
    assert set(streams.waited) == {torch.device("cuda", 1)}


def test_rows_are_put_after_what_the_main_thread_has_begun() -> None:
    """Its stream need not be that of the thread that puts."""
    devices = [torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 1)]
    images: dict[int, Any] = {i: mock.Mock(device=device) for i, device in enumerate(devices)}
    with mock.patch("torch.cuda.synchronize") as synchronize, Uploader(images, mock.Mock()):
        synchronize.assert_called_once_with(devices[0])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_differ_are_found(device: str) -> None:
    with mock.patch("ecemb.engines.device_image._CHUNK_BYTES", 40):
        image, table, tensors = made(device, 29, (torch.float32, 3), (torch.float64, 0), (torch.float16, 1))
        image.fill()
        assert image.differing(range(29)).tolist() == []
        tensors[0][11, 2] += 1
        table.columns[2][28] ^= 1
        assert image.differing(range(29)).tolist() == [11, 28]
        assert image.differing(range(11, 28)).tolist() == [11]
        assert image.differing(range(12, 28)).tolist() == []


def test_what_fails_while_rows_are_put_is_raised_and_ends_the_rest() -> None:
    image, table, _ = made("cpu", 6, (torch.float32, 2))
    space = RowSpace([table], 1, [table])
    broken = mock.patch.object(image, "put", side_effect=RuntimeError("CUDA error"))
    with broken, Uploader({0: image}, space) as uploader:
        uploader.ready(0, space.words)
        with pytest.raises(RuntimeError, match="CUDA error"):
            uploader.finish()
    with Uploader({}, space) as uploader:  # nothing is outside the arena
        uploader.ready(0, space.words)
        uploader.finish()


@pytest.mark.parametrize("device", DEVICES)
def test_several_tables_are_brought_at_once(device: str) -> None:
    several = [made(device, rows, (torch.float32, 3)) for rows in (5, 1, 0, 9)]
    images = Images({i: image for i, (image, _, _) in enumerate(several)})
    for i, ((image, table, tensors), row) in enumerate(zip(several, (4, 0, None, None), strict=True)):
        image.fill()
        if row is not None:
            images.mark(i, torch.tensor([row], device=device))
            tensors[0][row] = 77
        assert equal(table, tensors) == (row is None)
    images.take().store(told := Told(*(table for _, table, _ in several)))
    assert told.rows == {0: [4], 1: [0]}
    assert all(equal(table, tensors) for _, table, tensors in several)


def changed(device: str) -> tuple[Images, Table, Tensor]:
    """A table of 7 rows, of which 1 and 2 are marked and differ from its image."""
    image, table, (tensor,) = made(device, 7, (torch.float32, 3))
    image.fill()
    images = Images({0: image})
    images.mark(0, torch.tensor([1, 2]))
    tensor[[1, 2]] += 1
    return images, table, tensor


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_rows_are_set_aside_before_the_last_ones_are_stored(device: str) -> None:
    """As by a commit that has not begun when the next transaction ends."""
    images, table, tensor = changed(device)
    first, then = images.take(), tensor.clone()
    images.mark(0, torch.tensor([2, 4]))
    tensor[[2, 4]] += 1
    second = images.take()
    first.store(one := Told(table))
    then[4] = tensor[4] - 1
    assert one.rows == {0: [1, 2]} and equal(table, [then])
    second.store(two := Told(table))
    assert two.rows == {0: [2, 4]} and two.were_old and equal(table, [tensor])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_group_are_numbered_through_its_tables(device: str) -> None:
    several = [made(device, rows, (torch.float32, 3)) for rows in (5, 0, 4)]
    images = Images({i: image for i, (image, _, _) in zip((1, 2, 4), several, strict=True)})
    images.mark(1, torch.tensor([8, 0, 4, 5], device=device))
    images.mark(2, torch.tensor([1], device=device))
    images.mark(4, torch.tensor([4], device=device))  # beyond the end, where a table without rows may be
    images.take().store(told := Told(*(table for _, table, _ in several)))
    assert told.rows == {1: [0, 4], 4: [0, 1, 3]}


@pytest.mark.parametrize("are_staged", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_are_brought_in_batches(device: str, are_staged: bool, seed: int) -> None:
    several = [made(device, rows, (torch.float32, 3)) for rows in (50, 3, 40)]  # a record has 16 bytes
    images = Images({i: image for i, (image, _, _) in enumerate(several)})
    images._marks[0]._most_bytes = 61 * 16 - (0 if are_staged else 1)
    for chunk_bytes in (200, 5):
        for i, (image, _, tensors) in enumerate(several):
            image.fill()
            rows = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(seed))
            rows = rows[: len(rows) * 2 // 3].to(device)
            images.mark(i, rows)
            tensors[0][rows] += 1
        with mock.patch("ecemb.engines.device_image._BATCH_BYTES", chunk_bytes):
            staged = images.take()
            assert staged.is_held is are_staged
            batches = list(image_module._batches(staged.pieces[0][1]))
            sizes = [sum(len(rows) for _, rows in batch) for batch in batches]
            assert max(sizes) == max(1, chunk_bytes // 16) and sum(sizes) == 33 + 2 + 26
            staged.store(Told())
        assert all(equal(table, tensors) for _, table, tensors in several)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_a_full_device_can_t_hold_are_read_from_their_tables(device: str) -> None:
    images, table, tensor = changed(device)
    with mock.patch.object(Image, "records", side_effect=torch.OutOfMemoryError):
        staged = images.take()
    assert not staged.is_held
    staged.store(Told(table))
    assert equal(table, [tensor]) and not staged.pieces


def test_tables_on_the_cpu_need_no_cuda() -> None:
    """Which a worker that is forked from a process with a context can't use."""
    image, table, (tensor,) = made("cpu", 7, (torch.float32, 3))
    images = Images({0: image})
    images.mark(0, torch.tensor([1]))
    refuse = {"side_effect": AssertionError}
    with mock.patch("torch.cuda.stream", **refuse), mock.patch("torch.cuda.device", **refuse):
        images.take().store(Told(table))
    assert table.columns[0][1].tobytes() == tensor[1].numpy().tobytes()


def test_marking_waits_for_nothing() -> None:
    """A step would, if it read back what it has marked."""
    image, _, _ = made("cpu", 7, (torch.float32, 3))
    images = Images({0: image})
    with mock.patch.object(image_module, "finish_all", side_effect=AssertionError):
        images.mark(0, torch.tensor([1, 3]))


# --- the guard -----------------------------------------------------------------------------------


def by_hand(device: str) -> Training:
    """Two tables a rank, one of them empty on rank 1, with a dense head, all on one device."""
    torch.manual_seed(1)
    model = nn.Module()
    model.head = nn.Linear(3, 1)
    rows = (11, 0 if dist.get_rank() else 5)
    tables: dict[str, nn.Module] = {
        f"t{i}": nn.EmbeddingBag(count, 3, sparse=True, dtype=dtype)
        for i, (count, dtype) in enumerate(zip(rows, (torch.float32, torch.float64), strict=True))
    }
    model.to(device)
    for table in tables.values():
        table.to(device)

    def look_up() -> Tensor:
        features = torch.zeros(4, 3, device=device)
        for table in tables.values():
            if count := table.weight.shape[0]:
                features = features + table(torch.randint(count, (4, 2)).to(device)).float()
        return features

    return Training(model, tables, [table.weight for table in tables.values()], look_up)


def taken_for_a_device(device: str) -> Any:
    return mock.patch("ecemb.engines.sparse.is_off_arena", lambda tensor: tensor.device.type == device)


def image_fits(guard: ecemb.Guard, training: Training) -> bool:
    columns = iter(guard._memory.space.tables)
    states = training.sparse.state
    return all(
        equal(stored, [weight, states[weight]["sum"]])
        for stored, weight in zip(columns, training.weights, strict=False)
    )


def steps(guard: ecemb.Guard, training: Training, last: int, *, aborts: bool = True) -> Iterator[int]:
    """Trains up to a step; step 2 is aborted by rank 1, if any is."""
    while guard.next_step < last:
        with guard.step() as step:
            training.body()
            if aborts and step.number == 2 and dist.get_rank() == 1:
                step.abort("to try it")
        yield step.number


def undisturbed(folder: Path, meet: Barrier, device: str, aborts: bool) -> dict[str, str]:
    initialise(folder)
    training = by_hand(device)
    guard = training.protect(2, 1)
    list(steps(guard, training, STEPS, aborts=aborts))
    guard.close()
    return training.snapshot()


def fail(folder: Path, meet: Barrier, device: str, options: dict[str, Any]) -> None:
    """Trains four steps, fails in the fifth, in which only rank 0 raises, and leaves its arena."""
    with taken_for_a_device(device):
        initialise(folder)
        training = by_hand(device)
        weights = [weight.data_ptr() for weight in training.weights]
        guard = training.protect(2, 1, **options)
        assert weights == [weight.data_ptr() for weight in training.weights]
        before = training.undone()
        for _ in steps(guard, training, 4, aborts="window" not in options):
            if guard._transactions.is_between:  # a window has ended: this is what a failure goes back to
                guard._transactions.settle()
                assert image_fits(guard, training)
                before = training.undone()
        try:
            with guard.step():
                training.body()
                if dist.get_rank() == 0:
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, ecemb.errors.EcembError):
            assert training.undone() == before
            assert image_fits(guard, training)
        meet.wait(DEADLINE_S)
        raise RuntimeError("the job has failed")


def go_on(folder: Path, meet: Barrier, device: str, options: dict[str, Any]) -> dict[str, str]:
    with taken_for_a_device(device):
        initialise(folder)
        training = by_hand(device)
        guard = training.protect(2, 1, **options)
        assert guard.recovery.lost == (1,)
        assert image_fits(guard, training)
        list(steps(guard, training, STEPS, aborts="window" not in options))
        guard._transactions.drain()
        assert image_fits(guard, training)
        guard.close()
        return training.snapshot()


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_on_images_ends_as_one_in_the_arena(device: str, tmp_path: Path) -> None:
    expected = {aborts: launch(2, undisturbed, tmp_path, device, aborts) for aborts in (False, True)}
    for options in ({}, {"window": 3}, {"overlap": True}, {"rebuild": "background"}):
        with pytest.raises(RankFailed, match="the job has failed"):
            launch(2, fail, tmp_path, device, options)
        for one in arenas(tmp_path):
            if one.header is not None and one.header.constants.rank == 1:
                one.path.unlink()
        assert launch(2, go_on, tmp_path, device, options) == expected["window" not in options]
        assert headers(tmp_path) == {}


def in_windows(folder: Path, meet: Barrier, apart: str, fails: bool) -> dict[str, Any]:
    """Windows of 3 steps; the second one is drained after its first step."""
    fetched: list[int] = []
    take = Images.take

    def counted(self: Images) -> StagedRows:
        staged = take(self)
        fetched.append(staged.size_bytes)
        return staged

    with taken_for_a_device(apart), mock.patch.object(Images, "take", counted):
        initialise(folder)
        training = by_hand("cpu")
        guard = training.protect(2, 1, window=3)
        began = guard.next_step
        while guard.next_step < STEPS:
            with guard.step() as step:
                training.body()
                if fails and step.number == 5:
                    meet.wait(60)
                    os._exit(9)
            if step.number == 3:
                assert guard.scrub().wrong_words == 0
            if not guard._transactions._steps:
                assert apart != "cpu" or image_fits(guard, training)
        guard.close()
        rows_bytes = sum(len(weight) * (8 + 2 * 24) for weight in training.weights)
        assert len(fetched) == (3 if apart == "cpu" and not began else len(fetched))
        assert max(fetched, default=0) <= rows_bytes
        return {"began": began, **training.snapshot()}


def test_in_a_window_the_image_is_updated_once(tmp_path: Path) -> None:
    """And a kill in the middle of one takes the tables back to where it began."""
    expected = launch(2, in_windows, tmp_path, "meta", False)
    assert launch(2, in_windows, tmp_path, "cpu", False) == expected
    with pytest.raises(RankFailed):
        launch(2, in_windows, tmp_path, "cpu", True)
    again = launch(2, in_windows, tmp_path, "cpu", False)
    assert {end.pop("began") for end in again} == {4}
    assert {end.pop("began") for end in expected} == {0}
    assert again == expected


def written_apart(folder: Path, meet: Barrier) -> None:
    with taken_for_a_device("cpu"):
        initialise(folder)
        training = by_hand("cpu")
        guard = training.protect(2, 1)
        list(steps(guard, training, 2))
        assert guard.scrub().wrong_words == 0
        if dist.get_rank() == 0:
            training.weights[0].data[7] += 1  # unseen by torch
            with refused(UndeclaredWrite, "'t0'", "1 rows", "row 7", "a restart"):
                guard.scrub()
        else:
            with pytest.raises(PeerFailure, match="'t0'"):
                guard.scrub()


def test_a_scrub_compares_tables_with_their_images(tmp_path: Path) -> None:
    launch(2, written_apart, tmp_path)


def refusals(folder: Path, meet: Barrier) -> None:
    with taken_for_a_device("cpu"):
        initialise(folder)
        table = nn.Embedding(6, 4, sparse=True)
        table.weight.data = torch.zeros(4, 6).t()
        optimizer = torch.optim.SparseAdam([table.weight])
        arguments: dict[str, Any] = {
            "optimizers": optimizer,
            "tables": {"t": table},
            "code": ecemb.Code(2, 1),
        }
        with pytest.raises(UnsupportedTable, match="weight of table 't' on cpu is not contiguous"):
            ecemb.protect(nn.Module(), **arguments)
        table.weight.data = torch.zeros(6, 4)
        guard = ecemb.protect(nn.Module(), **arguments)
        with guard.step():
            table(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
        assert sorted(optimizer.state[table.weight]) == ["exp_avg", "exp_avg_sq", "step"]
        with pytest.raises(UndeclaredWrite, match="table 't' was written in place"), guard.step():
            nn.init.zeros_(table.weight)


def test_what_is_refused(tmp_path: Path) -> None:
    launch(1, refusals, tmp_path)
