"""torchrun's own elasticity, `--nnodes=2:3`: hosts die, join and get SIGTERM, and the job goes on in memory.

Three agents on one machine stand for hosts of one rank each. The first one hosts the rendezvous, and stays.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.harness.ports import ReservedPort
from support import agents as forked_agents
from support.torchrec.checkpoint_runs import ROOT, assert_same

DEADLINE_S = 600.0
STEPS = 10_000  # more than the test needs: it lets the job end

# An agent counts as dead after 15 s, for a living one may stand still for less on a busy machine.
CONF = {"keep_alive_interval": 1, "keep_alive_max_attempt": 15, "last_call_timeout": 2, "join_timeout": 600}


def has_ended(pid: int) -> bool:
    """Whether a process runs no code any more; it may still be known."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


class Agents:
    """torchrun agents of one job, by host."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port = root, port
        self.processes: dict[str, forked_agents.Agent] = {}

    def start(self, host: str) -> None:
        (self.root / host).mkdir()
        conf = {**CONF, "is_host": int(not self.processes)}
        arguments = ["--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d"]
        arguments += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=agents", "--monitor-interval=0.1"]
        arguments += ["--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items())]
        arguments += [f"--local-addr=127.0.0.{len(self.processes) + 2}"]
        arguments += [str(ROOT / "tests/support/agents_worker.py"), str(self.root), host, str(STEPS)]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        log = self.root / f"{host}.log"
        self.processes[host] = forked_agents.start("support.moving_imports", arguments, log, variables)

    def log(self, host: str) -> str:
        return (self.root / f"{host}.log").read_text(errors="replace")

    def wait(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not there():
            said = "\n".join(f"--- {host}\n{self.log(host)[-2500:]}" for host in self.processes)
            assert time.monotonic() < deadline, f"{what}\n{said}"
            time.sleep(0.05)

    def train(self, ranks: int, hosts: str) -> int:
        """Waits until each of these hosts has trained in a job of `ranks`; returns their first step."""

        def steps(host: str) -> list[int]:
            return [int(one.name.split("-")[0]) for one in self.root.glob(f"*-{ranks}-{host}-0.trains")]

        self.wait(lambda: all(steps(host) for host in hosts), f"{ranks} ranks do not train on {hosts}")
        return min(steps(hosts[0]))

    def hold(self) -> int:
        """Lets all ranks wait in a step; returns its number."""
        seen = [int(one.name.split("-")[0]) for one in self.root.glob("*.trains")]
        step = max(seen) + 200
        (self.root / "hold.new").write_text(str(step))
        (self.root / "hold.new").rename(self.root / "hold")
        return step

    def kill(self, host: str, step: int, ranks: int) -> None:
        """Kills an agent, and waits for the end of its worker as well, which is in a step."""
        pid = (self.root / f"{step}-{ranks}-{host}-0.trains").read_text()
        self.processes[host].kill()
        self.processes[host].wait()
        self.wait(lambda: has_ended(int(pid)), f"the worker of {host} has not ended with its agent")

    def release(self) -> None:
        (self.root / "hold").unlink()
        for path in self.root.glob("*.trains"):
            path.unlink()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with contextlib.closing(ReservedPort()) as port:
        found = Agents(tmp_path, port.number)
        yield found
        for process in found.processes.values():
            process.kill()
            process.wait()


def assert_moved(root: Path, step: int, ranks: int) -> None:
    """What the new ranks began with is what the old ones had, bit for bit."""
    assert_same(torch.load(root / f"{step}-{ranks}.begins"), torch.load(root / f"{step}.state"))


def test_hosts_die_join_and_get_sigterm(agents: Agents) -> None:
    for host in "abc":
        agents.start(host)
    assert agents.train(3, "abc") == 0

    step = agents.hold()  # c dies with its memory in the middle of a step
    agents.wait(lambda: len(list(agents.root.glob(f"{step}-3-*.trains"))) == 3, f"not all are in step {step}")
    (agents.root / f"{step + 1}.state").unlink()
    agents.kill("c", step, 3)
    shutil.rmtree(agents.root / "c")
    agents.release()
    assert agents.train(2, "ab") == step
    assert_moved(agents.root, step, 2)

    agents.start("d")
    step = agents.train(3, "abd")
    assert_moved(agents.root, step, 3)

    for path in agents.root.glob("*-2-*.trains"):
        path.unlink()
    agents.processes["d"].send_signal(signal.SIGTERM)  # d's worker ends between two steps
    step = agents.train(2, "ab")
    assert_moved(agents.root, step, 2)
    assert f"ends between two steps: step {step} is next" in agents.log("d")
    assert agents.processes["d"].wait(DEADLINE_S) != 0
