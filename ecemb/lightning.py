"""A callback for PyTorch Lightning: what it does between two updates by the optimizer is a step of a guard.

    ecemb.init_process_group("gloo", job="ctr")
    protection = Protection(code=ecemb.Code(4, 3))
    trainer = Trainer(devices=4, strategy="ddp", callbacks=[protection], use_distributed_sampler=False)
    trainer.fit(module, protection.batches(loader))
    trainer.save_checkpoint("final.ckpt")
    protection.close()

Lightning's place in the training (epochs, batches, optimizer steps), its learning rate schedules and the
scaler of its precision are state of the guard: a restart goes on as from a checkpoint that was saved after
the last committed batch, in the middle of an epoch or not. `pip install 'ecemb[lightning]'`.

Tables' gradients are summed over the ranks, and DistributedDataParallel averages dense ones: what is the mean
over the global batch there has N times its size here. Keep tables on the CPU, not on the meta device:
Lightning moves its module before the guard is made.

Must not know: how a guard works.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from . import generators
from .adapters.tables import listed
from .code import Code
from .errors import ConfigurationError, UsageError
from .guard import Guard, Step, protect
from .nn import ShardedEmbeddingBag
from .rankstate import Stateful

__all__ = ["Protection"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names


def _callback() -> Any:
    """Lightning's base class of callbacks: of the package that is imported already, else of what is there.

    Raises:
        ConfigurationError: Lightning is not installed.
    """
    there = [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    for name in [name for name in there if name in sys.modules] or there:
        return importlib.import_module(name).Callback
    raise ConfigurationError(
        "ecemb.lightning needs PyTorch Lightning, which is not installed: pip install 'ecemb[lightning]'"
    )


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = _callback()


class Protection(_Callback):
    """Protects the sharded tables of a LightningModule while `Trainer.fit` runs.

    Call `ecemb.init_process_group` before the Trainer is made. Other callbacks come after it in `callbacks=`:
    what they change in their `on_train_batch_end` is not part of the step. Random draws between steps, such
    as those of a validation, leave the training's generators as they were.

    Args:
        code: the (n, k) code.
        state: further objects with state_dict() and load_state_dict() that belong to this rank's training
            position.
        tables: tables that the module shards by hand, by name, as for `ecemb.protect`.
        options: further arguments of `ecemb.protect`, such as `window`, `overlap` and `resume`.

    Attributes:
        step: the step in work, for `step.number` and `step.abort()`; None before the first one.
    """

    def __init__(
        self,
        *,
        code: Code,
        state: Sequence[Stateful] | Stateful | None = None,
        tables: Mapping[str, nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._code, self._state, self._tables, self._options = code, listed(state), tables or {}, options
        self._guard: Guard | None = None
        self._loader: _Loader | None = None
        self._batches: Iterator[Any] = iter(())
        self._progress: _Progress | None = None
        self._step = ExitStack()
        self._is_open = False
        self._drawn: dict[str, Any] = {}  # the generators' states, as the last step left them
        self.step: Step | None = None

    @property
    def guard(self) -> Guard:
        """The guard, from the start of the fit on.

        Raises:
            UsageError: `Trainer.fit` has not begun.
        """
        if self._guard is None:
            raise UsageError("the guard of a Protection is made when Trainer.fit begins: call that first")
        return self._guard

    def batches(self, loader: Any) -> Any:
        """The loader for `Trainer.fit`, whose batches are drawn inside the steps, as `Guard.batches` does.

        Args:
            loader: what `Guard.batches` takes, with a length.

        Raises:
            ConfigurationError: it has no length, or a loader was given before.
        """
        if self._loader is not None:
            raise ConfigurationError("a Protection has one loader: call batches() once")
        if not hasattr(loader, "__len__"):
            raise ConfigurationError(
                f"Protection.batches() takes a loader with a length, by which Lightning tells epochs apart; "
                f"{type(loader).__name__} has none"
            )
        self._loader = _Loader(loader, self._place, self._draw)
        return self._loader

    def close(self) -> None:
        """Ends the job, as `Guard.close` does: after the fit, when the model is saved. All ranks.

        Raises:
            UsageError: `Trainer.fit` has not begun.
            StepFailed: a step failed.
        """
        self.guard.close()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning's hook: keeps DistributedDataParallel away from the tables."""
        tables = [one for one in pl_module.modules() if isinstance(one, ShardedEmbeddingBag)]
        weights = {id(one) for table in (*tables, *self._tables.values()) for one in table.parameters()}
        pl_module._ddp_params_and_buffers_to_ignore = [  # where DistributedDataParallel looks for it
            name for name, parameter in pl_module.named_parameters() if id(parameter) in weights
        ]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook: a fresh start, or a recovery, happens here.

        Raises:
            ConfigurationError: the fit's loader is not from `batches`.
            UsageError: this is the second fit.
            EcembError: what `ecemb.protect` raises.
        """
        if self._loader is None:
            raise ConfigurationError("Trainer.fit takes protection.batches(loader) for its train_dataloaders")
        if self._guard is not None:
            raise UsageError("a Protection is for one Trainer.fit: a process has one guard")
        self._progress = _Progress(trainer)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._guard = protect(
            trainer.strategy.model,
            optimizers=trainer.optimizers,
            tables=self._tables,
            code=self._code,
            state=[self._progress, *schedules, *self._state],
            **self._options,
        )
        self._batches = self._guard.batches(self._loader.loader)
        self._drawn = generators.process_states()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook: looks at what it makes of the loader.

        Raises:
            ConfigurationError: it would not go through all of it.
        """
        length = 0 if self._loader is None else len(self._loader)
        if trainer.num_training_batches != length:
            raise ConfigurationError(
                f"Trainer.fit takes {trainer.num_training_batches} batches of an epoch, and the loader has "
                f"{length}: leave limit_train_batches, overfit_batches and fast_dev_run out"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Lightning's hook: the batch has begun the step.

        Raises:
            ConfigurationError: it is another loader's.
        """
        if not self._is_open:
            raise ConfigurationError("Trainer.fit takes protection.batches(loader) for its train_dataloaders")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning's hook: the step commits, if this batch's gradients are not to be added to."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        self._is_open = False
        self._step.close()
        self._drawn = generators.process_states()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning's hook: the step in work is undone."""
        self._is_open = False
        self._step.__exit__(type(exception), exception, exception.__traceback__)

    def _place(self) -> int:
        """The batch of its epoch that is drawn next."""
        if self._progress is None or self._loader is None:
            return 0
        together = self._progress.trainer.accumulate_grad_batches
        steps = -(-len(self._loader) // together)
        return self.guard.next_step % steps * together

    def _draw(self) -> Any:
        """The next batch, inside a step."""
        if not self._is_open:
            if self._progress is not None:
                self._progress.runs = True
            generators.set_process_states(self._drawn)
            self.step = self._step.enter_context(self.guard.step())
            self._is_open = True
        return next(self._batches)


class _Loader:
    """A loader as Lightning sees it: an epoch goes on where the guard stands when a batch is drawn."""

    def __init__(self, loader: Any, place: Callable[[], int], draw: Callable[[], Any]) -> None:
        self.loader = loader
        self._place, self._draw = place, draw

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._place(), len(self.loader)):
            yield self._draw()

    def state_dict(self) -> dict[str, Any]:  # tells Lightning that it can be resumed: by the guard
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Progress:
    """Lightning's own place: what it would put into a checkpoint besides model and optimizers.

    Attributes:
        trainer: whose.
        runs: whether batches are drawn: from then on the place is Lightning's affair, whatever is undone.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.runs = False

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        return {"loop": trainer.fit_loop.state_dict(), "precision": trainer.precision_plugin.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.runs:
            self.trainer.fit_loop.load_state_dict(state["loop"])
        if state["precision"]:
            self.trainer.precision_plugin.load_state_dict(state["precision"])
