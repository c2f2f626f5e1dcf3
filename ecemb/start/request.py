"""The arguments of `ecemb.protect`, and the state of the training, checked on this rank alone.

Owns the rules for arguments that don't depend on other ranks, and the division of a training's state into
tables, replicated state and rank state, as this rank finds it in the model and its optimizers. Must not know
the other ranks, nor arenas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from ..checkpoint.folder_store import reader_of
from ..checkpoint.interface import CheckpointReader
from ..checkpoint.saver import name_of
from ..checkpoint.transfer import Transfer
from ..coding.code import Code
from ..engines.discover import Tables, find
from ..errors import ConfigurationError
from ..recovery.verify import VERIFY_SHARE
from ..state import rank_state as rank_states
from ..state.ddp_buckets import GradientBuckets, check_apart, found_in
from ..state.optimizers import NamedOptimizers
from ..state.rank_state import RankState, Stateful, objects_of
from ..state.replicated import ReplicatedState
from ..step.transaction import COMPARE_EVERY
from ..step.window import Window
from .placement_choice import FailureDomain, chosen

ParityBackend = Literal["tcp", "nccl"]
RebuildMode = Literal["blocking", "background"]


def codes_of(given: object) -> tuple[Code, ...]:
    """The codes in a `code=` argument, by preference.

    Raises:
        ConfigurationError: the argument is neither a code nor a list or tuple of codes.
    """
    one_or_more: Any = given if isinstance(given, (list, tuple)) else (given,)
    codes = tuple(one for one in one_or_more if isinstance(one, Code))
    if not codes or len(codes) < len(one_or_more):
        raise ConfigurationError(
            f"code= takes an ecemb.Code, e.g. Code(n=4, k=3), a list of them by preference, or a function of "
            f"the number of ranks that returns one of these; it is {given!r}"
        )
    return codes


@dataclasses.dataclass(frozen=True)
class Request:
    """The user's arguments of `protect`.

    Attributes:
        model: the whole model.
        optimizers: all optimizers of the training.
        modules: modules of tables that are sharded by hand, by key.
        code: the (n, k) code; the first of `codes` until one is chosen.
        state: the user's objects, as passed in `state=`.
        window: number of steps in a transaction.
        overlap: whether a thread decides a transaction while the next step's body runs.
        failure_domain: see `ecemb.protect`.
        parity_backend: the transport of deltas.
        reader: finds a checkpoint; None without `resume=`.
        without: parameters and modules that no optimizer changes.
        compare_every: commits between two comparisons of replicated state among the ranks.
        verify: share of training's time in which parity is compared with rows.
        resume_required: whether a start without memory needs a checkpoint.
        renamed: key of a table -> its key in the checkpoint, where the two differ.
        transfer: tables that a fresh start takes from another training; None for none.
        elastic: whether the memory may move to another number of ranks.
        codes: the codes to choose from, by preference; empty for `code` alone.
        shards: key of a table that is sharded by hand -> first row of this rank's rows in the whole table,
            and the whole table's number of rows.
        rebuild: whether training waits for lost rows ("blocking"), or begins without them ("background").
        strict: whether a start is refused if the script has state that no recovery restores.

    Raises:
        ConfigurationError: an attribute breaks a rule.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    modules: Mapping[str, nn.Module]
    code: Code
    state: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None
    window: Window
    overlap: bool
    failure_domain: FailureDomain
    parity_backend: ParityBackend = "tcp"
    reader: CheckpointReader | None = None
    without: Sequence[nn.Module | nn.Parameter] = ()
    compare_every: int = COMPARE_EVERY
    verify: float = VERIFY_SHARE
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    transfer: Transfer | None = None
    elastic: bool = False
    codes: Sequence[Code] = ()
    shards: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict[str, tuple[int, int]])
    rebuild: RebuildMode = "blocking"
    resume_required: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.failure_domain not in ("auto", "host", "rank"):
            raise ConfigurationError(
                f"failure_domain is 'auto', 'host' or 'rank'; it is {self.failure_domain!r}"
            )
        for name in ("overlap", "elastic", "resume_required", "strict"):
            if not isinstance(given := getattr(self, name), bool):
                raise ConfigurationError(f"{name}= is True or False; it is {given!r}")
        if type(self.compare_every) is not int or self.compare_every < 1:
            raise ConfigurationError(
                f"compare_every= is a number of commits, 1 or more: {self.compare_every!r}"
            )
        if type(self.verify) not in (int, float) or not 0 <= self.verify <= 1:
            raise ConfigurationError(
                f"verify= is the share of training's time in which parity is compared with rows, from 0 "
                f"(never) to 1; it is {self.verify!r}"
            )
        if self.parity_backend not in ("tcp", "nccl"):
            raise ConfigurationError(f"parity_backend is 'tcp' or 'nccl'; it is {self.parity_backend!r}")
        if self.parity_backend == "nccl" and self.overlap:
            raise ConfigurationError(
                "parity_backend='nccl' with overlap=True: deltas would be sent while the next step's "
                "training uses NCCL, and two of its communicators in use at the same time may wait for "
                "each other forever. Leave one of the two out: over TCP, deltas go beside the next step"
            )
        if self.rebuild not in ("blocking", "background"):
            raise ConfigurationError(f"rebuild is 'blocking' or 'background'; it is {self.rebuild!r}")
        if self.resume_required and self.reader is None:
            raise ConfigurationError(
                "resume_required=True asks for a checkpoint, and resume= names none: pass resume="
            )
        self._check_sources()
        self._check_shards()

    def _check_shards(self) -> None:
        """Checks `shards`, the places of tables that are sharded by hand."""
        given: Any = self.shards
        form = "shards= takes a mapping from keys of tables= to (first row, rows of the whole table)"
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{form}, e.g. {{'user': (500, 1000)}}; it is {given!r}")
        for name, place in self.shards.items():
            is_pair = isinstance(place, tuple) and [type(one) for one in place] == [int, int]  # pyright: ignore[reportUnnecessaryIsInstance]
            if not is_pair or not 0 <= place[0] <= place[1]:
                raise ConfigurationError(f"{form}; of {name!r} it has {place!r}")
            if name not in self.modules:
                raise ConfigurationError(
                    f"shards= has {name!r}, which is no key of tables= on this rank: name the module there, "
                    f"or leave its place out; ecemb knows where its own tables and TorchRec's stand"
                )

    def _check_sources(self) -> None:
        """Checks `renamed` and `transfer`, which name tables of a checkpoint or another training."""
        given: Any = self.renamed
        if not isinstance(given, Mapping) or not all(
            isinstance(one, str) for one in (*given, *given.values())
        ):  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
            raise ConfigurationError(
                f"renamed= takes a mapping from keys of tables to their keys in the checkpoint, e.g. "
                f"{{'user': 'bags.embedding_bags.user'}}; it is {self.renamed!r}"
            )
        if self.renamed and self.reader is None:
            raise ConfigurationError(
                "renamed= gives names of tables in the checkpoint that resume= finds: pass resume=, or "
                "transfer= to begin a new training from another one's tables"
            )
        if self.transfer is not None and not isinstance(self.transfer, Transfer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"transfer= takes an ecemb.checkpoint.Transfer, e.g. Transfer('checkpoints', ['user']); it "
                f"is {self.transfer!r}"
            )
        if self.transfer is not None:
            self.source()

    def with_code_for(self, hosts: Sequence[str], held: tuple[int, int] | None) -> Request:
        """This request with the chosen code.

        Args:
            hosts: rank -> its host.
            held: (n, k) of the arenas that the job continues with; None if there are none, or if another
                number of ranks made them.

        Raises:
            PlacementError: no code fits.
        """
        codes = self.codes or (self.code,)
        same = [code for code in codes if (code.n, code.k) == held]
        return dataclasses.replace(self, code=(same or [chosen(codes, hosts, self.failure_domain)])[0])

    def source(self) -> CheckpointReader:
        """The reader of `transfer`, which must not be None.

        Raises:
            ConfigurationError: the transfer's source is neither a path nor a reader.
        """
        return reader_of(cast("Transfer", self.transfer).source, "Transfer(source)")

    def origin(self) -> dict[str, Any]:
        """`renamed` and `transfer` as plain JSON values, for the comparison between ranks."""
        taken: list[Any] = []
        if self.transfer is not None:
            names = self.transfer.tables
            rows = {name: len(ids) for name, ids in self.transfer.rows.items()}
            taken = [
                name_of(self.source()),
                dict(names) if isinstance(names, Mapping) else None if names is None else list(names),
                rows,
                self.transfer.states,
            ]
        return {"renamed": dict(self.renamed), "transfer": taken}


@dataclasses.dataclass(frozen=True)
class Training:
    """A training's state, divided by how it is recovered.

    Attributes:
        tables: protected tables, whose rows parity covers.
        optimizers: the guard's optimizers, with the checks of their steps.
        buckets: gradient buckets of DistributedDataParallel.
        replicated: dense parameters, buffers and their optimizers' state: the same on all ranks.
        rank_state: generators, scalars, `state=` objects and metrics of this rank.
        state_bytes: room for the packed rank state, in bytes.
    """

    tables: Tables
    optimizers: NamedOptimizers
    buckets: GradientBuckets
    replicated: ReplicatedState
    rank_state: RankState
    state_bytes: int


def examine_training(request: Request) -> Training:
    """Finds the state of a training. This rank alone.

    Raises:
        ConfigurationError: the model, an optimizer or a `state=` object can't be protected.
        UnsupportedTable: a table can't be protected.
        UnsupportedOptimizer: a table's optimizer can't be protected, or a table has none.
    """
    tables, optimizers = find(request.model, request.modules, request.optimizers)
    _check_state(objects_of(request.state), tables.parameters)
    averaged = found_in(request.model, tables.averaged)
    check_apart(averaged, tables.parameters)
    buckets = GradientBuckets([*averaged, *tables.averaged])
    replicated = ReplicatedState(request.model, optimizers, tables.parameters, tables.left_out)
    every = [*request.optimizers, *optimizers]
    named = NamedOptimizers(request.model, tables.stepped, tables.parameters, every, request.without)

    def scalars() -> dict[str, Any]:
        return {"tables": tables.state(), "buckets": buckets.state()}

    def set_scalars(state: dict[str, Any]) -> None:
        tables.set_state(state["tables"], request.renamed)
        buckets.set_state(state["buckets"])

    rank_state = RankState(request.state, scalars, set_scalars, request.model)
    return Training(tables, named, buckets, replicated, rank_state, rank_states.room(len(rank_state.pack())))


def _check_state(state: Mapping[str | int, object], own: Sequence[nn.Parameter]) -> None:
    """Raises ConfigurationError if restoring a `state=` object would overwrite protected tables.

    Args:
        state: the `state=` objects, by name or index.
        own: parameters of the protected tables.
    """
    tables = {id(parameter) for parameter in own}
    for key, item in state.items():
        held: list[Any] = []
        way_out = "leave it out, model= is saved anyway"
        if isinstance(item, nn.Module):
            held = list(item.parameters())
        elif isinstance(item, torch.optim.Optimizer):
            held = [parameter for group in item.param_groups for parameter in group["params"]]
            way_out = "name it in optimizers= alone"
        if any(id(parameter) in tables for parameter in held):
            raise ConfigurationError(
                f"state= object {key!r} ({type(item).__name__}) holds parameters of protected tables, which "
                f"come back by themselves, and its load_state_dict() would overwrite them: {way_out}"
            )
