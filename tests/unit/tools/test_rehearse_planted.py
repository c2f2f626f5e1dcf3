"""`ecemb rehearse` finds what is planted in copies of the examples, one fault at a time."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from ecemb.engines.internals import INSTALL
from ecemb.tools import rehearse
from support.fork_server import fork_server

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EPOCH = 5  # batches

OPTIONS = {
    "dlrm": "--code 2,1 --rows 200 --dim 4 --batch 8 --held-out 1",
    "torchrec_dlrm": "--rows 5000 --batch 8 --code 2,1",
}
BEFORE_PROTECT = {"dlrm": "tally = Tally()\n", "torchrec_dlrm": "guard = ecemb.protect("}
BEHIND_A_STEP = {
    "dlrm": "    if rank == 0 and (step.number % 50",
    "torchrec_dlrm": "    if rank == 0 and (batches.next % 20",
}
UPDATE = {"dlrm": "        dense.step()\n", "torchrec_dlrm": "    optimizer.step()\n"}
STEPS = {"dlrm": "step.number", "torchrec_dlrm": "batches.next"}
WEIGHTS = {
    "dlrm": "[table.weight for table in model.tables]",
    "torchrec_dlrm": "[one for name, one in model.named_parameters() if 'embedding_bags' in name]",
}
DENSE = {
    "dlrm": ("dense", "model.bottom"),
    "torchrec_dlrm": ("dense._optimizer", "getattr(model.module, 'module', model.module).over_arch"),
}
OF_A_BATCH = {"dlrm": "number = batch * self.ranks", "torchrec_dlrm": "number = self.next * self.ranks"}


def planted(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, f"the example hasn't once:\n{old}"
    return source.replace(old, new)


def behind_some_steps(source: str, name: str, lines: str) -> str:
    """With lines in front of the one that prints the loss, in the second of four steps."""
    there = BEHIND_A_STEP[name]
    body = textwrap.indent(f"if {STEPS[name]} % 4 == 1:\n{textwrap.indent(lines, '    ')}", "    ")
    return planted(source, there, body + there)


def normalises(source: str, name: str) -> str:
    lines = (
        f"for weight in {WEIGHTS[name]}:\n    weight.data.copy_(functional.normalize(weight.data, dim=-1))\n"
    )
    return behind_some_steps(source, name, lines)


def accumulates(source: str, name: str) -> str:
    if name == "dlrm":
        source = planted(source, 'window="auto", max_replay=60', "window=1")
        clear = "        sparse.zero_grad()\n        dense.zero_grad()\n"
        update = "        sparse.step()\n        dense.step()\n"
    else:
        source = planted(source, 'window="auto"', "window=1")
        clear, update = "    optimizer.zero_grad()\n", "    optimizer.step()\n"
    for lines, condition in ((clear, f"{STEPS[name]} % 2"), (update, f"not {STEPS[name]} % 2")):
        space = lines[: len(lines) - len(lines.lstrip())]
        source = planted(source, lines, f"{space}if {condition}:\n{textwrap.indent(lines, '    ')}")
    return source


def forgets(source: str, name: str) -> str:
    optimizer, module = DENSE[name]
    lines = (
        "import torchmetrics\n"
        f"schedule = torch.optim.lr_scheduler.StepLR({optimizer}, 2, 0.9)\n"
        f"average = torch.optim.swa_utils.AveragedModel({module})\n"
        "metric = torchmetrics.MeanMetric()\n"
    )
    source = planted(source, BEFORE_PROTECT[name], lines + BEFORE_PROTECT[name])
    update = UPDATE[name]
    space = update[: len(update) - len(update.lstrip())]
    calls = ("schedule.step()", f"average.update_parameters({module})", "metric.update(loss.detach())")
    return planted(source, update, update + "".join(f"{space}{call}\n" for call in calls))


def reads_on(source: str, name: str) -> str:
    there = OF_A_BATCH[name]
    new = f"self.read_on = getattr(self, 'read_on', -1) + 1\n        {there}"
    return planted(source, there, new.replace(there, "number = self.read_on * self.ranks"))


def draws(source: str, name: str) -> str:
    return behind_some_steps(source, name, "torch.randint(args.rows, (8,))  # negatives of an evaluation\n")


def ends_epochs(source: str, name: str) -> str:
    if name == "torchrec_dlrm":
        there = OF_A_BATCH[name]
        source = planted(
            source, there, f"if self.next == self.end:\n            raise StopIteration\n        {there}"
        )
        loop = "while batches.next < args.steps:\n    loss = train()\n"
        return planted(
            source,
            loop,
            f"while batches.next < args.steps:\n    batches.end = {EPOCH} * (batches.next // {EPOCH} + 1)\n"
            "    while True:\n        try:\n            loss = train()\n        except StopIteration:\n"
            "            break\n",
        )
    head, loop, rest = source.partition("for batch in batches:\n")
    assert loop and rest.startswith("    with guard.step() as step:\n")
    body, end, rest = rest.partition("\nheld_out = ")
    assert end
    body = planted(body, "as step:\n", "as step:\n        batch = next(remaining)\n")
    numbers = f"range(guard.next_step, {EPOCH} * (guard.next_step // {EPOCH} + 1))"
    return (
        f"{head}while guard.next_step < args.steps:\n"
        f"    remaining = iter([Rows(rank, ranks)[args.held_out + number] for number in {numbers}])\n"
        f"    while True:\n        try:\n{textwrap.indent(body, '        ')}"
        f"        except StopIteration:\n            break\n{end}{rest}"
    )


PLANTS: dict[str, tuple[Callable[[str, str], str], list[str]]] = {  # what the output says; [] if all is well
    "writes through .data": (
        normalises,
        ["the script changes model.", ".py, line ", "guard.touch(table, rows)"],
    ),
    "gradients of two steps": (accumulates, ["UsageError", "would use a gradient"]),
    "forgotten objects": (
        forgets,
        ["schedule (StepLR)", "average (AveragedModel)", "metric (MeanMetric)", "object.schedule.", "state="],
    ),
    "a position of the data's own": (reads_on, ["    loss (rank", "the batches are others"]),
    "an evaluation that draws": (draws, ["the script changes generators.torch", ".py, line "]),
    "StopIteration in a step": (ends_epochs, []),
}


@pytest.mark.long
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_planted_fault_is_found(
    name: str, plant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "torchrec_dlrm" and find_spec("torchrec") is None:
        pytest.skip(INSTALL)
    fork_server()  # agents come from the one that all tests use
    change, says = PLANTS[plant]
    source = (EXAMPLES / f"{name}.py").read_text()
    script = tmp_path / f"{name}.py"
    script.write_text(change(source, name))
    parser = argparse.ArgumentParser()
    rehearse.add(parser)
    words = ["--ranks", "2", "--steps", "12", str(script), *OPTIONS[name].split(), "--job", tmp_path.name]
    code = rehearse.run(parser.parse_args(words))
    said = capsys.readouterr().out
    if (name, plant) == ("torchrec_dlrm", "a position of the data's own"):  # whose object is in state=
        says = ["state.0.read_on (rank", "does not hold all"]
    assert code == (1 if says else 0), said
    assert [text for text in says if text not in said] == [], said
    if not says:
        assert "all end with the same bits" in said and "warns" not in said, said
