"""Cases of a test that run one after another within it: pytest itself takes longer than most of them do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """`pytest.mark.parametrize` within one test. After a failure its output ends with the failed case."""

    def decorate(test: Test) -> Test:
        own = (names,) if isinstance(names, str) else names
        every = [dict(zip(own, (case,) if isinstance(names, str) else case, strict=True)) for case in cases]

        @functools.wraps(test)
        def run(**given: Any) -> None:
            for case in every:
                print(f"case: {case}")
                test(**given, **case)

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name not in own]
        run.__dict__["__signature__"] = signature.replace(parameters=others)
        return run

    return decorate
