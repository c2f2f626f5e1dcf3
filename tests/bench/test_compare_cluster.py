"""A comparison on a cluster: options that don't go together, launchers, what launches leave; one in small."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.method import Costs, Promise
from bench import ROOT
from bench import __main__ as command
from bench.harness.result import Arguments, BadOption, Incomplete, Row, WrongResult, document
from bench.harness.result import command as line
from bench.harness.torchrun import LaunchFailed
from bench.methods.ledger import Account, Done, Life
from bench.methods.registry import METHODS
from bench.methods.registry import Place as MethodPlace
from bench.questions.compare.cases import BY_METHOD
from bench.questions.compare_cluster import answers as answered
from bench.questions.compare_cluster import launch, launchers, question, rows, steps, watched
from bench.questions.compare_cluster.answers import Answers
from bench.questions.compare_cluster.launch import Place
from bench.questions.compare_cluster.options import QUICK, SCRIPT, Options, checked
from bench.questions.compare_cluster.question import Comparison
from bench.questions.compare_cluster.rank import Order
from bench.report import excerpts, pages, screen
from bench.workloads.scripts import BadScript, Job, criteo_nn, load


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        command.main([*words])
    return " ".join(capsys.readouterr().err.split("error:")[1].split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --kills 3", "--kills is for a comparison on a cluster, which one of --launcher, --hosts"),
        ("drift --hosts 2", "--hosts is for compare, and not for drift"),
        ("compare --hosts 4", "--launcher torchrun starts ranks on this machine alone, and --hosts is 4"),
        ("compare --hosts 4 --launcher srun", "--shared is needed with several hosts, and --hosts is 4"),
        ("compare --hosts 0", "--hosts is at least 1; it is 0"),
        (
            "compare --hosts 1 --backend nccl",
            "--backend nccl exchanges tensors of devices, and --device is cpu",
        ),
        ("compare --hosts 1 --engine sparse", "--engine chooses among the models of bench/"),
        ("compare --script nowhere.py", "--script nowhere.py is no file"),
        ("compare --hosts 1 --set rows", "--set takes NAME=VALUE; it is 'rows'"),
        ("compare --hosts 1 --launches 1", "--launches is at least 2; it is 1"),
        ("compare --hosts 1 --steps 20", "--steps is at least 67 with --kills 3"),
        (
            "compare --launcher ssh",
            "--launcher is torchrun, srun, or a template with {command} or {line} in it",
        ),
        ("compare --launcher {node}{command}", "--launcher has no placeholder {node}"),
        ("compare --launcher {command", "--launcher '{command' can't be read"),
        ("compare --hosts 1 --methods raid", "--methods has 'raid'; there are: nothing, ecemb (4, 3)"),
    ],
)
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert said in refusal(capsys, *words.split())


def test_the_command_line_of_other_questions_imports_nothing_of_ecemb() -> None:
    """What is imported counts as the code of a result."""
    said = (
        "import sys, bench.__main__; print([n for n in sys.modules if n.split('.')[0] in ('ecemb', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_options_become_a_command_that_asks_again() -> None:
    given = Options(hosts=4, launcher="srun", shared=Path("/nfs"), methods=("ecemb (4, 3)", "full files"))
    words = line("compare_cluster", Arguments(more=dataclasses.replace(given, settings=("rows=9", "dim=4"))))
    assert words == (
        "python -m bench compare_cluster --launcher srun --hosts 4 --set rows=9 --set dim=4 "
        "--methods 'ecemb (4, 3),full files'"
    )
    assert Options().words() == []


def test_the_question_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(arguments: Arguments) -> list[Row]:
        asked.append(arguments.more)
        raise BadOption("enough")

    monkeypatch.setattr(question, "run", run)
    words = [
        "compare",
        "--hosts",
        "1",
        "--quick",
        "--methods",
        "ecemb (4, 3),cpr vanilla",
        "--device",
        "cuda",
    ]
    with pytest.raises(SystemExit):
        command.main([*words, "--set", "rows=9", "--set", "dim=4"])
    (given,) = asked
    assert (given.steps, given.kills, given.launches) == QUICK
    assert given.methods == ("ecemb (4, 3)", "cpr vanilla") and given.settings == ("rows=9", "dim=4")
    assert (given.device, given.backend, given.script) == ("cuda", "nccl", SCRIPT)


def test_templates_of_launchers() -> None:
    agent = ["python", "-m", "agent", "a b"]
    assert launchers.words("torchrun", agent, 1, 8) == agent
    assert launchers.words("srun", agent, 4, 2)[:3] == ["srun", "--nodes=4", "--ntasks=4"]
    assert launchers.words("srun", agent, 4, 2)[-4:] == agent
    template = "pdsh -w n[1-{hosts}] 'ulimit -l {ranks_per_host}; {line}'"
    assert launchers.words(template, agent, 4, 2) == [
        *("pdsh", "-w", "n[1-4]", "ulimit -l 2; python -m agent 'a b'")
    ]


def test_steps_follow_one_another() -> None:
    planned = steps.of(100, 2)
    assert planned.total == 100 and planned.plain_end == steps.WARM + planned.plain
    assert [*planned.saves] == [planned.plain_end + steps.AFTER * number for number in range(steps.SAVES)]
    first, second = planned.kill_steps
    assert planned.saves[-1] + steps.AFTER < first < second < 100 - steps.TAIL
    assert steps.EVERY < steps.APART, "each failure has a save of its own to go back to"


def test_methods_that_cannot_run_are_left_out_by_name() -> None:
    few = Comparison(Options(ranks_per_host=2, methods=("ecemb (4, 3)", "full files", "ecemb copies x2")), 0)
    cases, why = few.cases()
    assert [case.method for case in cases] == ["full files", "ecemb copies x2"]
    assert why == {"ecemb (4, 3)": "its code has n = 4 blocks on as many ranks, and there are 2"}
    on_devices = Options(ranks_per_host=1, device="cuda", methods=("cpr mfu", "snapshots x2"))
    assert Comparison(on_devices, 0).cases()[1].keys() == {"cpr mfu", "snapshots x2"}


def test_blocks_lie_on_different_hosts_where_there_are_enough() -> None:
    assert question.domain(BY_METHOD["ecemb (4, 3)"], 4) == "host"
    assert question.domain(BY_METHOD["ecemb (4, 3)"], 3) == "rank"
    assert question.domain(BY_METHOD["full files"], 4) == "rank"
    assert question.victims(Place("srun", 4, 2, ()), 5) == [7, 4, 1, 6, 3]
    assert question.victims(Place("torchrun", 1, 4, ()), 5) == [3, 2, 1, 0, 3]


ORDER = Order(
    folder="",
    memory="",
    job="job",
    method="full files",
    script="",
    settings=(),
    device="cpu",
    backend="gloo",
    domain="rank",
    ranks_per_host=2,
    plain=10,
    kills=1,
    steps=67,
    cut_off=(60,),
    victims=(1,),
    noted=0,
    seed=0,
    timeout_s=1.0,
)


def mark(wall_s: float, cpu_s: float, sent: int = 0, links: int = 0) -> dict[str, Any]:
    costs = dataclasses.asdict(Costs(sent_bytes=sent, written_bytes=sent))
    return {"wall_s": wall_s, "cpu_s": cpu_s, "costs": costs, "links": {"eth0": links} if links else {}}


def answers(step_s: float = 1.0, digest: str = "a", **order: Any) -> Answers:
    """Of two ranks; rank 1 dies in step 60, and training goes on 5 s later with step 58."""
    marks = {
        "plain": mark(0, 0, 0, 100),
        "plain end": mark(10 * step_s, 20 * step_s, 500, 1100),
    }
    for number in range(steps.SAVES):
        begin = 100.0 * number
        marks |= {
            f"save {number}": mark(begin, 0),
            f"stalled {number}": mark(begin + step_s + 3, 0),
            f"followed {number}": mark(begin + 4 * step_s + 5, 0),
            f"written {number}": mark(begin + 4 * step_s + 6, 0, 80),
        }
    done = [Done(step, 100.0 + step, 0.0, Costs()) for step in range(60)]
    again = [
        Done(step, 165.0 + step - 58, 0.0, Costs(memory_bytes=40, stored_bytes=60)) for step in range(58, 67)
    ]
    costs = Costs(memory_bytes=40, stored_bytes=60)
    accounts = [
        Account(
            (
                Life(0, 0.1, Costs(), tuple(range(61)), tuple(done), struck_s, 1.0, costs),
                Life(58, 2.0, Costs(sent_bytes=7), tuple(range(58, 67)), tuple(again), None, 1.0, costs),
            )
        )
        for struck_s in (None, 160.0)
    ]
    ends = [{"digest": digest, "finite": True, "table_bytes": 20, "samples": 8} for _ in range(2)]
    other = {name: {**one, "links": {}} for name, one in marks.items()}
    found = dataclasses.replace(ORDER, **order)
    return Answers(found, ends, ends, accounts, [marks, other], [{"host": "n1", "mbit_s": {}}], 1)


def test_rows_say_what_launches_took() -> None:
    bare = [answers(1.0), answers(1.2)]
    found = rows.of(BY_METHOD["full files"], [answers(1.1), answers(1.2)], bare, Promise(True, None), {})
    values = {row.metric: row.value for row in found}
    assert values["step_wall_pct"] == pytest.approx(100 * (2.3 / 2.2 - 1))
    assert values["link_bytes_per_step"] == 100 and values["sent_bytes_per_step"] == 50
    assert values["save_stall_s"] == pytest.approx(3) and values["save_lost_s"] == pytest.approx(5)
    assert values["next_step_s"] == 5 and values["prepare_s"] == 2 and values["restart_sent_bytes"] == 14
    assert values["steps_run_again"] == 3 and values["bit_identical"] == 1 and values["survives_ranks"] == 2
    assert values["memory_over_tables"] == 2 and values["stored_over_tables"] == 3
    every_s = (2 * 5 * 14 * 3600) ** 0.5
    assert values["interval_s"] == pytest.approx(every_s)
    assert values["training_longer_pct"] == pytest.approx(100 * 5 / every_s)


def in_small() -> list[Row]:
    """Rows of two methods, one of which is left out."""
    labels: dict[str, Any] = {"script": "mine", "hosts": 1, "ranks": 2, "ranks_per_host": 2, "device": "cpu"}
    labels |= {"backend": "gloo", "launcher": "torchrun", "network": "none"}
    bare = [answers(1.0), answers(1.1)]
    found = rows.without(bare, [answers(1.1), answers(1.0)], answers(), labels)
    of_files = {**labels, "method": "full files", "rule": "Young", "domain": "rank"}
    found += rows.of(BY_METHOD["full files"], bare, bare, Promise(True, None), of_files)
    found.append(
        Row("left_out", 1, "methods", 1, 1, 1, {**labels, "method": "cpr vanilla", "why": "a reason"})
    )
    return found


def test_the_table_has_the_form_of_the_readme() -> None:
    totals, keeps, left_out, under = screen.on_a_cluster([row.to_json() for row in in_small()]).split("\n\n")
    assert totals.startswith("| method | 3 h | 14 h | 100 h |\n")
    assert [line.split(" | ")[0] for line in totals.splitlines()[2:]] == [
        "| full checkpoints",
        "| no protection",
    ]
    assert keeps.startswith("| method | next step | host memory | may be lost | same bits |\n")
    assert keeps.splitlines()[2].endswith(" | yes *m* |") and len(keeps.splitlines()) == 4
    assert left_out == "- **cpr vanilla** is left out: a reason."
    assert "mine: 1 hosts with 2 ranks each, on cpu, gloo, launcher torchrun, network none." in under


def test_the_page_has_the_table_and_what_it_is_made_of() -> None:
    answer = {**document("compare_cluster", Arguments(), in_small()), "file": "compare-cluster"}
    made = pages.render([answer])
    page = made["results/compare_cluster.md"]
    assert screen.on_a_cluster(answer["rows"]) in page and page.count("\n") < 150
    for excerpt in excerpts.EXCERPTS["compare_cluster"]:
        assert f"## {excerpt.heading}\n" in page
        assert {row["metric"] for row in excerpt.rows([answer])} == {*excerpt.metrics}
    assert "| 1 hosts, none; full checkpoints: " in made[pages.SUMMARY]


def test_broken_promises_are_noticed() -> None:
    promise = Promise(bit_identical=True, steps_again=None)
    answered.check(answers(), answers().ends, promise)
    with pytest.raises(WrongResult, match="full files ended with other bytes"):
        answered.check(answers(digest="b"), answers().ends, promise)
    with pytest.raises(WrongResult, match=r"life 0: ranks \[1\] were killed, and not 0"):
        answered.check(answers(victims=(0,)), answers().ends, promise)
    with pytest.raises(WrongResult, match="2 lives, and 3 were to be"):
        answered.check(answers(kills=2), answers().ends, promise)


def test_a_script_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def build(job): ...\ndef batch(job, number): ...\n")
    with pytest.raises(BadScript, match=r"mine.py has no function train\(\)"):
        load(str(path))


def test_lines_of_criteos_format_go_to_ranks_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "day"
    samples = ["\t".join([str(i % 2), *[str(i)] * 13, *[f"{i:x}"] * 26]) for i in range(6)]
    path.write_text("\n".join(["no line", *samples]))

    def job(rank: int) -> Job:
        settings = {"data": str(path), "batch": "2", "rows": "10"}
        return Job(rank, 2, torch.device("cpu"), settings=settings)

    assert [
        criteo_nn.batch(job(0), 0).ids[0, :, 0].tolist(),
        criteo_nn.batch(job(1), 0).ids[3, :, 0].tolist(),
    ] == [
        [1, 2],
        [3, 4],
    ]
    following = criteo_nn.batch(job(0), 1)  # the file begins again after its last line
    assert following.ids[25, :, 0].tolist() == [5, 6] and following.clicks[:, 0].tolist() == [0, 1]
    assert following.ids.shape == (26, 2, 1) and following.integers.shape == (2, 13)
    assert torch.equal(criteo_nn.batch(job(0), 1).ids, following.ids)


def test_a_launch_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    order = tmp_path / "job" / "order.json"
    order.parent.mkdir()
    here = "bash -c 'echo as {hosts}; exit 3' {command}"
    with pytest.raises(LaunchFailed, match="mine ended with 3:\nas 1"):
        launch.launch(Place(here, 1, 1, ()), "mine", order, 0, 60.0)
    with pytest.raises(LaunchFailed, match="mine did not end in 0 s"):
        launch.launch(Place("bash -c 'sleep 600' {command}", 1, 1, ()), "mine", order, 0, 0.2)
    with pytest.raises(LaunchFailed, match="there is no program 'nowhere' on this machine"):
        launch.launch(Place("nowhere {command}", 1, 1, ()), "mine", order, 0, 60.0)


def test_speeds_of_interfaces_are_those_that_the_kernel_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, speed in {"lo": "10", "eth0": "1000", "down": "-1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    (tmp_path / "virtual").mkdir()
    monkeypatch.setattr(watched, "_INTERFACES", tmp_path)
    assert watched.host()["mbit_s"] == {"eth0": 1000}


def test_launches_in_small(tmp_path: Path) -> None:
    """Rank 1 of the guide's script is killed under two methods; nothing is left in memory."""
    guide = (ROOT / "docs" / "guides" / "comparing.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"<!-- file: train.py -->\n```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    options = Options(
        hosts=1,
        ranks_per_host=2,
        memory=tmp_path / "memory",
        script=tmp_path / "train.py",
        settings=("rows=400",),
        kills=1,
        steps=59,
    )
    comparison = Comparison(checked(options), 0)
    bare = comparison._launched(tmp_path / "shared", question.WITHOUT)
    assert len(bare.accounts) == 2 and [end["table_bytes"] for end in bare.ends] == [2 * 200 * 16 * 4] * 2
    for method in ("ecemb copies x2", "snapshots x2"):
        one = comparison._launched(tmp_path / "shared", method)
        answered.check(one, bare.ends, METHODS[method](MethodPlace(Path(), Path())).promise)
        promise = Promise(bit_identical=True, steps_again=None, survives=1)
        values = {row.metric: row.value for row in rows.of(BY_METHOD[method], [one], [bare], promise, {})}
        assert values["bit_identical"] == 1 and values["next_step_s"] > 0
        assert values["sent_bytes_per_step" if method == "ecemb copies x2" else "save_sent_bytes"] > 0
    assert not [*(tmp_path / "memory").iterdir()] and not [*(tmp_path / "shared").iterdir()]


def test_a_method_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(_: Comparison, shared: Path, name: str, **kwargs: Any) -> Answers:
        if name == "full files":
            raise LaunchFailed("full files did not end")
        return answers(digest="b" if name == "snapshots x2" else "a", method=name)

    monkeypatch.setattr(Comparison, "_launched", launched)
    names = ("full files", "snapshots x2", "ecemb copies x2")
    comparison = Comparison(Options(ranks_per_host=2, methods=names, launches=2), 0)
    with pytest.raises(
        Incomplete, match=r"(?s)full files did not end.*snapshots x2 ended with other bytes"
    ) as found:
        comparison.measure()
    assert {row.labels["method"] for row in found.value.rows} == {"nothing", "ecemb copies x2"}
