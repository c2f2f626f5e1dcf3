"""`ecemb move`: whom it asks, when it gives up, and what it leaves behind then."""

from __future__ import annotations

import argparse
import contextlib
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ecemb.__main__ import main
from ecemb.errors import ConfigurationError
from ecemb.memory import scan
from ecemb.memory.header import State
from ecemb.memory.scan import Directory
from ecemb.tools import move
from support.arena_holders import create, hold, holding


def left(arena_dir: Path) -> Path:
    """An arena that no process holds."""
    arena = create(Directory(arena_dir, "ctr", "a"))
    arena.set("state", State.LIVE)
    arena.close()
    return arena.path


def test_a_job_that_does_not_run_is_not_asked(arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("no memory of it is here", "no process holds it"):
        assert main(["move", "--job", "ctr", "--arena-dir", str(arena_dir)]) == 1
        assert text in capsys.readouterr().err
        assert not list(arena_dir.rglob(scan.LEAVE_REQUEST))
        left(arena_dir)


def test_a_request_that_is_not_answered_is_taken_back(
    arena_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holding(hold, left(arena_dir)) as holder:
        holder.told()
        assert main(["move", "--job", "ctr", "--arena-dir", str(arena_dir), "--timeout", "0"]) == 1
        assert "has not left within 0 s" in capsys.readouterr().err
        assert not list(arena_dir.rglob(scan.LEAVE_REQUEST))


def test_a_job_that_ends_without_leaving_is_not_waited_for(
    arena_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move, "_PATIENCE_S", 0.0)
    with holding(hold, left(arena_dir)) as holder:
        holder.told()
        wait = move._wait

        def waits(options: argparse.Namespace) -> bool:
            holder.process.kill()
            holder.ended()
            return wait(options)

        monkeypatch.setattr(move, "_wait", waits)
        assert main(["move", "--job", "ctr", "--arena-dir", str(arena_dir)]) == 1
    assert "it has ended without leaving" in capsys.readouterr().err
    assert not list(arena_dir.rglob(scan.LEAVE_REQUEST))


def test_a_job_is_not_asked_for_a_command_that_can_not_start(
    arena_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holding(hold, left(arena_dir)) as holder:
        holder.told()
        assert main(["move", "--job", "ctr", "--arena-dir", str(arena_dir), "--", "torchrum", "a.py"]) == 1
    assert "'torchrum'" in capsys.readouterr().err
    assert not list(arena_dir.rglob(scan.LEAVE_REQUEST))


def test_a_request_stands_once_and_goes_with_its_folder(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_LOCK_PATIENCE_S", 0.0)
    place = Directory(arena_dir, "ctr", "a")
    assert not scan.is_asked_to_leave(place)
    for _ in range(2):
        with scan.asking_to_leave(place):
            assert scan.is_asked_to_leave(place)
            again = scan.asking_to_leave(place)
            with pytest.raises(ConfigurationError, match="another process asks job 'ctr'"), again:
                raise AssertionError("two processes ask")
            assert scan.is_asked_to_leave(place)
        assert not scan.is_asked_to_leave(place) and not place.path.exists()
    scan.withdraw_request(place)


def test_a_job_may_take_the_request_away_when_it_leaves(arena_dir: Path) -> None:
    place = Directory(arena_dir, "ctr", "a")
    with scan.asking_to_leave(place):
        scan.withdraw_request(place)
        assert not scan.is_asked_to_leave(place)


def test_who_ends_takes_no_other_request_away(arena_dir: Path) -> None:
    """A rank has taken the first one away, as it left; the job has begun again, and is asked once more."""
    place = Directory(arena_dir, "ctr", "a")
    first, second = scan.asking_to_leave(place), scan.asking_to_leave(place)
    with contextlib.ExitStack() as both:
        both.enter_context(first)
        scan.withdraw_request(place)
        later = both.pop_all()
        both.enter_context(second)
        later.close()
        assert scan.is_asked_to_leave(place)


def asks(told: Connection, place: Directory) -> None:
    with scan.asking_to_leave(place):
        told.send("it stands")
        signal.pause()


def test_the_request_of_a_process_that_was_killed_stands_no_more(arena_dir: Path) -> None:
    """Days later, the job's next launch would leave."""
    place = Directory(arena_dir, "ctr", "a")
    with holding(asks, place) as asker:
        asker.told()
        assert scan.is_asked_to_leave(place)
        asker.process.kill()
        asker.ended()
    assert place.status(scan.LEAVE_REQUEST) is not None and not scan.is_asked_to_leave(place)
    with scan.asking_to_leave(place):
        assert scan.is_asked_to_leave(place)
    assert not place.path.exists()
