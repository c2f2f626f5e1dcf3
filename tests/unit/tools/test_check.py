"""`ecemb check`: real scripts on real ranks, up to their `protect`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ecemb.__main__ import main
from ecemb.coding.placement import Placement
from ecemb.errors import ConfigurationError
from ecemb.start.survey import Survey, survives
from ecemb.tools.check import survey, text

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import random
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
import ecemb

class Counter:
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

class Holder(Counter):
    def __init__(self, one):
        self._one = one

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = ecemb.nn.ShardedEmbeddingBag(100, 4, device="meta")
        self.head = nn.Linear(4, 1)
        self.average = torch.zeros(3)
        self.register_buffer("mean", torch.zeros(2))
        self.loss = MeanMetric()

class Running(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", mean)

def main():
    ecemb.init_process_group("gloo", job="clicks", arena_dir=sys.argv[1])
    torch.manual_seed(0)
    model = Net()
    sparse = torch.optim.SGD([model.bag.weight], lr=0.1)
    dense = torch.optim.Adam(model.head.parameters())
    held, schedule = (torch.optim.lr_scheduler.StepLR(one, 2) for one in (dense, sparse))
    ema = torch.optim.swa_utils.AveragedModel(model.head)
    critic = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    forgotten = torch.optim.Adam(critic.parameters())
    counters = {"seen": Counter()}
    dice = random.Random(3)
    loader = DataLoader(range(4), shuffle=True, generator=torch.Generator())
    accuracy, inner = MeanMetric(), nn.Sequential(nn.Identity())
    several = MetricCollection({"one": MeanMetric()})
    running, same, weighted = Running(torch.ones(2)), Running(model.mean), nn.CrossEntropyLoss(torch.ones(2))
    state = {"held": Holder(held), "twin": Holder(held), "seen": MetricCollection({"one": MeanMetric()})}
    averaged, head, mine = state["seen"], model.head, model.loss
    parallel, replaced = nn.parallel.DistributedDataParallel(model.head), nn.Linear(2, 1, device="meta")
    ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(2, 1), state=state)
    raise SystemExit("it trains")

main()
"""
REFUSED = """
import sys
import torch
import ecemb

ecemb.init_process_group("gloo", job="clicks", arena_dir=sys.argv[1])
model = torch.nn.ModuleDict({"bag": ecemb.nn.ShardedEmbeddingBag(100, 4, device="meta")})
sparse = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ecemb.protect(model, optimizers=sparse, code=ecemb.Code(2, 1))
raise SystemExit("it trains")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs, and in which environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_a_survey_names_all_that_a_script_has(
    arena_dir: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "script.py").write_text(SCRIPT)
    words = ("--json", "--hosts", "2", "--ranks-per-host", "1", "script.py", str(arena_dir))
    code = main(["check", *words])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert (found["job"], found["hosts"], found["code"]) == ("clicks", ["host0", "host1"], [2, 1])
    assert found["tables"] == {"bag": [[50, 50], "weight float32"]}
    assert set(found["replicated"]) == {"head.weight", "head.bias", "mean"}
    assert found["optimizers"] == ["Adam of 2 dense parameters"]
    assert found["generators"] == ["torch", "numpy", "python"]
    assert found["state"] == ["held (Holder)", "twin (Holder)", "seen (MetricCollection)"]
    kept = {"state['seen'].one", "model.loss"}
    assert found["metrics"] == {name: ["MeanMetric", ["mean_value", "weight"]] for name in kept}
    unknown = {one["name"]: (one["kind"], one["lost"]) for one in found["unknown"]}
    assert {name: kind for name, (kind, _) in unknown.items()} == {
        "schedule": "StepLR",
        "ema": "AveragedModel",
        "critic": "Sequential",
        "forgotten": "Adam",
        "counters['seen']": "Counter",
        "dice": "Random",
        "loader.sampler.generator": "Generator",
        "accuracy": "MeanMetric",
        "several": "MetricCollection",
        "running": "Running",
        "model.average": "Tensor",
    }
    assert "begins empty" in unknown["several"][1]
    assert unknown["accuracy"][1].endswith("give it in state={'accuracy': accuracy}")
    assert "its buffers begin again" in unknown["running"][1]
    assert "optimizers=" in unknown["forgotten"][1] and "state=" in unknown["schedule"][1]
    assert all(50 * 16 <= one["tables"] < 50 * 16 + 64 for one in found["bytes"])
    assert all(one["parity"] >= 50 * 16 + one["rank_state"] for one in found["bytes"])
    assert found["survives"].endswith("any one host may be lost")
    assert not list(arena_dir.rglob("*.arena")) and not list(arena_dir.glob("*/*"))


def test_metrics_are_shown() -> None:
    kept = {"model.loss": ("MeanMetric", ["mean_value", "weight"]), "state['sum']": ("Composition", [])}
    sizes = [dict.fromkeys(("tables", "parity", "dense", "rank_state"), 1)]
    shown = text(Survey("clicks", ("a",), (2, 1), {}, {}, [], [], [], kept, [], sizes, "nothing"))
    line = "model.loss (MeanMetric): its state_dict() is empty by default; ecemb itself keeps "
    assert f"{line}model.loss.mean_value, model.loss.weight\n" in shown
    assert "state['sum'] (Composition): its state_dict() is empty by default" in shown


def test_what_protect_would_refuse_is_refused(
    arena_dir: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "script.py").write_text(REFUSED)
    code = main(["check", "--ranks-per-host", "2", "script.py", str(arena_dir)])
    out, err = capfd.readouterr()
    assert code == 1 and not out
    assert "ecemb: refused on rank 0: SGD with momentum=0.9 changes rows of table 'bag'" in err
    assert not list(arena_dir.glob("*/*"))


@pytest.mark.parametrize(
    ("hosts", "code", "said"),
    [
        ("a", (2, 1), "one rank has no parity"),
        ("abcd", (4, 3), "any one host may be lost"),
        ("abcd", (4, 2), "any 2 hosts may be lost at once"),
        ("aabbccdd", (4, 3), "any one host may be lost"),
        ("aabb", (4, 3), "any one rank may be lost, but not host a with all its ranks"),
        ("aabbcc", (4, 2), "any 2 ranks may be lost at once, or any one host, but not any 2 hosts"),
    ],
)
def test_what_may_be_lost(hosts: str, code: tuple[int, int], said: str) -> None:
    placement = Placement.interleaved(*code, hosts) if len(hosts) > 1 else None
    assert said in survives(placement, tuple(hosts))


def test_a_script_without_protect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--steps', '3']\n")
    with pytest.raises(ConfigurationError, match=r"ended without a call of ecemb.protect\(\)"):
        survey(script, ["--steps", "3"], None)
    with pytest.raises(ConfigurationError, match="is not a file"):
        survey(tmp_path / "another.py", [], None)
    assert main(["check", str(script)]) == 1
    assert "give --ranks-per-host N" in capsys.readouterr().err
