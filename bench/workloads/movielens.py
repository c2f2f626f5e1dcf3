"""MovieLens's ratings, as in its u.data: a line is a film that a user has rated.

By tabs: user, item, rating of 1 to 5, timestamp (published with the data, as is that lines are in random
order). A rating of 4 or 5 counts as a click (chosen; widespread). There is nothing to know but who and what:
the one integer is 1.
"""

from __future__ import annotations

from bench.workloads.clicks import Format, Sample, shown

FIELDS = ("user", "item", "rating", "timestamp")
LIKED = 4
_RATINGS = (b"1", b"2", b"3", b"4", b"5")
_DIGITS = 18  # an int64 has room for as many


def parse(line: bytes) -> Sample:
    """One line, without its end.

    Raises:
        ValueError: It is none; says why.
    """
    fields = line.split(b"\t")
    if len(fields) != len(FIELDS):
        raise ValueError(f"it has {len(fields)} fields, not {len(FIELDS)}")
    for name, field in zip(FIELDS, fields, strict=True):
        if not field.isdigit() or len(field) > _DIGITS:
            raise ValueError(f"its {name} is {shown(field)}, which is no number")
    user, item, rating, _ = fields
    if rating not in _RATINGS:
        raise ValueError(f"its rating is {shown(rating)}, not 1 to 5")
    return Sample(float(int(rating) >= LIKED), (1.0,), (int(user), int(item)))


MOVIELENS = Format("MovieLens's u.data", "user, item, rating and timestamp, by tabs", parse)
