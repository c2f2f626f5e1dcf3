"""The quick form of `make hunt`: a few moments of kills of what a warm start has."""

from __future__ import annotations

import pytest

from failures.hunt import hunt, kind_of


@pytest.mark.timeout(2400)
def test_killed_warm_starts_leave_nothing_and_end_with_the_same_bits(seed: int) -> None:
    assert hunt(3, seed)


def test_processes_are_told_apart_by_their_command_lines() -> None:
    run = "/bin/python -m torch.distributed.run --no-python /bin/python -m ecemb run train.py"
    stub = "/bin/python -m ecemb run --arena-dir /dev/shm/x train.py"
    lines = [run, stub, "ecemb-run server train.py", "/bin/python train.py"]
    assert [kind_of(line) for line in lines] == ["torchrun", "stub", "server", "worker"]
