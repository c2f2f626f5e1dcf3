"""A callback for PyTorch Lightning: the work between two updates by the optimizer is a step of a guard.

    ecemb.init_process_group("gloo", job="ctr")  # before the Trainer is made
    protection = Protection(code=ecemb.Code(4, 3))
    trainer = Trainer(
        accelerator="cpu",
        devices=4,  # of a host: as many as --nproc-per-node
        strategy="ddp",
        callbacks=[protection],  # before all other callbacks
        use_distributed_sampler=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, protection.batches(loader))
    protection.guard.save("final")  # whole tables; Lightning's own checkpoints have rank 0's rows alone
    protection.close()

Lightning's place in the training (epochs, batches, optimizer steps), its learning rate schedules and the
scaler of its precision are state of the guard: a restart continues after the last committed step, even in the
middle of an epoch. `pip install 'ecemb[lightning]'`.

Tables' gradients are summed over the N ranks, and DistributedDataParallel averages dense ones: if each rank's
loss is a mean over its batch, tables' gradients are N times those of the mean over the global batch. Keep
tables on the CPU: Lightning moves its module before the guard is made, and back at the end of the fit.

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

from ..coding.code import Code
from ..engines.discover import modules_of
from ..errors import ConfigurationError, UsageError
from ..guard import Guard, Step, protect
from ..nn import ShardedTable
from ..state import rank_state
from ..state.rank_state import Stateful, objects_of

__all__ = ["Protection"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names
_BY_EPOCHS = "GradientAccumulationScheduler"  # in either package


def _callback() -> Any:
    """Lightning's base class of callbacks: from the package already imported, else from the one installed.

    Raises:
        ConfigurationError: Lightning is not installed.
    """
    there = [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    for name in [name for name in there if name in sys.modules] or there:
        return importlib.import_module(name).Callback
    raise ConfigurationError(
        "ecemb.integrations.lightning needs PyTorch Lightning, which is not installed: "
        "pip install 'ecemb[lightning]'"
    )


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = _callback()


class Protection(_Callback):
    """Protects the sharded tables of a LightningModule while `Trainer.fit` runs.

    Call `ecemb.init_process_group` before the Trainer is made; other callbacks come after this one in
    `callbacks=`. A step begins when its first batch is drawn, and commits before any other code at the end of
    its last batch. Later code is in no step, and a restart doesn't run it again: `on_train_batch_end` of the
    module and of other callbacks, validation, and all hooks at the end of an epoch. State that the training
    depends on, such as a moving average, belongs into `training_step` or `on_before_zero_grad`.

    Draws between steps from torch's CPU generator, and from numpy's and python's global ones, such as those
    of a validation, don't change the training's generators; draws from CUDA generators do.

    Args:
        code: the (n, k) code.
        state: further objects with state_dict() and load_state_dict() that belong to this rank's training
            position, as for `ecemb.protect`.
        tables: tables that the module shards by hand, by name, as for `ecemb.protect`.
        options: further arguments of `ecemb.protect`, such as `window`, `overlap` and `resume`.

    Attributes:
        step: the current step, for `step.number` and `step.abort()`; None before the first step.

    Raises:
        ConfigurationError: `state` or `tables` has a form that `ecemb.protect` refuses.
    """

    def __init__(
        self,
        *,
        code: Code,
        state: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None = None,
        tables: Mapping[str, nn.Module | nn.Parameter] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._code, self._state, self._options = code, objects_of(state), options
        self._tables = modules_of(tables)
        self._guard: Guard | None = None
        self._loader: _Loader | None = None
        self._order_may_change: bool = False
        self._batches: Iterator[Any] = iter(())
        self._progress: _Progress | None = None
        self._step = ExitStack()
        self._is_open = False
        self._drawn: dict[str, Any] = {}  # the generators' states after the last step
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

    def batches(self, loader: Any, *, order_may_change: bool = False) -> Any:
        """Returns the loader for `Trainer.fit`, whose batches are drawn inside the steps (`Guard.batches`).

        Args:
            loader: an argument for `Guard.batches`, with a length.
            order_may_change: the same of `Guard.batches`.

        Raises:
            ConfigurationError: it has no length, or `batches` was called before.
        """
        if self._loader is not None:
            raise ConfigurationError("a Protection has one loader: call batches() once")
        if not hasattr(loader, "__len__"):
            raise ConfigurationError(
                f"Protection.batches() takes a loader with a length, which ends Lightning's epochs; "
                f"{type(loader).__name__} has none"
            )
        self._order_may_change = order_may_change
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
        tables = self._protected(pl_module).values()
        weights = {id(one) for table in tables for one in table.parameters()}
        name = "_ddp_params_and_buffers_to_ignore"  # an attribute that DistributedDataParallel reads
        found = [key for key, parameter in pl_module.named_parameters() if id(parameter) in weights]
        setattr(pl_module, name, [*getattr(pl_module, name, ()), *found])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook: a fresh start, or a recovery, happens here.

        Raises:
            ConfigurationError: the fit's loader is not from `batches`, a table is not on the CPU, a schedule
                follows a metric, a callback goes by epochs, or gradients of tables would be clipped.
            UsageError: this is the second fit.
            EcembError: the errors of `ecemb.protect`.
        """
        if self._loader is None:
            raise ConfigurationError("Trainer.fit takes protection.batches(loader) for its train_dataloaders")
        if self._guard is not None:
            raise UsageError("a Protection is for one Trainer.fit: a process has one guard")
        self._check(trainer, pl_module)
        self._progress = _Progress(trainer)
        self._guard = protect(
            trainer.strategy.model,
            optimizers=trainer.optimizers,
            tables=self._tables,
            code=self._code,
            state=self._objects(trainer, self._progress),
            **self._options,
        )
        self._batches = self._guard.batches(self._loader.loader, order_may_change=self._order_may_change)
        self._drawn = rank_state.process_states()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook: checks how Lightning uses the loader.

        Raises:
            ConfigurationError: an epoch would not take all of its batches.
        """
        length = 0 if self._loader is None else len(self._loader)
        if trainer.num_training_batches != length:
            raise ConfigurationError(
                f"Trainer.fit takes {trainer.num_training_batches} batches of an epoch, and the loader has "
                f"{length}: leave limit_train_batches, overfit_batches and fast_dev_run out"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Lightning's hook: checks that the batch was drawn in a step.

        Raises:
            ConfigurationError: the batch is from another loader.
        """
        if not self._is_open:
            raise ConfigurationError("Trainer.fit takes protection.batches(loader) for its train_dataloaders")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning's hook: commits the step, unless further batches' gradients are accumulated in it."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        self._commit()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's hook: commits the open step of a fit that was stopped during an accumulation.

        The step's gradients update nothing, as without protection.
        """
        if self._is_open:
            self._commit()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning's hook: undoes the current step."""
        self._is_open = False
        self._step.__exit__(type(exception), exception, exception.__traceback__)

    def _protected(self, pl_module: Any) -> dict[str, nn.Module]:
        """The tables, by name."""
        found = pl_module.named_modules()
        return {**{name: one for name, one in found if isinstance(one, ShardedTable)}, **self._tables}

    def _objects(self, trainer: Any, progress: _Progress) -> dict[str, Stateful]:
        """The state objects by name: Lightning's place, its schedules by their names or order, the user's."""
        configs = trainer.lr_scheduler_configs
        names = [getattr(config, "name", None) or str(index) for index, config in enumerate(configs)]
        if len(set(names)) < len(names):  # Lightning allows a name twice
            names = list(map(str, range(len(names))))
        return {
            "progress": progress,
            **{f"schedule {name}": one.scheduler for name, one in zip(names, configs, strict=True)},
            **{f"state {key}": item for key, item in self._state.items()},
        }

    def _check(self, trainer: Any, pl_module: Any) -> None:
        """Refuses everything that Lightning would change outside of all steps.

        Raises:
            ConfigurationError: there is such a table, schedule or callback, or a clipping that would fail.
        """
        for name, table in self._protected(pl_module).items():
            for weight in table.parameters():
                if weight.device.type != "cpu":
                    raise ConfigurationError(
                        f"table {name!r} is on {weight.device}, and Lightning moves it to the CPU at the end "
                        f"of the fit, unseen by the guard: keep tables there, by Trainer(accelerator='cpu')"
                    )
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                raise ConfigurationError(
                    f"the schedule {type(config.scheduler).__name__} follows a metric (reduce_on_plateau): "
                    f"Lightning steps it after the training step has committed, and a failure would lose "
                    f"that; take one that goes by steps or epochs, or keep this schedule out of "
                    f"configure_optimizers, step it in on_before_zero_grad, and give it in state="
                )
        clips = getattr(type(pl_module), "configure_gradient_clipping", None)
        by_lightning = clips is None or clips.__module__.startswith(_PACKAGES)
        if trainer.gradient_clip_val is not None and by_lightning and self._protected(pl_module):
            raise ConfigurationError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips all gradients, and torch "
                f"can't clip those of tables, which are sparse: override configure_gradient_clipping() in "
                f"the module, and clip the gradients of dense parameters there"
            )
        for callback in trainer.callbacks:
            if any(kind.__name__ == _BY_EPOCHS for kind in type(callback).__mro__):
                raise ConfigurationError(
                    f"the callback {type(callback).__name__} sets the number of batches of an update at an "
                    f"epoch's start, and a restart in the epoch doesn't call it: leave it out, and give "
                    f"Trainer(accumulate_grad_batches=), one number for all epochs"
                )

    def _commit(self) -> None:
        """Ends the step, which commits it, and keeps the generators' states."""
        self._is_open = False
        self._step.close()
        self._drawn = rank_state.process_states()

    def _place(self) -> int:
        """Index of the next batch in its epoch."""
        return 0 if self._progress is None else self._progress.place

    def _draw(self) -> Any:
        """The next batch, inside a step."""
        if not self._is_open:
            if self._progress is not None:
                self._progress.runs = True
            rank_state.set_process_states(self._drawn)
            self.step = self._step.enter_context(self.guard.step())
            self._is_open = True
        return next(self._batches)


class _Loader:
    """A loader for Lightning, which returns the rest of Lightning's current epoch."""

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
    """Lightning's place in the training: the part of its checkpoints besides model and optimizers.

    Attributes:
        trainer: the Trainer.
        runs: whether a batch was drawn: from then on Lightning keeps the place itself, also after an undo.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.runs = False

    @property
    def place(self) -> int:
        """Batches of its epoch that Lightning has trained."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "ranks": trainer.world_size,
            "loop": trainer.fit_loop.state_dict(),
            "precision": trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets Lightning to the place.

        Raises:
            ConfigurationError: another number of ranks saved the place, whose epochs have another length.
        """
        if state["ranks"] != self.trainer.world_size:
            raise ConfigurationError(
                f"Lightning's place in its epochs was saved by {state['ranks']} ranks, and these are "
                f"{self.trainer.world_size}, whose epochs have another number of batches: resume with "
                f"{state['ranks']} ranks"
            )
        if not self.runs:
            self.trainer.fit_loop.load_state_dict(state["loop"])
            self._settle()
        if state["precision"]:
            self.trainer.precision_plugin.load_state_dict(state["precision"])

    def _settle(self) -> None:
        """Sets the counters to a place between two batches, or between two epochs.

        Lightning counts a batch, and its epoch, after their step has committed, and counts a stopped epoch as
        complete.
        """
        loop = self.trainer.fit_loop
        epoch, batch = loop.epoch_progress, loop.epoch_loop.batch_progress
        halfway = epoch.current.ready > 0 and not batch.is_last_batch
        for count in (epoch.total, epoch.current):
            count.processed = count.completed = count.ready - halfway
        if batch.is_last_batch and batch.current.completed < batch.current.processed:
            batch.increment_completed()
            loop.epoch_loop._batches_that_stepped += 1
        loop.restarting = True  # this setter decides by the counters, and sets the epoch's loop as well
        loop.epoch_loop.restarting = halfway  # with max_steps, that setter always sets True
