"""The short scripts in examples/: killed in mid-training, each ends as it does when it is left alone.

All lives of all scripts are forked from one process that has imported what they need. Rank 1 is killed after
the body of a step, and its memory removed; then both ranks are started again, as torchrun does. So on for
each of the steps that are given.
"""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from ecemb.memory.scan import arenas
from ecemb.step.transaction import Transactions
from support.arena_holders import DEADLINE_S, holding

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
SCRIPTS = {  # arguments, the steps that rank 1 dies in, what it imports
    "amp": ("--steps 6 --parts 2 --rows 50 --batch 8", [3], "torch.distributed.fsdp.sharded_grad_scaler"),
    "by_hand": (
        "--steps 9 --users 40 --items 30 --lines 96 --dim 4 --batch 8",
        [0, 5, 7],
        "torch.utils.data",
    ),
    "loaders": (
        "--steps 12 --lines 60 --rows 50 --batch 6 --workers 0",
        [7],
        "torchdata.stateful_dataloader",
    ),
    # 5 batches of an epoch, 2 of a step: steps 3 and 6 are the first ones of their epochs
    "lightning_bags": ("--epochs 3 --lines 38 --rows 50 --batch 4", [3, 4, 6, 7], "pytorch_lightning"),
    "golden_training": ("--steps 6 --rows 5000 --batch 8", [3], "torchrec.distributed.train_pipeline"),
    # step 4 is the first one of its epoch
    "two_tower": ("--steps 6 --rows 5000 --lines 32 --batch 8", [4], "torchrec.distributed"),
    # validations in front of steps 0, 2 and 4, and 4 batches of an epoch
    "bert4rec": ("--steps 6 --items 60 --users 32 --batch 8 --validate 2", [2, 5], "torchrec.distributed"),
}
TRAININGS = [*SCRIPTS, "dlrm", "torchrec_dlrm", "word2vec"]
ORDER = ["--steps", "--rows", "--dim", "--batch", "--seed", "--job", "--arena-dir", "--code"]
MARKED = ("golden_training", "two_tower", "bert4rec")
MOST_LINES, MOST_MARKS = 120, 12


def nest(pipe: Connection, modules: Sequence[str]) -> None:
    """Imports, then forks a life for each rank whenever it is asked to; says how they ended."""
    warnings.simplefilter("ignore")
    for module in modules:
        importlib.import_module(module)
    pipe.send("ready")
    while True:
        name, arguments, port, folder, dies = pipe.recv()
        lives = [live(rank, name, arguments, port, folder, dies) for rank in range(RANKS)]
        pipe.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in lives])


def live(rank: int, name: str, arguments: list[str], port: int, folder: Path, dies: int | None) -> int:
    """A process that runs the script as `rank`; what it says goes to a file."""
    child = os.fork()
    if child:
        return child
    with (folder / f"{rank}.txt").open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    code = 1
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            LOCAL_WORLD_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID="examples",
            OMP_NUM_THREADS="1",
        )
        if dies is not None and rank == 1:
            die_after_the_body_of(dies)
        script = ROOT / "examples" / f"{name}.py"
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001 - it is in the file
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_after_the_body_of(step: int) -> None:
    commit = Transactions.commit

    def dies(self: Transactions) -> list[int]:
        if self.next_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self)

    Transactions.commit = dies


class Lives:
    """Runs a script's ranks, in the nest, over a store that is kept here, as torchrun's agent does."""

    def __init__(self, ask: Connection) -> None:
        self._ask = ask

    def run(self, name: str, job: str, folder: Path, dies: int | None = None) -> tuple[list[int], list[str]]:
        """Exit codes and what the ranks said, by rank."""
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=DEADLINE_S), wait_for_workers=False
        )
        arguments = [*SCRIPTS[name][0].split(), "--job", job, "--arena-dir", str(folder)]
        self._ask.send((name, arguments, store.port, folder, dies))
        assert self._ask.poll(DEADLINE_S), "the script doesn't end"
        codes = self._ask.recv()
        return codes, [(folder / f"{rank}.txt").read_text() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    modules = [module for _, _, module in SCRIPTS.values() if find_spec(module.partition(".")[0])]
    with holding(nest, modules) as holder:
        assert holder.pipe.poll(DEADLINE_S) and holder.pipe.recv() == "ready"
        yield Lives(holder.pipe)


def digests(said: Sequence[str]) -> list[str]:
    """The ranks' last lines; which process is which rank may differ."""
    return sorted(line for one in said for line in one.splitlines() if ": digest " in line)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_example_ends_as_one_that_is_left_alone(name: str, lives: Lives, tmp_path: Path) -> None:
    if find_spec(SCRIPTS[name][2].partition(".")[0]) is None:
        pytest.skip(f"{SCRIPTS[name][2]} is not installed")
    codes, said = lives.run(name, "alone", tmp_path)
    assert codes == [0, 0], "\n".join(said)
    for before, step in pairwise([None, *SCRIPTS[name][1], None]):
        codes, said_again = lives.run(name, "killed", tmp_path, dies=step)
        told = "\n".join(said_again)
        if before is not None:
            assert "the memory of rank 1 was lost" in told and f"goes on from step {before}" in told, told
        if step is None:
            assert codes == [0, 0], told
            assert digests(said_again) == digests(said)
        else:
            assert codes[1] == -signal.SIGKILL and codes[0] != 0, told
            for one in arenas(tmp_path):
                if one.header is not None and one.header.constants.rank == 1:
                    one.path.unlink()
    assert not list(arenas(tmp_path))


@pytest.mark.parametrize("name", MARKED)
def test_the_lines_for_ecemb_are_marked_and_few(name: str) -> None:
    _, _, code = (ROOT / "examples" / f"{name}.py").read_text().split('"""', 2)
    lines = code.splitlines()
    marked = [line for line in lines if "  # ecemb" in line]
    assert [line for line in lines if ("ecemb" in line or "guard" in line) and line not in marked] == []
    assert len(marked) <= MOST_MARKS and len(lines) <= MOST_LINES


def options(name: str) -> dict[str, dict[str, str]]:
    """The options of an example, in their order: name -> what add_argument is given."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse((ROOT / "examples" / f"{name}.py").read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            given = {str(one.arg): ast.unparse(one.value) for one in node.keywords}
            found[ast.literal_eval(node.args[0])] = given
    return found


@pytest.mark.parametrize("name", TRAININGS)
def test_all_examples_take_the_same_options(name: str) -> None:
    found, others = options(name), options("word2vec")
    length = "--epochs" if name == "lightning_bags" else "--steps"
    assert found.keys() >= {length, "--batch"}
    for one in ("--seed", "--job", "--arena-dir", "--code"):
        assert found[one] | {"default": ""} == others[one] | {"default": ""}, one
    assert found["--job"]["default"].replace("-", "_").strip("'") in name
    assert [one for one in found if one in ORDER] == [one for one in ORDER if one in found]


@pytest.mark.parametrize("name", [*TRAININGS, "demo", "serve"])
def test_an_example_says_what_to_install(name: str) -> None:
    tree = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    imported = {
        str(one).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    further = imported - {*sys.stdlib_module_names, "ecemb", "baselines", "torch"}
    [install] = [line for line in (ast.get_docstring(tree) or "").splitlines() if "pip install" in line]
    extra = {"": "", "torchdata": "[examples]", "pytorch_lightning": "[examples]"}.get("".join(further))
    if extra is None:
        assert "torchrec" in further and "torchrec==" in install
        extra = "[torchrec-cpu]"
    assert f"pip install '.{extra}'" in install if extra else install.strip() == "pip install ."


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_how_to_run_it(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/{name}.py" in source
