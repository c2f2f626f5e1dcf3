"""The end of a step: each rank sends its status to all, and all ranks conclude the same from the statuses.

A status is six numbers: the words of the deltas for the receiver, the transaction, the attempt (2 after an
abort), the outcome of the step, a digest of the replicated state, 0 if it is not compared this time, and the
most steps that the rank wants in its next window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ..errors import StepFailed
from ..group.collectives import Transport
from ..group.error_file import follows
from ..kernels.contract import Words

FINE, FAILED, ABORTED = range(3)


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The conclusion from the statuses of all ranks.

    Attributes:
        messages: this rank's deltas, by keeper.
        incoming: the words that each rank will send.
        aborted: the ranks that abort; if there are any, nothing is sent.
        window: the smallest of the wishes for the next window.
    """

    messages: Mapping[int, Words] = dataclasses.field(default_factory=dict[int, Words])
    incoming: list[int] = dataclasses.field(default_factory=list[int])
    aborted: list[int] = dataclasses.field(default_factory=list[int])
    window: int = 1


def status(
    world_size: int,
    transaction: int,
    attempt: int,
    flag: int,
    messages: Mapping[int, Words] | None = None,
    digest: int = 0,
    window: int = 1,
) -> NDArray[np.int64]:
    """This rank's status for each rank, int64 [world_size, 6].

    Args:
        world_size: ranks.
        transaction: the one in flight.
        attempt: 1, or 2 after an abort.
        flag: FINE, FAILED or ABORTED.
        messages: the deltas that will be sent, by keeper.
        digest: of the replicated state.
        window: the most steps that this rank wants in its next window.
    """
    rows = np.tile(np.array([0, transaction, attempt, flag, digest, window]), (world_size, 1))
    for keeper, words in (messages or {}).items():
        rows[keeper, 0] = len(words)
    return rows


def exchange_status(
    transport: Transport,
    sent: NDArray[np.int64],
    messages: Mapping[int, Words],
    committed: int,
    differs: Callable[[], str],
) -> Agreed:
    """Sends this rank's status to all ranks, and concludes from theirs how the step ended. All ranks.

    Args:
        transport: the control group.
        sent: as `status` makes it.
        messages: the deltas that will be sent, by keeper.
        committed: the last transaction that this rank committed.
        differs: finds what of the replicated state differs; collective, called when digests do.

    Raises:
        StepFailed: another rank's step failed, the ranks are not in the same step, or their replicated state
            differs.
        PeerFailure: a rank died.
    """
    step = int(sent[0, 1]) - 1
    told = transport.exchange_status(sent, f"the status of step {step}")
    incoming, transactions, attempts, flags, digests, windows = (column.tolist() for column in told.T)
    failed = [rank for rank, flag in enumerate(flags) if flag == FAILED]
    aborted = [rank for rank, flag in enumerate(flags) if flag == ABORTED]
    if failed:
        first = min(transactions[rank] for rank in failed) - 1
        raise follows(
            StepFailed(
                f"step {first} failed on ranks {failed} and is undone here: see their logs, then restart "
                f"the job; it goes on from step {committed}"
            ),
            "StepFailed",
        )
    if len(set(transactions)) > 1 or len(set(attempts)) > 1:
        raise StepFailed(
            f"the ranks are not in the same step: {dict(enumerate(t - 1 for t in transactions))}; "
            f"every rank must run every step from guard.next_step on"
        )
    if len(set(digests)) > 1 and not aborted:
        raise StepFailed(
            f"replicated state (dense parameters, buffers, optimizer state) differs between ranks "
            f"in step {step}: {differs()}; inside the step, average the dense "
            f"gradients over the ranks (e.g. DistributedDataParallel), and buffers such as a batch "
            f"norm's (SyncBatchNorm, or all_reduce them), so that all ranks hold the same values"
        )
    return Agreed(messages, incoming, aborted, min(windows))
