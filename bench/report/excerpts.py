"""The tables that a question's page shows, each under a heading; build/results.html has all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.harness.result import FIXED, Label
from bench.report import tables

Documents = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Excerpt:
    """One table of a page.

    Attributes:
        heading: In words.
        metrics: A column each; of one alone, the columns are as in `tables.table`.
        where: Label -> its values that are shown; those of a setting are what is before its colon.
        files: Of bench/results, without a suffix, whose rows are shown; those of all answers by default.
        columns_of: Label whose values become columns.
    """

    heading: str
    metrics: tuple[str, ...]
    where: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    columns_of: str = ""

    def rows(self, answers: Documents) -> list[Mapping[str, Any]]:
        """The rows that it shows, with the label `file` if those of several files have the same labels."""
        found = [
            (answer.get("file", ""), row)
            for answer in answers
            if not self.files or answer.get("file") in self.files
            for row in answer["rows"]
            if row["metric"] in self.metrics and self._shows(row)
        ]
        apart = {
            frozenset((key, row[key]) for key in row if key == "metric" or key not in FIXED)
            for _, row in found
        }
        if len(apart) < len(found):
            return [{"file": file, **row} for file, row in found]
        return [row for _, row in found]

    def _shows(self, row: Mapping[str, Any]) -> bool:
        return all(
            str(row.get(label)).partition(":")[0] in map(str, values) for label, values in self.where.items()
        )


def of(question: str, answers: Documents) -> list[str]:
    """A question's excerpts in Markdown, each under its heading; none of what its answers lack."""
    found = [(one, one.rows(answers)) for one in EXCERPTS.get(question, ())]
    return [f"## {one.heading}\n\n{tables.sheet(rows, one.columns_of)}" for one, rows in found if rows]


_WINDOWS = (1, 16, "auto")
_LOST = {
    "kind": ("memory",),
    "table_bytes": (256 << 20,),
    "killed": (1,),
    "engine": ("sparse",),
    "rebuild": ("blocking",),
}
_RANKS = {"ranks": (4, 16, 256, 4096)}
_METHODS = (
    *("full, async", "Check-N-Run", "CPR", "snapshots x2"),
    *("ecemb (4, 3)", "ecemb (4, 3), window auto", "ecemb (6, 4), window auto"),
)
_PROFILE = ("processors, 0.25 s a step",)

EXCERPTS: Mapping[str, tuple[Excerpt, ...]] = {
    "agreement": (
        Excerpt(
            "Messages and processor time of a transaction, by ranks",
            ("agreement_messages_per_transaction", "agreement_cpu_ms"),
        ),
        Excerpt("Bytes that a rank sends in a transaction", ("agreement_bytes_per_transaction",)),
        Excerpt("Processor time of 64 ranks, over that of 16", ("agreement_cpu_over",)),
        Excerpt("Modelled for more ranks", ("agreement_messages_modelled", "agreement_cpu_modelled_ms")),
    ),
    "check_n_run": (
        Excerpt(
            "Portion of a full checkpoint that an interval writes, and that is kept",
            ("written_pct", "stored_pct"),
            {"pattern": ("published",)},
        ),
        Excerpt(
            "Times less written and kept, in few bits",
            ("bandwidth_reduction", "capacity_reduction"),
            {
                "pattern": ("published",),
                "state": ("none", "row-wise Adagrad, exact"),
                "dim": (64,),
                "bits": ("8", "4", "2"),
            },
        ),
        Excerpt(
            "Quality that restores from few bits take",
            ("loss_added_pct", "auc_lost"),
            {"rule": ("chosen", "fewer than chosen"), "steps": (500,)},
        ),
        Excerpt(
            "What a checkpoint takes from a training",
            ("stall_ms", "stall_over_synchronous", "whole_after_ms", "checkpoint_cpu_ms"),
        ),
    ),
    "compare": (
        Excerpt(
            "How much longer training takes, and what a failure takes",
            ("training_longer_pct", "failure_takes_s", "saves_pct", "interval_s"),
        ),
        Excerpt(
            "Processor and wall time that a step takes longer",
            ("step_cpu_pct", "control_cpu_pct", "step_wall_pct", "control_wall_pct"),
        ),
        Excerpt(
            "After a failure, and what survives it",
            (
                *("next_step_s", "caught_up_s", "steps_run_again", "steps_forgotten", "bit_identical"),
                *("survives_ranks", "memory_over_tables", "stored_over_tables"),
            ),
        ),
        Excerpt(
            "What a save takes",
            ("save_lost_s", "save_stall_s", "save_stall_cpu_s", "save_until_written_s"),
            {"tables": ("0.34 GB a rank",)},
        ),
    ),
    "compare_cluster": (
        Excerpt(
            "Wall and processor time that a step takes longer, and what is sent in it",
            ("step_wall_pct", "step_cpu_pct", "sent_bytes_per_step", "link_bytes_per_step"),
        ),
        Excerpt(
            "After a failure",
            (
                *("next_step_s", "caught_up_s", "prepare_s", "steps_run_again", "steps_forgotten"),
                "bit_identical",
            ),
        ),
        Excerpt(
            "What a save takes",
            ("save_stall_s", "save_lost_s", "save_until_written_s", "interval_s", "saves_pct"),
        ),
    ),
    "cpr": (
        Excerpt(
            "Overhead of full and of partial recovery",
            ("overhead_pct",),
            {"setting": ("base", "20 failures"), "source": ("published", "formula", "emulated")},
        ),
        Excerpt(
            "Portion of the overhead that partial recovery removes in production",
            ("overhead_removed_pct",),
            {"setting": tuple(f"production, interval for PLS 0.1, {lost} lost" for lost in (1, 4))},
        ),
        Excerpt(
            "Quality that failures take",
            ("loss_added", "auc_lost"),
            {"pls_target": (0.1, 0.4), "method": ("vanilla", "mfu")},
        ),
        Excerpt("Loss that production's failures add", ("loss_in_production",)),
        Excerpt("Processor time of bookkeeping, of a step", ("bookkeeping_time_pct",)),
    ),
    "drift": (
        Excerpt(
            "How far a rebuilt row is off at the worst, by its norm",
            ("rebuilt_error_worst",),
            {"steps": (1000, 100_000)},
            columns_of="method",
        ),
        Excerpt("Rows lost to one NaN", ("rows_lost_to_one_nan",)),
    ),
    "elastic": (
        Excerpt(
            "How long a move takes, and how fast it is",
            ("move_s", "settle_s", "encode_s", "gb_per_s", "move_over_gloo", "sent_over_rows"),
        ),
        Excerpt("Memory that it takes for the while", ("arenas_over_said", "process_mb", "bound_mb")),
    ),
    "kernels": (
        Excerpt(
            "Updates of parity: how many times faster",
            ("update_speedup",),
            {"row_bytes": (64, 256), "r": (1, 2)},
            columns_of="access",
        ),
        Excerpt("Encoding: how fast", ("encode_gb_per_s",)),
        Excerpt("Decoding: how fast", ("decode_gb_per_s",)),
        Excerpt(
            "Rows moved: how many times faster than by NumPy",
            ("kernel_speedup",),
            {"row_bytes": (64, 256)},
            columns_of="row_bytes",
        ),
    ),
    "host": (
        Excerpt(
            "Processor time of a window's end, for each GB of changed rows",
            ("core_s_per_gb",),
            columns_of="phase",
        ),
        Excerpt("A plain copy of as many bytes", ("copy_core_s_per_gb",)),
        Excerpt("Changed rows a second", ("gb_per_s",), columns_of="threads"),
        Excerpt("Two threads, over one", ("two_threads_over_one",), columns_of="code"),
        Excerpt("Tables put back from a newly attached arena", ("put_gb_per_s",), columns_of="what"),
        Excerpt("The same, over a plain copy", ("put_over_copy",), columns_of="threads"),
        Excerpt("Memory allocated by the ranks of a host", ("allocate_gb_per_s",), columns_of="ranks"),
        Excerpt("Two ranks together, over one", ("two_ranks_over_one",)),
    ),
    "memory": (
        Excerpt("An arena, over its tables", ("arena_over_tables",)),
        Excerpt("Parts of an arena, over its tables", ("arena_part_over_tables",)),
        Excerpt("Buffers of a step, over the rows that it touches", ("step_buffers_over_touched",)),
    ),
    "network": (
        Excerpt("The links, without ecemb", ("tcp_gbit_per_s", "round_trip_us")),
        Excerpt(
            "Wall time that a step takes longer",
            ("added_wall_pct", "added_wall_ms", "commit_wall_ms"),
        ),
        Excerpt("Bytes that a rank sends in a step", ("bytes_per_step",), columns_of="counted_by"),
        Excerpt("What the planner computes, beside it", ("measured_s", "planned_s")),
        Excerpt(
            "A protected step that commits, by phase", ("phase_ms",), {"window": (1,)}, columns_of="link"
        ),
        Excerpt("How long the ranks agree", ("agreement_us",), columns_of="link"),
        Excerpt(
            "A recovery of lost memory",
            (
                *("recovery_s", "rebuild_s", "rebuild_mb_per_s", "rebuild_over_link", "rebuild_over_plain"),
                "received_over_lost",
            ),
        ),
        Excerpt("Bytes over the link, over those that the guard counts", ("link_over_guard",)),
    ),
    "overhead": (
        Excerpt(
            "Processor time that a step takes longer",
            ("overhead_cpu_pct",),
            {"setting": ("dlrm",), "window": _WINDOWS},
            ("overhead",),
        ),
        Excerpt(
            "The same where tables are nearly all of a step",
            ("overhead_cpu_pct",),
            {"setting": ("sparse-heavy",), "window": _WINDOWS},
            ("overhead",),
        ),
        Excerpt(
            "Processor time of the protection's own calls, of a step",
            ("phases_cpu_pct",),
            {"setting": ("dlrm",), "window": _WINDOWS},
            ("overhead",),
        ),
        Excerpt(
            "Wall time that a step takes longer, and bytes that a rank sends in it",
            ("overhead_wall_pct", "bytes_sent_per_step"),
            {"setting": ("dlrm",), "window": _WINDOWS, "method": ("protected", "replication")},
            ("overhead",),
        ),
        Excerpt(
            "Processor time on other processors, and with other tables",
            ("overhead_cpu_pct",),
            {
                "setting": ("dlrm", "managed-collision"),
                "window": (1, "auto"),
                "code": ("(4, 3)",),
                "method": ("protected", "control"),
            },
            tuple(f"overhead-{end}" for end in ("busy", "managed-collision", "sparse", "xeon")),
        ),
    ),
    "profile": (
        Excerpt("Wall time of a step's parts", ("span_ms",), columns_of="code"),
        Excerpt("Bytes moved, over the fewest possible", ("moved_over_least",), columns_of="where"),
        Excerpt("Bytes on the network, in a step of a rank", ("network_bytes_per_step",)),
        Excerpt("Bytes in memory, in a step of a rank", ("memory_bytes_per_step",), {"code": ("(4, 3)",)}),
        Excerpt("Time at the speed of copying", ("at_copying_speed_ms",)),
    ),
    "publish": (
        Excerpt(
            "How fresh rows are, and what an interval writes",
            ("freshness_s", "step_to_served_s", "first_read_s", "written_mb", "changed_rows_pct"),
        ),
    ),
    "quality": (
        Excerpt(
            "Quality after failures",
            ("auc", "auc_lost", "log_loss", "loss_added", "bit_identical", "steps_run_again", "pls"),
        ),
    ),
    "quantization": (
        Excerpt("Error of a row", ("l2_error",), {"table": ("trained",), "dim": (64,)}),
        Excerpt("Error, over that of k-means", ("error_over_kmeans",), {"table": ("trained",)}),
        Excerpt(
            "How many times smaller rows are", ("compression",), {"dim": (64,), "metadata": ("float16",)}
        ),
        Excerpt("How fast rows are stored", ("rows_per_s",), {"dim": (64,)}, columns_of="bits"),
    ),
    "rebuild": (
        Excerpt(
            "From a kill to the next step, and to full protection",
            ("kill_to_step_s", "time_to_full_protection_s"),
        ),
        Excerpt(
            "Training while rows are rebuilt",
            ("throughput_while_rebuilding", "steps_while_rebuilding", "waited_for_rows_s"),
        ),
    ),
    "recovery": (
        Excerpt("From a kill to the next step", ("kill_to_step_s",), columns_of="start"),
        Excerpt("The same, over a warm start by torchrun", ("over_warm",), columns_of="start"),
        Excerpt("Processes that stayed, of those that were not killed", ("stayed",)),
        Excerpt(
            "Phases of a recovery with 256 MiB of lost memory",
            ("recovery_phase_s",),
            _LOST,
            columns_of="start",
        ),
        Excerpt("What ecemb adds to a restart", ("added_recovery_s",)),
        Excerpt("How fast lost memory is rebuilt", ("rebuild_gb_per_s",)),
        Excerpt("Speed of a rebuild, over that of plain messages", ("rebuild_over_wire",)),
    ),
    "scaling": (
        Excerpt("Messages and bytes of a rank in a step", ("messages_per_step", "sent_bytes_per_step")),
        Excerpt("Memory of a rank, over its tables", ("memory_over_tables",)),
        Excerpt("Ranks that one sends deltas to", ("delta_peers",), _RANKS, columns_of="code"),
        Excerpt("Ranks that take part in the rebuild of one", ("rebuild_peers",), _RANKS, columns_of="code"),
    ),
    "simulate": (
        Excerpt("Time that trains, by hosts", ("ettr_by_hosts",), {"method": _METHODS, "job": _PROFILE}),
        Excerpt("Time that trains, on traces", ("ettr_on_trace",), {"method": _METHODS, "job": _PROFILE}),
        Excerpt("Cells of the map, by the kind that is ahead at the likeliest inputs", ("cells_first",)),
        Excerpt(
            "Months that lose more than parity rebuilds, on a trace",
            ("data_lost_on_trace_pct",),
            {
                "trace": ("infinitehbd_fault_trace.json",),
                "hosts": (400,),
                "code": ("(4, 3)", "(8, 7)", "(6, 4)", "(10, 8)"),
            },
        ),
    ),
    "start": (
        Excerpt("How long a start and a restart take", ("start_s", "restart_s")),
        Excerpt("Largest value that the store has to hold", ("store_value_bytes_max",)),
    ),
}
"""Question -> the excerpts of its page, in their order; the page of another question shows all tables."""
