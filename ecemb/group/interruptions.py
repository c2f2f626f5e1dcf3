"""What is done to its end, whatever a signal's handler raises: other ranks wait for it."""

from __future__ import annotations

from collections.abc import Callable

_MOST = 10  # exceptions of signal handlers; more are no interruptions


def to_the_end(act: Callable[[], object], *ends: type[Exception]) -> None:
    """Calls `act` until it returns, and then raises what a signal handler has raised first, if one has.

    Args:
        act: goes on where it left off.
        ends: the errors with which it can't.

    Raises:
        BaseException: one of `ends`, at once; or what a handler has raised, such as KeyboardInterrupt.
    """
    raised: list[BaseException] = []
    while True:
        try:
            act()
            break
        except ends:
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            raised.append(error)
            if len(raised) > _MOST:
                raise
    if raised:
        raise raised[0]
