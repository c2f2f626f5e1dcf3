"""Partial recovery as a method: a failed rank takes up its rows as last saved, the others keep theirs.

All ranks start again after a failure, in a process that stays (`ecemb.run`) or in a new one. Survivors go on
with their rows and dense state where these were trained, in their machine's memory (`living`): no step
copies them. What is no tensor, such as random generators and a position in the data, is kept in each step,
some kilobytes. So are dense tensors on a device, which can't lie in that memory.

No step is run again but the one that was cut off. It begins with the generators and the position that it
had, and what has taken it, rows or dense state, takes it twice (chosen). State that all ranks share comes
from a survivor. What a failed rank has alone and is no row comes back as it was last saved, as its rows do
(chosen). If no rank survives, all ranks go back to what they saved last (chosen).

Lost samples are counted as `pls` does, since `Mark.since`. PLS is the sum of `Costs.samples_lost` over ranks
and lives, divided by S_total N.

Ranks have to come back to their machines. One that starts on another takes up its saved rows, and counts as
failed.

Must not know: files' formats, which rows a save takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from baselines import packing
from baselines.method import Costs, Promise, Training
from baselines.slots import Slots, Stamp
from baselines.state import TrainingState, row_key
from baselines.stopwatch import Stopwatch
from ecemb.errors import ConfigurationError
from ecemb.nn import ShardedEmbeddingBag

from .living import LivingTensors, Places, is_on_device
from .plan import Held, Plan, plan
from .priority import SHARE
from .saved import Mark, SavedRank
from .saver import Saver, take_up
from .saving import Saving

_REST = "rest"
_OWN, _SHARED = "own/", "shared/"
_STEPS_LOST = f"{_SHARED}steps lost"
_PLACES = "places"
"""Of the tensors of the rest that live in files."""


class PartialRecovery:
    """CPR at a given interval; `controller` finds one. All ranks.

    Args:
        files: folder that outlives machines; the job's own, the same on all ranks.
        memory: folder of this rank's machine alone, on tmpfs; the job's own.
        every: steps in which the volume of everything is saved once (T_save).
        priority: "mfu", "ssu" or "scar"; None saves everything each T_save (vanilla).
        share: r: with priorities, this part is saved each r T_save.
        bytes_per_s: a rank writes, or reads, at most this much; None: as fast as it goes.

    Raises:
        ValueError: see `Saving`.
    """

    promise = Promise(bit_identical=False, steps_again=0, samples_lost=True)

    def __init__(
        self,
        files: Path,
        memory: Path,
        *,
        every: int,
        priority: str | None = None,
        share: float = SHARE,
        bytes_per_s: float | None = None,
    ) -> None:
        self._files, self._folder, self._bytes_per_s = files, memory, bytes_per_s
        self._saving = Saving(every, priority, share)
        self._state: TrainingState | None = None
        self._next = self._samples = 0
        self._stalled = Stopwatch()
        self._sent_bytes = self._memory_bytes = 0
        self._samples_lost = 0.0
        self._changed: dict[str, list[Tensor]] = {}  # of tables on a device, in this step
        self._places, self._on_device = torch.zeros(0, dtype=torch.uint8), dict[str, Tensor]()  # of the rest
        self._ends: list[Callable[[], None]] = []
        self._steps_lost = torch.zeros(1, dtype=torch.int64)  # of all ranks, in all lives

    def prepare(self, training: Training) -> int:
        """Starts, or goes on after a failure. All ranks.

        Returns:
            The step to run next.

        Raises:
            SavesLost: what is needed is not there.
            ValueError: what is there is another training's, or a table is on the meta device.
        """
        with self._stalled.running():
            self._open(training)
            held: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(held, Held(self._steps_kept(), self._saved.mark()))
            found = plan(held)
            if found is None:
                self._begin(0)
            else:
                self._resume(found, held[dist.get_rank()].saved)
                if any(one.saved is None for one in held):  # killed before all had saved
                    self._save(whole=True)
                    dist.barrier()
        return self._next

    def start(self, training: Training, step: int) -> None:
        """Starts in the middle of a training, and ignores what an earlier one has left. All ranks.

        Args:
            training: as it is.
            step: that comes next.

        Raises:
            ValueError: a table is on the meta device.
        """
        with self._stalled.running():
            self._open(training)
            self._begin(step)

    def discard(self) -> None:
        """Gives back what another life has left in this machine's memory; in place of `prepare`."""
        folder = self._place()
        Slots(folder).remove()
        LivingTensors(folder).remove()

    @contextmanager
    def step(self) -> Generator[None]:
        """Around a step's body; a save that is due comes after it. All ranks."""
        yield
        state = self._made()
        self._next += 1
        with self._stalled.running():
            if state.has_changed():
                self._living.move(state.rows, survived=False)
                self._move_rest()
            self._copy_rows()
            self._keep()
            if self._saving.is_due(self._next):
                self._saving.count_lookups()
                self._save()

    @property
    def steps_lost(self) -> int:
        """How many steps ranks' rows have forgotten, summed over all ranks and failures of the job."""
        return int(self._steps_lost)

    @property
    def interval_steps(self) -> int:
        """See `Method.interval_steps`."""
        return self._saving.interval

    def memory(self) -> Sequence[Path]:
        """The tables' files, and the rest."""
        return [*self._living.paths, *self._slots.paths]

    def costs(self) -> Costs:
        """Of this life until now. The tables' own memory, moved as it is, is no cost."""
        return Costs(
            stalled_s=self._stalled.seconds + self._saving.touching.seconds,
            written_bytes=self._saved.written_bytes,
            sent_bytes=self._sent_bytes + self._saving.sent_bytes,
            stored_bytes=self._saved.stored_bytes,
            memory_bytes=self._memory_bytes,
            samples_lost=self._samples_lost,
        )

    def close(self) -> None:
        """Gives the memory back. All ranks."""
        self._saved.close()
        dist.barrier()
        self._saving.unwatch()
        for end in self._ends:
            end()
        self._slots.remove()
        self._living.remove()

    def _open(self, training: Training) -> None:
        self._state, self._samples = TrainingState(training), training.samples
        self._modules = {
            name or "model": module
            for name, module in training.model.named_modules()
            if isinstance(module, ShardedEmbeddingBag)
        }
        self._living, self._slots = LivingTensors(self._place()), Slots(self._place())
        self._saved = SavedRank(self._files, dist.get_rank(), self._bytes_per_s)
        self._saver = Saver(self._saved, self._saving)

    def _place(self) -> Path:
        return self._folder / f"rank-{dist.get_rank()}"

    def _begin(self, step: int) -> None:
        self._next = step
        self._slots.forget()
        self._live(survived=False)
        self._save(whole=True)
        dist.barrier()  # no step begins before all have saved

    def _live(self, *, survived: bool) -> None:
        """From here on, state is where it outlives the process."""
        state = self._made()
        self._living.move(state.rows, survived=survived)
        for table in state.tables:
            if table.rows and is_on_device(table.tensors["weight"]):
                changed = self._changed.setdefault(table.name, [])
                with suppress(ConfigurationError):  # nothing trains it: no row of it ever changes
                    self._ends.append(table.on_touch(lambda rows, into=changed: into.append(rows.clone())))
        self._saving.watch(state.tables, _sizes(state.tables), self._modules)
        self._living.move(self._saving.lasting, survived=survived)
        self._move_rest()
        self._keep()

    def _resume(self, found: Plan, saved: Mark | None) -> None:
        """Goes on as planned; `saved` is this rank's last save."""
        here, rank = Stamp(found.step, 0), dist.get_rank()
        lost = dict(zip(found.failed, found.steps_lost, strict=True))
        survived = rank not in lost
        rows: dict[str, Tensor] = {}
        if survived:
            rest = packing.unpack(self._slots.read(_REST, here))
            rest |= self._living.read(_places_of(rest.pop(_PLACES)))
        else:
            rows, rest = self._saved.load()
            self._samples_lost = float(lost[rank] * self._samples)
        given = self._broadcast(rest, found.source)
        rest = {key: tensor for key, tensor in rest.items() if key.startswith(_OWN)}
        rest |= {key: tensor for key, tensor in given.items() if key.startswith(_SHARED)}
        self._steps_lost = rest.pop(_STEPS_LOST) + sum(found.steps_lost)
        self._made().put({key.partition("/")[2]: tensor for key, tensor in rest.items()})
        if not survived:
            take_up(self._made().tables, rows)
        self._next, self._saver.since = found.step, 0 if saved is None else saved.since
        self._slots.forget(here)
        self._live(survived=survived)

    def _broadcast(self, rest: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """What one rank has. All ranks."""
        length = torch.tensor([packing.size(rest)])
        dist.broadcast(length, source)
        packed = torch.zeros(int(length), dtype=torch.uint8)
        if dist.get_rank() == source:
            packing.pack(rest, packed.numpy())
            self._sent_bytes += packed.numel() * (dist.get_world_size() - 1)
        dist.broadcast(packed, source)
        return packing.unpack(packed.numpy())

    def _rest(self) -> dict[str, Tensor]:
        """All state that is no row, live."""
        own, shared = self._made().rest()
        named = {f"{_OWN}{key}": tensor for key, tensor in own.items()}
        named |= {f"{_SHARED}{key}": tensor for key, tensor in shared.items()}
        return named | {_STEPS_LOST: self._steps_lost}

    def _steps_kept(self) -> tuple[int, ...]:
        """Steps of which this machine has all state that is no row, ascending."""
        found: set[int] = set()
        for name, stamp in self._slots.kept():
            places = packing.unpack(self._slots.read(name, stamp))[_PLACES]
            if self._living.are_there(_places_of(places)):
                found.add(stamp.step)
        return tuple(sorted(found))

    def _move_rest(self) -> None:
        """Moves tensors that are no rows to where they outlive the process; those on a device stay."""

        def lasting() -> dict[str, Tensor]:
            plain = {f"{_OWN}{key}" for key in own} | {f"{_SHARED}{key}" for key in shared} | {_STEPS_LOST}
            return {key: tensor for key, tensor in self._rest().items() if key not in plain}

        own, shared = self._made().plain()
        self._on_device = {key: tensor for key, tensor in lasting().items() if is_on_device(tensor)}

        def in_files() -> dict[str, Tensor]:
            return {key: tensor for key, tensor in lasting().items() if key not in self._on_device}

        self._living.move(in_files, survived=False)
        places = json.dumps(self._living.places(in_files())).encode()
        self._places = torch.from_numpy(np.frombuffer(bytearray(places), np.uint8))

    def _keep(self) -> None:
        """Keeps what does not live in files: what is no tensor of the training, and tensors on a device."""
        own, shared = self._made().plain()
        rest = {f"{_OWN}{key}": tensor for key, tensor in own.items()}
        rest |= {f"{_SHARED}{key}": tensor for key, tensor in shared.items()}
        rest |= {**self._on_device, _STEPS_LOST: self._steps_lost, _PLACES: self._places}
        packing.pack(rest, self._slots.begin(_REST, packing.size(rest)))
        self._slots.seal(Stamp(self._next, 0))
        kept_bytes = self._slots.kept_bytes + self._saving.memory_bytes + self._living.image_bytes
        self._memory_bytes = max(self._memory_bytes, kept_bytes)

    def _copy_rows(self) -> None:
        """Copies the rows that the step has changed, of tables on a device."""
        for table in self._made().tables:
            if changed := self._changed.get(table.name):
                rows = torch.cat(changed).unique()
                changed.clear()
                for name in table.tensors:
                    self._living.copy_rows(row_key(table.name, name), rows)

    def _save(self, *, whole: bool = False) -> None:
        """Saves to the files what is due, or everything."""
        state, rest = self._made(), self._rest()
        if dist.get_rank() != 0:  # if no rank survives, what is shared comes from rank 0
            rest = {key: tensor for key, tensor in rest.items() if not key.startswith(_SHARED)}
        self._saver.save(state.tables, rest, self._next, whole=whole)

    def _made(self) -> TrainingState:
        if self._state is None:
            raise RuntimeError("prepare() comes first")
        return self._state


def _places_of(packed: Tensor) -> Places:
    return json.loads(packed.numpy().tobytes())


def _sizes(tables: Sequence[Any]) -> dict[str, int]:
    """Bytes of whole tables, over all ranks, by name. All ranks."""
    mine = {table.name: sum(tensor.nbytes for tensor in table.tensors.values()) for table in tables}
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    names = sorted({name for sizes in theirs for name in sizes})
    return {name: sum(sizes.get(name, 0) for sizes in theirs) for name in names}
