"""`ecemb.protect`: what the user asks for, opened as a Guard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Literal

import torch
from torch import nn

from .adapters.discover import listed, modules_of, optimizers_of
from .checkpoint.interface import CheckpointReader
from .checkpoint.saver import reader_of
from .checkpoint.transfer import Transfer
from .coding.code import Code
from .errors import ConfigurationError, UsageError
from .guard import Guard
from .session import current
from .startup.opening import open_memory
from .startup.request import FailureDomain, ParityBackend, RebuildMode, Request, codes_of
from .state.rank_state import Stateful
from .step.transaction import COMPARE_EVERY
from .step.window import Window


def protect(
    model: nn.Module,
    *,
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer = (),
    tables: Mapping[str, nn.Module] | None = None,
    code: Code | Sequence[Code] | Callable[[int], Code | Sequence[Code]],
    state: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None = None,
    without_optimizer: Sequence[nn.Module | nn.Parameter] | nn.Module | nn.Parameter = (),
    window: int | Literal["auto"] = 1,
    mtbf: timedelta | None = None,
    max_replay: timedelta | float | None = None,
    overlap: bool = False,
    failure_domain: FailureDomain = "auto",
    parity_backend: ParityBackend = "tcp",
    compare_every: int = COMPARE_EVERY,
    resume: str | os.PathLike[str] | CheckpointReader | None = None,
    resume_required: bool = False,
    renamed: Mapping[str, str] | None = None,
    transfer: Transfer | None = None,
    elastic: bool = False,
    shards: Mapping[str, tuple[int, int]] | None = None,
    rebuild: RebuildMode = "blocking",
) -> Guard:
    """Protects a model's sharded embedding tables; a fresh start, or a recovery, happens here. All ranks.

    Finds every `ecemb.nn.ShardedEmbeddingBag` and every sharded collection of TorchRec in the model
    (docs/torchrec.md lists them), and adds `tables`. Tables move into the arena; those on the meta device are
    materialised there. Those on a CUDA device stay, and have an image there. After a recovery, tables, dense
    parameters, optimizer state, random number generators and `state` are as they were after step
    `guard.next_step` - 1.

    Args:
        model: the whole model; what is not a protected table must be the same on all ranks. Before,
            wrap it in TorchRec's DistributedModelParallel, or dense parts alone in DistributedDataParallel.
        optimizers: all optimizers of the training, or the only one; those of dense parameters are the same on
            every rank, with the same options. Tables need torch.optim.SGD, Adagrad or SparseAdam (TorchRec's:
            its fused SGD, row-wise Adagrad or Adagrad). TorchRec's combined optimizers are taken apart.
        tables: further tables, sharded by hand: nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True)
            by a key of your choice. Ranks need not hold the same ones.
        code: the (n, k) code; n at most the number of ranks. A list has codes by preference: the first that
            fits counts. A function of the number of ranks returns one of the two.
        state: schedules, counters and the like of this rank, with state_dict() and load_state_dict(), by
            name. One alone will do, and so will a list in a fixed order where no two are of one class.
        without_optimizer: parameters, or modules, with requires_grad=True that no optimizer changes: frozen
            ones, and those that the script writes inside the step. All others need one of `optimizers`.
        window: number of steps that are committed together: a row that several of them change is sent once,
            and at most this many steps are run again after a failure. "auto" measures the first steps, and
            picks the number with which commits and steps run again cost least (Young's formula); it picks
            again when a commit or a step takes half as long again, or half as long. Windows are shorter where
            the rows that they change have no room.
        mtbf: mean time between failures of the whole job, for "auto"; as published, 60 days / hosts.
        max_replay: most time of steps that a failure takes back, for "auto": a timedelta, or seconds.
        overlap: whether a thread commits beside the steps that follow, which may be run again as well.
        failure_domain: "host": any r lost hosts are survived, or an error names codes that fit; "rank":
            any r lost ranks; "auto": hosts if there are enough, else ranks, with a warning.
        parity_backend: what deltas go over: "tcp", from host memory over connections of the ranks' own, or
            "nccl" (and rows, where parity is made or checked), through each rank's current CUDA device; not
            with `overlap`.
        compare_every: commits between two comparisons of dense state among the ranks, by checksum.
        resume: folder that `Guard.save` saves to (or a CheckpointReader). A fresh start begins at its newest
            checkpoint, with any number of ranks, and so does a job that has lost more memory than the code
            survives. It may be empty or missing, and is made by the first save: then the job begins at step
            0, with a warning. Tables may have moved to another engine, between `ecemb.nn` and TorchRec: rows
            are found by table and number.
        resume_required: whether a job without memory begins at a checkpoint or not at all: without one in
            `resume`, because of a wrong path for example, the start raises CheckpointFailed.
        renamed: keys of tables in the checkpoint of `resume`, by their keys now, where the two differ; a key
            is the table's path in the model, without a range of columns.
        transfer: tables of another training that this one takes at step 0, where it begins.
        elastic: whether the job goes on with another number of ranks, from memory: rows, their optimizer's
            state and dense state exactly, the rest as from a checkpoint. Hosts need room for old and new
            arenas at once. Tables sharded by hand need `shards`, also in the launch before.
        shards: where this rank's rows of a table that is sharded by hand stand, by its key in `tables`: the
            whole table's row at which they begin, and its number of rows. With it, another number of ranks
            can go on with the table, by `resume` or `elastic`.
        rebuild: "blocking": training waits until lost rows are rebuilt. "background": it begins at once; a
            replacement rank waits for the rows that a batch needs, and gets the others meanwhile. Until it
            has all, its memory counts as lost.

    Returns:
        The guard.

    Raises:
        NotInitialized: ecemb.init_process_group() comes first.
        UsageError: this process has a guard already, or an earlier start of this launch was refused because
            an optimizer used gradients from before the last commit.
        ConfigurationError: an argument breaks a rule; also UnsupportedTable, UnsupportedOptimizer,
            PlacementError.
        LayoutMismatch: the job was started with another model or code.
        RendezvousError: it was started with another number of ranks, and `elastic` is not set.
        NotEnoughSpace: the arena doesn't fit.
        RecoveryError: the job can't go on: TooManyErasures, StateLost, JobFinished, InconsistentArenas.
        CheckpointError: what `resume` or `transfer` names can't be read, isn't safe, or doesn't fit; the
            error lists all that doesn't fit, and nothing was written.
        PeerFailure: a peer died or failed, or an argument breaks a rule there alone.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"ecemb.protect() takes the model, a torch.nn.Module; it got {model!r}. Name tables that are "
            f"sharded by hand in tables="
        )
    session = current()
    if session.protected:
        raise UsageError("this process has a guard already: call ecemb.protect() once, and keep its guard")

    def asked() -> Request:
        codes = codes_of(code(session.world_size) if callable(code) else code)
        return Request(
            model=model,
            optimizers=optimizers_of(optimizers),
            modules=modules_of(tables),
            code=codes[0],
            state=state,
            without=listed(without_optimizer),
            window=Window(window, mtbf, max_replay),
            overlap=overlap,
            failure_domain=failure_domain,
            parity_backend=parity_backend,
            compare_every=compare_every,
            reader=None if resume is None else reader_of(resume),
            resume_required=resume_required,
            renamed=renamed or {},
            transfer=transfer,
            elastic=elastic,
            codes=codes,
            shards=shards or {},
            rebuild=rebuild,
        )

    opened = open_memory(session, asked)
    session.protected = True
    (guard := Guard.__new__(Guard))._begin(session, opened)  # pyright: ignore[reportPrivateUsage]
    return guard
