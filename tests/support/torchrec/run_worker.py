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
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor  # noqa: E402
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # noqa: E402
from torchrec import KeyedJaggedTensor  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.mc_embedding_modules import (  # noqa: E402
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # noqa: E402
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.modules.mc_modules import MCHManagedCollisionModule  # noqa: E402
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage  # noqa: E402

import ecemb  # noqa: E402
from ecemb.engines import contract  # noqa: E402
from ecemb.kernels import threads  # noqa: E402
from ecemb.memory.scan import arenas  # noqa: E402
from ecemb.net import rendezvous, staying, worker_exit  # noqa: E402
from ecemb.recovery import requester, throttle  # noqa: E402
from support.torchrec.runs import WHOLE_EVERY  # noqa: E402
from support.torchrec.stand_ins import collection_on_cpus, hash_on_cpus  # noqa: E402
from support.torchrec.trained_model import (  # noqa: E402
    HASHED,
    LONGEST,
    MANAGED,
    SHARDERS,
    Collections,
    Model,
)

BATCH = 6
OTHERS = {"weighted", "variable"}  # have batches of their own


class Training:
    """What a user's script has: a model under DistributedModelParallel, its optimizers, and batches."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self.setting = setting
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks // 2)
        torch.manual_seed(5)
        self.set_clock = hash_on_cpus()
        collections = Collections(setting["tables"], ranks // setting["groups"])
        self.features, self.rows, self.ids = collections.features, collections.rows, collections.ids
        given: dict[str, Any] = {
            "plan": ShardingPlan(collections.plan),
            "sharders": list(dict.fromkeys(SHARDERS.values())),
            "device": torch.device("cpu"),
        }
        if setting["groups"] > 1:
            size = ranks // setting["groups"]
            given |= {"world_size": ranks, "sharding_group_size": size, "global_pg": dist.group.WORLD}
        make = DistributedModelParallel if setting["groups"] == 1 else collection_on_cpus
        self.model: Any = make(Model(collections), **given)
        fused: Any = self.model.fused_optimizer
        dense: Any = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        )
        if setting["warmup"]:
            stages = [WarmupStage(WarmupPolicy.LINEAR, 3, 0.5), WarmupStage(WarmupPolicy.CONSTANT, 90, 0.9)]
            fused = WarmupOptimizer(fused, stages, lr=0.2)
            dense = WarmupOptimizer(dense, stages, lr=0.01)
            dense = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=0.1)
        self.optimizer = CombinedOptimizer([("fused", fused), ("dense", dense)])
        self.maps = {n: m for n, m in self.model.named_modules() if isinstance(m, MCHManagedCollisionModule)}
        if self.maps:  # their histories get the size for the first batch
            reset_on_cpu()
            with torch.no_grad():
                self.model(self.batch(999), self.others(999))
        self.losses: list[float] = []
        self.declare: Callable[[], None] = lambda: None
        self.synced: Callable[[], None] = lambda: None
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
            drawn = torch.randint(0, self.ids[name], (int(of_feature.sum()),), generator=draw)
            ids.append(drawn * (HASHED // self.ids[name]) if name.split("/")[0] in MANAGED else drawn)
        values = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
        weights = torch.rand(len(values), generator=draw) if weighted else None
        return KeyedJaggedTensor(names, values, weights, lengths=lengths, **more)

    def batches(self, steps: Iterable[int]) -> Iterator[KeyedJaggedTensor]:
        return (self.batch(step) for step in steps)

    def run(self, step: int, batches: Iterator[KeyedJaggedTensor]) -> None:
        """All that belongs into a step."""
        self.set_clock(step)
        if self.pipeline is not None:
            self.pipeline.progress(batches)
            return
        if step == self.setting["load"]:
            state = self.model.state_dict()
            for key, value in state.items():
                state[key] = halved(value)
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
        if self.setting["groups"] > 1 and step % 2:
            self.model.sync()
            self.synced()

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
        for name, module in self.maps.items():
            counters = ("_current_iter", "_last_eviction_iter", "_current_history_buffer_offset", "_evicted")
            found |= {f"{name}.{counter}": getattr(module, counter) for counter in counters}
            used = module._current_history_buffer_offset
            for key, history in {"ids": module._history_accumulator, **module._history_metadata}.items():
                found[f"{name}.{key}"] = history[:used].clone()
        return found | flat("optimizer", self.optimizer.state_dict()) | flat("loss", self.losses[-1:])


def reset_on_cpu() -> None:
    """Resets evicted rows, as FBGEMM's operator does, which row-wise Adagrad lacks on CPUs."""

    def reset(module: Any, pruned_indices: Tensor, *, logical_table_ids: Tensor, **_: Any) -> None:
        table = int(logical_table_ids)
        module.split_embedding_weights()[table][pruned_indices] = 0
        for state in module.split_optimizer_states()[table] if module.optimizer.name != "EXACT_SGD" else ():
            state[pruned_indices] = 0

    SplitTableBatchedEmbeddingBagsCodegen.reset_embedding_weight_momentum = reset


def count_evictions(folder: Path, killers: list[Killer]) -> None:
    """Appends to FOLDER/evictions.RANK, for each map that gives rows to other ids: the step, and how many.

    Once there are killers: not for the batch that gives histories their sizes.
    """
    update = MCHManagedCollisionModule._update_and_evict
    evict = BaseShardedManagedCollisionEmbeddingCollection._evict

    def counted(module: Any, *given: Any) -> None:
        unused = int((module._mch_sorted_raw_ids == module._delimiter).sum()) - 1  # the last is never used
        update(module, *given)
        if killers and (count := module._evicted_emb_indices.numel() - unused) > 0:
            with (folder / f"evictions.{dist.get_rank()}").open("a") as file:
                print(killers[0].step, count, file=file)

    def evicted(module: Any, evictions: dict[str, Tensor | None]) -> None:
        evict(module, evictions)
        for table, rows in evictions.items():
            if killers and rows is not None and table.startswith("hashed"):
                with (folder / f"reused.{dist.get_rank()}").open("a") as file:
                    print(killers[0].step, len(rows), file=file)
        for killer in killers if any(rows is not None for rows in evictions.values()) else ():
            killer.reach("evicted")

    MCHManagedCollisionModule._update_and_evict = counted
    BaseShardedManagedCollisionEmbeddingCollection._evict = evicted


def halved(value: Any) -> Any:
    """A copy of an entry of a state. That of a sharded tensor would take torch most of a training's time."""
    if isinstance(value, ShardedTensor):
        shards = [Shard(one.tensor.detach() * 0.5, one.metadata) for one in value.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, value.metadata(), process_group=value._process_group
        )
    copied = copy.deepcopy(value)
    for tensor in flat("", copied).values():
        tensor.mul_(0.5)
    return copied


def flat(name: str, value: Any) -> dict[str, Any]:
    """What lies in nested containers and in this rank's shards, by path. No copies."""
    if isinstance(value, dict):
        parts = [flat(f"{name}.{key}", one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [flat(f"{name}.{number}", one) for number, one in enumerate(value)]
    elif hasattr(value, "to_local"):
        parts = [flat(name, value.to_local())]
    elif hasattr(value, "local_shards"):
        shards = (getattr(shard, "tensor", shard) for shard in value.local_shards())
        parts = [flat(f"{name}[{i}]", shard) for i, shard in enumerate(shards)]
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
        time.sleep(0.001)


def main() -> None:
    folder = Path(sys.argv[1])
    setting = json.loads((folder / "setting.json").read_text())
    torch.set_num_threads(1)
    killers: list[Killer] = []
    if setting["protected"]:  # before methods of the model get ecemb's calls
        count_evictions(folder, killers)
    if setting["stays"]:  # however slow the machine is, a process that can come back is not replaced
        staying.AWAY_S = rendezvous._STUCK_S = rendezvous._PATIENCE_S = worker_exit.NEWS_S = 600.0
        ecemb.run(lambda _: train(folder, setting, killers))
    else:
        train(folder, setting, killers)


def train(folder: Path, setting: dict[str, Any], killers: list[Killer]) -> None:
    killers.clear()
    assert not [one for one in gc.get_objects() if type(one) is SplitTableBatchedEmbeddingBagsCodegen]
    if setting["protected"]:
        ecemb.init_process_group("gloo", job=setting["job"], arena_dir=folder / "arenas")
    else:
        dist.init_process_group("gloo")
    training = Training(setting)
    steps = setting["steps"]
    if setting["protected"]:
        if setting["rebuild"] == "background":  # of rows that are not waited for, only the first few come
            throttle.BUSY_NS, throttle.FLOOR_BYTES_PER_S, threads._LOOKS = 0, 1e-6, sys.maxsize
            os.environ[requester.POISON] = "1"
        n, k = setting["code"]
        contract._CHUNK_BYTES = 1000  # so that all rows of a table are several chunks
        guard = ecemb.protect(
            training.model,
            optimizers=training.optimizer,
            code=ecemb.Code(n=n, k=k),
            failure_domain="rank",
            resume=setting["resume"] or None,
            rebuild=setting["rebuild"],
        )
        with (folder / f"recoveries.{training.rank}").open("a") as file:
            print(guard.recovery.kind, guard.next_step, *sorted(guard.recovery.lost), file=file)
        training.declare = lambda: [guard.touch(table) for table in guard.tables] and None
        killers.append(killer := Killer(folder, training, setting["kills"]))
        training.synced = lambda: killer.reach("synced")
        batches = training.batches(range(guard.next_step, steps))
        for step in range(guard.next_step, steps):
            if setting["rebuild"] == "background" and step % WHOLE_EVERY == 0:
                guard.scrub()
            with guard.step() as one:
                killer.step = one.number
                training.run(step, batches)
                if step in setting["aborts"] and training.rank == 1:
                    one.abort()
                killer.reach("body")
            training.evaluate(step)
            if step == setting["save"]:
                guard.save(folder / "saved")
        (folder / f"rejoined.{training.rank}").write_text(str(guard.stats()["rejoined"]))
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
