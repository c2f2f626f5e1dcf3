"""`ecemb top`: what it shows of real arenas, and that looking changes nothing."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ecemb.__main__ import main
from ecemb.memory.header import CONSTANTS_OFFSET, Found, State
from ecemb.memory.scan import Directory
from ecemb.tools import top
from ecemb.tools.arenas import arenas_of
from support.arena_holders import create, hold, holding

SECOND_NS = 10**9
SAME = ["job", "host", "rank", "state", "next step", "MiB", "pid"]


def leave(arena_dir: Path, job: str = "ctr", **changes: Any) -> Path:
    """A rank's arena after some steps; `changes` are of its words, but for `rank` and `state`."""
    arena = create(Directory(arena_dir, job, "a"), job=job, rank=changes.pop("rank", 0))
    words = {"committed": 6, "prepared": 6, "rows_label": 6, "joined": 3, **changes}
    state = words.pop("state", State.LIVE)
    for name, value in {**words, "state": state}.items():
        arena.set(name, value)
    arena.close()
    return arena.path


def every(arena_dir: Path) -> list[Found]:
    return arenas_of(argparse.Namespace(arena_dir=arena_dir, job=None))


def looked(arena_dir: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[Any]:
    assert main(["top", "--arena-dir", str(arena_dir), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_living_arena_says(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time_ns()
    recovery = {"recovery_kind": 3, "recovery_step": 4, "recovery_us": 250_000}
    path = leave(
        arena_dir, rank=2, rows_label=9, committed_ns=now, recovered_ns=now - 60 * SECOND_NS, **recovery
    )
    with holding(hold, path) as holder:
        holder.told()
        before = path.stat()
        with path.open("rb") as file:
            head = file.read(CONSTANTS_OFFSET)
        (one,) = looked(arena_dir, capsys)
        with path.open("rb") as file:
            assert file.read(CONSTANTS_OFFSET) == head
        after = path.stat()
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
        age, told = one.pop("parity_age_s"), one.pop("recovery")
        assert one == {
            "job": "ctr",
            "host": "a",
            "rank": 2,
            "state": "LIVE",
            "next_step": 6,
            "behind": 0,
            "open": 3,
            "lacking_bytes": 0,
            "size_bytes": path.stat().st_blocks * 512,
            "pid": holder.pid,
            "damage": None,
            "path": str(path),
        }
        since_s = (time.time_ns() - now) / SECOND_NS
        assert 0 <= age <= since_s and 60 <= told.pop("ago_s") <= 60 + since_s
        assert told == {"kind": "memory", "step": 4, "seconds": 0.25}
        holder.kill()
        (one,) = looked(arena_dir, capsys)
        assert (one["state"], one["pid"]) == ("down", None)


def test_ranks_of_a_job_beside_each_other(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(arena_dir, rank=1, committed=4)
    leave(arena_dir, rank=0)
    leave(arena_dir, rank=3, joined=2, committed=9)  # its host came back after it had been replaced
    leave(arena_dir, rank=2, state=State.REBUILDING, committed=-1, lacking_bytes=3 << 20)
    leave(arena_dir, "other", committed=80)
    shown = top.lines(every(arena_dir), time.time_ns())
    assert [(one.rank, one.state, one.next_step, one.behind) for one in shown] == [
        (0, "down", 6, 0),
        (1, "down", 4, 2),
        (2, "REBUILDING", None, None),
        (3, "stale", 9, -3),
        (0, "down", 80, 0),
    ]
    assert all(one.parity_age_s is None and one.recovery is None for one in shown)
    assert [one.lacking_bytes for one in shown] == [0, 0, 3 << 20, 0, 0]
    assert main(["top", "--arena-dir", str(arena_dir)]) == 0
    assert "REBUILDING, 3 MiB to go" in capsys.readouterr().out


def test_as_plain_text(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time_ns()
    leave(arena_dir, recovery_kind=1, recovered_ns=now - 7200 * SECOND_NS, committed_ns=now - 300 * SECOND_NS)
    torn = leave(arena_dir)
    torn.write_bytes(b"")
    assert main(["top", "--arena-dir", str(arena_dir)]) == 0  # a pipe gets one look
    titles, first, second, note = capsys.readouterr().out.splitlines()
    assert titles.split("  ")[0] == "job" and "parity age" in titles
    assert first.split() == ["ctr", "a", "-", "torn", "-", "-", "-", "-", "0.0", "-", "-"]
    cells = second.split()
    assert cells[:9] == ["ctr", "a", "0", "down", "6", "0", "0", "5", "min"]
    assert second.endswith("fresh, step 0, 0.00 s, 2.0 h ago")
    assert "cut short" in note


def test_in_the_words_of_arenas_ls(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State, next step, memory and process of the same arenas, by two commands."""
    held = leave(arena_dir, rank=1)
    leave(arena_dir)
    leave(arena_dir, rank=2, joined=2)
    leave(arena_dir, rank=3, state=State.REBUILDING, committed=-1)
    found = []
    with holding(hold, held) as holder:
        holder.told()
        for command in ("arenas ls", "top"):
            assert main([*command.split(), "--arena-dir", str(arena_dir)]) == 0
            titles, *lines = (re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
            rows = [dict(zip(titles, line, strict=True)) for line in lines]
            found.append([[row[name] for name in SAME] for row in rows])
            assert [title for title in titles if title in SAME] == SAME
    assert found[0] == found[1]
    assert [row[3] for row in found[0]] == ["down", "LIVE", "stale", "REBUILDING"]


def test_only_this_users_arenas(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = leave(arena_dir)
    theirs = arena_dir / f"ecemb-{os.geteuid() + 1}"
    theirs.mkdir(0o700)
    (theirs / "ctr").mkdir()
    assert [one["path"] for one in looked(arena_dir, capsys, "--job", "ctr")] == [str(path)]
    home = path.parents[2]
    if os.geteuid() == 0:
        os.chown(home, 1, 1)
    else:
        home.chmod(0o777)
    (one,) = looked(arena_dir, capsys)
    assert one["state"] == "damaged" and str(home) in one["damage"]


def test_none(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--arena-dir", str(arena_dir), "--job", "x"]) == 1
    assert capsys.readouterr().err == (
        f"no arenas of this user and job 'x' in {arena_dir} (--arena-dir names another)\n"
    )
    assert main(["top", "--arena-dir", str(arena_dir / "x")]) == 1
    assert "ecemb: arena_dir" in capsys.readouterr().err


def test_the_live_view(arena_dir: Path) -> None:
    rich = pytest.importorskip("rich.console", reason="pip install 'ecemb[top]'")
    leave(arena_dir, rank=1, committed=4)
    leave(arena_dir)
    looks = 0

    def look() -> list[top.Line]:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt
        return top.lines(every(arena_dir), time.time_ns())

    screen = io.StringIO()
    console = rich.Console(file=screen, force_terminal=True, width=160, height=24)
    top.watch(look, "a title", 0.0, console=console)
    shown = screen.getvalue()
    assert shown.count("a title") >= 2 and "2 arenas" in shown
