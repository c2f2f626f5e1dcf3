"""One rank of a TorchRec training, run by torchrun, which may be asked to kill itself.

    torchrun … tests/support/torchrec/run_worker.py FOLDER

FOLDER/setting.json is what `runs.Setting` says. What the rank ends with is FOLDER/end.RANK.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchrec  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    EmainplaceModeDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn  # noqa: E402
from torch.distributed.optim import (  # noqa: E402
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed import sharding_plan as plans  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.fp_embeddingbag import (  # noqa: E402
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.modules.embedding_configs import DataType  # noqa: E402
from torchrec.modules.feature_processor_ import PositionWeightedModule  # noqa: E402
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage  # noqa: E402

import ecemb  # noqa: E402
from ecemb.adapters import engine  # noqa: E402
from ecemb.arena.scan import arenas  # noqa: E402

WIDTH, BATCH = 8, 6
OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "rowwise-adagrad": torchrec.optim.RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "averaging": None,  # by the sharder
}
DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


def shardings(number: int, ranks: int) -> dict[str, Any]:
    """Every sharding type, over other ranks for every `number`; two hosts are imagined."""
    hosts = ranks // 2
    return {
        "row_wise": plans.row_wise(),
        "table_wise": plans.table_wise(rank=number % ranks),
        "column_wise": plans.column_wise(ranks=[number % ranks, (number + 1) % ranks]),
        "table_row_wise": plans.table_row_wise(host_index=number % hosts),
        "table_column_wise": table_column_wise(number % hosts),
        "grid_shard": grid(hosts),
        "data_parallel": plans.data_parallel(),
    }


def table_column_wise(host: int) -> Any:
    """Columns split over the ranks of one host; torchrec's sharding plans have no function for it."""

    def sharding(parameter: Any, local_size: int, _: int, device_type: str, sharder: Any) -> Any:
        rows, width = parameter.shape[0], parameter.shape[1] // local_size
        shards = [([rows, width], [0, i * width], host * local_size + i) for i in range(local_size)]
        kind = plans.ShardingType.TABLE_COLUMN_WISE.value
        return plans._get_parameter_sharding(parameter, kind, shards, local_size, device_type, sharder)

    return sharding


def grid(hosts: int) -> Any:
    """As torchrec's grid_shard, which splits columns from a width of 256 on only."""

    def sharding(parameter: Any, local_size: int, _: int, device_type: str, sharder: Any) -> Any:
        rows, width = parameter.shape[0], parameter.shape[1] // hosts
        block = -(-rows // local_size)
        shards: list[Any] = []
        for host in range(hosts):
            for local in range(local_size):
                first = min(local * block, rows)
                size = [min(block, rows - first), width]
                shards.append((size, [first, host * width], host * local_size + local))
        kind = plans.ShardingType.GRID_SHARD.value
        return plans._get_parameter_sharding(parameter, kind, shards, local_size, device_type, sharder)

    return sharding


class Collections:
    """The collections of a model, before they are sharded.

    Attributes:
        modules: by the first word of their tables' names, and by more where tables of one must share that.
        features: by the same.
        plan: by path in the model.
        rows: by table.
    """

    def __init__(self, tables: list[str], ranks: int) -> None:
        self.modules, self.features = nn.ModuleDict(), dict[str, list[str]]()
        self.plan: dict[str, Any] = {}
        self.rows: dict[str, int] = {}
        for name in tables:
            kind, dtype, optimizer, _ = name.split("/")
            shared = {"fused": [optimizer], "variable": [dtype, optimizer]}.get(kind, [])
            self.features.setdefault("-".join([kind, *shared]), []).append(name)
        for key, names in self.features.items():
            self._add(key, names, ranks)

    def _add(self, key: str, names: list[str], ranks: int) -> None:
        kind = key.partition("-")[0]
        config = EmbeddingConfig if kind == "sequences" else EmbeddingBagConfig
        configs: list[Any] = []
        per_table: dict[str, Any] = {}
        for number, name in enumerate(names):
            self.rows[name] = 37 + len(self.rows) % 5  # not too few: FBGEMM needs rows on every rank
            _, dtype, _, sharding = name.split("/")
            table = name.replace("/", "_")
            per_table[table] = shardings(number, ranks)[sharding]
            configs.append(
                config(
                    name=table,
                    embedding_dim=WIDTH,
                    num_embeddings=self.rows[name],
                    feature_names=[name],
                    data_type=DTYPES[dtype],
                )
            )
        module = _collection(kind, configs, names)
        self.modules[key] = module
        plan = plans.construct_module_sharding_plan(
            module,
            per_table,
            sharder=SHARDERS[kind],
            local_size=ranks // 2,
            world_size=ranks,
            device_type="cpu",
        )
        if kind in ("fused", "averaged"):  # their parameters don't say which optimizer they have
            for one in plan.values():
                one.compute_kernel = "fused"
        self.plan[f"collections.{key}"] = plan


_AVERAGING = {
    "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    "learning_rate": 0.1,
    "emainplace_mode": EmainplaceModeDefinition(step_ema=2),
}
SHARDERS: dict[str, Any] = {
    "bags": (_bags := EmbeddingBagCollectionSharder(_AVERAGING)),  # for tables without another optimizer
    "averaged": _bags,
    "weighted": _bags,
    "variable": _bags,
    "sequences": EmbeddingCollectionSharder(),
    "processed": FeatureProcessedEmbeddingBagCollectionSharder(),
    "fused": FusedEmbeddingBagCollectionSharder(),
}
OTHERS = {"weighted", "variable"}  # have batches of their own
LONGEST = 3  # ids of a bag


def _collection(kind: str, configs: list[Any], names: list[str]) -> Any:
    meta = torch.device("meta")
    optimizers = [OPTIMIZERS[name.split("/")[2]] for name in names]
    if kind == "fused":
        return FusedEmbeddingBagCollection(configs, optimizers[0], {"lr": 0.1}, device=meta)
    if kind == "sequences":
        module: Any = EmbeddingCollection(device=meta, tables=configs)
        inner = module.embeddings
    else:
        weighted = kind in ("weighted", "processed")
        module = EmbeddingBagCollection(device=meta, tables=configs, is_weighted=weighted)
        inner = module.embedding_bags
    for number, (one, optimizer) in enumerate(zip(configs, optimizers, strict=True)):
        if optimizer is None:
            continue
        lr = 0.1 if kind == "variable" else 0.1 + 0.01 * number  # FBGEMM looks the former up at once
        apply_optimizer_in_backward(optimizer, inner[one.name].parameters(), {"lr": lr})
    if kind == "processed":
        processors: Any = {name: PositionWeightedModule(LONGEST) for name in names}
        return FeatureProcessedEmbeddingBagCollection(module, processors)
    return module


class Model(nn.Module):
    """Collections of embeddings under a dense layer."""

    def __init__(self, collections: Collections) -> None:
        super().__init__()
        self.features = collections.features
        self.collections = collections.modules
        self.over = nn.Linear(WIDTH * len(collections.rows), 1)

    def forward(
        self, batch: KeyedJaggedTensor, others: dict[str, KeyedJaggedTensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        parts: list[Tensor] = []
        for key, collection in self.collections.items():
            found = collection((others or {}).get(key, batch))
            if key != "sequences":
                parts.append(found.values().float())
                continue
            for name in self.features[key]:
                jagged = found[name]
                parts.append(
                    torch.segment_reduce(jagged.values().float(), "sum", lengths=jagged.lengths(), axis=0)
                )
        out = self.over(torch.cat(parts, dim=1))
        return out.square().mean(), out.detach()


class Training:
    """What a user's script has: a model under DistributedModelParallel, its optimizers, and batches."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting = setting
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks // 2)
        torch.manual_seed(5)
        collections = Collections(setting["tables"], ranks)
        self.features, self.rows = collections.features, collections.rows
        self.model = DistributedModelParallel(
            Model(collections),
            plan=ShardingPlan(collections.plan),
            sharders=list(dict.fromkeys(SHARDERS.values())),
            device=torch.device("cpu"),
        )
        fused: Any = self.model.fused_optimizer
        if setting["warmup"]:
            stages = [WarmupStage(WarmupPolicy.LINEAR, 3, 0.5), WarmupStage(WarmupPolicy.CONSTANT, 90, 0.9)]
            fused = WarmupOptimizer(fused, stages, lr=0.2)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        )
        self.optimizer = CombinedOptimizer([("fused", fused), ("dense", dense)])
        self.losses: list[float] = []
        self.declare: Callable[[], None] = lambda: None
        self.pipeline: Any = None
        if setting["pipeline"]:
            self.pipeline = TrainPipelineSparseDist(
                self.model, self.optimizer, torch.device("cpu"), execute_all_batches=True
            )

    def batch(self, step: int, part: int = 0) -> KeyedJaggedTensor:
        """Empty bags, repeated ids, and ids that no other batch has."""
        draw = torch.Generator().manual_seed(1_000_003 * step + 101 * part + self.rank)
        names = [name for name in self.rows if name.split("/")[0] not in OTHERS]
        return self._drawn(names, [BATCH] * len(names), draw)

    def others(self, step: int, part: int = 0) -> dict[str, KeyedJaggedTensor]:
        """Batches with weights, and with a number of bags for each feature, by collection."""
        draw = torch.Generator().manual_seed(1_000_003 * step + 101 * part + self.rank + 50)
        found: dict[str, KeyedJaggedTensor] = {}
        for key, names in self.features.items():
            if (kind := key.partition("-")[0]) not in OTHERS:
                continue
            if kind == "weighted":
                found[key] = self._drawn(names, [BATCH] * len(names), draw, weighted=True)
                continue
            sizes = [1 + (step + number) % BATCH for number in range(len(names))]
            bags = torch.stack([torch.arange(BATCH) % size for size in sizes])
            found[key] = self._drawn(
                names,
                sizes,
                draw,
                stride_per_key_per_rank=[[size] for size in sizes],
                inverse_indices=(names, bags),
            )
        return found

    def _drawn(
        self, names: list[str], sizes: list[int], draw: torch.Generator, weighted: bool = False, **more: Any
    ) -> KeyedJaggedTensor:
        lengths = torch.randint(0, LONGEST + 1, (sum(sizes),), generator=draw)
        ids: list[Tensor] = []
        for name, of_feature in zip(names, lengths.split(sizes), strict=True):
            ids.append(torch.randint(0, self.rows[name], (int(of_feature.sum()),), generator=draw))
        values = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
        weights = torch.rand(len(values), generator=draw) if weighted else None
        return KeyedJaggedTensor(names, values, weights, lengths=lengths, **more)

    def batches(self, steps: Iterable[int]) -> Iterator[KeyedJaggedTensor]:
        return (self.batch(step) for step in steps)

    def run(self, step: int, batches: Iterator[KeyedJaggedTensor]) -> None:
        """All that belongs into a step."""
        if self.pipeline is not None:
            self.pipeline.progress(batches)
            return
        if step == self.setting["load"]:
            state = copy.deepcopy(self.model.state_dict())
            for tensor in flat("", state).values():
                tensor.mul_(0.5)
            self.model.load_state_dict(state)
        if step == self.setting["write"]:
            self.declare()
            for key, value in self.model.state_dict().items():
                for tensor in flat(key, value).values() if hasattr(value, "local_shards") else ():
                    tensor.mul_(0.75)
        self.optimizer.zero_grad()
        for part in range(2 if step % 4 == 1 else 1):  # gradients accumulate in some steps
            loss, _ = self.model(self.batch(step, part), self.others(step, part))
            loss.backward()
            self.losses.append(loss.item())
        self.optimizer.step()

    def evaluate(self, step: int) -> None:
        """Between steps, which changes nothing."""
        if self.pipeline is None and "averaged" not in self.features:  # whose lookups count
            self.model.eval()
            with torch.no_grad():
                self.model(self.batch(step, 7), self.others(step, 7))
            self.model.train()

    def end(self) -> dict[str, Any]:
        """Everything that must be the same, flat."""
        found = flat("model", self.model.state_dict())
        found |= flat("fused", self.model.fused_optimizer.state_dict())
        return found | flat("optimizer", self.optimizer.state_dict()) | flat("loss", self.losses[-1:])


def flat(name: str, value: Any) -> dict[str, Any]:
    """What lies in nested containers and in this rank's shards, by path. No copies."""
    if isinstance(value, dict):
        parts = [flat(f"{name}.{key}", one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [flat(f"{name}.{number}", one) for number, one in enumerate(value)]
    elif hasattr(value, "local_shards"):
        parts = [flat(f"{name}[{i}]", shard.tensor) for i, shard in enumerate(value.local_shards())]
    else:
        return {name: value.detach() if isinstance(value, Tensor) else value}
    return {key: one for part in parts for key, one in part.items()}


class Killer:
    """Ends this process as the setting says, each time once."""

    def __init__(self, folder: Path, training: Training, kills: list[dict[str, Any]]) -> None:
        self.folder, self.rank, self.kills = folder, training.rank, kills
        self.step = -1
        kind = SplitTableBatchedEmbeddingBagsCodegen  # TorchRec doesn't register them as modules
        lookups = [module for module in gc.get_objects() if type(module) is kind]
        for number, module in enumerate(lookups):
            module.register_forward_hook(self._hook(number / len(lookups)))

    def _hook(self, part: float) -> Any:
        def after(_: Any, __: Any, output: Tensor) -> None:
            if output.requires_grad and not output.is_leaf:
                output.register_hook(lambda _: self.reach("backward", part))

        return after

    def reach(self, place: str, part: float = 1) -> None:
        for number, kill in enumerate(self.kills):
            if kill["step"] != self.step or kill["place"] != place or self.rank not in kill["ranks"]:
                continue
            mark = self.folder / f"killed.{number}.{self.rank}"
            if part < kill["part"] or mark.exists():
                continue
            mark.touch()
            if kill["wipe"]:
                for one in arenas(self.folder / "arenas"):
                    if one.header is not None and one.header.constants.rank == self.rank:
                        one.path.unlink()
            if len(kill["ranks"]) > 1:  # they meet, so that all die
                meet(self.folder, number, kill["ranks"])
            os.kill(os.getpid(), signal.SIGKILL)


def meet(folder: Path, number: int, ranks: list[int]) -> None:
    while not all((folder / f"killed.{number}.{rank}").exists() for rank in ranks):
        pass


def main() -> None:
    folder = Path(sys.argv[1])
    setting = json.loads((folder / "setting.json").read_text())
    torch.set_num_threads(1)
    if setting["protected"]:
        ecemb.init_process_group("gloo", job=setting["job"], arena_dir=folder / "arenas")
    else:
        dist.init_process_group("gloo")
    training = Training(setting)
    steps = setting["steps"]
    if setting["protected"]:
        n, k = setting["code"]
        engine._CHUNK_BYTES = 1000  # so that all rows of a table are several chunks
        guard = ecemb.protect(
            training.model,
            optimizers=training.optimizer,
            code=ecemb.Code(n=n, k=k),
            failure_domain="rank",
            abortable=bool(setting["aborts"]),
        )
        with (folder / f"recoveries.{training.rank}").open("a") as file:
            print(guard.recovery.kind, guard.next_step, *sorted(guard.recovery.lost), file=file)
        training.declare = lambda: [guard.touch(table) for table in guard.tables] and None
        killer = Killer(folder, training, setting["kills"])
        batches = training.batches(range(guard.next_step, steps))
        for step in range(guard.next_step, steps):
            with guard.step() as one:
                killer.step = one.number
                training.run(step, batches)
                if step in setting["aborts"] and training.rank == 1:
                    one.abort()
                killer.reach("body")
            training.evaluate(step)
        (folder / f"tables.{training.rank}").write_text("\n".join(guard.tables))
        end = training.end()
        guard.close()
    else:
        taken = [step for step in range(steps) if step not in setting["aborts"]]
        batches = training.batches(taken)
        for step in taken:
            training.run(step, batches)
        end = training.end()
    torch.save(end, folder / f"end.{training.rank}")
    dist.barrier()


if __name__ == "__main__":
    main()
