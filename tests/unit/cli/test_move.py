"""`python -m ecemb move`: whom it asks, when it gives up, and what it leaves behind then."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecemb.__main__ import main
from ecemb.arena import leave_request
from ecemb.arena.header import State
from ecemb.arena.scan import Directory
from ecemb.cli import move
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
        assert not list(arena_dir.rglob(leave_request.NAME))
        left(arena_dir)


def test_a_request_that_is_not_answered_is_taken_back(
    arena_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holding(hold, left(arena_dir)) as holder:
        holder.told()
        assert main(["move", "--job", "ctr", "--arena-dir", str(arena_dir), "--timeout", "0"]) == 1
        assert "has not left within 0 s" in capsys.readouterr().err
        assert not list(arena_dir.rglob(leave_request.NAME))


def test_a_job_that_ends_without_leaving_is_not_waited_for(
    arena_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move, "_PATIENCE_S", 0.0)
    ask = leave_request.ask
    with holding(hold, left(arena_dir)) as holder:
        holder.told()

        def asked(place: Directory) -> None:
            ask(place)
            holder.process.kill()
            holder.ended()

        monkeypatch.setattr(leave_request, "ask", asked)
        assert main(["move", "--job", "ctr", "--arena-dir", str(arena_dir)]) == 1
    assert "it has ended without leaving" in capsys.readouterr().err
    assert not list(arena_dir.rglob(leave_request.NAME))


def test_a_request_stands_once_and_goes_with_its_folder(arena_dir: Path) -> None:
    place = Directory(arena_dir, "ctr", "a")
    assert not leave_request.is_asked(place)
    for _ in range(2):
        leave_request.ask(place)
        assert leave_request.is_asked(place)
    leave_request.withdraw(place)
    leave_request.withdraw(place)
    assert not leave_request.is_asked(place) and not place.path.exists()
