"""Several torchrun agents on one machine stand for hosts; scenarios kill, replace and bring them back.

    python tests/failures/hosts.py [NAME...]

Each agent's workers name a host of their own, keep their arenas in a folder of their own, and have their own
address: nothing is shared but the machine's processors. A scenario ends with `Result`, or raises
`Unexpected`; what a failed one leaves behind is kept, and its path printed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness.ports import ReservedPort
from ecemb.memory.arena import Arena
from ecemb.memory.header import Constants, State
from ecemb.memory.scan import Directory
from ecemb.net.wording import listed
from failures.driver import ROOT, Digests, differences
from failures.namespaces import INTERFACE, Namespaces, NotPossible
from failures.plan import Plan, Setting
from failures.trace import Trace

POLL_S = 0.01
REACH_S = 600.0  # at most: a start, and the training up to a step
END_S = 300.0  # at most: what workers of a killed agent take to end
NOTICED_S = 120.0  # at most: until a host that is cut off is missed; the kernel's own patience is 15 minutes
TIMEOUT_S = 60.0  # what the workers pass to init_process_group
TRAINING = Setting(6, 3, 2, "Adagrad", steps=60)
PER_HOST = 2
HELD = 30  # the step past which a run does not go before its hosts have been killed
WARNS = "would be more than the code survives"

# An agent counts as dead after 15 s, as by default, and until then no other takes its place. A living one may
# stand still for less on a busy machine.
RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 15, "join_timeout": 600, "read_timeout": 20}

# Agents share the rendezvous' store with their workers, and keep the address of the first round's: a new
# agent then waits in vain for an address, and the workers of a lost one's peers for a store that is gone.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Unexpected(AssertionError):
    """A scenario did not go as it should."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a scenario ended.

    Attributes:
        name: of the scenario.
        identical: whether the run ended bit-identical to an undisturbed one.
        seconds_recovery: from the last kill until all ranks train again; None if there was none.
        note: what was seen; if not identical, what differs.
    """

    name: str
    identical: bool
    seconds_recovery: float | None
    note: str


@dataclasses.dataclass
class Agent:
    """A torchrun agent that stands for a host.

    Attributes:
        name: of the agent; a host that comes back has another one.
        host: what its workers pass as `host=`.
        memory: folder that its workers pass as `arena_dir=`.
        process: torchrun.
    """

    name: str
    host: str
    memory: Path
    process: subprocess.Popen[bytes]


class Hosts:
    """One job on several hosts. A context: at its end no process is left, nor memory.

    Args:
        setting: what is trained.
        hosts: how many agents make up the job.
        timeout_s: what the workers pass to `init_process_group`.
        endpoint: of the rendezvous.
        saves: after this many steps each, a checkpoint is saved, from which starts may resume; 0 for none.
    """

    def __init__(
        self,
        setting: Setting = TRAINING,
        hosts: int = 3,
        timeout_s: float = TIMEOUT_S,
        endpoint: str | None = None,
        saves: int = 0,
    ) -> None:
        self.setting = setting
        self.folder = Path(tempfile.mkdtemp(prefix="ecemb-hosts-"))
        self.memory = Path(tempfile.mkdtemp(prefix="ecemb-hosts-", dir="/dev/shm"))
        for name in ("traces", "results"):
            (self.folder / name).mkdir()
        Plan(setting).write(self.folder / "plan.json")
        self.agents: dict[str, Agent] = {}
        self.killed_ns = 0
        self._port = ReservedPort()
        self.endpoint = endpoint or f"127.0.0.1:{self._port.number}"
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._saves = saves
        self._hosted = False
        self._launched = 0
        self._traces: dict[Path, Trace] = {}
        self._before: set[Path] = set()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for pid in self.processes():
            _kill(pid)
        for agent in self.agents.values():
            agent.process.wait()
        self._port.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            print(f"kept: {self.folder}", file=sys.stderr, flush=True)

    # --- what happens to hosts ---------------------------------------------------------------

    def start(
        self,
        host: str,
        *,
        address: str | None = None,
        inside: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        per_host: int = PER_HOST,
    ) -> Agent:
        """Start an agent; the first one of a launch hosts the rendezvous' store.

        Args:
            host: its workers' name for it, and its memory's folder; may be several with commas between them.
            address: its own; by default a loopback address above those of earlier agents, for torchrun
                numbers workers by their agents' addresses.
            inside: words that the command begins with, such as those that enter a namespace.
            environment: of this agent, beside the job's.
            per_host: how many workers it starts.
        """
        self._launched += 1
        name = f"{self._launched}-{host}"
        memory = self.memory / host
        memory.mkdir(exist_ok=True)
        conf = {**RENDEZVOUS, "is_host": int(not self._hosted)}
        self._hosted = True
        command = [*inside, sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nnodes={self._hosts}", f"--nproc-per-node={per_host}", "--max-restarts=20"]
        command += ["--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}"]
        command += ["--rdzv-id=hosts", "--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in conf.items())]
        command += [f"--local-addr={address or f'127.0.0.{self._launched + 1}'}"]
        command += [str(Path(__file__).with_name("host_worker.py")), str(self.folder), str(memory), host]
        variables = {
            **os.environ,
            **ENVIRONMENT,
            **(environment or {}),
            "ECEMB_TIMEOUT_S": str(self._timeout_s),
            "ECEMB_SAVES": str(self._saves),
            "ECEMB_HOSTS": str(self.folder),
            "ECEMB_AGENT": name,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        agent = Agent(name, host, memory, process)
        self.agents[name] = agent
        return agent

    def kill(self, agent: Agent, *, workers: bool = True) -> None:
        """SIGKILL an agent: with all that it started, or alone."""
        self.part(agent)
        agent.process.kill()
        if workers:
            self.discard(agent)
        agent.process.wait()

    def part(self, agent: Agent) -> None:
        """From now on the job goes on without an agent, whose process may end how it likes."""
        self.killed_ns = time.monotonic_ns()
        self._before |= set(self._look())
        del self.agents[agent.name]

    def discard(self, agent: Agent) -> None:
        """End what is left of an agent that the job has parted with."""
        while left := list(self.processes(agent)):
            for pid in left:
                _kill(pid)
        agent.process.wait()

    def lose_memory(self, agent: Agent) -> None:
        """Remove the arenas of an agent's host."""
        shutil.rmtree(agent.memory)

    def take_memory(self, agent: Agent) -> Callable[[], object]:
        """Put the arenas of an agent's host aside; call the result to put them back."""
        aside = agent.memory.with_suffix(".aside")
        agent.memory.rename(aside)
        return lambda: aside.rename(agent.memory)

    def hold(self, step: int) -> None:
        """Let no rank go on past the beginning of `step`, until `release`."""
        (self.folder / "hold.new").write_text(str(step))
        (self.folder / "hold.new").rename(self.folder / "hold")

    def release(self) -> None:
        """Let all go on to the end."""
        (self.folder / "hold").unlink(missing_ok=True)

    def hold_fills(self) -> None:
        """Let no start with new arenas go on from when they are prepared, until `release_fills`."""
        (self.folder / "hold_fills").touch()

    def release_fills(self) -> None:
        """Let new arenas go LIVE."""
        (self.folder / "hold_fills").unlink()

    def wait_for_fills(self) -> None:
        """Wait until all ranks of a start with new arenas are held where `hold_fills` says."""

        def there() -> bool:
            return len(list(self.folder.glob("filled-*"))) >= self.setting.ranks

        self._wait(there, REACH_S, "no start with new arenas")

    def launch_anew(self, hosts: int | None = None) -> None:
        """Wait for all agents to have ended, and forget them: the next one hosts a new store.

        Args:
            hosts: how many agents make up the job from now on; as many as before by default.
        """
        agents = list(self.agents.values())
        self.agents.clear()
        self._wait(lambda: all(a.process.poll() is not None for a in agents), END_S, "agents did not end")
        self.wait_for_end(set(self.processes()))
        self._hosts = hosts or self._hosts
        self._port.close()
        self._port = ReservedPort()
        self.endpoint = f"127.0.0.1:{self._port.number}"
        self._hosted = False

    # --- what is seen ------------------------------------------------------------------------

    def reach(self, step: int) -> dict[int, Trace]:
        """Wait until all ranks are in `step` or past it, since the last kill; returns their traces."""

        def there() -> bool:
            crew = self._crew()
            return len(crew) == self.setting.ranks and all(trace.step >= step for trace in crew.values())

        self._wait(there, REACH_S, f"no training in step {step}")
        return self._crew()

    def wait_for_end(self, pids: Collection[int]) -> float:
        """Wait until these processes have ended, by themselves; returns the seconds that it took."""
        began = time.monotonic()
        self._wait(lambda: not set(pids) & set(self.processes()), END_S, f"processes {pids} did not end")
        return time.monotonic() - began

    def log(self, agent: Agent) -> str:
        """What an agent and its workers have said."""
        return (self.folder / f"{agent.name}.log").read_text(errors="replace")

    def wait_for_log(self, agent: Agent, text: str) -> None:
        """Wait until an agent, or one of its workers, has said this."""
        self._wait(lambda: text in self.log(agent), REACH_S, f"agent {agent.name} did not say {text!r}")

    def finish(self) -> None:
        """Let all go on, and wait for the job's end."""
        self.release()
        agents = list(self.agents.values())
        self._wait(lambda: all(a.process.poll() is not None for a in agents), REACH_S, "the job did not end")
        codes = {agent.name: agent.process.returncode for agent in agents}
        _expect(not any(codes.values()), f"agents ended with {codes}")

    def result(self, name: str, note: str, recovered: Mapping[int, Trace] | None = None) -> Result:
        """Compare the end with that of an undisturbed run; `recovered` trained first after the last kill."""
        self._check_writers()
        results = (self.folder / "results").glob("*.json")
        digests = {int(path.stem): json.loads(path.read_text()) for path in results}
        found = differences(undisturbed(self.setting), digests)
        seconds = None
        if recovered:
            seconds = (max(trace.first_ns for trace in recovered.values()) - self.killed_ns) / 1e9
        return Result(name, not found, seconds, "; ".join([note, *found[:6]]))

    def processes(self, agent: Agent | None = None) -> Iterator[int]:
        """Everything alive that an agent started, itself included; of all agents without one."""
        marks = {f"ECEMB_HOSTS={self.folder}".encode()}
        if agent is not None:
            marks.add(f"ECEMB_AGENT={agent.name}".encode())
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marks <= set(path.read_bytes().split(b"\0")):
                    yield int(path.parts[2])
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue

    def _look(self) -> dict[Path, Trace]:
        for path in (self.folder / "traces").glob("*.trace"):
            if path not in self._traces:
                self._traces[path] = Trace(path)
        return self._traces

    def _crew(self) -> dict[int, Trace]:
        """Rank -> who trains it now."""
        traces = [
            trace for path, trace in self._look().items() if path not in self._before and trace.first_ns
        ]
        return {trace.opened.rank: trace for trace in sorted(traces, key=lambda trace: trace.first_ns)}

    def _check_writers(self) -> None:
        """Each rank had one worker at a time, and went on from what all had agreed on."""
        for rank in range(self.setting.ranks):
            here = sorted(
                (t for t in self._look().values() if t.opened.rank == rank), key=lambda t: t.first_ns
            )
            for one, two in pairwise(here):
                _expect(
                    one.last_ns < two.first_ns, f"two workers trained rank {rank}: {one.opened, two.opened}"
                )
        for trace in self._look().values():
            earlier = [t.step for t in self._look().values() if t.last_ns < trace.first_ns]
            known = max(earlier, default=0)
            _expect(
                known <= trace.opened.next_step <= known + 1,
                f"rank {trace.opened.rank} went on from step {trace.opened.next_step}, though the job was in "
                f"step {known}",
            )

    def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            ended = {name: a.process.returncode for name, a in self.agents.items() if a.process.poll()}
            if ended:
                raise Unexpected(f"{what}: agents ended with {ended}; {self._last_error()}see {self.folder}")
            if time.monotonic() > deadline:
                for pid in self.processes():
                    _show_stack(pid)
                time.sleep(1.0)
                raise Unexpected(f"{what} within {seconds:.0f} s; {self._last_error()}see {self.folder}")
            time.sleep(POLL_S)

    def _last_error(self) -> str:
        logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return next((f"{line}; " for line in reversed(lines) if "ecemb.errors." in line), "")


@functools.cache
def undisturbed(setting: Setting) -> Digests:
    """What a run without failures ends with."""
    setting = dataclasses.replace(setting, workers=0)
    with Hosts(setting, hosts=1) as job:
        job.start("a,b,c", per_host=setting.ranks)
        job.finish()
        results = (job.folder / "results").glob("*.json")
        digests = {int(path.stem): json.loads(path.read_text()) for path in results}
    _expect(len(digests) == setting.ranks, f"the undisturbed run has results of ranks {sorted(digests)}")
    return digests


def by_host(crew: Mapping[int, Trace]) -> dict[str, set[int]]:
    """Host -> its ranks."""
    found: dict[str, set[int]] = {}
    for rank, trace in crew.items():
        found.setdefault(trace.opened.host, set()).add(rank)
    return found


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unexpected(otherwise)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _show_stack(pid: int) -> None:
    try:
        if b"host_worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGUSR1)
    except (FileNotFoundError, ProcessLookupError):
        return


# --- scenarios -----------------------------------------------------------------------------------


def _started(job: Hosts, names: str = "abc", held: int = HELD) -> dict[str, Agent]:
    job.hold(held)
    return {name: job.start(name) for name in names}


def _expect_seats(crew: Mapping[int, Trace], seats: Mapping[str, set[int]]) -> None:
    _expect(by_host(crew) == seats, f"ranks are on {by_host(crew)}, and should be on {dict(seats)}")


def _expect_recovery(crew: Mapping[int, Trace], lost: set[int]) -> None:
    """Exactly the lost ranks were rebuilt."""
    kind = "memory" if lost else "process"
    for opened in [trace.opened for trace in crew.values()]:
        right = opened.kind == kind and set(opened.lost) == lost
        _expect(right and (opened.rebuilt_bytes > 0) == (opened.rank in lost), f"another recovery: {opened}")


def scenario_lost() -> Result:
    """A host is gone with its memory; a new one takes its ranks whole, whatever torchrun numbers them."""
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["b"])
        job.lose_memory(agents["b"])
        job.start("d")
        after = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        moved = sum(trace.opened.worker != trace.opened.rank for trace in after.values())
        _expect(moved > 0, "torchrun numbered the workers as before: nothing was shown")
        job.finish()
        rebuilt = sum(trace.opened.rebuilt_bytes for trace in after.values())
        note = f"{rebuilt} bytes rebuilt; {moved} of {len(after)} ranks are not torchrun's"
        return job.result("lost", note, after)


def scenario_restarted() -> Result:
    """A host's processes are gone, and its memory stays: nothing is rebuilt."""
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["b"])
        job.start("b")
        after = job.reach(0)
        _expect_seats(after, seats)
        _expect_recovery(after, set())
        job.finish()
        return job.result("restarted", "nothing rebuilt", after)


def scenario_lost_and_restarted() -> Result:
    """One host is gone with its memory, and the processes of another as well."""
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["c"])
        job.kill(agents["b"])
        job.lose_memory(agents["b"])
        job.start("c")
        job.start("d")
        after = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        job.finish()
        return job.result("lost and restarted", "one host rebuilt", after)


def scenario_returned() -> Result:
    """A host that was replaced comes back with its old arenas, in another lost host's place."""
    return _returned("returned", "c")


def scenario_returned_home() -> Result:
    """A host that was replaced comes back with its old arenas, to replace the one that replaced it."""
    return _returned("returned home", "d")


def _returned(name: str, victim: str) -> Result:
    """The old arenas count for nothing and are removed, even if they were of the very ranks that are lost.

    Guards the rule that an arena is stale when its `joined` is below the highest `opened`: without it, the
    job comes to no plan from arenas of different times.
    """
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["b"])
        put_back = job.take_memory(agents["b"])
        stale = _arenas(agents["b"].memory.with_suffix(".aside"))
        agents["d"] = job.start("d")
        job.reach(0)
        seats["d"] = seats.pop("b")
        job.hold(2 * HELD)
        job.reach(HELD + 12)
        job.kill(agents[victim])
        job.lose_memory(agents[victim])
        put_back()
        job.start("b")
        after = job.reach(0)
        seats["b"] = seats.pop(victim)
        _expect_seats(after, seats)
        _expect_recovery(after, seats["b"])
        now = _arenas(agents["b"].memory)
        _expect(len(stale) == PER_HOST == len(now) and not stale & now, f"{stale} were there, and {now} are")
        job.finish()
        return job.result(name, "stale arenas not used, and removed", after)


def scenario_too_many() -> Result:
    """Two hosts are gone, more than the code survives: nothing is written, until one of them is back."""
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["b"])
        job.lose_memory(agents["b"])
        job.kill(agents["c"])
        put_back = job.take_memory(agents["c"])
        others = [agents["a"], job.start("d"), job.start("e")]
        lost = sorted(seats["b"] | seats["c"])
        for agent in others:
            job.wait_for_log(agent, f"TooManyErasures: the memory of {listed(lost)} is lost")
        job.kill(others[2])
        put_back()
        job.start("c")
        after = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        job.finish()
        return job.result(
            "too many", f"refused without ranks {lost}, and went on with {sorted(seats['c'])}", after
        )


def scenario_store() -> Result:
    """The host of the rendezvous' store is gone with its memory: all agents fail, and are launched again."""
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["a"])
        job.lose_memory(agents["a"])
        job.launch_anew()
        for name in "dcb":
            job.start(name)
        after = job.reach(0)
        seats["d"] = seats.pop("a")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        job.finish()
        return job.result("store", "went on from the arenas", after)


def scenario_first() -> Result:
    """The host of torchrun's RANK 0 is gone with its memory, and the new one gets RANK 0."""
    with Hosts() as job:
        job.hold(HELD)
        agents = {
            name: job.start(name, address=f"127.0.0.{at}") for name, at in (("a", 9), ("b", 5), ("c", 7))
        }
        before = job.reach(12)
        seats = by_host(before)
        _expect(before[0].opened.host == "b", f"RANK 0 is on {before[0].opened.host}")
        job.kill(agents["b"])
        job.lose_memory(agents["b"])
        job.start("d", address="127.0.0.3")
        after = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        job.finish()
        return job.result("first", "RANK 0 went to the new host", after)


def scenario_orphans() -> Result:
    """Only a host's agent is killed: its workers end, and their forked loaders are no second writers.

    The loaders are stopped, so that they outlive their parents for as long as this takes. Guards that workers
    die with their agent, and that a claim on an arena does not live on in forked processes.
    """
    with Hosts(dataclasses.replace(TRAINING, workers=2)) as job:
        agents = _started(job)
        crew = job.reach(12)
        seats = by_host(crew)
        workers = {crew[rank].opened.pid for rank in seats["b"]}
        loaders = set(job.processes(agents["b"])) - workers - {agents["b"].process.pid}
        for pid in loaders:
            os.kill(pid, signal.SIGSTOP)
        job.kill(agents["b"], workers=False)
        orphaned_s = job.wait_for_end(workers)  # the others are held, so that nothing else would end them
        job.start("b")
        after = job.reach(0)
        _expect_seats(after, seats)
        _expect_recovery(after, set())
        left = loaders & set(job.processes())
        _expect(left == loaders and len(left) == 2 * PER_HOST, f"of the loaders {loaders}, {left} are left")
        for pid in left:
            os.kill(pid, signal.SIGCONT)
        job.wait_for_end(left)
        job.finish()
        return job.result("orphans", f"workers ended in {orphaned_s:.2f} s, {len(left)} loaders later", after)


def scenario_fewer() -> Result:
    """A host is gone with its memory, and the job goes on without it: a warning says what that means."""
    with Hosts() as job:
        agents = _started(job)
        job.reach(12)
        for agent in agents.values():
            job.kill(agent)
        job.lose_memory(agents["c"])
        job.launch_anew(hosts=2)
        both = [job.start(name, per_host=3) for name in "ab"]
        after = job.reach(0)
        _expect({len(ranks) for ranks in by_host(after).values()} == {3}, f"ranks are on {by_host(after)}")
        job.finish()
        lines = [line for agent in both for line in job.log(agent).splitlines() if WARNS in line]
        warnings = {line.split(": ", 1)[1] for line in lines}
        _expect(len(warnings) == 2, f"warned of {warnings}")
        return job.result("fewer", "each of the two hosts was warned of", after)


def scenario_cut_off() -> Result:
    """A host with an address of its own is cut off: a hang, then the timeout, then a new host.

    Cut-off workers end as well. When the link is back, the host waits as a spare, and takes the next lost
    one's place: its old arenas count for nothing.
    """
    timeout_s = 8
    with Namespaces(4) as net, Hosts(timeout_s=timeout_s, endpoint=f"{net.address(1)}:29500") as job:

        def start(name: str, at: int) -> Agent:
            interface = {"GLOO_SOCKET_IFNAME": INTERFACE}
            return job.start(name, address=net.address(at), inside=net.inside(at), environment=interface)

        job.hold(HELD)
        agents = {name: start(name, at) for at, name in enumerate("abc", 1)}
        before = job.reach(12)
        seats = by_host(before)
        net.cut(2)
        job.part(agents["b"])
        cut_off = {before[rank].opened.pid for rank in seats["b"]}
        noticed_s = job.wait_for_end({trace.opened.pid for trace in before.values()} - cut_off)
        job.wait_for_end(cut_off)
        _expect(noticed_s < NOTICED_S, f"noticed after {noticed_s:.1f} s")
        told = [
            name for name in "ac" if "PeerFailure" in (job.folder / f"{agents[name].name}.log").read_text()
        ]
        _expect(told == ["a", "c"], f"only {told} speak of a PeerFailure")
        start("d", 4)
        middle = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(middle, seats)
        _expect_recovery(middle, seats["d"])
        net.mend(2)
        job.discard(agents["b"])
        spare = start("b", 2)
        job.hold(2 * HELD)
        job.reach(HELD + 12)
        _expect(len(_arenas(spare.memory)) == PER_HOST, "the old arenas are gone before their time")
        job.kill(agents["c"])
        job.lose_memory(agents["c"])
        after = job.reach(0)
        seats["b"] = seats.pop("c")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["b"])
        job.finish()
        return job.result(
            "cut off", f"noticed after {noticed_s:.1f} s with a timeout of {timeout_s} s", after
        )


def scenario_tombstone() -> Result:
    """A lost host's replacement holds an earlier run's tombstone, of the same name: it counts for nothing."""
    with Hosts() as job:
        agents = _started(job)
        seats = by_host(job.reach(12))
        job.kill(agents["b"])
        job.lose_memory(agents["b"])
        old = _bury(job.memory / "d", min(seats["b"]), job.setting)
        agent = job.start("d")
        after = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        _expect(old.name not in _arenas(agent.memory), "the tombstone of the earlier run is still there")
        job.finish()
        return job.result("tombstone", "the earlier run's tombstone was not taken for the job's end", after)


def _bury(memory: Path, rank: int, setting: Setting) -> Path:
    """Leave what a run that ended long ago has left on a host whose last removal was cut off."""
    memory.mkdir()
    fields = {field.name for field in dataclasses.fields(Constants)}
    values = {
        "job": "failures",
        "arena_id": "0123456789abcdef",
        "rank": rank,
        "world_size": setting.ranks,
        "n": setting.n,
        "k": setting.k,
        "positions": tuple(range(setting.ranks)),
        "domains": ("a",) * setting.ranks,
        "layout_hash": "",
        "layout": "{}",
        "block_words": ((1,) * setting.k,) * setting.ranks,
        "regions": (),
        "fill": 5,
    }
    constants = Constants(**{name: value for name, value in values.items() if name in fields})
    arena = Arena.create(Directory(memory, "failures", memory.name), constants, {})
    arena.join(5, 5)
    for word in ("opened", "committed", "prepared"):
        arena.set(word, 5)
    arena.set("state", State.FINISHED)
    arena.close()
    return arena.path


def scenario_killed_resume() -> Result:
    """Two of three hosts are away, a resume from a checkpoint is killed half-way, and they come back.

    All memory is there then, and no step is lost. Guards that arenas which never went LIVE have no say in
    what was opened.
    """
    with Hosts(saves=10) as job:
        agents = _started(job, held=17)
        seats = by_host(job.reach(17))
        put_back = []
        for name in "bc":
            job.kill(agents[name])
            put_back.append(job.take_memory(agents[name]))
        job.hold_fills()
        others = [job.start("d"), job.start("e")]
        job.wait_for_fills()
        for agent in others:
            job.kill(agent)
        job.release_fills()
        for back in put_back:
            back()
        for name in "bc":
            job.start(name)
        after = job.reach(0)
        _expect_seats(after, seats)
        _expect_recovery(after, set())
        job.finish()
        return job.result("killed resume", "went on from memory, at the step where it stood", after)


def scenario_other_format() -> Result:
    """Another version of ecemb wrote a host's arenas: that is neither damage nor loss, so nothing starts."""
    return _other_format("other format", saves=0)


def scenario_other_format_and_checkpoint() -> Result:
    """The same with a checkpoint to resume from: that would silently lose steps that are there."""
    return _other_format("other format, and a checkpoint", saves=10)


def _other_format(name: str, saves: int) -> Result:
    with Hosts(saves=saves) as job:
        agents = _started(job, held=17)
        seats = by_host(job.reach(17))
        for host in "bc":
            job.kill(agents[host])
        job.lose_memory(agents["b"])
        _add_to_format(agents["c"].memory, 1)
        before = _arenas(job.memory)
        others = [agents["a"], job.start("c"), job.start("d")]
        for agent in others:
            job.wait_for_log(agent, "ecemb.errors.ArenaIncompatible")
        _expect(_arenas(job.memory) == before, "a start that was refused made or removed arenas")
        _add_to_format(agents["c"].memory, -1)
        after = job.reach(0)
        seats["d"] = seats.pop("b")
        _expect_seats(after, seats)
        _expect_recovery(after, seats["d"])
        job.finish()
        return job.result(name, "refused until the version that wrote the arenas was back", after)


def _add_to_format(memory: Path, by: int) -> None:
    for path in memory.rglob("*.arena"):
        with path.open("r+b") as file:
            file.seek(8)  # after the magic
            version = int.from_bytes(file.read(8), "little")
            file.seek(8)
            file.write((version + by).to_bytes(8, "little"))


def _arenas(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.arena")}


# A scenario that this machine can't show raises `NotPossible`.
SCENARIOS: dict[str, Callable[[], Result]] = {
    "lost": scenario_lost,
    "restarted": scenario_restarted,
    "lost and restarted": scenario_lost_and_restarted,
    "returned": scenario_returned,
    "returned home": scenario_returned_home,
    "too many": scenario_too_many,
    "store": scenario_store,
    "first": scenario_first,
    "orphans": scenario_orphans,
    "fewer": scenario_fewer,
    "cut off": scenario_cut_off,
    "tombstone": scenario_tombstone,
    "killed resume": scenario_killed_resume,
    "other format": scenario_other_format,
    "other format, and a checkpoint": scenario_other_format_and_checkpoint,
}


def main(names: Sequence[str]) -> int:
    """Run scenarios by name, or all; returns the exit code."""
    failed = 0
    for name in names or SCENARIOS:
        began = time.monotonic()
        try:
            result = SCENARIOS[name]()
        except NotPossible as error:
            print(f"{name}: skipped: {error}", flush=True)
            continue
        except Unexpected as error:
            print(f"{name}: FAILED: {error}", flush=True)
            failed += 1
            continue
        took = time.monotonic() - began
        recovery = "-" if result.seconds_recovery is None else f"{result.seconds_recovery:.1f} s"
        verdict = "identical" if result.identical else "NOT IDENTICAL"
        print(f"{name}: {verdict}, recovery {recovery}, {took:.0f} s in all: {result.note}", flush=True)
        failed += not result.identical
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all is ended and cleared away
    sys.exit(main(sys.argv[1:]))
