"""Where the rows of every rank stand in the whole tables, as one text for the arenas' constants.

An arena describes the tables of its own rank. A job that is `elastic` needs those of lost ranks as well, when
another number of ranks goes on with it. The text is compact: tables that ranks share are in it once.

Must not know: arenas, other ranks' memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..checkpoint.contents import Shard
from ..coding.rows import TableLayout
from ..errors import InconsistentArenas

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
