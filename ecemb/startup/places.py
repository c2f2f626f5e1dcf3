"""Where the rows of every rank stand in the whole tables, as one text for the arenas' constants.

An arena describes the tables of its own rank. Another number of ranks that goes on with the job needs those
of lost ranks as well. The text is compact: tables that ranks share are in it once.

Must not know: arenas, other ranks' memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..checkpoint.contents import Shard
from ..coding.rows import TableLayout
from ..errors import ConfigurationError, InconsistentArenas

Places = list[list[Shard]]
"""Of each rank: its tables in the order of their addresses."""


def packed(places: Sequence[Sequence[Shard]]) -> str:
    """One text for the tables of all ranks."""
    tables: dict[str, int] = {}
    ranks: list[list[list[int]]] = []
    for of_rank in places:
        ranks.append([])
        for shard in of_rank:
            name, _, columns, group = shard.layout.to_json()
            number = tables.setdefault(json.dumps([name, columns, group, shard.rows]), len(tables))
            ranks[-1].append([number, shard.layout.rows, shard.start])
    return json.dumps([list(map(json.loads, tables)), ranks], separators=(",", ":"))


def check_hand(places: Sequence[Sequence[Shard]], named: Sequence[Sequence[str]]) -> None:
    """Refuses tables whose shards, as the script places them, are not the whole table.

    Args:
        places: of each rank.
        named: of each rank, the tables that it has placed by `shards=`.

    Raises:
        ConfigurationError: rows are missing or in two shards, or a rank says nothing.
    """
    for name in sorted({name for of_rank in named for name in of_rank}):
        found = {rank: one for rank, held in enumerate(places) for one in held if one.layout.name == name}
        if left := [rank for rank in found if name not in named[rank]]:
            raise ConfigurationError(f"shards= has {name!r}, but not on ranks {left}: place it on all ranks")
        runs = sorted((one.start, one.start + one.layout.rows) for one in found.values() if one.layout.rows)
        wholes = {one.rows or 0 for one in found.values()}
        ends = [0, *(stop for _, stop in runs)]
        if [start for start, _ in runs] != ends[:-1] or wholes != {ends[-1]}:
            held = ", ".join(f"{start} to {stop - 1}" for start, stop in runs)
            raise ConfigurationError(
                f"shards= places rows {held} of {name!r}, a table of {sorted(wholes)} rows: rows are missing "
                f"or twice there. Each rank holds neighbouring rows, and each row is on one rank"
            )


def unpacked(text: str) -> Places:
    """Inverse of `packed`.

    Raises:
        InconsistentArenas: `packed` does not return such a text.
    """
    try:
        tables, ranks = json.loads(text)
        return [
            [
                Shard(TableLayout.from_json([tables[at][0], rows, *tables[at][1:3]]), start, tables[at][3])
                for at, rows, start in of_rank
            ]
            for of_rank in ranks
        ]
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise InconsistentArenas(
            f"the arenas say in {text[:60]!r} where the rows of each rank stand, which can't be read "
            f"({error}): another version of ecemb made them. Launch the number of ranks that made them, or "
            f"resume from a checkpoint: ecemb.protect(resume=)"
        ) from error
