"""All recovered state besides rows: replicated state, and state that differs by rank.

`replicated` saves and restores the former: `walk` finds it and its changes, `flatten` lays it out, and
`partitioned` refuses what is no replica. `rank_state` saves and restores the latter, with `rng` and
`metric_states`. `batches` and `loaders` keep the position in the data. `serialize` converts both to bytes
without pickle. `optimizers` and `ddp_buckets` deal with PyTorch's optimizers and DistributedDataParallel.
Gradients are no state, and `carried_gradients` refuses an update that would need them after a restart.
"""
