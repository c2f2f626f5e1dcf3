"""`python -m ecemb rehearse` of a script that writes past torch, on real ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ecemb.tools import rehearse

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
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    parser = argparse.ArgumentParser()
    rehearse.add(parser)
    code = rehearse.run(parser.parse_args(["--ranks", "2", "--steps", "8", str(script), str(arena_dir)]))
    said = capsys.readouterr().out
    assert code == 1, said
    assert said.count("the same bits after each step") == 2  # killed processes, whose memory stays
    assert said.count("DIFFERENT when step 2 begins") == 2
    assert said.count("the script changes model.e.weight between steps 1 and 2") == 2
    at = SCRIPT.splitlines().index("        table.weight.data.mul_(2)") + 1
    assert said.count(f"at {script}, line {at}") == 2 and said.count("looking for the line") == 1
    assert not list(arena_dir.rglob("*.arena"))
