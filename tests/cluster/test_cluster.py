"""The Slurm cluster on one machine: a short scenario of `make cluster`, and the harness without Slurm."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from bench.harness.signature import seal
from bench.questions.compare_cluster import options
from cluster import __main__ as command
from cluster import box as box_module
from cluster.box import Box, NotPossible
from cluster.job import GUIDE, SMALL, GuideChanged, changed_script, guide_script
from cluster.scenarios import Result, killed_of_three
from failures.driver import ROOT
from support import cluster_compare as compare


@pytest.mark.long  # takes both processors; .ci/run has it by itself, before all others
def test_a_killed_node_is_replaced_by_the_spare_of_the_guides_script() -> None:
    try:
        result = killed_of_three()
    except NotPossible as error:
        pytest.skip(str(error))
    print(result)
    assert not result.differences


def test_the_guides_script_asks_for_a_spare_node() -> None:
    script = guide_script()
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    assert "#SBATCH --nodes=5 " in script
    assert "--nnodes 4 " in script


def test_words_of_the_script_are_replaced_or_missed() -> None:
    few = changed_script(SMALL)
    assert "--nproc-per-node 2" in few
    assert few.replace("--nproc-per-node 2", "--nproc-per-node 8") == guide_script()
    with pytest.raises(GuideChanged, match="'--nproc-per-node 9' is 0 times"):
        changed_script({"--nproc-per-node 9": ""})
    with pytest.raises(GuideChanged, match="'a' is 2 times"):
        changed_script({"a": "b"}, "a a")


def test_a_guide_without_a_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slurm.md").write_text("# Slurm\n")
    with pytest.raises(GuideChanged, match=r"slurm\.md has no block of bash"):
        guide_script(tmp_path / "slurm.md")


@pytest.mark.parametrize("lacks", ["programs", "root"])
def test_what_a_box_lacks_is_named_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if lacks == "programs":
        monkeypatch.setattr("shutil.which", lambda program: None)
        needed = "a Slurm cluster takes the packages iproute2, munge, slurm-wlm, util-linux"
    else:
        monkeypatch.setattr(box_module, "missing", list)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        needed = "network namespaces take root"
    with pytest.raises(NotPossible, match=needed), Box(2):
        pass
    assert not list(tmp_path.iterdir())


def test_scenarios_that_are_not_possible_are_skipped_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(box_module, "missing", lambda: ["munge"])
    assert command.main(["killed", "--json", str(tmp_path / "cluster.json")]) == 0
    assert capsys.readouterr().out == "killed: skipped: a Slurm cluster takes the packages munge\n"
    assert not list(tmp_path.iterdir())


def test_results_are_sealed_and_have_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenarios = {
        "two deaths": lambda: Result("two deaths", 8, (), (3.0, 5.0), "as it should"),
        "nothing": lambda: Result("nothing", 8, (), (), "not restarted"),
    }
    monkeypatch.setattr(command, "SCENARIOS", scenarios)
    path = tmp_path / "cluster.json"
    assert command.main(["--json", str(path)]) == 0
    assert "two deaths: identical; next step after 3.0 s, 5.0 s; as it should" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["seal"] == seal(document)
    times = [row for row in document["rows"] if row["metric"] == "cluster_next_step_s"]
    assert [(row["scenario"], row["low"], row["high"], row["repeats"]) for row in times] == [
        ("two deaths", 3.0, 5.0, 2)
    ]
    scenarios["nothing"] = lambda: Result("nothing", 8, ("rank 3: parity",), (), "")
    assert command.main(["--json", str(path)]) == 1
    assert "nothing: NOT IDENTICAL: rank 3: parity" in capsys.readouterr().out
    found = [row["value"] for row in json.loads(path.read_text())["rows"] if row.get("scenario") == "nothing"]
    assert found == [1]


def test_the_guide_has_the_seconds_of_all_results() -> None:
    """Each row of its table has the scenario's name in backquotes, and "12 s" or "12 and 15 s" after it."""
    paths = (ROOT / "bench" / "results").glob("cluster*.json")
    rows = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    guide = GUIDE.read_text(encoding="utf-8")
    assert not any(row["value"] for row in rows if row["metric"] == "cluster_differences")
    for row in rows:
        if row["metric"] == "cluster_next_step_s":
            ends = dict.fromkeys((f"{row['low']:.0f}", f"{row['high']:.0f}"))
            assert re.search(rf"`{row['scenario']}` .*\| {' and '.join(ends)} s \|", guide), row


def test_an_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["drowned"])
    assert "no scenario drowned; there are: word for word, killed" in capsys.readouterr().err


def test_the_comparison_is_submitted_with_the_options_that_are_passed_on(tmp_path: Path) -> None:
    text = compare.script("1gbit a host", tmp_path, ["--json", "a b.json", "--kills", "1"])
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=compare --nodes=4 ")
    words = shlex.split(text.splitlines()[-1])
    assert words[:5] == ["exec", sys.executable, "-m", "bench", "compare"]
    assert words[-4:] == ["--json", "a b.json", "--kills", "1"]
    parser = argparse.ArgumentParser()
    options.add(parser)
    parser.set_defaults(question="compare", quick=False, engine=None, setting=None)
    given = options.of(parser.parse_args([word for word in words[5:] if word not in ("--json", "a b.json")]))
    assert given is not None and (given.hosts, given.kills, given.launcher) == (4, 1, "srun")
    assert given.methods == compare.METHODS and given.network == "1gbit a host"


def test_a_comparison_is_skipped_where_a_box_is_not_possible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(box_module, "missing", lambda: ["munge"])
    assert compare.main(["--rate", "10gbit"]) == 0
    assert capsys.readouterr().out == "skipped: a Slurm cluster takes the packages munge\n"
