"""The engines: each links one library's tables to the arena.

`contract` is the interface of an engine, with the code that all engines share and the check that tensors are
still in the arena; `internals` reads and wraps private parts of other libraries. `sparse` serves tables that
torch.optim updates by sparse gradients, `torchrec` with `fbgemm` TorchRec's tables, `collisions` its maps of
ids; `members` lists its classes. `discover` finds a model's tables, also for `ecemb.tables`; `device_image`
serves tables in another device's memory.
"""
