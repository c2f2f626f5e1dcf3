"""`python -m bench all`: every question, one after another, each in a process of its own.

What a question prints goes to a file beside its JSON. One that fails doesn't stop the others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

_TAIL_LINES = 15


class SuiteFailed(Exception):
    """Some questions were not answered; the message names them, and has their last words."""


@dataclass(frozen=True)
class Asked:
    """One question, as it is asked.

    Attributes:
        name: Of its files.
        words: Of the command line.
    """

    name: str
    words: tuple[str, ...]


def ask(questions: Sequence[Asked], folder: Path, seed: int, *, quick: bool) -> None:
    """Asks all, and writes NAME.json, and NAME.log with what was printed, to a folder.

    Raises:
        SuiteFailed: Some were not answered; the others were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    bar = tqdm(questions, unit="question")
    for one in bar:
        bar.set_description(one.name)
        options = ["--seed", str(seed), "--json", str(folder / f"{one.name}.json")]
        log = folder / f"{one.name}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                [sys.executable, "-m", "bench", *one.words, *options, *(["--quick"] if quick else [])],
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            failed.append("\n".join([f"{one.name} ended with {done.returncode}:", *lines[-_TAIL_LINES:]]))
    if failed:
        raise SuiteFailed("\n\n".join(failed))
