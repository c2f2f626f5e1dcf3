"""What ranks do together to save, on a rank alone; on real ranks it is in test_checkpoint.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ecemb.checkpoint import Piece
from ecemb.checkpoint.saver import Saver
from ecemb.errors import CheckpointFailed, ConfigurationError
from support.refusals import refused


class Outage(Exception):
    """As clients of object storage raise them: no OSError, and none of ecemb's."""


class Unreachable:
    """A CheckpointWriter whose storage is away."""

    def __str__(self) -> str:
        return "s3://bucket/job"

    def _fail(self, *_: Any) -> Any:
        raise Outage("could not connect")

    prepare = write = commit = discard = retain = finish = _fail


def rank_0() -> Saver:
    """Of a job of one rank."""
    job, memory, transport = mock.Mock(), mock.Mock(committed=7), mock.Mock(rank=0, world_size=1)
    job.name = "ctr"
    transport.gather = lambda data, _: [data]
    return Saver(job, memory, transport, mock.Mock(), [], mock.Mock(), mock.Mock())


def test_an_outage_does_not_keep_a_job_from_being_closed(caplog: pytest.LogCaptureFixture) -> None:
    saver = rank_0()
    saver.keep_in_mind(Unreachable())
    with caplog.at_level(logging.WARNING, "ecemb"):
        saver.finish()
    for word in ("s3://bucket/job has no record that job ctr is finished", "Outage: could not connect"):
        assert word in caplog.text


def test_a_failed_save_in_an_outage_is_told_as_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """And not as the failure to remove what it has left."""
    saver = rank_0()
    with refused(CheckpointFailed, "writing a checkpoint failed on rank 0", "Outage: could not connect"):
        saver._write(saver._transport, Unreachable(), "token", {"step": 7}, [], 2)
    assert "leftovers of a failed save can't be removed: Outage: could not connect" in caplog.text


def test_a_copy_that_fails_fails_on_all_ranks_and_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would wait in the background for this one."""
    saver, writer = rank_0(), mock.Mock(spec=Unreachable)
    writer.prepare.return_value = "token"
    full = mock.Mock(**{"clone.side_effect": RuntimeError("can't allocate memory")})
    monkeypatch.setattr("ecemb.checkpoint.saver.pieces_of", lambda *_: [Piece("a", (1,), 0, full)])
    monkeypatch.setattr(saver, "_agree", lambda *_, **__: (writer, {"step": 7}))
    with refused(CheckpointFailed, "copying all tables failed on rank 0", "can't allocate memory"):
        saver.save(writer, keep=1, asynchronous=True)
    writer.discard.assert_called_once_with("token")
    saver.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_path_without_a_working_directory_is_refused_on_all_ranks(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others wait for is sent before the rank raises; and it tells them why."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    saver, sent = rank_0(), list[bytes]()
    monkeypatch.setattr(saver._transport, "gather", lambda data, _: sent.append(data) or [data])
    with refused(ConfigurationError, "'checkpoints' is a relative path", "pass an absolute path"):
        saver.save("checkpoints", keep=1, asynchronous=asynchronous)
    [told] = sent
    other = rank_0()
    other._transport.rank = 1
    monkeypatch.setattr(other._transport, "gather", lambda data, _: [told, data])
    monkeypatch.setattr("ecemb.checkpoint.saver.account", lambda *_: {"step": 7, "dense": "", "names": []})
    with refused(ConfigurationError, "agreeing on a checkpoint failed on rank 0", "pass an absolute path"):
        other.save(tmp_path, keep=1, asynchronous=asynchronous)


@pytest.mark.parametrize("keep", [0, -1, True, None, 2.5, float("inf"), "2"])
def test_what_is_no_number_to_keep_is_refused(keep: Any, tmp_path: Path) -> None:
    with refused(ConfigurationError, "keep=", "at least 1", repr(keep)):
        rank_0().save(tmp_path, keep=keep, asynchronous=False)


@pytest.mark.parametrize("asynchronous", ["no", 1, None])
def test_what_is_neither_asynchronous_nor_not_is_refused(asynchronous: Any, tmp_path: Path) -> None:
    with refused(ConfigurationError, "asynchronous= is True or False", repr(asynchronous)):
        rank_0().save(tmp_path, keep=1, asynchronous=asynchronous)
