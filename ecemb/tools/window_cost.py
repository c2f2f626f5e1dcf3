"""What a window of steps costs a job: the time that training waits, processor time, memory, and replays.

Owns: the rates of today's code, each with its source, so that faster code changes these and no formula; and
`cost_of`, the sum over a window's phases as `ecemb.step.transaction` runs them.

- *In the training thread.* For tables in host memory, each step captures the rows that it is the window's
  first to change. For tables on a GPU a step marks rows there, and the window's end stages them. Then the
  ranks agree.
  Between hosts, a status is on its way for some half round trips (`on_the_way_s`).
- *Beside training*, with `overlap`, else in the training thread as well: staged rows are stored in the
  images, deltas laid out and sent, parity changed, by one thread of each rank. A team of threads helps it,
  which is counted for deltas alone (`threads_of`). While less than half of the host's processors run, it
  does not rest. Else it rests after each part, so that it takes `SHARE` of a processor, until the next window
  ends. Then training waits for it.
- *Replays.* A failure takes back half a window on average, and with `overlap` as well the window before,
  until that one is prepared on all ranks.

"auto" is what `ecemb.step.window` does: Young's interval for a commit as it is measured at window 1, within
its bounds, and as many steps as have room.

Must not know: placement, the chance of loss, options of the command.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from ..coding.code import Code
from ..kernels.threads import MOST_THREADS
from ..memory.capacity import reserve_of
from ..step.interval import best
from .job import Job

CAPTURE_S_PER_GB = 1.1
"""Core-seconds for a GB of changed records: to save old records, and to overwrite images. `capture` of
bench/results/overhead-xeon.json, setting dlrm, "auto" (0.8 in overhead.json, of a faster memory)."""
DELTA_S_PER_GB = 0.9
"""The same for `delta` (0.5 in overhead.json)."""
EXCHANGE_S_PER_GB = 0.5
"""The same for `exchange`, for each of r parity blocks (0.4 in overhead.json)."""
APPLY_S_PER_GB = 0.5
"""The same for `apply`, for each of r parity blocks (0.4 in overhead.json)."""
SHARE, AT_ONCE_S = 0.04, 0.005
"""Share of a processor that a commit takes beside training that keeps processors busy, and what it takes
before its first rest: as in `ecemb.step.transaction.CommitThrottle`."""
STEP_S = 0.4e-3
"""Processor time of a step's begin and end: `other` and `watch` of overhead.json."""
COMMIT_S = 0.8e-3
"""Processor time of a commit, whatever it has changed: `savepoint` and the fixed part of `state` of
overhead.json."""
MESSAGE_S = 0.17e-3
"""The same for each of a commit's messages (agreement.json: 1.05 ms for 7, 2.9 ms for 15)."""
DENSE_S_PER_GB = 0.2
"""The same for a GB of dense state that goes to the arena (`state` of overhead.json: 6.1 MB in 1.2 ms)."""
MARK_S = 15 * 10e-6
"""Host time of a step that marks rows on a GPU: some 15 launches for a rank's tables (chosen: 10 us each)."""
MARK_BYTES = 45
"""Bytes of temporaries for each id that a step marks (counted in `ecemb.engines`)."""
DEVICE_BYTES_PER_S = 1e12
"""Speed of a GPU's memory for scattered rows (chosen: a third of an H100's)."""
BUS_BYTES_PER_S = 25e9
"""Copies from a GPU to pinned host memory (chosen: PCIe 4.0; half of PCIe 5.0)."""
TAKE_S_PER_ROW = 3 * 8 / 5e9
"""Host time of a window's end for each row: its number is copied from the GPU to pageable memory, and copied
twice more (chosen: 5 GB/s)."""
STAGED_SHARE = 1 / 16
"""Part of a GPU's memory that staged rows may take, as in `ecemb.engines.device_image`; more rows are stored
while training waits."""
FLOW_BYTES_PER_S = 0.625e9
"""Speed of one connection (chosen: 5 Gbit/s, the least of the limits of clouds for one flow; up to 25)."""
DRAM_BYTES_PER_BYTE = 19
"""Memory traffic of a host for a changed byte, all phases (counted, r = 1)."""
DRAM_BYTES_PER_S = 300e9
"""Memory speed of a host (chosen: 12 channels of DDR5, as far as scattered rows reach it)."""
ROW_HEAD_BYTES = 8
"""The bytes of a row's number in a journal and in a message."""
SPARE = 1.125
"""What grows with a window, over what the window needs: it has to find this much free
(`ecemb.memory.rank_memory.journal_bytes`), and grows by a quarter at a time where there is space."""


@dataclass(frozen=True)
class WindowCost:
    """What a window costs each rank.

    Attributes:
        steps: Steps of the window.
        window_s: Seconds that they take without protection.
        changed_rows: Different rows of a rank that they change.
        changed_bytes: Bytes of these rows' records.
        sent_bytes: Bytes of deltas that a rank sends.
        waits_s: Reason -> seconds that training waits for it.
        work_s: Phase -> processor time of a rank in seconds.
        overhead: Additional part of a step's time.
        replayed_steps: Whole steps that run again after a failure, on average.
        memory_bytes: Part -> bytes of a rank in host memory, its tables in host memory left out.
        host_bytes: Bytes of all ranks of a host there, tables in host memory among them.
        reserve_bytes: Bytes of a host's memory that windows leave to other processes.
        device_bytes: Part -> bytes of a rank on its GPU; none of tables in host memory.
        used: Resource -> the part of it that is used; above 1, training waits for it or it does not suffice.
    """

    steps: int
    window_s: float
    changed_rows: float
    changed_bytes: float
    sent_bytes: float
    waits_s: Mapping[str, float]
    work_s: Mapping[str, float]
    overhead: float
    replayed_steps: float
    memory_bytes: Mapping[str, float]
    host_bytes: float
    reserve_bytes: float
    device_bytes: Mapping[str, float]
    used: Mapping[str, float]


THREAD = "the commit thread, one of each rank"
RESTS = f"the commit thread's {SHARE:.0%} beside busy processors"
CORES = "processors"
NETWORK = "network"
FLOW = "a connection to a peer"
STAGED = "device memory for staged rows"
MEMORY = "host memory beside the reserve"
DRAM = "host memory's speed"
BUS = "the bus to the GPU"

WAYS_OUT = {
    THREAD: "longer windows change fewer rows in all; a smaller r",
    RESTS: "more cores; longer windows, as long as they have room",
    CORES: "longer windows; fewer ranks on a host",
    NETWORK: "longer windows; a smaller r",
    FLOW: "longer windows; a larger n, which has more peers",
    STAGED: "shorter windows; more GPUs, so that each changes fewer rows",
    MEMORY: "longer stripes (r/k), shorter windows, more hosts",
    DRAM: "longer windows; fewer ranks on a host",
    BUS: "longer windows",
}
"""Resource -> what makes a job use less of it."""


def messages(ranks: int, code: Code) -> int:
    """Messages of a commit: status and vote, ceil(log2 N) each, and deltas to n - 1 keepers."""
    return 2 * (ranks - 1).bit_length() + code.n - 1


STATUS, DELTAS, VOTE = "status", "deltas", "vote"
"""What a commit sends."""


def on_the_way_s(job: Job, code: Code, sent_bytes: float) -> dict[str, float]:
    """What a commit sends -> seconds that its messages are between hosts, all ranks at once; 0 on one host.

    Status and vote take ceil(log2 N) messages each, one after another, to ranks at the distances 1, 2, 4 and
    so on. The shortest distances, which add up to no more than a host's ranks, cross from a host to another
    once at most. Deltas go to n - 1 keepers at once, at the speed of a host's network, or of a connection.

    Args:
        job: The job.
        code: The code.
        sent_bytes: Deltas of a rank.
    """
    if job.hosts == 1:  # messages stay on the host
        return dict.fromkeys((STATUS, DELTAS, VOTE), 0.0)
    short = (job.ranks_per_host + 1).bit_length() - 1
    between = (job.ranks - 1).bit_length() - short + 1
    way_s = job.round_trip_s / 2
    flow_s = sent_bytes / (code.n - 1) / FLOW_BYTES_PER_S
    network_s = sent_bytes * job.ranks_per_host / job.network_bytes_per_s
    return {STATUS: between * way_s, DELTAS: way_s + max(flow_s, network_s), VOTE: between * way_s}


def cost_of(job: Job, code: Code, steps: int | None = None) -> WindowCost:
    """Computes what a window costs.

    Args:
        job: The job.
        code: The code.
        steps: Of the window; None for what `job.window` says.
    """
    if steps is None:
        steps = auto_steps(job, code) if job.window == "auto" else job.window
    on_device = job.device == "cuda"
    rows = job.changed_rows(steps)
    changed = rows * job.record_bytes
    gb = changed / 1e9
    sent = code.r * rows * (job.record_bytes + ROW_HEAD_BYTES)
    window_s = steps * job.step_s
    is_staged = changed <= STAGED_SHARE * job.device_memory_bytes

    work = {
        "capture" if not on_device else "store": CAPTURE_S_PER_GB * gb,
        "delta": DELTA_S_PER_GB * gb,
        "exchange": code.r * EXCHANGE_S_PER_GB * gb,
        "apply": code.r * APPLY_S_PER_GB * gb,
    }
    on_the_way = on_the_way_s(job, code, sent)
    exchange_s = max(work["exchange"], on_the_way[DELTAS]) + on_the_way[VOTE]
    fixed_s = (
        COMMIT_S
        + MESSAGE_S * messages(job.ranks, code)
        + DENSE_S_PER_GB * job.dense_bytes / 1e9 * min(1.0, (code.r + 1) / job.ranks)
        + on_the_way[STATUS]
    )
    waits = {"begin and end of steps": steps * STEP_S, "agreement and dense state": fixed_s}
    beside = work["delta"] + work["apply"]
    store_s = 0.0
    if on_device:
        ids = job.batch * job.ids * job.features
        waits["marks"] = steps * (MARK_S + 2 * MARK_BYTES * ids / DEVICE_BYTES_PER_S)
        waits["rows that are staged"] = (
            TAKE_S_PER_ROW * rows + (job.rank_rows + 2 * changed) / DEVICE_BYTES_PER_S
        )
        store_s = work["store"] + changed / BUS_BYTES_PER_S
        if is_staged:
            beside += store_s
        else:
            waits["rows that are stored at once"] = store_s
            store_s = 0.0
    else:
        waits["rows that are captured"] = work["capture"]
    delta_s = work["delta"] / threads_of(job)
    all_s, thread_s, undecided_s = beside - work["delta"] + delta_s + exchange_s, 0.0, 0.0
    if job.overlap:
        thread_s = beside + work["exchange"]
        used = {THREAD: all_s / window_s}
        done_s, apply_s = all_s, work["apply"]
        if rests(job):
            waited_s = exchange_s - work["exchange"]
            done_s, apply_s = _with_rests(all_s - waited_s) + waited_s, _with_rests(apply_s)
            used[RESTS] = done_s / window_s
        undecided_s = min(window_s, done_s - apply_s)
        if done_s > window_s:
            late = late_s(store_s, all_s - store_s, window_s) if rests(job) else all_s - window_s
            waits["a commit that is late"] = late
            undecided_s = window_s
    else:
        waits["the commit"] = all_s
        used = {THREAD: sum(waits.values()) / window_s}

    crowd = job.ranks_per_host / job.cores
    if on_device:  # the training thread has a processor of its own, while there are as many
        waits["processors that are busy"] = max(0.0, crowd * (window_s + thread_s) - window_s)
    else:
        late = waits.get("a commit that is late", 0.0)
        waits = {name: wait * max(1.0, crowd) for name, wait in waits.items()}
        waits["processors that are busy"] = crowd * max(0.0, thread_s - late)

    memory = memory_of(job, code, rows)
    reserve_bytes = reserve_of(job.host_memory_bytes)
    host_bytes = host_bytes_of(job, memory)
    used |= {
        CORES: crowd * (1 + thread_s / window_s),
        MEMORY: host_bytes / (job.host_memory_bytes - reserve_bytes),
        DRAM: DRAM_BYTES_PER_BYTE * changed * job.ranks_per_host / window_s / DRAM_BYTES_PER_S,
    }
    if job.hosts > 1:
        used |= {
            NETWORK: sent * job.ranks_per_host / job.network_bytes_per_s / window_s,
            FLOW: sent / (code.n - 1) / FLOW_BYTES_PER_S / window_s,
        }
    device: dict[str, float] = {}
    if on_device:
        device = {"marks": job.rank_rows, "staged rows": changed if is_staged else 0.0}
        used |= {STAGED: changed / (STAGED_SHARE * job.device_memory_bytes)}
        used[BUS] = changed / BUS_BYTES_PER_S / window_s
    return WindowCost(
        steps=steps,
        window_s=window_s,
        changed_rows=rows,
        changed_bytes=changed,
        sent_bytes=sent,
        waits_s=waits,
        work_s=work,
        overhead=sum(waits.values()) / window_s,
        replayed_steps=(steps - 1) / 2 + steps * undecided_s / window_s,
        memory_bytes=memory,
        host_bytes=host_bytes,
        reserve_bytes=reserve_bytes,
        device_bytes=device,
        used=dict(sorted(used.items(), key=lambda item: -item[1])),
    )


def threads_of(job: Job) -> int:
    """Threads of a rank's kernels, as `share_of_processors` has them.

    They share the work of `delta`. In the code they share the scatter of records and changes of parity as
    well (`ecemb.kernels.cpu`), but two threads were no faster than one where that was measured
    (docs/results/host.md), so these count as the work of one.
    """
    return max(1, min(MOST_THREADS, job.cores // job.ranks_per_host))


def rests(job: Job) -> bool:
    """Whether a commit beside training finds half of the host's processors in use, or more.

    Training keeps all of them busy, or with tables on GPUs one of each rank. Each rank's commit takes one.
    """
    return job.device == "cpu" or 2 * (2 * job.ranks_per_host - 1) >= job.cores


def late_s(store_s: float, parts_s: float, window_s: float) -> float:
    """Seconds that training waits at a window's end for the commit of the window before.

    Until then the commit thread has worked for its share of the window; or, if that is more, has stored rows,
    which is work without a rest, and rests for it.

    Args:
        store_s: Work of storing staged rows.
        parts_s: Work of all else, in parts.
        window_s: Seconds of the window.
    """
    if _with_rests(store_s + parts_s) <= window_s:
        return 0.0
    done_s = max(SHARE * window_s, min(store_s, window_s))
    return max(0.0, store_s + parts_s - done_s)


def _with_rests(work_s: float) -> float:
    """Seconds of the commit thread's work with its rests."""
    return work_s / SHARE if work_s > AT_ONCE_S else work_s


def memory_of(job: Job, code: Code, rows: float) -> dict[str, float]:
    """Part -> bytes of a rank in host memory, its tables in host memory left out.

    Args:
        job: The job.
        code: The code.
        rows: Different rows of the rank that a window changes.
    """
    rank_bytes = job.rank_rows * job.record_bytes
    named = SPARE * rows * (job.record_bytes + ROW_HEAD_BYTES)
    parts = {
        "images": rank_bytes if job.device == "cuda" else 0.0,
        "parity": rank_bytes * code.r / code.k,
        "journals": (2 if job.overlap else 1) * named,
        "inbox": code.r * named,
        "messages": named,
        "dense state": 2 * job.dense_bytes * min(1.0, (code.r + 1) / job.ranks),
    }
    return {name: size for name, size in parts.items() if size}


def host_bytes_of(job: Job, memory: Mapping[str, float]) -> float:
    """Bytes of all ranks of a host in its memory: tables in host memory, and the parts of `memory_of`."""
    tables = job.rank_rows * job.record_bytes if job.device == "cpu" else 0.0
    return job.ranks_per_host * (tables + sum(memory.values()))


def auto_steps(job: Job, code: Code) -> int:
    """The steps of a window that "auto" chooses; see `ecemb.step.window.Window`.

    It measures steps that commit one by one: of a commit the training thread's time, and the processor time
    of the commit thread. It chooses again where steps become faster by half, as they do when no commit is
    late any more.
    """
    first = cost_of(job, code, 1)
    commit_s = first.waits_s["agreement and dense state"]
    for name in ("rows that are staged", "rows that are stored at once", "the commit"):
        commit_s += first.waits_s.get(name, 0.0)
    if job.overlap:
        commit_s += first.work_s["delta"] / threads_of(job) + first.work_s["exchange"] + first.work_s["apply"]
        if "rows that are stored at once" not in first.waits_s:
            commit_s += first.work_s.get("store", 0.0)
    step_s = job.step_s * (1 + first.overhead)
    if job.step_s < step_s / 2:
        step_s = job.step_s
    return roomy_steps(job, code, best(commit_s, step_s, job.mtbf_s))


def roomy_steps(job: Job, code: Code, most: int) -> int:
    """The most steps of a window, up to `most`, that a host has memory for beside its reserve.

    1 if there is none even so.
    """
    room_bytes = job.host_memory_bytes - reserve_of(job.host_memory_bytes)

    def is_too_long(steps: int) -> bool:
        return host_bytes_of(job, memory_of(job, code, job.changed_rows(steps))) > room_bytes

    return max(1, bisect.bisect_left(range(1, most + 1), True, key=is_too_long))
