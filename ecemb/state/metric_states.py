"""States of torchmetrics' metrics, which their state_dict() leaves out by default (`persistent=False`).

A metric is recognised by its attributes; torchmetrics is not imported. Must not know: how states are packed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import LayoutMismatch
from .serialize import plain, replaced

_ELSEWHERE = "ecemb.state.metric_states: a tensor of the metric's device"
_RESTORED = "_update_count", "_computed", "_forward_cache"  # attributes that `put` restores separately
_OF_A_COLLECTION = ("_groups", "_groups_checked", "_state_is_copy")
_MISSING = object()


def is_metric(one: object) -> bool:
    """Whether the object is a metric of torchmetrics, or has the same attributes and methods."""
    if not isinstance(one, nn.Module) or type(vars(one).get("_defaults")) is not dict:
        return False
    return all(callable(getattr(one, name, None)) for name in ("update", "compute", "reset"))


def states_of(metric: nn.Module) -> list[str]:
    """The names of a metric's states."""
    return list(vars(metric)["_defaults"])


def is_growing(metric: nn.Module) -> bool:
    """Whether a metric keeps all samples: one of its states is a list."""
    return any(isinstance(value, list) for value in vars(metric)["_defaults"].values())


def found_in(root: object) -> dict[str, nn.Module]:
    """The metrics in a module, by path; an object that is not a module has none."""
    if not isinstance(root, nn.Module):
        return {}
    return {path: module for path, module in root.named_modules() if is_metric(module)}


class MetricStates:
    """The states of all metrics in an object.

    Args:
        root: the object; it has metrics if it is a module.
        name: name of the object in messages.
        without: ids of metrics to leave out, which are kept elsewhere.
        growing: whether metrics that keep all samples are included; they may outgrow their room.
    """

    def __init__(
        self, root: object, name: str, without: Collection[int] = (), *, growing: bool = True
    ) -> None:
        self._root, self._name, self._without, self._growing = root, name, without, growing
        self._kept = self._found()
        self._before = {  # numbers and tensors in other attributes of the metrics, as this object was made
            path: {key: _copied(value) for key, value in _others(metric)}
            for path, metric in self._kept.items()
        }
        modules = dict(root.named_modules()) if isinstance(root, nn.Module) and self._kept else {}
        self._children = [vars(module)["_modules"] for module in modules.values()]
        self._count = self._counted()
        attributes = set(_OF_A_COLLECTION)
        self._collections = {path: one for path, one in modules.items() if vars(one).keys() >= attributes}

    @property
    def metrics(self) -> dict[str, nn.Module]:
        """The metrics, by name."""
        return {self._full(path): metric for path, metric in self._kept.items()}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def state(self) -> dict[str, dict[str, Any]]:
        """The current state of each metric, and the groups of collections, by path.

        Raises:
            ConfigurationError: a state has a type that can't be packed.
            LayoutMismatch: metrics were added or removed.
        """
        if not self._kept:
            return {}
        if self._counted() != self._count:
            self._check_same()
        linked = {id(metric) for _, members in self._linked() for metric in members}
        states: dict[str, dict[str, Any]] = {}
        for path, metric in self._kept.items():
            attributes, before = vars(metric), self._before[path]
            kept: dict[str, Any] = {"names": states_of(metric)}
            if id(metric) not in linked:
                kept["states"] = [getattr(metric, name) for name in kept["names"]]
                kept["updates"] = attributes.get("_update_count", 0)
            if attributes.get("_is_synced"):
                kept["before sync"] = attributes.get("_cache")
            others = {
                key: value for key, value in _others(metric) if not _same(value, before.get(key, _MISSING))
            }
            if others:
                kept["others"] = others
            states[path] = plain(kept, _on_cpu, f"metric {self._full(path)} ({type(metric).__name__})")
        for path, collection in self._collections.items():
            attributes = vars(collection)
            kept = states.setdefault(path, {})
            kept["collection"] = [
                plain(attributes[name], None, self._full(path)) for name in _OF_A_COLLECTION
            ]
        return states

    def check(self, states: Mapping[str, Any]) -> None:
        """Checks that saved states belong to these metrics. Called before anything is restored.

        Raises:
            LayoutMismatch: they belong to other metrics.
        """
        now = {path: states_of(metric) for path, metric in self._kept.items()}
        then = {path: one["names"] for path, one in states.items() if "names" in one}
        for path in [*then, *now]:
            if then.get(path) != now.get(path):
                had, has = (f"one with states {one[path]}" if path in one else "none" for one in (then, now))
                raise LayoutMismatch(
                    f"metric {self._full(path)}: there is {has}, and there was {had} when the job was "
                    f"started: run the script that started it, or use another job="
                )

    @torch.no_grad()
    def put(self, states: Mapping[str, Any]) -> None:
        """Restores a result of `state`. Metrics that are not in it stay unchanged."""
        for path, metric in self._kept.items():
            if path not in states:
                continue
            saved = _on_device(states[path], getattr(metric, "device", "cpu"))
            for name, value in zip(saved["names"], saved.get("states", ()), strict="states" in saved):
                setattr(metric, name, value)
            if "_update_count" in vars(metric) and "updates" in saved:
                vars(metric)["_update_count"] = saved["updates"]
            if "_is_synced" in vars(metric):
                vars(metric).update(_is_synced="before sync" in saved, _cache=saved.get("before sync"))
            others = saved.get("others", {})
            for key, value in _others(metric):
                then = others.pop(key, self._before[path].get(key, _MISSING))
                if then is _MISSING:
                    delattr(metric, key)
                elif not _same(value, then):
                    setattr(metric, key, _copied(then))
            for key, value in others.items():
                setattr(metric, key, value)
            vars(metric)["_computed"] = None
        for path, collection in self._collections.items():
            if path in states:
                vars(collection).update(zip(_OF_A_COLLECTION, states[path]["collection"], strict=True))
        for first, members in self._linked():
            for metric in members:
                for name in states_of(metric):
                    setattr(metric, name, getattr(first, name))
                vars(metric).update(_update_count=vars(first).get("_update_count", 0), _computed=None)

    def _found(self) -> dict[str, nn.Module]:
        found = found_in(self._root)
        return {
            path: metric
            for path, metric in found.items()
            if id(metric) not in self._without and (self._growing or not is_growing(metric))
        }

    def _full(self, path: str) -> str:
        return f"{self._name}.{path}" if path else self._name

    def _counted(self) -> int:
        return sum(map(len, self._children))

    def _check_same(self) -> None:
        now = self._found()
        for path in sorted(now.keys() ^ self._kept.keys()):
            raise LayoutMismatch(
                f"metric {self._full(path)} was {'added' if path in now else 'removed'} under protection: "
                f"after a failure the script would start without the change; make it before ecemb.protect()"
            )

    def _linked(self) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        """Groups of collections: the metric that is updated, and the metrics that take its states later."""
        for collection in self._collections.values():
            attributes = vars(collection)
            if attributes["_groups_checked"] and not attributes["_state_is_copy"]:
                for first, *others in attributes["_groups"].values():
                    yield getattr(collection, first), [getattr(collection, name) for name in others]


def _others(metric: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of numbers and tensors in attributes other than states, such as a wrapper's extremes."""
    states = vars(metric)["_defaults"]
    for key, value in list(vars(metric).items()):
        if type(value) in (int, float) or isinstance(value, torch.Tensor):
            if key not in states and key not in _RESTORED:
                yield key, value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
    return one == other


def _on_cpu(tensor: torch.Tensor) -> object:
    tensor = tensor.detach()
    return tensor.contiguous() if tensor.device.type == "cpu" else (_ELSEWHERE, tensor.cpu().contiguous())


def _is_elsewhere(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_ELSEWHERE,)


def _on_device(saved: Any, device: Any) -> Any:
    return replaced(saved, _is_elsewhere, lambda one: one[1].to(device))
