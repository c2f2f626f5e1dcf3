"""The adapters: each links one engine's tables to the arena.

`engine` is the contract. `sparse` serves torch.optim's sparse gradients, `torchrec` with `fbgemm`
TorchRec's tables; `discover` finds a model's tables, `live_tables` is the public view. `residence` notices
tensors that left the arena, `host_mirror` serves tables in another device's memory.
"""
