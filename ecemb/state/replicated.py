"""Replicated state, which is the same on every rank: saved and restored.

It consists of dense parameters, buffers, extra state of modules, and the state and options of optimizers with
dense parameters, including parameters of theirs outside the model.

Must not know: the network, protected rows, the storage of the state.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import LayoutMismatch
from ..local.state_slots import StateStore
from .composition import Composition, drop_options, options, record
from .flatten import Layout, Outline, filled, same, separated, unpacked
from .optimizer_match import check_fit, kind
from .optimizers import others, with_inner
from .partitioned import check_modules, check_optimizers, check_whole
from .sighting import Sighting
from .tensor_copies import any_of, copied, overwrite_, put, raw
from .tensor_places import Members, buffers, has_room, takes, with_extra_state

logger: logging.Logger = logging.getLogger("ecemb")

_SAME = "ecemb.same"  # (this, name): a buffer that shares the tensor of that name
_SHOWN_NAMES = 8  # in a message
_MAX_WALKS = 8  # in a row: state that has other tensors or lists after each step is not looked at any more
_GENERATIONS = 2  # an abort goes back by one transaction


class ReplicatedState:
    """The state of a model and its optimizers that is the same on all ranks.

    Args:
        model: its parameters and buffers are saved, except protected ones.
        optimizers: those with dense parameters are saved, with options and state, except the state of
            protected parameters; so are optimizers inside them.
        protected: the protected parameters.
        aside: modules whose buffers are not saved.

    Raises:
        ConfigurationError: parameters or optimizer state are partitioned over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        protected: Iterable[nn.Parameter],
        aside: Iterable[nn.Module] = (),
    ) -> None:
        check_modules(model)
        self._model = model
        self._left = list(aside)
        self._aside = {id(one) for module in self._left for one in module.modules()}
        self._protected = {id(parameter) for parameter in protected}
        self._optimizers = [one for one in with_inner(optimizers) if self._dense(one)]
        check_optimizers(self._optimizers)
        self._at_start = buffers(model, self._aside)
        self._modules = {name for name, _ in model.named_modules()}
        self._extra: dict[str, nn.Module] = {}
        self._fixed = self._fixed_now()
        self._outline: Outline | None = None  # of the last save or load
        self._members: Members | None = None
        self._appeared: dict[str, bool] = {}  # buffers that were added after the start -> whether persistent
        self._ids: dict[int, str] = {}  # ids of the model's tensors -> their names
        self._layouts: dict[int, Layout] = {}  # by the slot's address
        self._last: tuple[list[torch.Tensor], bytearray] = [], bytearray()  # tensors, numbers of `_outline`
        self._saved: dict[int, list[torch.Tensor]] = {}  # the tensors saved lately, by transaction
        self._seen: Composition | None = None  # at the last save or load
        self._sighting: Sighting | None = None  # at the last save; None after a load
        self._walks = 0  # of saves, in a row

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors now."""
        return sum(tensor.numel() * tensor.element_size() for tensor in separated(self._collect())[1])

    @property
    def kept(self) -> tuple[dict[str, torch.Tensor], list[torch.optim.Optimizer]]:
        """The model's dense parameters and buffers by name, and the optimizers of dense parameters."""
        return dict(self._tensors()), list(self._optimizers)

    def save(self, slots: StateStore, transaction: int) -> None:
        """Writes the state of `transaction`: the share of it that is kept there.

        Raises:
            LayoutMismatch: a restart could not restore it.
        """
        sighting = self._sighted()
        outline, (tensors, numbers) = cast("Outline", self._outline), self._last
        memory = slots.open(transaction, outline.size_bytes(slots.share))
        address = memory.__array_interface__["data"][0]
        layout = self._layouts.get(address)
        if layout is None:
            layout = self._layouts[address] = outline.lay_out(memory, tensors, slots.share)
        layout.save(tensors, numbers)
        slots.seal(transaction)
        self._remember(transaction)
        self._seen, self._sighting = sighting.composition, sighting

    def load(self, slots: StateStore, transaction: int) -> None:
        """Restores the state of `transaction`, all of which is kept there, into model and optimizers.

        The tensors that were saved are written in place. Tensors that replaced them are not overwritten: they
        may have other owners, such as a batch that became a buffer.

        Raises:
            LayoutMismatch: the model or an optimizer is not the one that was saved.
            InconsistentArenas: the bytes in the slot are not those of `save`.
        """
        outline, _, tensors = unpacked(slots.read(transaction))
        self.restore(outline, tensors, self._saved.get(transaction))
        self._separate(self._collect(), check=False)
        self._remember(transaction)
        self._seen = self._composition()

    def moved(self) -> dict[str, str]:
        """What is not as it was saved or loaded last, and how."""
        names = [] if self._outline is None else self._outline.names
        return {} if self._seen is None else self._now().moved_since(self._seen, names)

    def restore(
        self,
        outline: object,
        tensors: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Restores a state from the results of `unpacked`; its tensors are copied.

        Args:
            outline: the state without its tensors.
            tensors: its tensors.
            own: the only tensors that are written in place; by default all of the model's.

        Raises:
            LayoutMismatch: the model or an optimizer is not the one that was saved.
        """
        saved = cast("dict[str, Any]", filled(outline, list(tensors)))
        now = self._tensors()
        self._check_fits(saved, now)
        ours = self._ids if own is None else {id(tensor) for tensor in own}
        self._restore_model(saved, now, ours)
        for optimizer, kept in zip(self._optimizers, saved["optimizers"], strict=True):
            self._restore_optimizer(optimizer, kept, () if own is None else ours)

    def digest(self) -> int:
        """A checksum of the state, below 2**32: equal on all ranks as long as the replicas agree.

        Composition and numbers are those of the last save or load; tensors have their present values.
        """
        tensors, numbers = self._last
        digest = zlib.crc32(numbers, zlib.crc32(b"" if self._outline is None else self._outline.head))
        for tensor in tensors:
            digest = zlib.crc32(raw(tensor).data, digest)
        return digest

    def whole(self) -> NDArray[np.uint8]:
        """The state that `digest` is of, in one piece, like the content of a slot that holds all of it."""
        tensors, numbers = self._last
        outline = self._outline or Outline({}, [], b"")
        memory = np.empty(outline.size_bytes(), np.uint8)
        outline.lay_out(memory, tensors).save(tensors, numbers)
        return memory

    def _separate(self, collected: dict[str, object], *, check: bool) -> None:
        """Finds outline, tensors and numbers of a state; if `check`, as `save` raises."""
        value, tensors, numbers = separated(collected)
        if self._outline is None or not same(value, self._outline.value):
            if check:
                self._check_fixed()
            self._outline = Outline(value, tensors, numbers)
            self._layouts.clear()
        self._sighting = None
        self._last = tensors, numbers

    def _remember(self, transaction: int) -> None:
        self._saved.pop(transaction, None)
        self._saved[transaction] = self._last[0]
        while len(self._saved) > _GENERATIONS:
            del self._saved[next(iter(self._saved))]

    def _sighted(self) -> Sighting:
        """The state now; `_outline` and `_last` become those of it. Raises as `save`."""
        again = None if self._sighting is None or not self._sighting.fits() else self._sighting.now()
        if again is not None:
            self._walks, self._last = 0, (self._last[0], again.numbers)
            return again
        collected = self._collect()
        self._separate(collected, check=True)
        found = Sighting(self._composition(collected), self._last[1])
        self._walks += 1
        members = cast("Members", self._members)
        if self._walks <= _MAX_WALKS and not members.have_changed():
            found.watch(collected, members.holders, self._optimizers)
        return found

    def _now(self) -> Composition:
        again = None if self._sighting is None else self._sighting.now()
        return self._composition() if again is None else again.composition

    def _composition(self, collected: dict[str, object] | None = None) -> Composition:
        found = self._collect(extra=False) if collected is None else collected
        return record({key: one for key, one in found.items() if key != "extra"}, self._optimizers)

    def _collect(self, *, extra: bool = True) -> dict[str, object]:
        tensors = self._tensors()
        members = cast("Members", self._members)
        shared = {name: (_SAME, first) for name, first in members.shared.items()}
        collected: dict[str, object] = {
            "model": {**tensors, **dict.fromkeys(members.empty), **shared},
            "optimizers": [self._collected(optimizer) for optimizer in self._optimizers],
        }
        if self._appeared:
            collected["appeared"] = self._appeared
        if self._extra and extra:
            collected["extra"] = {name: module.get_extra_state() for name, module in self._extra.items()}
        return collected

    def _collected(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        dense = self._dense(optimizer)
        collected: dict[str, object] = {
            "kind": kind(optimizer),
            "parameters": self._names(optimizer),
            "options": [options(group) for group in optimizer.param_groups],
            "state": {
                index: optimizer.state[parameter]
                for index, parameter in enumerate(dense)
                if parameter in optimizer.state
            },
        }
        if other := dict(others(optimizer)):
            collected["others"] = other
        outside = {index: one for index, one in enumerate(dense) if id(one) not in self._ids}
        for index, parameter in outside.items():
            check_whole(f"parameter {index} of {type(optimizer).__name__}", parameter)
        return collected | ({"outside": outside} if outside else {})

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str | None]]:
        """The model's names of its dense parameters, by group."""
        groups = [group["params"] for group in optimizer.param_groups]
        return [[self._ids.get(id(p)) for p in group if id(p) not in self._protected] for group in groups]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The model's dense parameters and buffers, by name, each once."""
        if self._members is None or self._members.have_changed():
            found = self._found()
            self._members = Members(self._model, found, self._aside)
            places = buffers(self._model, self._aside)
            self._extra = with_extra_state(self._model, self._aside)
            self._appeared = {name: kept for name, kept in places.items() if name not in self._at_start}
        else:
            found = self._members.now()
        self._ids = {id(tensor): name for name, tensor in found.items()}
        return found

    def _found(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if id(parameter) not in self._protected
        }
        left = {id(buffer) for module in self._left for _, buffer in nn.Module.named_buffers(module)}
        tensors.update((n, b) for n, b in self._model.named_buffers() if id(b) not in left)
        for name, tensor in tensors.items():
            check_whole(name, tensor)
        return tensors

    def _dense(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._protected
        ]

    def _fixed_now(self) -> dict[str, object]:
        """The properties that may not change: a restart begins with those of the script's model."""
        parameters = ((n, one) for n, one in self._model.named_parameters() if id(one) not in self._protected)
        fixed: dict[str, object] = {
            name: None if nn.parameter.is_lazy(one) else (one.dtype, one.shape) for name, one in parameters
        }
        now, extra = buffers(self._model, self._aside), with_extra_state(self._model, self._aside)
        fixed |= {f"buffer {name}": "there" for name in now if name in self._at_start}
        above = {name.rpartition(".")[0] for name in now} - self._modules
        fixed |= {f"module {name} with buffers": "there" for name in above}
        fixed |= {f"extra state of module {name}": "there" for name in extra}
        for i, optimizer in enumerate(self._optimizers):
            fixed[f"groups of optimizer {i}"] = len(optimizer.param_groups)
            for j, group in enumerate(optimizer.param_groups):
                fixed[f"the number of parameters in group {j} of optimizer {i}"] = len(group["params"])
        return fixed

    def _check_fixed(self) -> None:
        now = self._fixed_now()
        names = self._fixed.keys() | now.keys()
        if changed := sorted(name for name in names if self._fixed.get(name) != now.get(name)):
            name = changed[0]
            raise LayoutMismatch(
                f"{name} has changed under protection ({self._fixed.get(name)} before, {now.get(name)} now): "
                f"after a failure the script would start without the change; make it before ecemb.protect()"
            )

    def _check_fits(self, saved: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises LayoutMismatch unless the saved state fits; called before anything is written."""
        members = cast("Members", self._members)
        now = {*tensors, *members.empty, *members.shared}
        made = saved.get("appeared", {})
        differing = {name for name in saved["model"].keys() - now if name not in made}
        differing |= {name for name in made.keys() - now if not has_room(self._model, name)}
        differing |= (now - saved["model"].keys()) - self._appeared.keys()
        if differing:
            missing = sorted(name for name in differing if name in saved["model"])
            added = sorted(differing.difference(missing))
            raise LayoutMismatch(
                f"the job was started with other dense parameters or buffers ({_shown(missing)} only then, "
                f"{_shown(added)} only now): run the script that started it, or use another job="
            )
        if len(self._optimizers) != len(saved["optimizers"]):
            raise LayoutMismatch(
                f"optimizers= has {len(self._optimizers)} with dense parameters (those with only tables "
                f"don't count, those inside others do), and had {len(saved['optimizers'])} when the job was "
                f"started: run the script that started it, or use another job="
            )
        for name, tensor in tensors.items():
            then = saved["model"].get(name)
            if not isinstance(tensor, nn.Parameter):
                continue
            if not isinstance(then, torch.Tensor) or (tensor.dtype, tensor.shape) != (then.dtype, then.shape):
                kind = f"{then.dtype}" if isinstance(then, torch.Tensor) else "no tensor of its own"
                shape = f" of shape {tuple(then.shape)}" if isinstance(then, torch.Tensor) else ""
                raise LayoutMismatch(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was {kind}{shape} "
                    f"when the job was started: run the script that started it, or use another job="
                )
        if missing := sorted(self._extra.keys() ^ saved.get("extra", {}).keys()):
            raise LayoutMismatch(
                f"{missing[0] or 'the model'} has extra state either only in the saved model or only in "
                f"this one: run the script that started the job, or use another job="
            )
        names = [self._names(optimizer) for optimizer in self._optimizers]
        check_fit(self._optimizers, names, saved["optimizers"])

    @torch.no_grad()
    def _restore_model(
        self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], ours: Collection[int]
    ) -> None:
        members = cast("Members", self._members)
        made, device = saved.get("appeared", {}), any_of(tensors)
        for name in (*tensors, *members.empty, *members.shared):
            if name not in saved["model"]:
                members.drop(name)
        for name, then in saved["model"].items():
            now = tensors.get(name)
            if isinstance(then, torch.Tensor) and now is not None and self._takes(now, then, ours):
                overwrite_(now, then)
            elif isinstance(then, torch.Tensor) or then is None:
                value = copied(then, device if now is None else now)
                members.put(name, value, persistent=made.get(name, True))
        for name, then in saved["model"].items():
            if isinstance(then, tuple):
                members.put(name, members.at(cast("Any", then)[1]))
        for name, module in self._extra.items():
            module.set_extra_state(copied(saved["extra"][name], device))

    @staticmethod
    def _takes(now: torch.Tensor, then: torch.Tensor, ours: Collection[int]) -> bool:
        return isinstance(now, nn.Parameter) or (id(now) in ours and takes(now, then))

    @torch.no_grad()
    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], ours: Collection[int]
    ) -> None:
        for group, then in zip(optimizer.param_groups, kept["options"], strict=True):
            drop_options(optimizer, group, then)
            beside = next(iter(group["params"]), None)
            group.update({key: put(group.get(key), value, beside, ours) for key, value in then.items()})
        dense = self._dense(optimizer)
        for index, parameter in enumerate(dense):
            if index in kept["state"]:
                now = optimizer.state.get(parameter)
                optimizer.state[parameter] = put(now, kept["state"][index], parameter, ours)
            else:
                optimizer.state.pop(parameter, None)
        other = kept.get("others", {})
        for key in dict(others(optimizer)).keys() - other.keys():
            del optimizer.state[key]
        for key, value in other.items():
            optimizer.state[key] = put(optimizer.state.get(key), value, dense[0], ours)
        for index, value in kept.get("outside", {}).items():
            overwrite_(dense[index], value)


def _shown(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}" if names else "none"
