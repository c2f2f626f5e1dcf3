"""Rows of tables that are apart from the arena, on their way into it when a transaction ends.

Must not know: engines, other ranks, when a transaction ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..adapters.host_mirror import Images
from ..kernels.contract import Ids
from ..local.journal import RowJournal
from ..recovery.background import Background


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
        self.captured_rows: int = 0

    @property
    def owed_bytes(self) -> int:
        """What rows that were set aside will take in the journal."""
        return self.images.owed_bytes if self.images is not None else 0

    def take(self, journal: RowJournal, *, at_once: bool) -> None:
        """Sets changed rows aside where they are; stores them in any case if they can't be, or `at_once`."""
        if self.images is not None:
            with self._phase("image"):
                aside = self.images.take()
            if at_once or not aside:
                self.store(journal)

    def store(self, journal: RowJournal) -> None:
        """Brings rows that were set aside into the arena, journalled first; in any thread.

        Args:
            journal: of the transaction that has changed them.

        Raises:
            NotEnoughSpace: the journal can't grow. Some rows may be in the arena; an undo takes them back.
        """
        if self.images is None:
            return

        def capture(table: int, ids: Ids) -> None:
            self._background.assert_there(table, ids)
            self.captured_rows += journal.capture(table, ids)

        with self._phase("store"):
            self.images.store(capture)
