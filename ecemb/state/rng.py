"""Random number generators as plain state: those of the process, and those that an object owns.

The process's generators are the global ones of torch (CPU), numpy and python. States are values that
`serialize.dump` accepts.

Must not know: the users of generators, the storage of states.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigurationError

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def process_states() -> dict[str, Any]:
    """The states of torch's, numpy's and python's global generators.

    Raises:
        ConfigurationError: numpy's generator is not a Mersenne twister.
    """
    return {
        "torch": torch.get_rng_state(),
        "numpy": _numpy_state(),
        "python": _from_python(random.getstate()),
    }


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two results of `process_states` are equal, that is, nothing was drawn in between."""
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for name in a
        for one, other in zip(_listed(a[name]), _listed(b[name]), strict=True)
    )


def _listed(state: Any) -> Any:
    return state if isinstance(state, tuple) else (state,)


def set_process_states(states: Mapping[str, Any]) -> None:
    """Puts them back."""
    kind, key, pos, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, key.numpy().view(np.uint32), pos, has_gauss, gauss))
    random.setstate(_to_python(states["python"]))
    torch.set_rng_state(states["torch"])


def owned(holders: Sequence[object]) -> list[Any]:
    """The generators of torch, numpy and python that are attributes of the objects, each once, in order.

    torch's global generator is left out, and random.SystemRandom, which has no state.
    """
    found: dict[int, Any] = {}
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, random.SystemRandom) or value is torch.default_generator:
                continue
            if isinstance(value, _KINDS):
                found[id(value)] = value
    return list(found.values())


def state(generator: Any) -> Any:
    """The state of one generator: torch's, numpy's (Generator or RandomState) or python's."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _from_python(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return _from_numpy(generator.get_state(legacy=False))
    return _from_numpy(generator.bit_generator.state)


def set_state(generator: Any, state: Any) -> None:
    """Puts it back."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(_to_python(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_to_numpy(state))
    else:
        generator.bit_generator.state = _to_numpy(state)


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float]:
    kind, key, pos, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    if kind != "MT19937":
        raise ConfigurationError(
            f"numpy's global generator is {kind}, and ecemb keeps only MT19937: pass your own generators "
            f"in state="
        )
    return kind, torch.from_numpy(key.view(np.int32).copy()), int(pos), int(has_gauss), float(gauss)


def _from_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _from_numpy(item) for key, item in items}
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return [str(array.dtype), torch.from_numpy(array.view(np.uint8).copy())]
    return value


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _to_numpy(item) for key, item in items}
    if isinstance(value, list):
        dtype, data = cast("list[Any]", value)
        return data.numpy().view(dtype)
    return value


def _from_python(state: tuple[Any, ...]) -> tuple[int, torch.Tensor, float | None]:
    version, words, normal = state
    return version, torch.from_numpy(np.array(words, np.uint32).view(np.int32)), normal


def _to_python(state: Any) -> tuple[int, tuple[int, ...], float | None]:
    version, words, normal = state
    return version, tuple(words.numpy().view(np.uint32).tolist()), normal
