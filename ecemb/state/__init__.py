"""All recovered state besides rows: replicated state, and state that differs by rank.

`replicated` saves and restores the former: `walk` finds it and its changes, and refuses what is no replica;
`flatten` lays it out. `rank_state` saves and restores the latter, with generators and `metric_states`. `data`
keeps the position in the data. `serialize` converts both to bytes without pickle. `optimizers` and
`ddp_buckets` deal with PyTorch's optimizers and DistributedDataParallel. Gradients are no state, and
`optimizers` refuses an update that would need them after a restart.
"""
