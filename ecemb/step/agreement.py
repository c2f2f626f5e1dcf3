"""The agreement among ranks on a transaction: the status, the exchange of deltas, and the vote.

The rules are those of docs/protocol.md, 1.2 and 1.3: two disseminations, the status and the vote, and
between them the deltas, to the n - 1 ranks that keep parity of this rank's rows. The rounds carry their kind
and the number of the status, which all ranks count alike since the start. Deltas begin with their size.

A rank that fails after a status, and before it has sent its deltas, sends `MARK` in their place, and receives
the deltas that others send to it: so no rank waits for it.

`compare_replicas` names the tensors that differ when the ranks' digests of replicated state differ.

Must not know: what a step does, and what a rank restores after a failure.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..coding.placement import Placement
from ..errors import InconsistentArenas, PeerFailure, StepFailed
from ..kernels.contract import Words
from ..kernels.threads import to_the_end
from ..net.collectives import Dissemination, Kind, Transport, say
from ..net.error_file import follows
from ..net.mesh import Channels
from ..state.flatten import checksums

Ints = NDArray[np.int64]

FINE, ABORTED, FAILED = range(3)
MARK = -1
"""Stands in the place of the first size of a message whose sender failed: it sends no deltas."""
_YES, _NO = 1, 0

_FLAG, _LOWEST, _HIGHEST, _WINDOW, _LEAST_DIGEST, _MOST_DIGEST, _LACKING, _ABORTS, _MARKED = range(9)
_LARGEST = frozenset((_FLAG, _HIGHEST, _MOST_DIGEST, _LACKING))  # the fold takes the maximum of these words
_RANK_BITS = 20  # low bits of _LOWEST and _HIGHEST: a rank; above them the transaction that it ends
_MASK_BITS = 63  # ranks in each word from _MARKED on
_NO_STEP = (1 << 63) - 1  # in the place of the first step that is aborted


@dataclasses.dataclass
class Decision:
    """Progress of the exchange of deltas and of the vote that follow one status.

    Attributes:
        tag: tag of the vote's round 0.
        votes: the vote's rounds.
        voted: whether this rank owes no vote: it has begun to vote, or all ranks fail.
        heads: rank -> first words of its deltas; empty until the exchange begins.
        swap: the exchange; None until it begins.
        is_resting: whether receiving the words after the heads has begun.
        swapped: whether this rank owes no deltas: all are sent and received, or all ranks fail.
    """

    tag: int
    votes: Dissemination
    voted: bool = False
    heads: dict[int, Words] = dataclasses.field(default_factory=dict[int, Words])
    swap: Channels | None = None
    is_resting: bool = False
    swapped: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The conclusion from the statuses of all ranks, the same on all of them.

    Attributes:
        decision: state of the exchange and of the vote that follow.
        aborted: the ranks that abort a step of the transaction.
        aborts: the first step that they abort, by the transaction that would end with it; 0 if there is none.
        window: the smallest number of steps that a rank can take in its next window.
        is_lacking: whether a rank still lacks rows or parity (docs/protocol.md, 9).
    """

    decision: Decision
    aborted: list[int]
    aborts: int
    window: int
    is_lacking: bool


class Agreement:
    """This rank's part in the agreement on each transaction.

    Args:
        transport: the control group.
        placement: who keeps whose parity; None for a world of one rank.
        make_room: allocates memory to receive deltas: sender -> number of words, to sender -> uint64 array.
    """

    def __init__(
        self,
        transport: Transport,
        placement: Placement | None,
        make_room: Callable[[Mapping[int, int]], dict[int, Words]],
    ) -> None:
        self._last: Decision | None = None  # of the last verdict
        self._transport, self._make_room = transport, make_room
        self._keepers: dict[int, int] = {}  # keeper -> sections of the message to it
        self._senders: dict[int, int] = {}  # sender -> sections of the message from it
        if placement is not None:
            rank = transport.rank
            self._keepers = {keeper: len(blocks) for keeper, blocks in placement.recipients(rank).items()}
            self._senders = {one: len(placement.recipients(one)[rank]) for one in placement.senders(rank)}
        self._number = 0
        self._is_between = False  # between the first round of a status and its verdict

    def conclude(
        self,
        transaction: int,
        flag: int,
        *,
        window: int,
        digest: int,
        committed: int,
        differs: Callable[[], str],
        aborts: int | None = None,
        is_lacking: bool = False,
    ) -> Verdict:
        """Sends this rank's status of the transaction, and returns the verdict of all ranks. All ranks.

        Args:
            transaction: The transaction in flight.
            flag: FINE or ABORTED.
            window: Steps that this rank can take in the next window.
            digest: Digest of the replicated state; 0 if it is not compared in this transaction.
            committed: The last transaction that this rank committed.
            differs: Names the tensors of replicated state that differ. Collective; called if digests differ.
            aborts: The first step that this rank aborts, by the transaction that would end with it; None for
                the last one, or none.
            is_lacking: Whether this rank lacks rows or parity.

        Raises:
            StepFailed: Another rank's step failed, the ranks are not in the same step, or their replicated
                state differs.
            PeerFailure: A rank died.
        """
        step, transport = transaction - 1, self._transport
        tag, vote_tag = transport.tag(Kind.STATUS, self._number), transport.tag(Kind.VOTE, self._number)
        status = Dissemination(transport, tag, _folded, lambda value: int(value[_FLAG]) == FAILED)
        votes = Dissemination(transport, vote_tag, np.minimum, lambda value: int(value[0]) == _NO)
        decision = Decision(vote_tag, votes)
        self._is_between = True
        try:
            first = transaction if aborts is None else aborts
            value = self._status(transaction, flag, window, digest, aborts=first, is_lacking=is_lacking)
            status.run(value, f"the status of step {step}")
        finally:
            if status.is_over and int(status.value[_FLAG]) != FAILED:
                values: list[int] = status.value.tolist()
                if _is_out_of_step(values) or _differs(
                    values
                ):  # all ranks fail: none votes, or waits for deltas
                    decision.voted = decision.swapped = True
                self._last, self._number, self._is_between = decision, self._number + 1, False
        return self._verdict(status.value, decision, step, committed, differs)

    def leave(self, transaction: int) -> None:
        """Sends to all ranks that may wait for this rank that its step failed. Its last message.

        Between the first round of a status and the verdict it sends nothing: there only another rank's
        failure or death can have ended the step, and that ends the other ranks as well.
        """
        to_the_end(lambda: self._leave(transaction), PeerFailure)

    def _leave(self, transaction: int) -> None:
        if self._last is not None:
            self.withdraw(self._last)
        if not self._is_between:
            failed = self._status(transaction, FAILED, 0, 0)
            say(self._transport, self._transport.tag(Kind.STATUS, self._number), failed)

    @contextmanager
    def gathering(self, decision: Decision, *, is_void: bool = False) -> Generator[None]:
        """Block in which ranks gather slices, before deltas: a rank that fails in it exchanges no deltas.

        Args:
            decision: The verdict's decision.
            is_void: Whether no deltas and no vote follow.
        """
        decision.swapped = True
        yield
        decision.swapped = decision.voted = is_void

    def exchange(self, decision: Decision, messages: Mapping[int, Words], what: str) -> None:
        """Sends deltas to the keepers of this rank's parity, and receives the deltas of parity kept here.

        Over a fabric deltas are sent after the heads of all messages have come.

        Args:
            decision: The verdict's decision.
            messages: keeper -> deltas, uint64 [words]; each message begins with the head of a section.
            what: Name of the wait in errors.

        Raises:
            StepFailed: A rank has failed since the verdict.
            PeerFailure: A rank died.
        """
        fabric = self._transport.fabric
        send = messages if fabric is None else {to: messages[to][:size] for to, size in self._keepers.items()}
        swap = self._meet(decision, send, what)
        sizes = {rank: _size(head) for rank, head in decision.heads.items()}
        if failed := [rank for rank, size in sizes.items() if size == MARK]:
            raise follows(StepFailed(f"{what}: ranks {failed} failed: see their logs"), "StepFailed")
        if any(size < len(decision.heads[rank]) for rank, size in sizes.items()):
            raise InconsistentArenas(
                f"{what}: the ranks announce messages of {sizes} words: the network is damaged, or the ranks "
                f"run different versions of ecemb; restart the job"
            )
        inbox = self._make_room(sizes)
        if fabric is not None:
            self._finish(decision, swap, {}, {}, what)
            self._transport.exchange(messages, inbox, what)
            return
        rests: dict[int, Words] = {}
        for rank, head in decision.heads.items():
            inbox[rank][: len(head)], rests[rank] = head, inbox[rank][len(head) :]
        self._finish(decision, swap, rests, {}, what)

    def _meet(self, decision: Decision, send: Mapping[int, Words], what: str) -> Channels:
        """Begins to send, and waits for the heads of all deltas that this rank receives."""
        if decision.swap is None:
            decision.heads = {rank: np.zeros(size, np.uint64) for rank, size in self._senders.items()}
            decision.swap = self._transport.swap(send, decision.heads)
        self._run(decision, decision.swap, what, all_sent=False)
        return decision.swap

    def _finish(
        self,
        decision: Decision,
        swap: Channels,
        rests: Mapping[int, Words],
        unwanted: Mapping[int, int],
        what: str,
    ) -> None:
        """Sends all deltas, and receives or discards the words after the heads.

        A second call, after an interruption, continues the exchange.

        Args:
            decision: Marks how far the exchange is.
            swap: The exchange.
            rests: rank -> memory to receive its remaining words.
            unwanted: rank -> number of its remaining words to receive and discard.
            what: Name of the wait in errors.
        """
        if not decision.is_resting:
            swap.expect(rests)
            swap.skip(unwanted)
            decision.is_resting = True
        self._run(decision, swap, what, all_sent=True)
        decision.swapped = True

    def _run(self, decision: Decision, swap: Channels, what: str, *, all_sent: bool) -> None:
        """Exchanges to the end, and only then raises a signal handler's error; a rank's death ends it."""
        try:
            to_the_end(partial(swap.run, what, all_sent=all_sent), PeerFailure)
        except PeerFailure:
            decision.swapped = True
            raise

    def vote(self, decision: Decision, what: str) -> None:
        """Sends that this rank has prepared; returns when all ranks have. All ranks.

        Raises:
            StepFailed: A rank failed before it had prepared.
            PeerFailure: A rank died.
        """
        decision.voted = True
        decision.votes.run(np.array([_YES], np.int64), what)
        if int(decision.votes.value[0]) == _NO:
            raise follows(StepFailed(f"{what}: another rank failed before it had prepared"), "StepFailed")

    def withdraw(self, decision: Decision) -> None:
        """Sends NO and ends the exchange, as this rank failed after the verdict; no NO once it has voted."""
        to_the_end(lambda: self._withdraw(decision), PeerFailure)

    def _withdraw(self, decision: Decision) -> None:
        """Does the work of `withdraw`; called again after an interruption."""
        if not decision.voted:
            say(self._transport, decision.tag, np.array([_NO], np.int64))
            decision.voted = True
        if not decision.swapped:
            with suppress(PeerFailure):  # recovery decides, and no rank waits for this rank's deltas
                self._end_swap(decision)

    def _end_swap(self, decision: Decision) -> None:
        """Sends a mark in the place of deltas, or the rest of them; receives and discards those of others."""
        what = "leaving"
        swap = self._meet(decision, {keeper: _mark(size) for keeper, size in self._keepers.items()}, what)
        sizes = {rank: _size(head) - len(head) for rank, head in decision.heads.items()}
        self._finish(decision, swap, {}, sizes if self._transport.fabric is None else {}, what)

    def _status(
        self,
        transaction: int,
        flag: int,
        window: int,
        digest: int,
        *,
        aborts: int = 0,
        is_lacking: bool = False,
    ) -> Ints:
        rank, size = self._transport.rank, self._transport.world_size
        masks = [0] * -(-size // _MASK_BITS)
        if flag != FINE:
            masks[rank // _MASK_BITS] = 1 << rank % _MASK_BITS
        place = transaction << _RANK_BITS | rank
        # In the order of _FLAG to _MARKED.
        first = aborts if flag == ABORTED else _NO_STEP
        return np.array([flag, place, place, window, digest, digest, is_lacking, first, *masks], np.int64)

    def _verdict(
        self, value: Ints, decision: Decision, step: int, committed: int, differs: Callable[[], str]
    ) -> Verdict:
        """The verdict from the folded status, which is the same on all ranks.

        Raises:
            StepFailed: as `conclude`.
        """
        values: list[int] = value.tolist()
        flag, marked = values[_FLAG], _marked(values[_MARKED:])
        (lowest, first), (highest, last) = _place(values[_LOWEST]), _place(values[_HIGHEST])
        if flag == FAILED:
            raise follows(
                StepFailed(
                    f"step {lowest - 1} failed on ranks {marked} and is undone here: see their logs, then "
                    f"restart the job; it goes on from step {committed}"
                ),
                "StepFailed",
            )
        if _is_out_of_step(values):
            raise StepFailed(
                f"the ranks are not in the same step: rank {first} ends step {lowest - 1}, and rank {last} "
                f"step {highest - 1}; every rank must run every step from guard.next_step on"
            )
        if _differs(values):
            raise StepFailed(
                f"replicated state (dense parameters, buffers, optimizer state) differs between ranks "
                f"in step {step}: {differs()}; inside the step, average the dense "
                f"gradients over the ranks (e.g. DistributedDataParallel), and buffers such as a batch "
                f"norm's (SyncBatchNorm, or all_reduce them), so that all ranks hold the same values"
            )
        aborts = values[_ABORTS] if marked else 0
        return Verdict(decision, marked, aborts, values[_WINDOW], bool(values[_LACKING]))


def _is_out_of_step(values: Sequence[int]) -> bool:
    """Whether ranks are in different steps."""
    return _place(values[_LOWEST])[0] != _place(values[_HIGHEST])[0]


def _differs(values: Sequence[int]) -> bool:
    """Whether replicated state differs between ranks; False if a rank aborts the step."""
    return values[_FLAG] == FINE and values[_LEAST_DIGEST] != values[_MOST_DIGEST]


def _size(head: Words) -> int:
    """Number of words of a message, by the sizes in its head; `MARK` for a mark."""
    sizes: list[int] = head.view(np.int64).tolist()
    return MARK if sizes[0] == MARK else sum(sizes)


def _mark(sections: int) -> Words:
    """The message that a failed rank sends in the place of deltas of this number of sections."""
    words = np.zeros(sections, np.uint64)
    words[:1].view(np.int64)[0] = MARK
    return words


def _folded(own: Ints, received: Ints) -> Ints:
    """Folds two statuses: the worse flag with its ranks, and the minimum or maximum of each other word."""
    mine: list[int] = own.tolist()  # Python's ints are faster than single elements of an array
    others: list[int] = received.tolist()
    pairs = enumerate(zip(mine, others, strict=True))
    out = [max(pair) if at in _LARGEST else min(pair) for at, pair in pairs]
    if mine[_FLAG] == others[_FLAG]:
        out[_MARKED:] = (a | b for a, b in zip(mine[_MARKED:], others[_MARKED:], strict=True))
    else:
        out[_MARKED:] = (mine if mine[_FLAG] > others[_FLAG] else others)[_MARKED:]
    return np.array(out, np.int64)


def _place(value: int) -> tuple[int, int]:
    """Decodes `_LOWEST` or `_HIGHEST`: a transaction, and a rank that ends it."""
    return value >> _RANK_BITS, value & ((1 << _RANK_BITS) - 1)


def _marked(masks: Sequence[int]) -> list[int]:
    """The ranks whose bit is set: those that sent the worst flag."""
    return [
        at * _MASK_BITS + i
        for at, mask in enumerate(masks)
        if mask
        for i in range(_MASK_BITS)
        if mask >> i & 1
    ]


_SHOWN = 8  # ranks that an error message names


def compare_replicas(memory: NDArray[np.uint8], transport: Transport) -> str:
    """Names the replicated state that differs, and the ranks that differ. All ranks.

    Args:
        memory: This rank's saved replicated state, uint8 [bytes], as a slot's `read` returns it.
        transport: The control group.

    Returns:
        Text: the first name that differs, the ranks that differ there from most others, and the number of
        further names that differ; the same on all ranks.

    Raises:
        InconsistentArenas: `memory` holds no saved state.
        PeerFailure: A peer died.
    """
    own = json.dumps(checksums(memory)).encode()
    texts = transport.gather(own, "looking for what differs in replicated state")
    return difference_of_replicas([json.loads(text) for text in texts])


def difference_of_replicas(of_ranks: Sequence[Mapping[str, int]]) -> str:
    """The text of `compare_replicas`, from the checksums of all ranks.

    Args:
        of_ranks: per rank, name -> checksum, in the order of the state.
    """
    names = list(dict.fromkeys(name for one in of_ranks for name in one))
    found = {name: values for name in names if len(set(values := [one.get(name) for one in of_ranks])) > 1}
    if not found:
        return "the order of its parts differs"
    first, values = next(iter(found.items()))
    usual, _ = Counter(values).most_common(1)[0]
    ranks = [rank for rank, value in enumerate(values) if value != usual]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    plural = "s" if len(ranks) > 1 else ""
    others = f", and {len(found) - 1} more after it" if len(found) > 1 else ""
    return (
        f"{first} is the first that differs, on rank{plural} {ranks[:_SHOWN]}{more} from most others{others}"
    )
