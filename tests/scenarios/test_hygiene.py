"""What lies beside a job, under it, and after it: other jobs, full mounts, damaged and removed arenas, forks.

Each scenario is a job of its own, with several lives (see support/three_hosts.py). Scenarios share their
processes, since starting them takes longest.
"""

from __future__ import annotations

import ast
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ecemb
from ecemb import session as sessions
from ecemb.__main__ import main
from ecemb.errors import (
    ArenaBusy,
    ArenaIncompatible,
    EcembError,
    NotEnoughSpace,
    PeerFailure,
    StepFailed,
    TooManyErasures,
    UsageError,
)
from ecemb.memory.arena import Arena
from ecemb.memory.header import CONSTANTS_OFFSET, FORMAT, WORDS_OFFSET
from ecemb.memory.scan import Directory, arenas
from ecemb.net import rendezvous
from support.arena_holders import constants, create, holding
from support.fork_server import fork_server
from support.processes import run_ranks
from support.refusals import matching
from support.simulation import Machines, job_of
from support.three_hosts import WORLD, Place, Training, life, unguarded
from support.training_lives import STEPS

MIB = 1 << 20
DEADLINE_S = 300
PACKAGE = Path(ecemb.__file__).parent


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system in memory with 128 MiB; None where mounting is not for us."""
    folder = tmp_path_factory.mktemp("mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=128m,mode=1777", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# --- scenarios of one job -----------------------------------------------------------------------


@contextmanager
def told() -> Iterator[list[str]]:
    """What ecemb logs as a warning, or worse."""
    messages: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, keeper = logging.getLogger("ecemb"), Keeper(logging.WARNING)
    logger.addHandler(keeper)
    try:
        yield messages
    finally:
        logger.removeHandler(keeper)


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MIB)


def all_meet() -> None:
    """Between lives there is no group: the store that outlives them stands in."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    name = f"meet/{MEETINGS[0]}"
    MEETINGS[0] += 1
    store.add(name, 1)
    end = time.monotonic() + DEADLINE_S
    while store.add(name, 0) < WORLD:
        assert time.monotonic() < end, "the others don't come"
        time.sleep(0.005)


MEETINGS = [0]


def a_damaged_arena_counts_as_lost_and_is_rebuilt(place: Place) -> None:
    with life(place):
        training = Training()
        training.run(training.protect(), 3)
        bits = training.bits()
    (mine,) = place.arenas()
    if place.index == 1:
        patch(mine, CONSTANTS_OFFSET + 5, b"\xff")
    with life(place), told() as messages:
        training = Training()
        guard = training.protect()
        assert (guard.recovery.kind, guard.next_step) == ("memory", 3)
        assert training.bits() == bits
    assert any("counts as lost" in text and "checksum" in text for text in messages), messages
    assert len(place.arenas()) == 1
    assert (place.arenas() == [mine]) is (place.index != 1)


def too_many_damaged_are_named_and_left_as_they_are(place: Place) -> None:
    with life(place):
        training = Training()
        training.run(training.protect(), 2)
        bits = training.bits()
    (mine,) = place.arenas()
    before = head(mine)
    if place.index != 2:
        patch(mine, 20, b"\xff")
    damaged = head(mine)
    with (
        life(place),
        matching(TooManyErasures, "is lost", "are kept", "/host0/", "/host1/", "checksum"),
    ):
        Training().protect()
    assert place.arenas() == [mine]
    assert head(mine)[:WORDS_OFFSET] == damaged[:WORDS_OFFSET]
    patch(mine, 0, before[:WORDS_OFFSET])
    with life(place):
        training = Training()
        assert training.protect().next_step == 2
        assert training.bits() == bits


def an_arena_of_another_format_stops_every_start(place: Place) -> None:
    """One rank's is enough, and what its host may hold is neither rebuilt elsewhere nor removed."""
    with life(place):
        training = Training()
        training.run(training.protect(), 1)
        bits = training.bits()
    (mine,) = place.arenas()
    if place.index == 1:
        patch(mine, 8, (FORMAT + 1).to_bytes(8, "little"))
    with matching(ArenaIncompatible, f"format {FORMAT + 1}", f"reads format {FORMAT}", "host1"), life(place):
        raise AssertionError("started beside it")
    assert place.arenas() == [mine]
    if place.index == 1:
        patch(mine, 8, FORMAT.to_bytes(8, "little"))
    with life(place):
        training = Training()
        assert training.protect().next_step == 1
        assert training.bits() == bits


def an_arena_removed_under_its_job_is_lost_at_the_restart_and_not_before(place: Place) -> None:
    expected = unguarded(place)
    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, 2)
        if place.index == 1:
            shutil.rmtree(place.arenas()[0].parents[1].parent / place.job / place.host)
        training.run(guard, 3)
    with life(place):
        training = Training()
        guard = training.protect()
        assert (guard.recovery.kind, len(guard.recovery.lost), guard.next_step) == ("memory", 1, 3)
        training.run(guard)
        assert training.bits() == expected
        dist.barrier()
        if place.index == 0:
            place.arenas()[0].unlink()
        with told() as messages:
            guard.close()
        assert any("was removed while the job runs" in text for text in messages) is (place.index == 0)
    assert not place.arenas()


def damage_inside_an_arena_is_named_with_a_way_out_that_works(place: Place) -> None:
    """The journal of a step that was cut off, the code's generator, the rank's state: host1's are damaged."""
    for region in ("row_journal", "generator", "rows"):
        here = Place(place.index, place.root, f"{place.job}-{region.replace('_', '-')}")
        with life(here):
            training = Training()
            guard = training.protect()
            training.run(guard, 2)
            bits = training.bits()
            cut_off = guard.step()
            KEPT.append((cut_off, guard, training))  # else it would be undone, when it is forgotten
            cut_off.__enter__()
            training.step(2)
            arena = guard._memory.arena
            if place.index == 1 and region == "rows":  # the rank state's record is the last one
                guard._memory.rank_state[20] ^= 1
            elif place.index == 1:
                arena.region(region)[:8] = 255
        (mine,) = here.arenas()
        with life(here):
            with pytest.raises((EcembError, RuntimeError)) as caught:
                Training().protect()
            caught.value.__traceback__ = None
            assert "damaged" in str(caught.value), caught.value
            assert region == "rows" or "arenas rm" in str(caught.value), caught.value
        assert here.arenas() == [mine]
        if place.index == 1:
            assert main(["arenas", "rm", str(mine)]) == 0
        with life(here):
            training = Training()
            guard = training.protect()
            assert (guard.recovery.kind, guard.next_step) == ("memory", 2)
            assert training.bits() == bits
            guard.close()


KEPT: list[object] = []


def a_forked_child_has_no_guard_and_does_no_harm(place: Place) -> None:
    with life(place):
        training = Training()
        guard = training.protect()
        training.run(guard, 1)
        bits = training.bits()

        def step() -> None:
            with guard.step():
                pass

        def touch() -> None:
            training.bag.weight.data.fill_(7.0)

        for act, outcome in (
            (step, "UsageError: forked child"),
            (guard.close, "UsageError: forked child"),
            (partial(rendezvous._destroy_groups, os.getpid()), "ended"),
            (touch, f"signal {signal.SIGSEGV}"),
        ):
            came = child(act)
            assert came == outcome, came
        dist.barrier()  # the child has not closed its parent's connections
        assert training.bits() == bits
        training.run(guard, 2)
        guard.close()


def child(act: Callable[[], object]) -> str:
    """How `act` ends in a forked child."""
    there, back = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.write(back, b"ended")
        except UsageError as error:
            os.write(
                back, b"UsageError: forked child" if "a forked child of it" in str(error) else b"UsageError"
            )
        except BaseException as error:  # noqa: BLE001
            os.write(back, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(back)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(there, "rb") as reader:
        text = reader.read().decode()
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


def a_mount_that_others_fill_fails_the_step_and_not_the_job(place: Place) -> None:
    """Whatever part of the step the space runs out in, it is undone on all ranks; no SIGBUS."""
    rows = 120_000
    filler = Path(place.root) / "others" / "filler"

    def big(training: Training) -> None:
        training.sparse.zero_grad()
        training.bag(torch.arange(rows).view(-1, 3)).square().mean().backward()
        training.sparse.step()

    def build() -> tuple[Training, ecemb.Guard]:
        training = Training(rows=rows)
        guard = training.protect()
        training.run(guard, 1)
        return training, guard

    failures: list[BaseException] = []
    for free_bytes in (0, MIB // 2, MIB):  # what a try has reserved stays for the next one
        with life(place):
            training, guard = build()
            assert guard.next_step == 1
            bits = training.bits()
            dist.barrier()
            if place.index == 0:
                fill(filler, free_bytes)
            dist.barrier()
            try:
                with guard.step():
                    big(training)
            except (NotEnoughSpace, StepFailed, PeerFailure) as error:
                failures.append(error.with_traceback(None))
                error.__context__ = error.__cause__ = None
            else:
                raise AssertionError(f"the step fitted into {free_bytes} bytes")
            assert training.bits() == bits
            assert guard.next_step == 1
            with pytest.raises(StepFailed, match="takes no more steps"), guard.step():
                pass
            del training, guard
            gc.collect()
        all_meet()
        if place.index == 0:
            filler.unlink()
        all_meet()
    assert all(
        "arena_dir" in str(error) and place.root in str(error)
        for error in failures
        if isinstance(error, NotEnoughSpace)
    )
    assert any(isinstance(error, NotEnoughSpace) for error in failures)
    with life(place):
        training, guard = build()
        with guard.step():
            big(training)
        training.run(guard)
        bits = training.bits()
    with life(Place(place.index, place.root, place.job + "-unguarded")):
        training = Training(rows=rows)
        training.step(0)
        big(training)
        for number in range(2, STEPS):
            training.step(number)
        assert training.bits() == bits
    with life(place):
        _, guard = build()
        guard.close()


def fill(path: Path, free_bytes: int) -> None:
    """Take all space of the file system but `free_bytes`."""
    path.parent.mkdir(exist_ok=True)
    stats = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize - free_bytes)


def lives_leave_nothing_behind(place: Place) -> None:
    def held() -> tuple[int, int, int, int]:
        maps = Path("/proc/self/maps").read_text().count(".arena")
        files = sum(path.is_file() for path in Path(place.root).rglob(f"{place.job}/**/*"))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, files

    seen: list[tuple[int, int, int, int]] = []
    for number in range(7):
        with life(place):
            training = Training()
            guard = training.protect()
            training.run(guard, number + 1)
            del training, guard
        gc.collect()
        all_meet()
        seen.append(held())
        all_meet()
    end = time.monotonic() + DEADLINE_S
    while any(now > then for now, then in zip(held(), seen[2], strict=True)):  # a thread may still be ending
        assert time.monotonic() < end, (seen, held())
        time.sleep(0.01)
    assert held()[3] == WORLD


SCENARIOS: dict[str, Callable[[Place], None]] = {
    scenario.__name__: scenario
    for scenario in (
        a_damaged_arena_counts_as_lost_and_is_rebuilt,
        too_many_damaged_are_named_and_left_as_they_are,
        an_arena_of_another_format_stops_every_start,
        an_arena_removed_under_its_job_is_lost_at_the_restart_and_not_before,
        damage_inside_an_arena_is_named_with_a_way_out_that_works,
        a_forked_child_has_no_guard_and_does_no_harm,
        a_mount_that_others_fill_fails_the_step_and_not_the_job,
        lives_leave_nothing_behind,
    )
}
NEEDS_MOUNT = {a_mount_that_others_fill_fails_the_step_and_not_the_job.__name__}


def play(index: int, port: int, root: str, names: list[str]) -> dict[str, str]:
    """Runs all scenarios in this process; scenario -> traceback of what failed."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    os.environ.update(
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    failures: dict[str, str] = {}
    for number, name in enumerate(names):
        try:
            SCENARIOS[name](Place(index, root, f"job{number}"))
        except BaseException:  # noqa: BLE001 - the scenario's test raises it
            failures[name] = traceback.format_exc()
        store.set(f"{name}/{index}", "ended")  # whoever failed waits for those that it left waiting
        store.wait([f"{name}/{other}" for other in range(WORLD)], timedelta(seconds=DEADLINE_S))
        MEETINGS[0] = 1000 * (number + 1)
    return failures


@pytest.fixture(scope="module")
def played(mount: Path | None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What failed in each process. The store is kept here, as torchrun's agent does."""
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    root = str(mount or tmp_path_factory.mktemp("arenas"))
    names = [name for name in SCENARIOS if mount is not None or name not in NEEDS_MOUNT]
    return run_ranks(WORLD, play, store.port, root, names, deadline_s=DEADLINE_S, group=False)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, played: list[dict[str, str]], mount: Path | None) -> None:
    if mount is None and name in NEEDS_MOUNT:
        pytest.skip("mounting is for root")
    for index, failures in enumerate(played):
        if name in failures:
            pytest.fail(f"process {index}:\n{failures[name]}", pytrace=False)


# --- two jobs, and one job twice ----------------------------------------------------------------


def start(index: int, folder: Path, job: str, port: int, awaits_s: float = DEADLINE_S) -> None:
    """One launch; it waits so long for processes that hold arenas."""
    os.environ.update(RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    timeout, scan = timedelta(seconds=DEADLINE_S), Directory.scan
    with mock.patch.object(Directory, "scan", lambda here, timeout_s: scan(here, min(timeout_s, awaits_s))):
        ecemb.init_process_group("gloo", job=job, arena_dir=folder, host="here", timeout=timeout)


def end() -> None:
    session = sessions.current()
    if session.arena is not None:
        session.arena.close()
    if (watch := getattr(session, "watch", None)) is not None:
        watch.say_goodbye()
    sessions._session = None
    dist.destroy_process_group()


def side_by_side(number: int, meet: Barrier, ports: list[int], folder: Path) -> tuple[str, str, list[str]]:
    """Processes 0 and 1 are one launch, 2 and 3 another."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    pair, index = divmod(number, 2)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def protect(training: Training) -> ecemb.Guard:
        return training.protect(code=ecemb.Code(2, 1), failure_domain="rank")

    # Jobs of two names know nothing of each other.
    for until in (2, 4):
        start(index, folder, f"job{pair}", ports[pair])
        training = Training()
        guard = protect(training)
        assert guard.recovery.lost == ((1,) if pair == 1 and until == 4 else ())
        training.run(guard, until)
        bits = training.bits()
        rank, mine = dist.get_rank(), sessions.current().arena
        assert mine is not None
        meet.wait(DEADLINE_S)
        if until == 2:
            end()
            if pair == 1 and rank == 1:
                mine.path.unlink()
            meet.wait(DEADLINE_S)

    # The first one's name is launched once more while it lives.
    if pair == 1:
        end()
        with matching(ArenaBusy, "living processes hold arenas", "/job0/here/", "by process"):
            start(index, folder, "job0", ports[2], awaits_s=1.0)
        assert sessions._session is None
    meet.wait(DEADLINE_S)
    if pair == 0:
        training.run(guard, 5)
        guard.close()
        end()
    meet.wait(DEADLINE_S)

    # Two launches of a new job at the same moment.
    start(index, folder, "twin", ports[3 + pair])
    meet.wait(DEADLINE_S)
    outcome = "trains"
    training = Training()
    try:
        guard = protect(training)
    except (ArenaBusy, PeerFailure) as error:
        outcome = str(error)
    else:
        training.run(guard, 1)
    meet.wait(DEADLINE_S)
    left = [found.path.name for found in arenas(folder) if found.job == "twin"]
    meet.wait(DEADLINE_S)
    end()
    return bits, outcome, left


def free_ports(count: int) -> Iterator[dist.TCPStore]:
    for _ in range(count):
        yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_two_jobs_side_by_side_and_one_job_launched_twice(tmp_path: Path) -> None:
    meet = fork_server().Barrier(4)
    stores = list(free_ports(5))
    ports = [store.port for store in stores]
    told = run_ranks(4, side_by_side, meet, ports, tmp_path, deadline_s=DEADLINE_S, group=False)
    bits = [one for one, _, _ in told]
    assert bits[:2] == bits[2:]
    outcomes = [one for _, one, _ in told]
    pairs = [outcomes[:2], outcomes[2:]]
    refusals = [pair for pair in pairs if pair != ["trains", "trains"]]
    assert refusals, "both launches train"
    for pair in refusals:
        assert all("launched a second time" in one for one in pair), pair
    assert all(len(left) == 2 * (2 - len(refusals)) for _, _, left in told)
    assert main(["arenas", "rm", "--arena-dir", str(tmp_path), "--job", "job1"]) == 0


# --- users, modes, limits -----------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may write to, as /dev/shm is."""
    folder = Path(
        tempfile.mkdtemp(prefix="ecemb-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    )
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_another_user(pipe: Connection, folder: Path, umask: int) -> None:
    os.umask(umask)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    arena = create(Directory(folder, "ctr", "a"))
    try:
        shutil.rmtree(folder / "ecemb-0")
    except PermissionError:
        pipe.send([str(found.path) for found in arenas(folder)])
    arena.region("rows")[:] = 1
    pipe.recv()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user is for root")
@pytest.mark.parametrize("umask", [0, 0o777])
def test_the_same_job_of_two_users_is_two_jobs(shared: Path, umask: int) -> None:
    arena = create(Directory(shared, "ctr", "a"))
    before = os.umask(umask)
    try:
        with holding(as_another_user, shared, umask) as other:
            seen = other.told()
            assert [str(found.path) for found in arenas(shared)] == [str(arena.path)]
            (theirs,) = (Path(path) for path in seen)
            assert theirs.parents[2] == shared / "ecemb-65534"
            for path in (theirs, *theirs.parents[:3]):
                assert path.stat().st_mode & 0o777 == (0o600 if path == theirs else 0o700)
            with pytest.raises(EcembError, match="not an arena file of this user"):
                Arena.attach(theirs)
    finally:
        os.umask(before)


def in_a_limited_group(pipe: Connection, group: str, folder: Path) -> None:
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        Arena.create(Directory(folder, "ctr", "a"), constants(), {"journal": 96 * MIB})
        pipe.send("created")
    except NotEnoughSpace as error:
        pipe.send(str(error))


def test_a_real_memory_limit_is_an_error_and_no_kill(shared: Path) -> None:
    for top, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = top / f"ecemb-test-{os.getpid()}"
        if not (top / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
            (group / limit).write_text(str(64 * MIB))
            break
        except OSError:
            if group.exists():
                group.rmdir()
    else:
        pytest.skip("no memory cgroup can be made here")
    try:
        with holding(in_a_limited_group, str(group), shared) as other:
            said = other.told()
        assert f"{group / limit}" in said, said
        assert "Raise the limit" in said
    finally:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


# --- leftovers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_recoveries_leave_no_more_than_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    job = job_of(3, 2, 3, rng, rows=4)
    machines = Machines(tmp_path / "job", job)
    seen: list[tuple[int, int, int, int]] = []
    for number in range(26):
        rank = rng.randrange(job.size)
        if rng.randrange(3) == 0 and number and job.placement.tolerates({*machines.plan().lost, rank}):
            machines.lose(rank)
        ends = {rng.randrange(job.size): rng.randrange(1, 60)} if number % 5 == 4 else None
        committed = machines.run(number // 2 + 1, ends=ends).committed
        gc.collect()
        files = sum(path.is_file() for path in machines.root.rglob("*"))
        maps = Path("/proc/self/maps").read_text().count(".arena")
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), maps, files))
        assert committed >= 0
    machines.run(15)
    machines.check(15)
    # What earlier tests left may still end meanwhile.
    assert all(last <= first for last, first in zip(seen[-1][:3], seen[1][:3], strict=True)), seen
    assert max(files for *_, files in seen) <= job.size + 1  # a newcomer that died is not yet removed


# --- the source ---------------------------------------------------------------------------------


def sources() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "mktemp",
    "system",
    "popen",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


DANGEROUS_OPTIONS = {"weights_only", "shell", "allow_pickle"}

RUNS_THE_USERS_SCRIPT = {("worker.py", "exec")}
"""`ecemb-run` runs a script as python does: from the file that its command line names."""


def breaches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: it is gone under python -O"
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, a.name) for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield node.lineno, str(node.module)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
        given = {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg in DANGEROUS_OPTIONS}
        if called.split(".")[-1] in FORBIDDEN_CALLS and not called.endswith(".eval"):
            yield node.lineno, called
        if called == "torch.load" and given.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        if given.get("shell", "False") != "False":
            yield node.lineno, "shell="
        if given.get("allow_pickle", "False") != "False":
            yield node.lineno, "allow_pickle="


def test_nothing_is_loaded_that_could_run_code() -> None:
    found = [(path, line, what) for path, tree in sources() for line, what in breaches(tree)]
    assert {(path.name, what) for path, _, what in found} == RUNS_THE_USERS_SCRIPT, found
    bad = "import pickle\nassert x\ntorch.load(f)\neval(s)\ndist.all_gather_object(a, b)\nrun(c, shell=True)"
    assert len(list(breaches(ast.parse(bad)))) == 6
