"""Rows of tables that are apart from the arena, on their way into it when a transaction ends.

Must not know: engines, other ranks, when a transaction ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from ..adapters.host_mirror import Aside, Images
from ..kernels.contract import Ids
from ..local.journal import RowJournal
from ..recovery.background import Background


class Changed(NamedTuple):
    """The rows that a transaction has changed.

    Attributes:
        journal: the transaction's.
        aside: those that are not in the arena yet; None if all are.
    """

    journal: RowJournal
    aside: Aside | None


class Apart:
    """Brings rows that have changed apart from the arena into it.

    Args:
        images: of the tables; None if there are none, and then nothing is done.
        background: the rebuild beside training.
        phase: adds a block's duration to a phase of the step.

    Attributes:
        captured_rows: rows saved in journals, each once in a transaction.
    """

    def __init__(
        self,
        images: Images | None,
        background: Background,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.images = images
        self._background, self._phase = background, phase
        self._aside: Aside | None = None
        self.captured_rows: int = 0

    @property
    def owed_bytes(self) -> int:
        """What rows that are set aside will take in the journal."""
        return self._aside.size_bytes if self._aside is not None else 0

    def take(self, journal: RowJournal) -> None:
        """Sets changed rows aside where they are; the transaction before is decided.

        Those for which the device has no room are stored here.

        Args:
            journal: of the transaction that has changed them.
        """
        if self.images is None:
            return
        with self._phase("image"):
            self._aside = aside = self.images.take()
        if not aside.is_held:
            self.store(self.hand_over(journal))

    def hand_over(self, journal: RowJournal) -> Changed:
        """The rows that a transaction has changed, for the thread that commits it."""
        changed, self._aside = Changed(journal, self._aside), None
        return changed

    def drop(self) -> None:
        """Forgets rows that are set aside: their transaction is undone."""
        self._aside = None

    def store(self, changed: Changed) -> None:
        """Brings rows into the arena, journalled first; in any thread.

        Raises:
            NotEnoughSpace: the journal can't grow. Some rows may be in the arena; an undo takes them back.
        """
        if changed.aside is None:
            return

        def capture(table: int, ids: Ids) -> None:
            self._background.assert_there(table, ids)
            self.captured_rows += changed.journal.capture(table, ids)

        with self._phase("store"):
            changed.aside.store(capture)
