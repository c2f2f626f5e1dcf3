"""Object storage that fails, with its real client: each fault is survived, or is a named error.

After each fault, readers that go past the proxy find the newest whole checkpoint bit by bit, or the one
before. docs/guides/durable.md has the table of what is shown here. Needs what test_object_storage.py needs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from baselines.check_n_run.background import Background
from baselines.check_n_run.durable import DurableTier
from baselines.check_n_run.following import Increments
from baselines.check_n_run.store import store_at
from baselines.check_n_run.writing import CheckpointFailed as NotWritten
from ecemb.checkpoint import Follower
from ecemb.errors import CheckpointFailed
from support.check_n_run.job import Job
from support.check_n_run.training import ROWS, Life, is_right, state
from support.guarded_training import bags, initialise, whole_tables
from support.object_storage import Fault, Storage, storage
from support.processes import launch

WHY = "is not in this environment: run `make test-s3`"
pytest.importorskip("moto.server", reason=f"moto {WHY}")
s3fs = pytest.importorskip("s3fs", reason=f"s3fs {WHY}")

PART_BYTES: Final = 5 << 20
"""S3's smallest part of an object in several."""
SILENT: Final = {"read_timeout": 1}
"""Of a client whose server is silent; an answer that takes longer is only asked for again."""

PUTS: Final = ("PUT chunk", "PUT receipt", "PUT manifest")
DELETES: Final = ("DELETE manifest", "DELETE chunk", "DELETE receipt")
READS: Final = ("LIST", "HEAD manifest", "GET manifest", "HEAD chunk", "GET chunk")
SAVES: Final = (
    *("LIST", "HEAD manifest", "GET manifest", *PUTS, "HEAD chunk", "HEAD receipt", "GET receipt"),
    *DELETES,
)
WRITTEN: Final = {
    "503": SAVES,
    "500": SAVES,
    "reset": SAVES,
    "silent": ("GET manifest", "PUT chunk", "PUT manifest"),
    "lost": (*PUTS, *DELETES),
    "cut upload": PUTS,
    "half": PUTS,
    "cut": ("LIST", "GET manifest", "GET receipt"),
    "short": ("LIST", "GET manifest", "GET receipt"),
}
"""Fault -> requests of a save that it happens to."""
READ: Final = {
    "503": READS,
    "500": READS,
    "reset": READS,
    "silent": ("LIST", "GET chunk"),
    "cut": ("LIST", "GET manifest", "GET chunk"),
    "short": ("LIST", "GET manifest", "GET chunk"),
}
"""Fault -> requests of a start with `resume=`, or of a follower."""
LASTING: Final = ("503", "reset")
OUTAGES: Final = 3
"""At how many requests of a save, or of a start, an outage begins, besides the first one."""


@pytest.fixture(scope="module")
def s3() -> Iterator[Storage]:
    """Clients wait 10 ms before they try again, and try less often."""
    with pytest.MonkeyPatch.context() as patched, storage() as running:
        patched.setattr("botocore.retryhandler.delay_exponential", lambda *_, **__: 0.01)
        patched.setattr(s3fs.S3FileSystem, "retries", 2)
        yield running


def client(s3: Storage, action: str) -> dict[str, Any]:
    return s3.through(**(SILENT if action == "silent" else {}))


def counted(s3: Storage, act: Callable[[], object]) -> dict[str, int]:
    """How many requests of each kind something sends if nothing fails."""
    s3.proxy.arm()
    act()
    return dict(s3.proxy.seen)


def once(kinds: Sequence[str], action: str, counts: dict[str, int], draw: random.Random) -> list[Fault]:
    """A fault of one request of each kind, among those that `counted` saw."""
    return [Fault(kind, action, draw.randrange(counts[kind])) for kind in kinds]


def check(s3: Storage, url: str, memory: Path, *steps: int) -> int:
    """Returns the step that readers find who meet no fault."""
    again = job_at(url, memory / "reader", options=s3.direct)
    assert again.next in steps and again.is_right()
    follower = Follower(Increments(url, options=s3.direct), columns=["weight", "sum"])
    assert follower.refresh() == (again.next > 0)
    if again.next:
        assert shown(follower) == again.next
    return again.next


def shown(follower: Follower) -> int:
    """The step that a follower shows, all of whose rows are of that step."""
    for name, rows in state(follower.step).items():
        assert torch.equal(follower.snapshot.tables["table"][name].reshape(rows.shape), rows)
    return follower.step


def job_at(url: str, memory: Path, **options: Any) -> Job:
    """A job whose checkpoints have few chunks."""
    return Job(url, memory, runs={"weight": ROWS, "sum": ROWS}, **options)


def next_save(job: Job) -> bool:
    job.step()
    return job.save()


# --- saves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", WRITTEN)
def test_a_save_survives(action: str, s3: Storage, tmp_path: Path, seed: int) -> None:
    url = s3.new_url()
    job = job_at(url, tmp_path, policy="full", options=client(s3, action))
    next_save(job)
    counts = counted(s3, lambda: next_save(job))
    assert set(counts) == set(SAVES)
    draw = random.Random(f"{seed} {action}")
    s3.proxy.arm(*once(WRITTEN[action], action, counts, draw))
    assert next_save(job)
    assert s3.proxy.hits == len(WRITTEN[action])
    check(s3, url, tmp_path, job.next)
    s3.proxy.arm()
    assert next_save(job)
    left = store_at(url, s3.direct).paths()
    assert len([path for path in left if path.endswith(".manifest")]) == 1
    assert len({path.partition("/")[0].partition(".")[0] for path in left}) == 1


@pytest.mark.parametrize("action", LASTING)
def test_an_outage_from_any_request_of_a_save_on(action: str, s3: Storage, tmp_path: Path, seed: int) -> None:
    """The save is a named error; the checkpoint before it, or the new one, is there; the training goes on."""
    url = s3.new_url()
    job = job_at(url, tmp_path, policy="full", options=client(s3, action))
    next_save(job)
    requests = sum(counted(s3, lambda: next_save(job)).values())
    draw = random.Random(f"{seed} {action}")
    for first in (0, *draw.sample(range(1, requests), OUTAGES)):
        s3.proxy.arm(Fault("", action, first, None))
        job.step()
        with pytest.raises(
            CheckpointFailed, match=f"{re.escape(url)}: .* failed: .*the training can go on: "
        ) as error:
            job.save()
        found = check(s3, url, tmp_path, job.next - 1, job.next)
        if "The new checkpoint is whole" in str(error.value):
            assert found == job.next
        s3.proxy.arm()
        assert job.save() == (found < job.next)
        check(s3, url, tmp_path, job.next)
    s3.proxy.arm()
    assert next_save(job)
    assert len([path for path in store_at(url, s3.direct).paths() if path.endswith(".manifest")]) == 1


@pytest.mark.parametrize("when", ["before the next save", "after it"])
def test_a_manifest_that_arrives_when_the_save_has_failed(when: str, s3: Storage, tmp_path: Path) -> None:
    """Its chunks are still there, or there is a newer checkpoint."""
    url = s3.new_url()
    job = job_at(url, tmp_path, policy="full", options=s3.through())
    next_save(job)
    s3.proxy.arm(Fault("PUT manifest", "late"), Fault("PUT manifest", "503", 1, None))
    with pytest.raises(CheckpointFailed, match="completing the checkpoint of step 2 failed"):
        next_save(job)
    check(s3, url, tmp_path, 1)
    late = s3.proxy.take_late()
    assert len(late) == 1
    if when == "before the next save":
        s3.proxy.deliver(late)
        check(s3, url, tmp_path, 2)
    s3.proxy.arm()
    assert next_save(job)
    check(s3, url, tmp_path, 3)
    if when == "after it":
        s3.proxy.deliver(late)
        check(s3, url, tmp_path, 3)
    assert next_save(job)
    check(s3, url, tmp_path, 4)
    assert len([path for path in store_at(url, s3.direct).paths() if path.endswith(".manifest")]) == 1


def test_differential_checkpoints_after_faults(s3: Storage, tmp_path: Path, seed: int) -> None:
    """A failed save makes the next one full; each that follows stands on what is there."""
    url = s3.new_url()
    job = job_at(url, tmp_path, policy="consecutive", options=s3.through())
    draw = random.Random(seed)
    needs: list[int] = []
    for number in range(6):
        s3.proxy.arm(*([Fault("PUT chunk", "500", draw.randrange(2), None)] if number == 3 else []))
        job.step()
        if number == 3:
            with pytest.raises(CheckpointFailed, match="writing the checkpoint of step 4 failed"):
                job.save()
            continue
        assert job.save()
        check(s3, url, tmp_path, job.next)
        (newest,) = [one for one in [job.tiers[0].newest()] if one is not None]
        chain = Increments(url, options=s3.direct).chain()
        assert chain is not None and chain.name == newest.name
        needs.append(len(chain.links) - 1)
    assert needs == [0, 1, 2, 0, 1]


# --- objects in several parts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("POST begin", "503"),
        ("PUT part", "503"),
        ("PUT part", "lost"),
        ("PUT part", "cut upload"),
        ("POST complete", "500"),
        ("POST complete", "error in 200"),
        ("POST complete", "lost"),
    ],
)
def test_an_object_in_several_parts(
    kind: str, action: str, s3: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, store = parts_of(s3, s3.new_url(), monkeypatch)
    s3.proxy.arm(Fault(kind, action, first=int(kind == "PUT part")))
    store.put("a", content)
    assert s3.proxy.hits == 1
    assert store.get("a") == content


def test_parts_that_are_not_put_together(s3: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3.new_url()
    content, store = parts_of(s3, url, monkeypatch)
    s3.proxy.arm(Fault("POST complete", "500", 0, None))
    with pytest.raises(OSError, match="internal error"):
        store.put("a", content)
    assert store_at(url, s3.direct).paths() == []
    with pytest.raises(FileNotFoundError):
        store.get("a")


def parts_of(s3: Storage, url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, Any]:
    """An object of three parts, and a store that sends it so."""
    real = s3fs.S3FileSystem._pipe_file

    async def in_parts(self: Any, path: str, data: bytes, **options: Any) -> Any:
        return await real(self, path, data, **{**options, "chunksize": PART_BYTES})

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", in_parts)
    s3fs.S3FileSystem.clear_instance_cache()
    return random.Random(0).randbytes(2 * PART_BYTES + 1000), store_at(url, s3.through())


# --- starts -----------------------------------------------------------------------------------------


def saved(s3: Storage, url: str, memory: Path, steps: int) -> Job:
    """A job past the proxy, with a checkpoint of each step, all of which stay."""
    job = job_at(url, memory / "writer", policy="consecutive", options=s3.direct)
    for _ in range(steps):
        job.step()
        assert job.save(keep=9)
    return job


@pytest.mark.parametrize("action", READ)
def test_a_start_survives(action: str, s3: Storage, tmp_path: Path, seed: int) -> None:
    url, options = s3.new_url(), client(s3, action)
    saved(s3, url, tmp_path, 2)
    counts = counted(s3, lambda: job_at(url, tmp_path, options=options))
    assert set(READS) <= set(counts)
    draw = random.Random(f"{seed} {action}")
    s3.proxy.arm(*once(READ[action], action, counts, draw))
    job = job_at(url, tmp_path, options=options)
    assert s3.proxy.hits == len(READ[action])
    assert job.next == 2 and job.is_right()
    assert job.tiers[0].finished("job") is None


@pytest.mark.parametrize("action", LASTING)
def test_a_start_in_an_outage(action: str, s3: Storage, tmp_path: Path, seed: int) -> None:
    """It is no first launch: it ends with a named error, and changes nothing."""
    url, options = s3.new_url(), s3.through()
    saved(s3, url, tmp_path, 2)
    requests = sum(counted(s3, lambda: job_at(url, tmp_path, options=options)).values())
    before = store_at(url, s3.direct).paths()
    for first in (0, *random.Random(f"{seed} {action}").sample(range(1, requests), OUTAGES)):
        s3.proxy.arm(Fault("", action, first, None))
        with pytest.raises(CheckpointFailed, match=f"{re.escape(url)}: .* failed: .*start again"):
            job_at(url, tmp_path, options=options)
        with pytest.raises(
            CheckpointFailed, match=f"{re.escape(url)}: looking whether job job is finished failed"
        ):
            DurableTier(url, tmp_path, options=options).finished("job")
    s3.proxy.arm()
    assert store_at(url, s3.direct).paths() == before
    assert job_at(url, tmp_path, options=options).is_right()


def test_a_start_that_reads_half_of_each_chunk(s3: Storage, tmp_path: Path) -> None:
    url = s3.new_url()
    saved(s3, url, tmp_path, 2)
    for action, words in (
        ("short", "not what was written: its checksum differs"),
        ("cut", "failed: .*start again"),
    ):
        s3.proxy.arm(Fault("GET chunk", action, 0, None))
        with pytest.raises(CheckpointFailed, match=f"{re.escape(url)}: .*{words}"):
            job_at(url, tmp_path, options=s3.through())
    s3.proxy.arm()
    assert job_at(url, tmp_path, options=s3.through()).is_right()


# --- followers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", READ)
def test_a_follower_survives(action: str, s3: Storage, tmp_path: Path, seed: int) -> None:
    url = s3.new_url()
    training = saved(s3, url, tmp_path, 1)
    follower = Follower(Increments(url, options=client(s3, action)), columns=["weight", "sum"])
    assert follower.refresh() and shown(follower) == 1
    training.step()
    training.save(keep=9)
    counts = counted(s3, follower.refresh)
    draw = random.Random(f"{seed} {action}")
    training.step()
    training.save(keep=9)
    counts |= {"HEAD chunk": 1, "GET chunk": 1}  # the next increment may have fewer
    s3.proxy.arm(*once(READ[action], action, counts, draw))
    assert follower.refresh()
    assert s3.proxy.hits == len(READ[action])
    assert shown(follower) == training.next and follower.behind == 0


@pytest.mark.parametrize("action", [*LASTING, "cut", "short"])
def test_a_follower_in_an_outage(action: str, s3: Storage, tmp_path: Path, seed: int) -> None:
    """It shows the last snapshot, and reads the newest checkpoint afterwards."""
    url = s3.new_url()
    training = saved(s3, url, tmp_path, 1)
    follower = Follower(Increments(url, options=s3.through()), columns=["weight", "sum"])
    assert follower.refresh()
    training.step()
    training.save(keep=9)
    requests = sum(counted(s3, follower.refresh).values())
    before = follower.snapshot
    training.step()
    training.save(keep=9)
    if action in LASTING:
        s3.proxy.arm(Fault("", action, random.Random(f"{seed} {action}").randrange(requests), None))
    else:
        s3.proxy.arm(Fault("GET chunk", action, 0, None))
    with pytest.raises(CheckpointFailed, match=f"{re.escape(url)}.*(can't be read|not what was written)"):
        follower.refresh()
    assert follower.snapshot is before and shown(follower) == before.step
    s3.proxy.arm()
    assert follower.refresh() and shown(follower) == training.next


def test_a_follower_beside_saves_and_retention(s3: Storage, tmp_path: Path) -> None:
    """What it reads is replaced meanwhile, as full checkpoints with keep=1 do."""
    url = s3.new_url()
    training = job_at(url, tmp_path, policy="full", options=s3.direct)
    next_save(training)
    follower = Follower(Increments(url, options=s3.through()), columns=["weight", "sum"])
    s3.proxy.meanwhile = lambda: next_save(training)
    for kind, first in (("GET chunk", 1), ("HEAD chunk", 1), ("GET manifest", 0), ("HEAD manifest", 0)):
        next_save(training)
        s3.proxy.arm(Fault(kind, "call", first))
        assert follower.refresh() and s3.proxy.hits == 1, kind
        assert shown(follower) == training.next, kind
    assert follower.behind >= 1


# --- the method without a guard -----------------------------------------------------------------------


def test_the_methods_own_checkpoints(s3: Storage, tmp_path: Path, seed: int) -> None:
    """`CheckNRun` writes beside training; ranks report to rank 0 through the storage."""
    url = s3.new_url()
    life = Life(store_at(url, s3.through()), tmp_path, "one_shot")
    draw = random.Random(seed)
    for action in ("503", "500", "reset", "half", "lost", "cut upload"):
        s3.proxy.arm(Fault("PUT chunk", action, draw.randrange(2)), Fault("PUT manifest", action))
        life.step()
        life.save()
        assert s3.proxy.hits == 2, action
        again = Life(store_at(url, s3.direct), tmp_path / "again", "one_shot")
        assert again.next == life.next and is_right(again), action
    one = Life(store_at(s3.new_url(), s3.direct), tmp_path / "one", "full", ranks=1)
    one.step()
    writer = Background(url, s3.through(), process=False)
    s3.proxy.arm(Fault("PUT manifest", "503", 0, None))
    writer.start(one.jobs()[0])
    with pytest.raises(NotWritten, match="step 1 was not written: .*Those before it are untouched"):
        writer.wait()
    again = Life(store_at(url, s3.direct), tmp_path / "again", "one_shot")
    assert again.next == life.next and is_right(again)


# --- on real ranks ------------------------------------------------------------------------------------


def life(
    folder: Path, _: Barrier, url: str, options: dict[str, Any], saves: tuple[int, ...], end: int
) -> dict[str, Any]:
    """One launch of a job, which saves in the background; it is not closed, since the job has more to do."""
    folder.mkdir(exist_ok=True)
    initialise(folder)
    ranks = torch.distributed.get_world_size()
    script = bags()
    tier = DurableTier(url, folder / "memory", policy="one_shot", options=options)
    guard = script.protect(ranks, ranks - 1, resume=tier, failure_domain="rank")
    found: dict[str, Any] = {"kind": guard.recovery.kind, "begin": guard.next_step, "errors": []}
    found["begins"] = whole_tables(script)
    for _ in range(guard.next_step, end):
        with guard.step():
            script.body()
        if guard.next_step in saves:
            try:
                guard.save(tier, asynchronous=True)
            except CheckpointFailed as error:
                found["errors"].append(str(error))
                guard.save(tier, asynchronous=True)
            found["saved"] = whole_tables(script)
    guard._saver.drain()
    return found | {"ends": script.snapshot()}


def test_a_job_goes_on_after_a_failed_save_and_resumes(s3: Storage, tmp_path: Path) -> None:
    """The save of step 2 fails in the background, which that of step 3 says; then all memory is lost."""
    options = s3.through(retries={"max_attempts": 1})
    undisturbed = launch(2, life, tmp_path / "undisturbed", str(tmp_path / "store"), {}, (), 6)
    url, folder = s3.new_url(), tmp_path / "disturbed"
    s3.proxy.arm(Fault("PUT manifest", "500", 1, None, until="DELETE manifest"))
    first = launch(2, life, folder, url, options, (1, 2, 3), 5)
    for path in list(folder.rglob("*.arena")):
        path.unlink()
    s3.proxy.arm(Fault("LIST", "reset"), Fault("GET chunk", "cut"), Fault("GET manifest", "503"))
    second = launch(2, life, folder, url, options, (5,), 6)
    assert s3.proxy.hits == 3
    for one, then, now in zip(undisturbed, first, second, strict=True):
        assert (then["kind"], then["begin"], len(then["errors"])) == ("fresh", 0, 1)
        for words in ("completing the checkpoint of step 2 failed", url, "call guard.save() again"):
            assert words in then["errors"][0]
        assert (now["kind"], now["begin"], now["errors"]) == ("checkpoint", 3, [])
        assert now["begins"] == then["saved"]
        assert now["ends"] == one["ends"]
