"""What happens to trainings of a Slurm cluster, and what must come of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from cluster.box import Box
from cluster.job import HELD, HOSTS, SMALL, TRAINING, Job, changed_script, guide_script
from failures.hosts import Unexpected, by_host
from failures.trace import Trace

NODES = HOSTS + 1
EARLY = 12
SILENCE_S = 8.0
WORD_FOR_WORD = dataclasses.replace(TRAINING, ranks=8 * HOSTS, steps=24)
SHORT = dataclasses.replace(TRAINING, ranks=3, n=3, k=2, steps=18)
SAVES = 10


@dataclasses.dataclass(frozen=True)
class Result:
    """How a scenario ended.

    Attributes:
        name: of the scenario.
        ranks: of each job.
        differences: what is not bit-identical to an undisturbed run.
        recovery_s: from each death, cut or drain until all ranks trained again.
        note: what was seen.
    """

    name: str
    ranks: int
    differences: tuple[str, ...]
    recovery_s: tuple[float, ...]
    note: str


def expect(holds: bool, otherwise: str) -> None:
    """Raises `Unexpected` unless something holds."""
    if not holds:
        raise Unexpected(otherwise)


def _started(job: Job, early: int = EARLY, held: int = HELD) -> dict[int, Trace]:
    """Submit a job, and let it train for some steps, but not to its end."""
    job.hold(held)
    job.submit()
    return job.reach(early)


def _victims(crew: Mapping[int, Trace]) -> list[str]:
    """Nodes that train, without the first one, which holds torchrun's store and the batch script."""
    return sorted(set(by_host(crew)) - {"n1"})


def _spare(box: Box, crew: Mapping[int, Trace]) -> str:
    """The node whose agent waits."""
    (name,) = set(box.nodes) - set(by_host(crew))
    return name


def _replaced(job: Job, before: Mapping[int, Trace], old: str, new: str) -> dict[int, Trace]:
    """Wait for the next step: the ranks of one node are on another, rebuilt, and no step is lost."""
    crew = job.reach()
    seats = by_host(before)
    lost = seats[new] = seats.pop(old)
    expect(by_host(crew) == seats, f"ranks are on {by_host(crew)}, and should be on {seats}")
    known = max(trace.step for trace in before.values())
    for rank, trace in crew.items():
        opened = trace.opened
        right = set(opened.lost) == lost and (opened.rebuilt_bytes > 0) == (rank in lost)
        expect(right and known <= opened.next_step <= known + 1, f"rank {rank} recovered otherwise: {opened}")
    return crew


def _result(name: str, jobs: Job | list[Job], recovery_s: list[float], *notes: str) -> Result:
    all_jobs = jobs if isinstance(jobs, list) else [jobs]
    states = [job.finish() for job in all_jobs]
    found = [line for job in all_jobs for line in job.differences()]
    note = "; ".join([*notes, f"Slurm calls the job {' and '.join(states)}"])
    return Result(name, all_jobs[0].setting.ranks, tuple(found), tuple(recovery_s), note)


def _lose_a_node(
    name: str, box: Box, job: Job, *notes: str, early: int = EARLY, held: int = HELD, silently: bool = False
) -> Result:
    before = _started(job, early, held)
    victim, spare = _victims(before)[0], _spare(box, before)
    job.disturbed()
    box.kill(victim, silently=silently)
    after = _replaced(job, before, victim, spare)
    return _result(name, job, [job.recovery_s(after)], f"{spare} took the place of {victim}", *notes)


def word_for_word() -> Result:
    """The guide's script as it stands: a node is killed, and the spare takes its place."""
    with Box(NODES) as box:
        job = Job(box, WORD_FOR_WORD, script=guide_script())
        return _lose_a_node("word for word", box, job, early=6, held=16)


def killed() -> Result:
    """All processes of a node are killed, and its memory is gone; its kernel closes their connections."""
    with Box(NODES) as box:
        return _lose_a_node("killed", box, Job(box))


def killed_of_three() -> Result:
    """The same in short: three nodes of one rank, and a spare."""
    words = {
        "--nodes=5 ": "--nodes=4 ",
        "--nnodes 4 ": "--nnodes 3 ",
        "--nproc-per-node 8": "--nproc-per-node 1",
    }
    with Box(4) as box:
        job = Job(box, SHORT, script=changed_script(words))
        return _lose_a_node("killed, of three", box, job, early=6, held=12)


def without_power() -> Result:
    """A node falls silent, and never comes back."""
    with Box(NODES) as box:
        job = Job(box, timeout_s=SILENCE_S)
        return _lose_a_node("without power", box, job, f"timeout of {SILENCE_S:.0f} s", silently=True)


def first_node() -> Result:
    """The node with the batch script, srun and torchrun's store is killed: the job is submitted again."""
    with Box(NODES) as box:
        job = Job(box)
        before = _started(job)
        spare = _spare(box, before)
        job.disturbed()
        box.kill("n1")
        box.wait(lambda: "down" in box.state("n1"), 120, "n1 down")
        state = job.state()
        first = job.ids[-1]
        box.slurm("scancel", str(first))
        job.submit("--nodes=4")
        after = _replaced(job, before, "n1", spare)
        note = f"{spare} took the place of n1; Slurm called the first submission {state}"
        return _result("first node", job, [job.recovery_s(after)], note)


def cut_off() -> Result:
    """A node is cut off until it is replaced, and then is back."""
    with Box(NODES) as box:
        job = Job(box, timeout_s=SILENCE_S)
        before = _started(job)
        victim, spare = _victims(before)[0], _spare(box, before)
        job.disturbed()
        box.cut(victim)
        after = _replaced(job, before, victim, spare)
        took_s = job.recovery_s(after)
        box.wait(lambda: "down" in box.state(victim), 120, f"{victim} down")
        box.mend(victim)
        box.wait(lambda: box.state(victim) in ("idle", "mixed", "allocated"), 120, f"{victim} back")
        note = f"{spare} took the place of {victim}, whose old workers came back to nothing"
        return _result("cut off and back", job, [took_s], note)


def blip() -> Result:
    """A node is cut off for a second."""
    with Box(NODES) as box:
        job = Job(box)
        before = _started(job)
        victim = _victims(before)[0]
        box.cut(victim)
        box.rest(1.0)
        box.mend(victim)
        job.hold(HELD + 10)
        after = job.reach(HELD + 5)
        return _result("cut off for 1 s", job, [], _restarts(before, after))


def _restarts(before: Mapping[int, Trace], after: Mapping[int, Trace]) -> str:
    others = sum(after[rank].opened != before[rank].opened for rank in before)
    return f"{others} of {len(before)} workers were restarted"


def drained() -> Result:
    """A node is drained with scontrol, and its agent gets SIGTERM."""
    with Box(NODES) as box:
        job = Job(box)
        before = _started(job)
        victim, spare = _victims(before)[0], _spare(box, before)
        job.disturbed()
        box.slurm("scontrol", "update", f"NodeName={victim}", "State=DRAIN", "Reason=maintenance")
        inside = ["srun", f"--jobid={job.ids[-1]}", "--overlap", "-N1", "-n1", "-w", victim]
        box.slurm(*inside, "pkill", "-TERM", "-f", "bin/torchrun")
        after = _replaced(job, before, victim, spare)
        took_s = job.recovery_s(after)
        expect("drain" in box.state(victim), f"{victim} is {box.state(victim)}")
        return _result("drained", job, [took_s], f"{spare} took the place of {victim}")


def no_spare_left() -> Result:
    """A second death, after the spare is used: a submission adds an agent on the node that came back."""
    with Box(NODES) as box:
        job = Job(box)
        before = _started(job)
        victim, spare = _victims(before)[0], _spare(box, before)
        job.disturbed()
        box.kill(victim)
        middle = _replaced(job, before, victim, spare)
        took_s = [job.recovery_s(middle)]
        box.wait(lambda: "down" in box.state(victim), 120, f"{victim} down")
        box.start(victim)
        box.wait(lambda: box.state(victim) == "idle", 120, f"{victim} idle")
        job.hold(2 * HELD - 10)
        middle = job.reach(HELD + EARLY)
        second = next(name for name in _victims(middle) if name != spare)
        job.disturbed()
        box.kill(second)
        job.submit_agent(victim)
        after = _replaced(job, middle, second, victim)
        took_s.append(job.recovery_s(after))
        note = f"{victim} came back, and took the place of {second} by a submission of its own"
        return _result("no spare left", job, took_s, note)


def requeued() -> Result:
    """All nodes are lost with all memory; they come back, Slurm requeues the job, and it resumes."""
    with Box(NODES) as box:
        job = Job(box, saves=SAVES)
        _started(job, early=25)
        job.disturbed()
        for name in box.nodes:
            box.kill(name)
        for name in box.nodes:
            box.start(name)
        after = job.reach()
        took_s = job.recovery_s(after)
        steps = {trace.opened.next_step for trace in after.values()}
        expect(steps == {20}, f"it resumed at steps {steps}, and should at 20")
        return _result("requeued", job, [took_s], "resumed from the checkpoint of step 20")


def two_jobs() -> Result:
    """Two jobs on the same nodes, with names and ports of their own; a node is killed."""
    with Box(NODES) as box:
        script = changed_script({**SMALL, "$endpoint:29400": "$endpoint:29401"})
        jobs = [Job(box, name="one"), Job(box, name="two", script=script)]
        for job in jobs:
            job.hold(HELD)
            job.submit()
        befores = [job.reach(EARLY) for job in jobs]
        common = set(_victims(befores[0])) & set(_victims(befores[1]))
        victim = sorted(common)[0]
        spares = [_spare(box, before) for before in befores]
        for job in jobs:
            job.disturbed()
        box.kill(victim)
        took_s = [
            job.recovery_s(_replaced(job, before, victim, spare))
            for job, before, spare in zip(jobs, befores, spares, strict=True)
        ]
        return _result("two jobs", jobs, took_s, f"both had ranks on {victim}")


def slow_node() -> Result:
    """A node has a quarter of a processor for a while."""
    with Box(NODES) as box:
        job = Job(box, timeout_s=SILENCE_S)
        before = _started(job)
        slow = _victims(before)[0]
        box.slow_down(slow, 0.25)
        job.hold(2 * HELD - 10)
        after = job.reach(HELD + 10)
        box.at_full_speed(slow)
        return _result("slow node", job, [], _restarts(before, after))


def one_gigabit() -> Result:
    """Links of 1 Gbit/s, and a node is killed."""
    with Box(NODES) as box:
        queue = box.limit_links("1gbit", "100us")
        delay = "0.1 ms each way" if queue == "netem" else "no delay, which this kernel can't make"
        return _lose_a_node("1 Gbit/s", box, Job(box), delay)


SCENARIOS: dict[str, Callable[[], Result]] = {
    "word for word": word_for_word,
    "killed": killed,
    "without power": without_power,
    "first node": first_node,
    "cut off and back": cut_off,
    "cut off for 1 s": blip,
    "drained": drained,
    "no spare left": no_spare_left,
    "requeued": requeued,
    "two jobs": two_jobs,
    "slow node": slow_node,
    "1 Gbit/s": one_gigabit,
}
