"""The messages that a process sends for protection: those of its `Transport`s, and their collectives.

Collectives are counted where torch.distributed is called, on groups other than the training's default one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ecemb.kernels.contract import Words
from ecemb.net.collectives import Transport

MARK_BYTES = 64
"""A message of at most this many bytes says how things stand; a longer one may carry deltas."""
CARRIES = "exchange"
"""The phase of a commit in which deltas are sent."""
KINDS = DELTAS, AGREEMENT, EMPTY = "deltas", "agreement", "empty"
OTHERS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
"""Collectives that ecemb doesn't use, so that the number of their messages is not known here."""


@dataclass
class Sent:
    """Messages that this rank has sent.

    Attributes:
        sizes: Peer -> the bytes of each message to it.
        kinds: Peer -> what each of them is.
        unknown: Names of collectives that were called and are not counted.
        phase: Says in which phase of the protection the process is.
        by_phase: phase -> the messages with anything in them, and their bytes.
    """

    sizes: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    kinds: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    unknown: set[str] = field(default_factory=set[str])
    phase: Callable[[], str] = str
    by_phase: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def add(self, peer: int, size: int) -> None:
        phase = self.phase()
        self.sizes.setdefault(peer, []).append(size)
        self.kinds.setdefault(peer, []).append(kind_of(size, phase))
        if size:
            messages, total = self.by_phase.get(phase, (0, 0))
            self.by_phase[phase] = messages + 1, total + size

    def of_kind(self, kind: str) -> dict[str, int]:
        """Of messages of a kind: how many, to how many peers, and their bytes."""
        chosen = {
            peer: [size for size, one in zip(sizes, self.kinds[peer], strict=True) if one == kind]
            for peer, sizes in self.sizes.items()
        }
        return {
            "messages": sum(map(len, chosen.values())),
            "peers": sum(1 for sizes in chosen.values() if sizes),
            "bytes": sum(map(sum, chosen.values())),
        }


def kind_of(size: int, phase: str) -> str:
    """What a message of this size in this phase is: deltas, agreement, or an empty part of a collective."""
    return DELTAS if size > MARK_BYTES and phase == CARRIES else AGREEMENT if size else EMPTY


@contextmanager
def counting() -> Iterator[Sent]:
    """Counts what this process sends for protection, while the block lasts."""
    sent = Sent()
    with ExitStack() as patches:
        for name in ("all_to_all_single", *OTHERS):
            note = functools.partial(_unknown, name) if name in OTHERS else _all_to_all_single
            noted = functools.partial(_noted, sent, getattr(dist, name), note)
            patches.enter_context(mock.patch.object(dist, name, noted))
        for name in ("send", "send_note"):
            patches.enter_context(
                mock.patch.object(Transport, name, _counted(sent, getattr(Transport, name)))
            )
        patches.enter_context(mock.patch.object(Transport, "swap", _swapped(sent, Transport.swap)))
        yield sent


def _swapped(sent: Sent, original: Callable[..., Any]) -> Callable[..., Any]:
    def swap(self: Transport, send: Mapping[int, Words], heads: Mapping[int, Words]) -> Any:
        for to, words in send.items():
            sent.add(to, words.nbytes)
        return original(self, send, heads)

    return swap


def _counted(sent: Sent, original: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: Transport, words: Words, to: int, *args: Any, **kwargs: Any) -> Any:
        sent.add(to, words.nbytes)
        return original(self, words, to, *args, **kwargs)

    return send


def _noted(
    sent: Sent, original: Callable[..., Any], note: Callable[..., None], *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("group") not in (None, dist.group.WORLD):
        note(sent, *args, **kwargs)
    return original(*args, **kwargs)


def _all_to_all_single(
    sent: Sent,
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
    **_: object,
) -> None:
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    of_row = input.nbytes // max(len(input), 1)
    splits = input_split_sizes or [len(input) // ranks] * ranks
    for peer, rows in enumerate(splits):
        if peer != own:
            sent.add(peer, rows * of_row)


def _unknown(name: str, sent: Sent, *_: object, **__: object) -> None:
    sent.unknown.add(name)
