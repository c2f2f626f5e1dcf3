"""Hosts as failure domains: the quick form of `python tests/failures/hosts.py`, and the harness itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from failures.hosts import SCENARIOS, Hosts, Unexpected, by_host, main
from failures.namespaces import Namespaces, NotPossible
from failures.trace import Opened, Trace


@pytest.mark.long  # test_agents.py has hosts that die and come, under agents of torchrun
def test_a_new_host_takes_the_ranks_of_one_that_is_gone_with_its_memory() -> None:
    result = SCENARIOS["lost"]()
    print(result)
    assert result.identical, result.note


def traced(folder: Path, pid: int, rank: int, steps: range, **changes: object) -> Trace:
    opened = Opened(pid, "1-a", "a", rank, rank, "process", steps.start, (), 0)
    trace = Trace.create(folder, Opened(**{**vars(opened), **changes}))
    for step in steps:
        trace.reach(step)
    return trace


def test_a_trace_outlives_its_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from failures.trace import Opened, Trace\n"
        "opened = Opened(os.getpid(), '1-a', 'a', 5, 2, 'memory', 7, (2, 3), 99)\n"
        "trace = Trace.create(Path(sys.argv[1]), opened); trace.reach(7); trace.reach(8)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, check=False, cwd=Path(__file__).parents[1], timeout=300)
    [path] = tmp_path.glob("*.trace")
    trace = Trace(path)
    assert trace.opened == Opened(int(path.stem), "1-a", "a", 5, 2, "memory", 7, (2, 3), 99)
    assert trace.step == 8
    assert 0 < trace.first_ns < trace.last_ns < time.monotonic_ns()


def test_a_second_writer_is_noticed() -> None:
    with Hosts() as job:
        first = traced(job.folder / "traces", 1, 0, range(5))
        traced(job.folder / "traces", 2, 0, range(4, 9))
        job._check_writers()
        first.reach(5)
        with pytest.raises(Unexpected, match="two workers trained rank 0"):
            job._check_writers()


@pytest.mark.parametrize("next_step", [0, 3, 6])
def test_a_start_from_another_step_is_noticed(next_step: int) -> None:
    with Hosts() as job:
        traced(job.folder / "traces", 1, 0, range(5))
        traced(job.folder / "traces", 2, 1, range(next_step, 9))
        with pytest.raises(Unexpected, match=f"rank 1 went on from step {next_step}, .* in step 4"):
            job._check_writers()


def test_ranks_are_on_the_hosts_of_their_latest_workers() -> None:
    with Hosts() as job:
        folder = job.folder / "traces"
        for rank, host in enumerate("aab"):
            traced(folder, 10 + rank, rank, range(3), host=host)
        assert by_host(job._crew()) == {"a": {0, 1}, "b": {2}}
        traced(folder, 20, 1, range(3, 4), host="c")
        assert by_host(job._crew()) == {"a": {0}, "b": {2}, "c": {1}}


def test_an_agent_that_ends_by_an_error_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    job = Hosts()

    def run() -> None:
        with job:
            job.start("a", inside=[sys.executable, "-c", "import sys; sys.exit(3)"]).process.wait()
            job.reach(0)

    with pytest.raises(Unexpected, match="ended with {'1-a': 3}"):
        run()
    assert str(job.folder) in capsys.readouterr().err
    assert not job.memory.exists()
    shutil.rmtree(job.folder)


def test_a_link_that_is_cut_is_silent() -> None:
    listen = (
        "import socket; s = socket.create_server(('', 7)); print('there', flush=True)\n"
        "while True: c, _ = s.accept(); c.sendall(b'x')"
    )
    call = "import socket, sys; there = sys.argv[1], 7; timeout_s = int(sys.argv[2])\n"
    call += "print(socket.create_connection(there, timeout_s).recv(1))"
    try:
        with Namespaces(2) as net:
            server = subprocess.Popen([*net.inside(1), sys.executable, "-c", listen], stdout=subprocess.PIPE)
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"there\n"

                def answer(timeout_s: int = 300) -> str:
                    command = [*net.inside(2), sys.executable, "-c", call, net.address(1), str(timeout_s)]
                    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
                    return (done.stdout + done.stderr).splitlines()[-1]

                assert answer() == "b'x'"
                net.cut(1)
                assert answer(timeout_s=1) in (
                    "TimeoutError: timed out",
                    "OSError: [Errno 113] No route to host",
                )
                net.mend(1)
                assert answer() == "b'x'"
            finally:
                server.kill()
                server.wait()
                if server.stdout is not None:
                    server.stdout.close()
    except NotPossible as error:
        pytest.skip(str(error))


def test_scenarios_that_are_not_possible_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["cut off"]) == 0
    assert capsys.readouterr().out == "cut off: skipped: network namespaces take root\n"
