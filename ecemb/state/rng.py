"""Random number generators as plain state: those of the process, of its devices, and those that objects own.

The process's generators are the global ones of torch (CPU), numpy and python. States are values that
`serialize.dump` accepts.

Must not know: the users of generators, the storage of states.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigurationError

_NUMPY: Any = cast("Any", np.random.get_state).__self__
_PYTHON: Any = cast("Any", random.getstate).__self__
_WORDS = 624  # of a Mersenne twister; python has the position of the next one behind them
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def process_states() -> dict[str, Any]:
    """The states of torch's, numpy's and python's global generators.

    Raises:
        ConfigurationError: numpy's generator is not a Mersenne twister.
    """
    return {name: state() for name, (state, _) in _PROCESS.items()}


class Reader:
    """Reads the states of the process's generators again and again.

    To read one takes long, so it is read only if the memory has changed that has all of it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, bytes | None] = {}
        self._states: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The result of `process_states`, to be read only: the object of the last call if nothing was drawn.

        A state that is equal to that of the last call is the same object.

        Raises:
            ConfigurationError: as `process_states`.
        """
        changed: dict[str, Any] = {}
        for name, (state, memory) in _PROCESS.items():
            now = memory()  # before the state: another thread may draw in between
            if now is None or now != self._memory.get(name):
                read = state()
                if not same({name: read}, self._states):
                    changed[name] = read
                self._memory[name] = now if now is not None and _words(read) in now else None
        if changed:
            self._states = {**self._states, **changed}
        return self._states


def cuda_states() -> list[Any]:
    """The number of this process's device, and all devices' generators; empty without CUDA."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.current_device(), torch.cuda.get_rng_state_all()]


def set_cuda_states(own: int, states: Sequence[torch.Tensor]) -> None:
    """Restores generators; that of the process's device goes to its current device."""
    count = torch.cuda.device_count()
    now = torch.cuda.current_device() if count else own
    swapped = {own: now, now: own}
    for device, state in enumerate(states):
        if (there := swapped.get(device, device)) < count:
            torch.cuda.set_rng_state(state, there)


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether the states of `a` are equal to those of `b`, that is, nothing was drawn in between."""
    return all(
        name in b and (a[name] is b[name] or all(map(_equal, _listed(a[name]), _listed(b[name]))))
        for name in a
    )


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


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
    state = np.random.get_state(legacy=False)
    if (kind := state["bit_generator"]) != "MT19937":
        raise ConfigurationError(
            f"numpy's global generator is {kind}, and ecemb keeps only MT19937: pass your own generators "
            f"in state="
        )
    key, pos = state["state"]["key"], state["state"]["pos"]
    key = torch.from_numpy(key.view(np.int32).copy())
    return kind, key, int(pos), int(state["has_gauss"]), float(state["gauss"])


def _torch_memory() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _numpy_memory() -> bytes | None:
    """The second of two normal numbers is in one object; the words and their position are in another."""
    twister = cast("Any", np.random).get_bit_generator()
    if type(twister) is not np.random.MT19937:
        return None
    return _fields(_NUMPY, np.random.RandomState).tobytes() + _fields(twister, np.random.MT19937).tobytes()


def _python_memory() -> bytes:
    """The second of two normal numbers is an attribute."""
    return _fields(_PYTHON, _random.Random).tobytes() + repr(_PYTHON.gauss_next).encode()


@functools.lru_cache(maxsize=4)
def _fields(one: object, kind: type) -> NDArray[np.uint8]:
    """The memory of an object without its head, a view: all fields of a class that is written in C."""
    head = object.__basicsize__
    memory = (ctypes.c_uint8 * (kind.__basicsize__ - head)).from_address(id(one) + head)
    return np.frombuffer(memoryview(memory), np.uint8)


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


def _words(state: Any) -> bytes:
    """The words of a state, which the generator's memory has unless its objects are not as known here."""
    return (state if isinstance(state, torch.Tensor) else state[1][:_WORDS]).numpy().tobytes()


_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[], bytes | None]]] = {
    "torch": (torch.get_rng_state, _torch_memory),
    "numpy": (_numpy_state, _numpy_memory),
    "python": (lambda: _from_python(random.getstate()), _python_memory),
}
