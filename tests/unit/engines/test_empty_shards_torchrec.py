"""Tables of which a rank has no rows, as those with fewer rows than ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.processes import run_ranks

pytest.importorskip("torchrec", reason="needs torchrec (CONTRIBUTING.md)")


def built(**options: Any) -> Any:
    """On the second of two ranks, "few" has no rows, and is the first of its batch."""
    from support.torchrec.models import build, plans

    by_row = {name: plans.row_wise() for name in ("few", "many")}
    return build({"few": (1, ("f",)), "many": (6, ("m",))}, "rowwise-adagrad", sharding=by_row, **options)


def refused() -> str:
    """The error for tables of two widths."""
    from ecemb.errors import UnsupportedTable
    from support.torchrec.models import Watched

    try:
        Watched(built(widths={"many": 8}))
    except UnsupportedTable as error:
        return str(error)
    return ""


def test_an_empty_shard_before_one_of_another_width_is_refused() -> None:
    first, second = run_ranks(2, refused)
    assert not first
    assert "'few' of 4 columns has no rows on this rank, and is in one batch with 'many' of 8" in second


def trained() -> bool:
    """Whether exactly the captured rows have changed."""
    from support.torchrec.models import Watched, batch

    watched = Watched(model := built())
    before = watched.rows()
    with watched.step():
        loss, _ = model(batch({"f": [[0]], "m": [[1, 5]]}))
        loss.backward()
    return watched.captured == watched.changed(before)


def test_the_rows_of_other_tables_are_captured() -> None:
    assert run_ranks(2, trained) == [True, True]


def beyond() -> str:
    """The error for row 0 of each table."""
    from ecemb.engines import torchrec as adapter
    from ecemb.errors import UsageError

    engine: Any = adapter.find(built())
    [of_both] = engine._batches
    try:
        assert list(of_both.looked_up((torch.tensor([0, 0]), torch.tensor([0, 1, 2])), {}))
    except UsageError as error:
        return str(error)
    return ""


def test_an_id_beyond_a_table_without_rows_raises_before_a_row_changes() -> None:
    """FBGEMM would make it row 0, which is another table's there."""
    first, second = run_ranks(2, beyond)
    assert not first
    assert "of which this rank has no rows" in second and "No row was written" in second


# --- tables on a device, for which the CPU stands in -----------------------------------------------


def trained_apart() -> tuple[bool, list[str]]:
    """Whether exactly the marked rows have changed, without a look of the host; and errors of ids beyond."""
    from unittest import mock

    from ecemb.engines import fbgemm
    from ecemb.errors import UndeclaredWrite
    from support.torchrec.models import Watched, batch

    told: list[str] = []
    with (
        mock.patch("ecemb.engines.fbgemm.is_off_arena", return_value=True),
        mock.patch.object(fbgemm.Features, "rows", side_effect=AssertionError("the host looked")),
    ):
        watched = Watched(model := built())
        [of_both] = watched.engine._batches
        before = watched.rows()
        for _ in range(2):
            with watched.step():
                loss, _ = model(batch({"f": [[0]], "m": [[1, 5]]}))
                loss.backward()
        agrees = watched.captured == watched.changed(before) and watched.undeclared == 0
        behind = torch.tensor([0, 0, 0]), torch.tensor([0, 0, 2])  # the first feature has no ids
        beyond = torch.tensor([0, 0]), torch.tensor([0, 1, 2])
        for call in (behind, beyond):
            try:
                with watched.step():
                    of_both.marked(call, {})
                    watched.engine._touched.add(of_both)  # what guard.touch declares hides no id
            except UndeclaredWrite as error:
                told.append(str(error))
        watched.tables.mark_clean()  # as after an undo
        with watched.step():
            of_both.marked(behind, {})
        return agrees and watched.undeclared == len(told), told


def test_a_table_without_rows_leaves_the_others_on_the_device() -> None:
    first, second = run_ranks(2, trained_apart)
    assert first == (True, [])
    agrees, [told] = second
    assert agrees
    assert "of which this rank has no rows" in told and "below num_embeddings" in told
