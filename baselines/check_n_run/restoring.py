"""From a chain of checkpoints back to rows, in any number of ranks.

Must not know: how the training's tensors are found, process groups.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from baselines import packing

from .chunks import unpacked
from .codec import kind_of, loaded
from .manifest import OWN, SHARED, Chunk, Manifest, NotWhole, OtherFormat, manifest_of, manifest_path, newest
from .progress import bar
from .quantize_scheme import Scheme
from .store import Store

logger = logging.getLogger("baselines")

READS: Final = 2
"""How often an object is read before it counts as damaged."""


class Damaged(RuntimeError):
    """Something is missing, or is not what was written."""


class AnotherTraining(ValueError):
    """A checkpoint has other tables than are to be restored."""


@dataclass(frozen=True)
class Shard:
    """Rows of some tensors of one table that are to be restored.

    Attributes:
        table: its key.
        start: row of the whole table with which the shard begins.
        rows: of the shard.
        whole_rows: of the whole table.
        tensors: of the shard by name, [rows, ...], live; overwritten.
    """

    table: str
    start: int
    rows: int
    whole_rows: int
    tensors: Mapping[str, Tensor]

    def overlaps(self, chunk: Chunk) -> bool:
        """Whether the chunk may have rows of it."""
        return chunk.first < self.start + self.rows and chunk.last >= self.start


def read(store: Store, name: str) -> Manifest | None:
    """The manifest of a checkpoint; None if it has no whole one.

    A manifest that isn't whole is read twice: the answer may have been cut off, and not the manifest.

    Raises:
        OtherFormat: another version has written it; to skip it would start the training over.
    """
    path = manifest_path(name)
    why: NotWhole | None = None
    for _ in range(READS):
        try:
            return manifest_of(store.get(path))
        except FileNotFoundError:
            return None
        except NotWhole as error:
            why = error
        except OtherFormat as error:
            raise OtherFormat(f"{path}: {error}") from error
    logger.warning("%s doesn't count as a checkpoint: %s", path, why)
    return None


def chain(store: Store, name: str) -> list[Manifest] | None:
    """A checkpoint after all that it stands on, in the order of restore; None if any of it isn't whole."""
    last = read(store, name)
    if last is None:
        return None
    before = {need: read(store, need) for need in last.facts.needs}
    if gone := [need for need, one in before.items() if one is None]:
        logger.warning(
            "%s doesn't count as a checkpoint: it stands on %s, not there as written", name, ", ".join(gone)
        )
        return None
    return [*(one for one in before.values() if one is not None), last]


def last_chain(store: Store) -> list[Manifest] | None:
    """The newest whole checkpoint after all that it stands on; None if there is none.

    Raises:
        Damaged: there are some, and all stand on others that are gone; to start over would remove them.
    """
    names = newest(store.paths())
    for name in names:
        if (found := chain(store, name)) is not None:
            return found
    for name in names:
        if (left := read(store, name)) is not None:
            raise Damaged(
                f"{name} stands on {', '.join(left.facts.needs)}, not all of which is there as it was "
                f"written: put it back, or name another target to start over"
            )
    return None


def whole(store: Store) -> list[Manifest]:
    """All checkpoints that are whole, with all that they stand on; the newest first."""
    found = {name: one for name in newest(store.paths()) if (one := read(store, name)) is not None}
    return [one for one in found.values() if all(need in found for need in one.facts.needs)]


def rest(store: Store, manifest: Manifest, ranks: Collection[int]) -> dict[str, Tensor]:
    """What some ranks had alone beside their rows, and what all ranks shared, by key.

    Raises:
        Damaged: it can't be read as it was written.
    """
    wanted = [*((rank, OWN) for rank in ranks), (0, SHARED)]
    found: dict[str, Tensor] = {}
    for receipt in manifest.ranks:
        for chunk in receipt.chunks:
            if not chunk.is_rows and (receipt.rank, chunk.table) in wanted:
                found |= packing.unpack(_read(store, chunk))
    return found


@torch.no_grad()
def rows(
    store: Store,
    checkpoints: Sequence[Manifest],
    shards: Sequence[Shard],
    changed: Callable[[Shard, Tensor], None],
    *,
    progress: bool = False,
) -> None:
    """Restores rows.

    Args:
        store: that has them.
        checkpoints: a `chain`.
        shards: several may be of one table. Tensors that some checkpoint has no rows of, since an optimizer
            made them later, begin with zeros.
        changed: called with a shard and its rows (int64 [m], ascending) that the last checkpoint has, if it
            is no full one.
        progress: a progress bar on stderr.

    Raises:
        Damaged: a chunk can't be read as it was written.
        AnotherTraining: it is another training's.
    """
    last = checkpoints[-1]
    _check(last, shards)
    of_table: dict[str, list[Shard]] = {}
    for shard in shards:
        of_table.setdefault(shard.table, []).append(shard)
        then = checkpoints[0].facts.tables.get(shard.table, {"tensors": {}})
        for name, tensor in shard.tensors.items():
            if name not in then["tensors"]:
                tensor.zero_()
    wanted = [(one, chunk) for one in checkpoints for chunk in _overlapping(one, of_table)]
    total = sum(chunk.size_bytes for _, chunk in wanted)
    with bar("restoring", total, shown=progress) as done:
        for manifest, chunk in wanted:
            for shard, taken in _put(store, manifest, chunk, of_table[chunk.table]):
                if manifest is last and last.facts.needs and len(taken):
                    changed(shard, taken)
            done(chunk.size_bytes)


def _check(last: Manifest, shards: Sequence[Shard]) -> None:
    for shard in shards:
        then = last.facts.tables.get(shard.table, {"rows": 0, "tensors": {}})
        now = described(shard.tensors)
        if then["rows"] != shard.whole_rows or not now.items() <= then["tensors"].items():
            raise AnotherTraining(
                f"the checkpoint of step {last.facts.step} is another training's: of table "
                f"{shard.table!r} it has {then}, and here it has {shard.whole_rows} rows of {now}. Run "
                f"the script that saved it, in as many ranks if the table is sharded by hand, or name "
                f"another target"
            )


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[object]]:
    """Type and shape of a row, by name: plain values."""
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])]
        for name, tensor in tensors.items()
    }


def _overlapping(manifest: Manifest, of_table: Mapping[str, Sequence[Shard]]) -> Iterator[Chunk]:
    for chunk in manifest.chunks:
        shards = of_table.get(chunk.table, ()) if chunk.is_rows else ()
        if any(shard.overlaps(chunk) for shard in shards):
            yield chunk


def _put(
    store: Store, manifest: Manifest, chunk: Chunk, shards: Sequence[Shard]
) -> Iterator[tuple[Shard, Tensor]]:
    """Restores what a chunk has of shards of its table; gives each with its rows."""
    numbers, tensors = unpacked(_read(store, chunk), chunk)
    for shard in shards:
        ends = torch.tensor([shard.start, shard.start + shard.rows])
        begin, end = torch.searchsorted(numbers, ends).tolist()
        here = numbers[begin:end] - shard.start
        for name, live in shard.tensors.items():
            if name in tensors and len(here):
                scheme = Scheme(**manifest.facts.schemes[kind_of(name)])
                of_chunk = loaded(tensors[name], scheme, live)[begin:end]
                put_rows(live, here, of_chunk)
        yield shard, here


def put_rows(live: Tensor, rows: Tensor, values: Tensor) -> None:
    """Overwrites rows (int64 [m], on the CPU) of a tensor on any device with values [m, ...] on the CPU."""
    live.index_copy_(0, rows.to(live.device), values.to(live.device))


def _read(store: Store, chunk: Chunk) -> packing.Bytes:
    """A chunk's bytes, uint8 [size], in aligned memory; what is damaged is read twice, as in `read`."""
    data = b""
    for _ in range(READS):
        try:
            data = store.get(chunk.path)
        except FileNotFoundError:
            break
        if len(data) == chunk.size_bytes and zlib.crc32(data) == chunk.crc:
            return np.frombuffer(bytearray(data), np.uint8)  # a copy, since torch wants what can be written
    name = chunk.path.partition("/")[0]
    raise Damaged(
        f"{chunk.path} is {'missing' if not data else 'not what was written: its checksum differs'}; "
        f"{name} and what stands on it can't be restored: {_way_out(store, name)}"
    )


def _way_out(store: Store, name: str) -> str:
    """What to do when a checkpoint is damaged."""
    try:
        before = [one for one in newest(store.paths()) if one < name]
        older = next((one for one in before if chain(store, one) is not None), None)
    except OtherFormat:
        older = None
    if older is None:
        return "no older one is whole: put it back as it was, or name another target to start over"
    return f"to go back to {older}, move {manifest_path(name)} away"
