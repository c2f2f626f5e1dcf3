"""What a job with a killed rank prints: the script and the command of README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.warm_starts import Home, home

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 15
TORCHRUN = re.compile(r"[WEI]\d{4} .*torch/distributed/")
KILLED, RANKS = "the kill follows", 4


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        yield made


def script(arena_dir: Path) -> str:
    """That of README.md, with its arenas in a folder of their own, and a line before the kill."""
    text = (ROOT / "README.md").read_text().split("<!-- file: train.py -->\n```python\n")[1].split("```")[0]
    changes = {
        "/dev/shm/": f"{arena_dir}/",
        'job="readme"': f'job="readme", arena_dir="{arena_dir}"',
        "os.kill(os.getpid(), 9)": f'os.write(2, b"{KILLED}\\n"), os.kill(os.getpid(), 9)',
    }
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return text


def words(place: Home) -> list[str]:
    """Those of README.md, but that torchrun looks after its workers more rarely: all have their say."""
    text = re.search(r"^\$ (torchrun .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert text is not None
    given = text[1].replace("--monitor-interval 0.01", "--monitor-interval 2").split()
    options = [one for one in given[1 : given.index("--no-python")] if one != "--standalone"]
    return [*options, *place.command(options=()), "train.py"]


def test_a_lost_rank_takes_few_lines_from_the_kill_to_the_recovery(place: Home) -> None:
    place.write("train.py", script(place.arena_dir))
    code, printed, log = place.torchrun(
        *words(place), changed={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    assert code == 0, log
    lines = log.partition(f"{KILLED}\n")[2].splitlines()
    last = max(at for at, line in enumerate(lines) if ": recovered, the memory of rank 2 was lost" in line)
    own = [line for line in lines[: last + 1] if not TORCHRUN.match(line)]
    assert len(own) <= MOST_LINES and not any("Traceback" in line for line in own), log
    told = [line for line in own if re.search(r"rank 2 \(host host2, pid \d+\) died", line)]
    assert len(told) <= RANKS - 1, log  # a line of each survivor
    assert not any("timeout=" in line for line in own)
    fresh, recovered = printed.splitlines()
    assert re.fullmatch(r"fresh start: parity of the initial state is in place \([\d.]+ s\)", fresh)
    assert re.fullmatch(r"recovered, the memory of rank 2 .* from step 10 \([\d.]+ s\)", recovered)
