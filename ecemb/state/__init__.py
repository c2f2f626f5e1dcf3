"""All recovered state besides rows: replicated state, and rank state, which differs by rank.

`replicated` saves and restores replicated state: `walk` collects it, detects its changes, and refuses state
that is partitioned over ranks; `flatten` lays it out. `rank_state` saves and restores rank state, with
generators and `metric_states`. `data` keeps the position in the data. `serialize` converts both to bytes
without pickle. `optimizers` and `ddp_buckets` deal with PyTorch's optimizers and DistributedDataParallel.
Gradients are not saved, and `optimizers` refuses an update that would need them after a restart.
"""
