"""Internals of TorchRec and FBGEMM: reads, whose errors name versions, and wrappers of methods without hooks.

Nothing here imports these libraries. Must not know: tables, journals, other ranks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import UnsupportedTable

TESTED = "1.8.0"


INSTALL = (
    f"pip install -e '.[torchrec-cpu]' && pip install --no-deps torchrec=={TESTED}, or with CUDA: "
    f"pip install -e '.[torchrec]'"
)


def own(thing: object, name: str) -> Any:
    """Reads an attribute that TorchRec or FBGEMM doesn't promise; the error names the versions."""
    try:
        return getattr(thing, name)
    except AttributeError:
        versions = ", ".join(f"{package} {version(package)}" for package in ("torchrec", "fbgemm-gpu"))
        raise UnsupportedTable(
            f"{type(thing).__name__} has no {name!r} in this version ({versions}), and ecemb needs it to "
            f"protect the tables: ecemb is tested with torchrec {TESTED} and the fbgemm-gpu of the same "
            f"version; install these: {INSTALL}"
        ) from None


def held(module: nn.Module, name: str, default: Any = None) -> Any:
    """`getattr` of a module's tensor or submodule, faster than `nn.Module.__getattr__`, for each step."""
    attributes = vars(module)
    if name in attributes:
        return attributes[name]
    for kind in ("_parameters", "_buffers", "_modules"):
        if name in (found := attributes[kind]):
            return found[name]
    return getattr(module, name, default)


def need(module: str, name: str) -> Any:
    """Imports a name from TorchRec or FBGEMM; the error says what to install if it is missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedTable(
            f"torchrec {version('torchrec')} with fbgemm-gpu {version('fbgemm-gpu')} doesn't give {name} of "
            f"{module} ({error}): ecemb is tested with version {TESTED} of both; install it: {INSTALL}"
        ) from error


def version(package: str) -> str:
    """The version of a package, without the name of its build."""
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


class Before:
    """Wraps a method of an object with a call before it; a copy of the object gets the method alone.

    Args:
        thing: the object, which gets this in place of its method.
        name: of the method.
        call: called with the method's arguments first.
    """

    def __init__(self, thing: object, name: str, call: Callable[..., None]) -> None:
        self._thing, self._name, self._call = thing, name, call
        self._method: Callable[..., Any] = own(thing, name)
        setattr(thing, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `call`, then the method; returns the method's result."""
        self._call(*args, **kwargs)
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[object, str]]:
        return getattr, (self._thing, self._name)

    def remove(self) -> None:
        """Gives the object its own method back."""
        self._thing.__dict__.pop(self._name, None)


class After(Before):
    """Wraps a method with a call after it, which gets the method's result, and then its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method, then `call`; returns the method's result."""
        result = self._method(*args, **kwargs)
        self._call(result, *args, **kwargs)
        return result
