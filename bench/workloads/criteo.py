"""Criteo's click logs, of Kaggle's challenge or the terabyte: a line is an ad that was shown.

By tabs: a label, 13 integers, 26 categories as hexadecimal numbers of 32 bits; any but the label may be empty
(published with the data, as is that lines are in the order of time). An integer is taken as log(1 + x), and
as 0 if empty or negative, as DLRM does.
"""

from __future__ import annotations

import math

from bench.workloads.clicks import Format, Sample, shown

INTEGERS, CATEGORIES = 13, 26
FIELDS = 1 + INTEGERS + CATEGORIES
_DIGITS, _HEX_DIGITS = 18, 15  # an int64 has room for as many


def parse(line: bytes) -> Sample:
    """One line, without its end.

    Raises:
        ValueError: It is none; says why.
    """
    label, *fields = line.split(b"\t")
    if len(fields) != FIELDS - 1:
        raise ValueError(f"it has {len(fields) + 1} fields, not {FIELDS}")
    if label not in (b"0", b"1"):
        raise ValueError(f"its label is {shown(label)}, not 0 or 1")
    return Sample(float(label), [*map(_integer, fields[:INTEGERS])], [*map(_category, fields[INTEGERS:])])


def _integer(field: bytes) -> float:
    if not field:
        return 0.0
    digits = field.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _DIGITS:
        raise ValueError(f"{shown(field)} is no integer")
    return math.log1p(max(int(field), 0))


def _category(field: bytes) -> int:
    if not field:
        return -1
    if not field.isalnum() or len(field) > _HEX_DIGITS:
        raise ValueError(f"{shown(field)} is no hexadecimal number")
    try:
        return int(field, 16)
    except ValueError:
        raise ValueError(f"{shown(field)} is no hexadecimal number") from None


CRITEO = Format(
    "Criteo's click logs",
    f"a label (0 or 1), {INTEGERS} integers and {CATEGORIES} hexadecimal numbers, by tabs; all but the label "
    "may be empty",
    parse,
)
