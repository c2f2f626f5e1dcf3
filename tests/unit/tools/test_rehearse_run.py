"""`ecemb rehearse` of a script that writes past torch, on real ranks."""

from __future__ import annotations

import argparse
import os
import re
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from ecemb.tools import rehearse
from support.fork_server import fork_server

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


def test_a_write_past_torch_is_found_where_memory_is_lost(
    tmp_path: Path, arena_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_server()  # agents come from the one that all tests use
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    parser = argparse.ArgumentParser()
    rehearse.add(parser)
    code = rehearse.run(parser.parse_args(["--ranks", "2", "--steps", "8", str(script), str(arena_dir)]))
    said = capsys.readouterr().out
    assert code == 1, said
    run = r"rank 1 killed in step 2 and rank 0 killed in step 5{} \.\.\. 8 steps, \d+ s\n  "
    assert re.search(run.format("") + "the same bits after each step", said), said
    lost = (
        run.format(", with their memory") + r"DIFFERENT when step 2 begins:\n    model\.e\.weight \(rank 1\)"
    )
    assert re.search(lost, said), said
    at = SCRIPT.splitlines().index("        table.weight.data.mul_(2)") + 1
    assert f"the script changes model.e.weight between steps 1 and 2 at {script}, line {at}" in said
    assert said.count("looking for the line") == 1 and not list(arena_dir.rglob("*.arena"))


def test_sigterm_ends_what_a_run_has_started(
    tmp_path: Path, arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server()
    script, started = tmp_path / "train.py", list[BaseProcess]()
    script.write_text(SCRIPT)

    def terminated(process: BaseProcess, folder: Path) -> None:
        started.append(process)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(rehearse, "_wait", terminated)
    parser = argparse.ArgumentParser()
    rehearse.add(parser)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        rehearse.run(parser.parse_args(["--ranks", "2", "--steps", "8", str(script), str(arena_dir)]))
    [agent] = started
    assert not agent.is_alive() and signal.getsignal(signal.SIGTERM) is before
