"""What is to be said before a hard exit of this process: `os._exit` runs no exit handlers."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[], None]] = []


def before_hard_exit(call: Callable[[], None]) -> None:
    """Has a function called before each hard exit of this process, in any thread."""
    _calls.append(call)


def forget(call: Callable[[], None]) -> None:
    """Takes back `before_hard_exit`; does nothing for an unknown function."""
    if call in _calls:
        _calls.remove(call)


def say_last_words() -> None:
    """Calls the functions. The thread that is about to call `os._exit` calls it."""
    for call in tuple(_calls):
        call()
