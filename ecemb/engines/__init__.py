"""The engines: each links one library's tables to the arena.

`contract` is what an engine does, with what all engines share, and notices tensors that left the arena;
`internals` reads and wraps what other libraries don't promise. `sparse` serves torch.optim's sparse
gradients, `torchrec` with `fbgemm` TorchRec's tables, `collisions` its maps of ids, and `members` knows its
classes. `discover` finds a model's tables, also for `ecemb.tables`; `device_image` serves tables in another
device's memory.
"""
