"""Scripts started plainly and warm, and the processes that this leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support import agents

DEADLINE_S = 600
AGENT = "torch.distributed.run"
"""What torchrun's agents import."""
LIGHT = ("--no-preload", "torch,ecemb,encodings")
"""Nothing is imported ahead: such a server is there at once, and forks as any other."""

_BEGINS = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import ecemb

def end_if_finished(kind, *error):
    if not issubclass(kind, ecemb.errors.JobFinished):  # killed while it was closing: its results are there
        sys.__excepthook__(kind, *error)
        os._exit(1)
    os._exit(0)
sys.excepthook = end_if_finished
torch.sparse.check_sparse_tensor_invariants.disable()
out, arenas, job, killed, steps = Path(sys.argv[1]), *sys.argv[2:6]

def build():
    torch.manual_seed(3)
    table = ecemb.nn.ShardedEmbeddingBag(500, 8, device="meta", name="table")
    model = torch.nn.ModuleDict({"table": table, "top": torch.nn.Linear(8, 1)})
    sparse = torch.optim.Adagrad(model["table"].parameters(), lr=0.1)
    return model, sparse, torch.optim.Adam(model["top"].parameters())

"""
_TRAINS = """
ecemb.init_process_group("gloo", job=job, arena_dir=arenas)
model, sparse, dense = build()
rank = dist.get_rank()
torch.manual_seed(10 + rank)
guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(n=2, k=1), failure_domain="rank")
for _ in range(guard.next_step, int(steps)):
    with guard.step() as step:
        sparse.zero_grad(), dense.zero_grad()
        model["top"](model["table"](torch.randint(0, 500, (16, 3)))).square().sum().backward()
        for one in model["top"].parameters():
            dist.all_reduce(one.grad)
        sparse.step(), dense.step()
    if step.number == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if str(rank) in killed.split(","):
            os.kill(os.getpid(), signal.SIGKILL)
        if f"raises {rank}" == killed:
            raise ValueError("on purpose")
states = [*model.state_dict().values(), *sparse.state_dict()["state"][0].values(), torch.get_rng_state()]
digest = hashlib.sha256(b"".join(torch.as_tensor(one).numpy().tobytes() for one in states)).hexdigest()
before = ",".join(guard.recovery.before_s)
told = [digest, os.getppid(), torch.get_num_threads(), before]
told += [os.environ["TORCHELASTIC_RESTART_COUNT"], guard.stats()["replaced"]]
(out / f"{job}-{rank}.new").write_text(" ".join(map(str, told)))
(out / f"{job}-{rank}.new").rename(out / f"{job}-{rank}")
guard.close()
dist.destroy_process_group()
"""
TRAINS = _BEGINS + _TRAINS
"""Two ranks: folder of results, folder of arenas, job, ranks that kill themselves once, number of steps."""
_KEEPS = _TRAINS.replace("build()", "place.keep('model', build)")
STAYS = f"{_BEGINS}def train(place):\n{textwrap.indent(_KEEPS, '    ')}\necemb.run(train)\n"
"""The same training in processes that stay when the other one dies."""

SLEEPS = "import os, time\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(1000)"
"""Names its process and its server."""

MARK = "WARM_STARTS_OF_A_TEST"


class Home:
    """A folder with scripts, one with sockets, and an environment by which all processes are found again."""

    def __init__(self, folder: Path, arena_dir: Path) -> None:
        self.folder = folder
        self.arena_dir = arena_dir
        self.mark = uuid.uuid4().hex
        self.spawned: list[subprocess.Popen[str]] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment = {**kept, MARK: self.mark, "PYTHONDONTWRITEBYTECODE": "1"}

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def command(self, *words: str, options: Sequence[str] = LIGHT, flags: Sequence[str] = ()) -> list[str]:
        where = ("--arena-dir", str(self.arena_dir))
        return [sys.executable, *flags, "-m", "ecemb", "run", *where, *options, *words]

    def start(
        self, *words: str, changed: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        return self.spawn(self.command(*words, **options), changed)  # type: ignore[arg-type]

    def spawn(
        self, command: Sequence[str], changed: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        environment = {**self.environment, **(changed or {})}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.spawned.append(process)
        return process

    def run(
        self, command: Sequence[str], stdin: str = "", changed: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **(changed or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            start_new_session=True,
        )
        return done.returncode, done.stdout, done.stderr

    def warm(self, *words: str, stdin: str = "", options: Sequence[str] = LIGHT) -> tuple[int, str, str]:
        return self.run(self.command(*words, options=options), stdin)

    def plain(self, *words: str, stdin: str = "", flags: Sequence[str] = ()) -> tuple[int, str, str]:
        return self.run([sys.executable, *flags, *words], stdin)

    def torchrun(self, *words: str, changed: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """Runs torchrun, whose workers are commands, to its end. Its agent is forked: not in `processes`."""
        out, err = (self.folder / f"{uuid.uuid4().hex}.{stream}" for stream in ("out", "err"))
        environment = {**self.environment, **(changed or {})}
        agent = agents.start(AGENT, ["--no-python", *words], out, environment, self.folder, errors=err)
        try:
            code = agent.wait(DEADLINE_S)
        finally:
            agent.kill()
            agent.wait()
        return code, out.read_text(), err.read_text()

    def processes(self) -> dict[int, str]:
        """All that live and were started by this test, by their command lines."""
        found: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    )
        return found

    def servers(self) -> list[int]:
        return [pid for pid, line in self.processes().items() if line.startswith("ecemb-run server")]

    def sockets(self) -> list[Path]:
        return sorted(self.arena_dir.glob("*/.warm/*.sock"))


@contextmanager
def home() -> Iterator[Home]:
    """A new one; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arenas, tempfile.TemporaryDirectory() as folder:
        made = Home(Path(os.path.realpath(folder)), Path(arenas))
        try:
            yield made
        finally:
            for pid in made.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in made.spawned:
                process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
            shutil.rmtree(arenas, ignore_errors=True)
            os.mkdir(arenas)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it prints; what it has said before it ended, if there is none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (process.wait(), process.communicate())
    return line.rstrip("\n")


def worker_and_server(stub: subprocess.Popen[str]) -> tuple[int, int]:
    """The processes that a stub of `SLEEPS` names."""
    worker, server = line_of(stub).split()
    return int(worker), int(server)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(what: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Returns once it is so."""
    deadline = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.01)
