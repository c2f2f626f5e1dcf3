"""What a job of one rank says to a new user: at a start that finds nothing, and at an end without a close."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.ports import ReservedPort
from support.warm_starts import Home, home

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, os, signal, sys
import torch
import ecemb
how, arenas, given, columns = json.loads(sys.argv[1])
torch.sparse.check_sparse_tensor_invariants.disable()
ecemb.init_process_group("gloo", job="words", arena_dir=arenas, host="here")
model = ecemb.nn.ShardedEmbeddingBag(50, columns, device="meta", name="table")
sparse = torch.optim.Adagrad(model.parameters(), lr=0.1)
guard = ecemb.protect(model, optimizers=sparse, code=ecemb.Code(n=2, k=1), **given)
print(f"begins with step {guard.next_step}", flush=True)
for _ in range(2):
    with guard.step() as step:
        sparse.zero_grad()
        model(torch.randint(50, (4, 3))).sum().backward()
        sparse.step()
        if step.number % 2 and how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if step.number % 2 and how == "raise":
            raise ValueError("on purpose")
if how == "close":
    guard.close()
if how == "leave":
    guard.leave("left")
"""


class Launches:
    """Starts of the script, in a process that has imported torch already."""

    def __init__(self, place: Home) -> None:
        self.place = place
        place.write("script.py", SCRIPT)

    def __call__(
        self, how: str, columns: int = 4, *, restarts: tuple[int, int] = (0, 0), **given: Any
    ) -> tuple[str, str]:
        """What a start prints, and what it says."""
        words = json.dumps([how, str(self.place.arena_dir), given, columns])
        with ReservedPort() as port:
            changed = {
                "PYTHONPATH": str(ROOT),
                "RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port.number),
                "TORCHELASTIC_RESTART_COUNT": str(restarts[0]),
                "TORCHELASTIC_MAX_RESTARTS": str(restarts[1]),
            }
            command = self.place.command("script.py", words, options=())
            _, printed, said = self.place.run(command, changed=changed)
        return printed, said

    @property
    def left(self) -> list[str]:
        """What is there of the job's memory, folders too."""
        whole = self.place.arena_dir / f"ecemb-{os.geteuid()}"
        return [str(path.relative_to(whole)) for path in whole.glob("words*/**/*")] + [
            path.name for path in whole.glob("words*")
        ]

    def remove(self, command: str) -> None:
        words = shlex.split(command)
        assert words[0] == "ecemb"
        code, _, said = self.place.run([sys.executable, "-m", *words], changed={"PYTHONPATH": str(ROOT)})
        assert code == 0, said


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    with home() as place:
        yield Launches(place)


def remains(said: str) -> list[str]:
    return [line for line in said.splitlines() if "was not closed" in line]


@pytest.mark.parametrize("how", ["end", "interrupt", "raise"])
def test_a_process_that_does_not_close_the_job_says_once_what_stays(how: str, launches: Launches) -> None:
    step = 2 if how == "end" else 1
    printed, said = launches(how, restarts=(0, 3) if how != "raise" else (3, 3))
    assert printed == "begins with step 0\n"
    (line,) = remains(said)
    told = re.fullmatch(
        r"job words was not closed: the memory of its 1 rank stays in (\S+) of 1 host\. The same launch goes "
        r"on from step (\d); to remove it, on each host: (.+)",
        line,
    )
    assert told and (told[1], told[2]) == (str(launches.place.arena_dir), str(step)), said
    assert launches("end")[0] == f"begins with step {step}\n"
    launches.remove(told[3])
    assert not launches.left


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_job_that_is_over_says_nothing_and_leaves_nothing(how: str, launches: Launches) -> None:
    _, said = launches(how)
    assert not remains(said) and not launches.left


def test_a_process_that_is_started_again_says_nothing(launches: Launches) -> None:
    _, said = launches("raise", restarts=(1, 3))
    assert "ValueError: on purpose" in said and not remains(said) and launches.left
    launches("close")
    assert not launches.left


def test_a_start_that_finds_no_checkpoint_says_so_and_makes_no_folder(launches: Launches) -> None:
    path = launches.place.folder / "chekpoints"
    printed, said = launches("close", resume=str(path))
    assert printed == "begins with step 0\n"
    line = f"resume= found no checkpoint: there is no folder {path}; job words begins at step 0"
    assert sum(line in one for one in said.splitlines()) == 1 and not path.exists()
    path.mkdir(mode=0o700)
    assert (
        f"found no checkpoint: {path} has no complete one; job words begins"
        in launches("end", resume=str(path))[1]
    )
    _, said = launches("close", resume=str(path), resume_required=True)  # goes on from memory
    assert "found no checkpoint" not in said and not launches.left
    (path / "finished-words").unlink()  # an existing folder is told that the job is closed
    path.rmdir()


def test_a_start_that_insists_on_a_checkpoint_refuses_to_begin_at_step_0(launches: Launches) -> None:
    path = launches.place.folder / "chekpoints"
    printed, said = launches("end", resume=str(path), resume_required=True)
    assert not printed and f"CheckpointFailed: resume= found no checkpoint: there is no folder {path}" in said
    assert not path.exists() and not launches.left and not remains(said)


def test_a_start_that_is_refused_leaves_no_folder(launches: Launches) -> None:
    _, said = launches("end", window=-1)
    assert "ConfigurationError" in said and not launches.left


def test_memory_of_another_model_is_named_with_the_command_that_removes_it(launches: Launches) -> None:
    launches("end")
    _, said = launches("end", columns=8)
    told = re.search(
        r"LayoutMismatch: .*\. To begin again as job 'words', which gives up its memory: (.+)", said
    )
    assert told, said
    launches.remove(told[1])
    assert not launches.left
    assert launches("close", columns=8)[0] == "begins with step 0\n"


def test_the_script_of_the_readme_started_by_plain_python_says_how_to_launch_it(launches: Launches) -> None:
    for name in ("README.md", "docs/index.md"):
        script = re.findall(r"```python\n(import os, shutil.*?)```", (ROOT / name).read_text(), re.DOTALL)[0]
        launches.place.write("train.py", script)
        code, printed, said = launches.place.run(
            [sys.executable, "train.py"], changed={"PYTHONPATH": str(ROOT)}
        )
        assert code == 1 and not printed and not launches.left
        assert said.splitlines()[-1].startswith(
            "ecemb.errors.ConfigurationError: launch me with torchrun, e.g. `torchrun --standalone "
            "--nproc-per-node 4 --max-restarts 3 train.py`: "
        )


NOTEBOOK = """
import os, signal, sys, traceback

cells, outside = sys.argv[1:], {"__name__": "__main__"}
for cell in cells:
    if cell == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        exec(cell, outside)
    except BaseException as error:
        print(type(error).__name__, flush=True)
"""
"""A kernel: it runs cells in one process, goes on after an error, and may be killed."""


def test_what_the_page_on_notebooks_says(launches: Launches) -> None:
    page = (ROOT / "docs" / "guides" / "notebook.md").read_text()
    first, steps, last = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first = first.replace(
        'job="notebook"', f'job="words-notebook", arena_dir={str(launches.place.arena_dir)!r}'
    )
    interrupted = steps.replace("steps(5)", "steps(9)").replace(
        "sparse.step()", "sparse.step()\n        if step.number == 7: raise KeyboardInterrupt"
    )
    launches.place.write(
        "kernel.py", "import torch\ntorch.sparse.check_sparse_tensor_invariants.disable()" + NOTEBOOK
    )

    def kernel(*cells: str) -> list[str]:
        command = [sys.executable, "kernel.py", *cells]
        _, printed, said = launches.place.run(command, changed={"PYTHONPATH": str(ROOT)})
        assert printed, said
        return printed.splitlines()

    fresh, shown, *errors = kernel(
        first, steps, interrupted, steps, first, "dist.destroy_process_group()", first, "kill"
    )
    assert fresh.startswith("fresh start") and "next step 5" in shown
    assert errors == ["KeyboardInterrupt", "StepFailed", "UsageError", "ArenaBusy"]
    again, shown, fresh = kernel(first, steps, last, first, last)
    assert "goes on from step 7" in again and "next step 7" in shown and fresh.startswith("fresh start")
    assert not launches.left
