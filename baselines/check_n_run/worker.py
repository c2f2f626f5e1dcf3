"""The process that writes: takes jobs from its standard input, and answers on its standard output.

It ends as soon as its input does, also in the middle of a job, when its parent has died. Both pipes carry
pickles, of this process's own parent only.

Must not know: what is written.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from queue import SimpleQueue

from .store import store_at
from .writing import WriteTask, write


def main() -> None:
    """Until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    told: SimpleQueue[object] = SimpleQueue()

    def listen() -> None:
        while True:
            try:
                told.put(pickle.load(sys.stdin.buffer))
            except EOFError:
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    target, options = told.get()  # pyright: ignore[reportGeneralTypeIssues]
    store = store_at(target, options)
    while isinstance(job := told.get(), WriteTask):
        try:
            answer: object = write(job, store)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
