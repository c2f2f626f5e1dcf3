"""examples/serve.py beside examples/word2vec.py, both killed: each answer is of a step that was saved."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest

from ecemb.memory.scan import arenas, remove
from support import agents

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0
STEPS, EVERY, RANKS = 60, 5, 2
POLL_S = 0.05
IMPORTS = "support.fork_server_imports"
DIES = """
import os, runpy, signal, sys
from ecemb.step.transaction import Transactions

commit, last = Transactions.commit, (12, 33, -1)[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]

def dies(self):
    if (self.next_step, os.environ["RANK"]) == (last, "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(self)

Transactions.commit = dies
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a script, whose rank 1 is killed in step 12, and in step 33 after the restart."""


@contextmanager
def process(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; what it logs is in another file, no line mixes with its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("ab") as out, errors_of(log).open("ab") as errors:
        running = subprocess.Popen([sys.executable, *words], stdout=out, stderr=errors, env=environment)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def errors_of(log: Path) -> Path:
    return log.with_suffix(".errors")


class Server:
    """examples/serve.py."""

    def __init__(self, running: subprocess.Popen[bytes], log: Path) -> None:
        def address() -> re.Match[str] | None:
            ended, said = running.poll() is not None, log.read_text()
            assert not ended, errors_of(log).read_text()
            assert "is served" not in said.partition("http://")[0], "another thread prints before the address"
            return re.search(r"^(http://.*)/list\n", said, re.MULTILINE)

        self.url = await_(address, f"an address in {log}")[1]

    def ask(self, word: str) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/{word}", timeout=DEADLINE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def await_step(self, least: int) -> list[dict[str, Any]]:
        """Asks until an answer is of this step, or of a later one; gives all answers."""
        found: list[dict[str, Any]] = []

        def asked() -> bool:
            status, answer = self.ask("list")
            if status == 200:
                found.append(answer)
            return bool(found) and found[-1]["step"] >= least

        await_(asked, f"step {least}")
        return found


def await_(found: Any, what: str) -> Any:
    """Calls until there is something."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(POLL_S)
    raise TimeoutError(what)


@pytest.mark.parametrize("changes", [pytest.param("", marks=pytest.mark.long), "consecutive"])
def test_answers_while_the_training_and_the_server_are_killed(changes: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(topics.topics[name] for name in sorted(topics.topics)[:40]))
    job, folder = f"serve-{uuid.uuid4().hex}", tmp_path / "checkpoints"
    training, logs = tmp_path / "training.log", [tmp_path / f"serving{i}.log" for i in range(2)]
    torchrun = [f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    options = f"--code 2,1 --dim 8 --batch 64 --steps {STEPS} --every {EVERY} --job {job} --words list"
    options += f" --arena-dir {tmp_path}" + (f" --changes {changes}" if changes else "")
    word2vec = str(ROOT / "examples" / "word2vec.py")
    (tmp_path / "dies.py").write_text(DIES.replace("sys.argv[1]", repr(word2vec)))
    script = [str(tmp_path / "dies.py"), *options.split(), "--text", str(text), "--checkpoints", str(folder)]
    server = [str(ROOT / "examples" / "serve.py"), str(folder), "--port", "0", "--text", str(text)]
    server += ["--changes"] if changes else []
    answers: list[dict[str, Any]] = []
    trains = agents.start(IMPORTS, [*torchrun, *script], training, errors=errors_of(training))
    try:
        with process(server, logs[0]) as running:
            first = Server(running, logs[0])
            assert first.ask("qqq")[0] in (404, 503)
            answers += first.await_step(EVERY)
            running.kill()
            running.wait()
        with process(server, logs[1]) as running:
            again = Server(running, logs[1])
            answers += again.await_step(STEPS)
            assert again.ask("qqq")[0] == 404
        assert trains.wait(DEADLINE_S) == 0, errors_of(training).read_text()
    finally:
        trains.terminate()  # torchrun ends its workers
        trains.wait(DEADLINE_S)
        for one in arenas(tmp_path):
            remove(one, force=True)
    steps = [answer["step"] for answer in answers]
    assert steps == sorted(steps) and all(step % EVERY == 0 for step in steps) and steps[-1] == STEPS
    by_step = {answer["step"]: answer["nearest"] for answer in answers}
    assert all(answer["nearest"] == by_step[answer["step"]] for answer in answers)
    said = errors_of(training).read_text()
    assert [f"goes on from step {step}" in said for step in (12, 33)] == [True, True]
    printed = [line for line in training.read_text().splitlines() if line.startswith("list: ")]
    assert printed == [f"list: {' '.join(by_step[STEPS])}"]
