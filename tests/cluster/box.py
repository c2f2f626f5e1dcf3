"""A Slurm cluster on this machine: munged, slurmctld and slurmd on nodes that are namespaces.

A node has process, mount, UTS, IPC and network namespaces of its own: its own hostname, /dev/shm and address.
All nodes share the file system, as over NFS, and this machine's processors. Nothing is written outside of
the box's folder, /run/netns and a control group, and nothing of the machine's own network is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from failures.namespaces import INTERFACE, Namespaces, NotPossible

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Program -> Debian's package of it."""
CPUS, MEMORY_MIB = 64, 600_000
"""Of each node, as slurm.conf has it: the guide's script asks for so much, and no task uses it."""
SHM = "4g"
CONTROLLER = "ctl"
READY_S = 120.0
COMMAND_S = 60.0
POLL_S = 0.05
NOT_RESPONDING_S = 10
"""SlurmdTimeout: the silence after which Slurm gives a node up."""
PERIOD_US = 100_000

CONF = """\
ClusterName=box
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=5
ReturnToService=2
SlurmdTimeout={not_responding_s}
KillWait=10
SlurmdParameters=config_overrides
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.slurmd.log
NodeName={nodes} CPUs={cpus} RealMemory={memory_mib} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:2
"""

NODE = """\
set -e
hostname {name}
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
mkdir -p /run/munge
mount -t tmpfs -o mode=755 tmpfs /run/munge
munged --force --key-file={folder}/munge.key --log-file={folder}/{name}.munged.log \\
    --pid-file=/run/munge/munged.pid --seed-file=/run/munge/seed
export SLURM_CONF={folder}/slurm.conf
{daemon} -D &
wait
"""


class CommandFailed(Exception):
    """A command ended with an error; has its words and what it printed."""


class Box:
    """A cluster with nodes n1 .. n`count`. A context: at its end no process, namespace or folder is left.

    If this process is killed, all processes of the nodes are killed as well.

    Args:
        count: how many nodes.

    Attributes:
        folder: of the cluster's files.
        nodes: names of the nodes.

    Raises:
        NotPossible: not root, a program is missing, or the kernel refuses; on entering.
    """

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ecemb-cluster-"))
        self.nodes = [f"n{index + 1}" for index in range(count)]
        self._net = Namespaces(count + 1)
        self._hosts = {name: at for at, name in enumerate([*self.nodes, CONTROLLER], 1)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._groups: dict[str, Path] = {}

    def __enter__(self) -> Box:
        try:
            _need_programs()
            self._net.__enter__()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        try:
            self._configure()
            self._run(CONTROLLER, "slurmctld")
            for name in self.nodes:
                self.start(name)
            self.wait(
                lambda: all(self.state(name) == "idle" for name in self.nodes), READY_S, "all nodes idle"
            )
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        for name in list(self._running):
            self._end(name)
        for name in list(self._groups):
            self.at_full_speed(name)
        self._net.__exit__()
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            print(f"kept: {self.folder}", flush=True)

    # --- nodes -------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Boot a node, with empty memory; its link is up."""
        self._net.mend(self._hosts[name])
        self._run(name, "slurmd")

    def kill(self, name: str, *, silently: bool = False) -> None:
        """End all processes of a node at once, and its memory.

        Args:
            name: of the node.
            silently: as without power: no connection is closed, since the link is cut before.
        """
        if silently:
            self.cut(name)
        self._end(name)

    def cut(self, name: str) -> None:
        """Let nothing through, to a node or from it, until `mend`."""
        self._net.cut(self._hosts[name])

    def mend(self, name: str) -> None:
        """Let everything through again."""
        self._net.mend(self._hosts[name])

    def limit_links(self, rate: str, delay: str = "") -> str:
        """Give each node's link a rate in both directions, and a delay if the kernel has netem.

        Returns:
            The queue's name: "netem", or "tbf" without a delay.
        """
        queue, words = "netem", ["rate", rate, *(["delay", delay] if delay else [])]
        for name in self.nodes:
            at = self._hosts[name]
            for host, device in ((at, INTERFACE), (0, f"host{at}")):
                begin = [*self._net.inside(host), "tc", "qdisc", "replace", "dev", device, "root"]
                if queue == "netem" and _fails([*begin, "netem", *words]):
                    queue, words = "tbf", ["rate", rate, "burst", "256kb", "latency", "50ms"]
                if queue == "tbf":
                    _command([*begin, queue, *words])
        return queue

    def sent_bytes(self, name: str) -> int:
        """What a node has sent over its link since the box was made."""
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_command([*self._net.inside(self._hosts[name]), "cat", path]))

    def slow_down(self, name: str, processors: float) -> None:
        """Let all processes of a node have no more than this part of the processors' time together.

        Raises:
            NotPossible: no control group with a limit can be made.
        """
        top = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
        group = top / f"ecemb-cluster-{os.getpid()}-{name}"
        quota_us = int(processors * PERIOD_US)
        try:
            group.mkdir()
            self._groups[name] = group
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError as error:
            raise NotPossible(f"no cpu control group can be made here: {error}") from error
        moved: set[int] = set()
        while new := set(self.processes(name)) - moved:  # what they start meanwhile is in the group already
            for pid in new:
                with suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(str(pid))
            moved |= new

    def at_full_speed(self, name: str) -> None:
        """End `slow_down`."""
        group = self._groups.pop(name)
        if not group.exists():
            return
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()

    def processes(self, name: str) -> Iterator[int]:
        """All that are alive on a node."""
        namespace = os.readlink(f"/proc/{self._first_process(name)}/ns/pid")
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.readlink(path / "ns" / "pid") == namespace:
                    yield int(path.name)

    # --- Slurm -------------------------------------------------------------------------------

    def slurm(
        self, *words: str, folder: Path | None = None, environment: dict[str, str] | None = None
    ) -> str:
        """Run a command of Slurm where users log in, which is the controller; returns its output."""
        inside = ["nsenter", "--target", str(self._first_process(CONTROLLER))]
        inside += ["--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={folder or self.folder}"]
        variables = {**(environment or dict(os.environ)), "SLURM_CONF": f"{self.folder}/slurm.conf"}
        return _command([*inside, *words], variables)

    def state(self, name: str) -> str:
        """Of a node, as `sinfo` has it: "idle", "allocated", "down*", ..."""
        try:
            return self.slurm("sinfo", "-h", "-N", "-n", name, "-o", "%T").strip()
        except CommandFailed:  # slurmctld doesn't answer yet
            return "unknown"

    def job_state(self, job: int) -> str:
        """Of a job: "RUNNING", "COMPLETED", ..."""
        shown = self.slurm("scontrol", "-o", "show", "job", str(job))
        return re.findall(r"JobState=(\w+)", shown)[0]

    def job_nodes(self, job: int) -> list[str]:
        """The nodes that a job has, its first one first; those that failed aren't among them."""
        shown = self.slurm("scontrol", "-o", "show", "job", str(job))
        listed = re.findall(r" NodeList=(\S+)", shown)[0]
        return [] if listed == "(null)" else self.slurm("scontrol", "show", "hostnames", listed).split()

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something is true.

        Raises:
            TimeoutError: It is not, within the time.
        """
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:.0f} s: {what}; see {self.folder}")
            time.sleep(POLL_S)

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    # --- inside ------------------------------------------------------------------------------

    def _configure(self) -> None:
        for name in ("state", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # used by nothing, and not looked for
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        lines = [
            "127.0.0.1 localhost",
            *(f"{self._net.address(at)} {name}" for name, at in self._hosts.items()),
        ]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        conf = CONF.format(
            folder=self.folder,
            controller=CONTROLLER,
            nodes=",".join(self.nodes),
            cpus=CPUS,
            memory_mib=MEMORY_MIB,
            not_responding_s=NOT_RESPONDING_S,
        )
        (self.folder / "slurm.conf").write_text(conf)

    def _run(self, name: str, daemon: str) -> None:
        script = NODE.format(name=name, daemon=daemon, folder=self.folder, shm=SHM)
        command = ["setpriv", "--pdeathsig", "KILL", *self._net.inside(self._hosts[name])]
        command += ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*command, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
                start_new_session=True,
            )

    def _first_process(self, name: str) -> int:
        """The one whose end is the end of all processes of a node, by its number on this machine."""
        parent = self._running[name].pid
        try:
            return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
        except (FileNotFoundError, IndexError) as error:
            raise RuntimeError(f"node {name} does not run; see {self.folder}/{name}.log") from error

    def _end(self, name: str) -> None:
        with suppress(RuntimeError, ProcessLookupError):  # it has ended
            os.kill(
                self._first_process(name), signal.SIGKILL
            )  # and the kernel kills all others of its namespace
        process = self._running.pop(name)
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def missing() -> list[str]:
    """The packages of Debian that a box lacks here."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})


def _need_programs() -> None:
    if packages := missing():
        raise NotPossible(f"a Slurm cluster takes the packages {', '.join(packages)}")


def _command(words: Sequence[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=COMMAND_S, env=environment
    )
    if done.returncode:
        raise CommandFailed(f"{' '.join(words)}: code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _fails(words: Sequence[str]) -> bool:
    return subprocess.run(words, check=False, capture_output=True, timeout=COMMAND_S).returncode != 0


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process by an exception, so that contexts are left."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
