"""`python -m ecemb rehearse`: what it finds in records, and a script that writes past torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ecemb.tools.rehearsal import digests
from ecemb.tools.rehearse import Death, Outcome, Record, Run, compare, lives_of

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import ecemb

ecemb.init_process_group("gloo", job="rehearsed", arena_dir=sys.argv[1])
torch.manual_seed(0)
table = torch.nn.Embedding(20, 4, sparse=True)
optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
guard = ecemb.protect(
    torch.nn.ModuleDict({"e": table}), optimizers=optimizer, tables={"e": table}, code=ecemb.Code(n=2, k=1)
)
for number in range(guard.next_step, 100):
    with guard.step():
        optimizer.zero_grad()
        table(torch.randint(20, (8,))).square().mean().backward()
        optimizer.step()
    if number == 1:
        table.weight.data.mul_(2)
guard.close()
"""


def run_of(records: list[Record]) -> Outcome:
    return Outcome("", {0: records}, 0)


def states(**changes: dict[tuple[int, str], str]) -> Record:
    """Six steps in which nothing changes but what is said."""
    places = [(step, when) for step in range(6) for when in ("begin", "end")]
    record: Record = {place: {"model.w": "a", "sched.last_epoch": "b", "loss": "c"} for place in places}
    for name, values in changes.items():
        for place, value in values.items():
            record[place][name.replace("__", ".")] = value
    return record


def test_the_first_place_of_a_difference_is_named_with_its_ranks() -> None:
    right = states()
    assert compare(run_of([right]), run_of([right])) is None
    wrong = {(4, "begin"): "x", (4, "end"): "x", (5, "begin"): "x"}
    found = compare(run_of([right]), run_of([states(), states(model__w=wrong)]))
    assert found is not None
    assert (found.step, found.when, found.names) == (4, "begin", {"model.w": [0]})
    assert "guard.touch" in found.cause


def test_what_undisturbed_runs_leave_differently_is_not_compared() -> None:
    other = states(sched__last_epoch={(3, "begin"): "x"})
    assert compare(run_of([states()]), run_of([other]), {"sched.last_epoch"}) is None


def test_a_change_between_steps_is_named_as_the_cause() -> None:
    plain = states(model__w={place: "b" for place in states() if place >= (3, "begin")})
    other = states(model__w={place: "x" for place in states() if place >= (4, "begin")})
    found = compare(run_of([plain]), run_of([other]))
    assert found is not None and found.step == 3
    assert "between steps 2 and 3" in found.cause


@pytest.mark.parametrize(
    ("name", "says"),
    [("sched__last_epoch", "state="), ("loss", "guard.batches"), ("generators__torch", "draws")],
)
def test_each_kind_of_difference_has_its_way_out(name: str, says: str) -> None:
    found = compare(run_of([states()]), run_of([states(**{name: {(4, "begin"): "x"}})]))
    assert found is not None and says in found.cause


def test_a_process_that_went_on_begins_a_record_of_its_own(tmp_path: Path) -> None:
    places = [(0, "begin"), (0, "end"), (1, "begin"), (1, "begin"), (1, "end"), (2, "begin"), (1, "begin")]
    lines = [json.dumps([*place, {}]) for place in places]
    path = tmp_path / "rank-0.jsonl"
    path.write_text("\n".join([*lines, '[1, "en']))
    assert [list(one) for one in lives_of(path)] == [places[:3], places[3:6], places[6:]]


def test_a_run_is_read_as_it_was_written() -> None:
    run = Run("a", 6, None, (Death(1, "end", 0, True),))
    assert Run.from_json(json.loads(json.dumps(dataclasses.asdict(run)))) == run


def test_digests_hold_all_that_a_step_may_change() -> None:
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 1), "norm": torch.nn.BatchNorm1d(2)})
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loose = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    arguments = {"model": model, "optimizers": optimizer, "state": {"schedule": schedule}}
    before = digests(arguments, [("loose", loose)])
    assert digests(arguments, [("loose", loose)]) == before

    def changed() -> set[str]:
        now = digests(arguments, [("loose", loose)])
        return {
            name.split("[")[0].split(".")[0] for name in {*now, *before} if now.get(name) != before.get(name)
        }

    model["norm"](torch.ones(3, 2))
    assert changed() == {"model"}
    torch.rand(1)
    assert changed() == {"model", "generators"}
    loose.last_epoch += 1
    assert changed() == {"model", "generators", "loose"}
    schedule.last_epoch += 1
    assert changed() == {"model", "generators", "loose", "state"}
    optimizer.param_groups[0]["lr"] = 0.5
    assert changed() == {"model", "generators", "loose", "state", "optimizers"}


@pytest.mark.processes
def test_a_write_past_torch_is_found_where_memory_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ecemb",
        "rehearse",
        "--ranks",
        "2",
        "--steps",
        "8",
        str(script),
        "/dev/shm",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("the same bits after each step") == 2  # killed processes, whose memory stays
    assert done.stdout.count("DIFFERENT in step 2, when it begins") == 2
    assert done.stdout.count("the script changes model.e.weight between steps 1 and 2") == 2
