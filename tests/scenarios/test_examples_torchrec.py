"""examples/torchrec_dlrm.py under torchrun: killed in mid-training, it ends as the unprotected script."""

from __future__ import annotations

import ast
import random
import re
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from ecemb.engines.internals import INSTALL
from ecemb.memory.header import Found
from ecemb.memory.scan import arenas
from support import agents
from support.torchrec.runs import IMPORTS

needs_torchrec = pytest.mark.skipif(find_spec("torchrec") is None, reason=INSTALL)
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torchrec_dlrm.py"
PAGE = ROOT / "docs" / "torchrec.md"
BATCH, STEPS, KILLED_IN = 32, 40, 20
DEADLINE_S = 600
END = re.compile(r"malformed lines left out: (\d+)\ndigest: ([0-9a-f]{16})\n")
MOST_LINES = 5
# On a busy machine gloo's threads may lay down their last tensor when Python is gone, and torch then aborts
# a process that has said its digest and is done. guard.close() takes longer than that; plain scripts end.
ABORTED = "terminate called without an active exception"
DIES = """
import os, runpy, signal, sys
from pathlib import Path
import torch.distributed as dist
from ecemb import session
from ecemb.step.transaction import Transactions

step, victim, died, *sys.argv = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
commit = Transactions.commit

def dies(self):
    here = self.next_step, dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if here == (step, victim, "0"):
        session.current().arena.path.unlink()
        Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(self)

Transactions.commit = dies
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, one of whose ranks is killed before it commits a step, and loses its memory."""


def diff() -> list[str]:
    """The lines of the diff in docs/torchrec.md; marks first, without headers."""
    [block] = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block.splitlines()


def unprotected() -> str:
    """The script before that diff was applied to it."""
    source = SCRIPT.read_text()
    for hunk in "\n".join(diff()).split("\n@@\n"):
        lines = [(line[:1], line[1:] + "\n") for line in hunk.split("\n")]  # an empty one is its own context
        before = "".join(text for mark, text in lines if mark != "+")
        after = "".join(text for mark, text in lines if mark != "-")
        assert source.count(after) == 1, f"{SCRIPT.name} hasn't once:\n{after}"
        source = source.replace(after, before)
    return source


class Run:
    """A script under torchrun, whose workers needn't import TorchRec."""

    def __init__(
        self, folder: Path, script: Path, *options: object, ranks: int = 4, restarts: int = 0
    ) -> None:
        self.files = [folder / f"{uuid.uuid4().hex}.{stream}" for stream in ("out", "err")]
        launch = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        words = [*launch, str(script), *map(str, options)]
        variables = {"PYTHONWARNINGS": "ignore"}
        # Lines of other ranks would mix with those of rank 0, if both streams were one.
        self.agent = agents.start(IMPORTS, words, self.files[0], variables, folder, errors=self.files[1])

    def end(self) -> tuple[str, ...]:
        """What the script says at its end: malformed lines and digest."""
        try:
            code = self.agent.wait(DEADLINE_S)
        finally:
            self.agent.terminate()  # torchrun stops its workers
        said, errors = (file.read_text() for file in self.files)
        found = END.search(said)
        assert found and (code == 0 or ABORTED in errors), said + errors
        return found.groups()


def criteo(random_: random.Random, lines: int) -> str:
    """A file in Criteo's format; a line in ten is malformed, a field in ten is empty."""
    made: list[str] = []
    for _ in range(lines):
        fields = [str(random_.choice([0, 1, 5, -1, 300])) for _ in range(13)]
        fields += [f"{random_.randrange(2**32):08x}" for _ in range(26)]
        line = "\t".join([random_.choice("01"), *("" if random_.random() < 0.1 else f for f in fields)])
        bad = [line[:20], line + "\tff", "2" + line[1:], line[:-1] + "z", ""]
        made.append(random_.choice(bad) if random_.random() < 0.1 else line)
    return "\n".join(made) + "\n"


def test_the_diff_is_five_lines() -> None:
    added = [line for line in diff() if line.startswith("+")]
    taken = [line for line in diff() if line.startswith("-")]
    assert len(added) <= MOST_LINES and len(taken) <= len(added)
    names = {node.id for node in ast.walk(ast.parse(unprotected())) if isinstance(node, ast.Name)}
    assert "dist" in names and not names & {"ecemb", "guard"}


@needs_torchrec
def test_a_killed_training_ends_as_an_unprotected_one(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    data = tmp_path / "clicks.tsv"
    data.write_text(criteo(random_, 40 * BATCH + 7))  # read nearly four times over
    options = ["--data", data, "--steps", STEPS, "--batch", BATCH, "--rows", 500]
    plain = tmp_path / "unprotected.py"
    plain.write_text(unprotected())
    job = f"test-torchrec-{uuid.uuid4().hex}"

    dies, died, victim = tmp_path / "dies.py", tmp_path / "died", random_.randrange(4)
    dies.write_text(DIES)

    run = Run(tmp_path, dies, KILLED_IN, victim, died, SCRIPT, *options, "--job", job, restarts=3)
    try:
        killed = run.end()
        assert run.agent.returncode == 0 and died.exists()
        assert not arenas_of(job)
    finally:
        for one in arenas_of(job):
            one.path.unlink()
    assert killed == Run(tmp_path, plain, *options).end()
    assert int(killed[0]) > 0


def arenas_of(job: str) -> list[Found]:
    found = [(one.header.constants.rank, one) for one in arenas("/dev/shm") if one.job == job and one.header]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


@needs_torchrec
def test_made_up_rows_train(tmp_path: Path) -> None:
    plain = tmp_path / "unprotected.py"
    plain.write_text(unprotected())
    assert Run(tmp_path, plain, "--steps", 3, "--batch", BATCH, "--rows", 500, ranks=1).end()[0] == "0"
