"""CPR: partial recovery, which loads only what failed and lets the others go on with what they have.

Follows Maeng et al., "CPR: Understanding and Improving Failure Tolerant Training for Deep Learning
Recommendation with Partial Recovery", MLSys 2021, arXiv 2011.02999.

What it says, as pure functions and in emulation:

- `job`: the training, its servers and failures.
- `overhead`: what failures and saves cost under full and under partial recovery, and which to choose.
- `pls`: the portion of lost samples, expected and counted.
- `emulation`: the same job event by event, many times.
- `setups`: the paper's settings, and its sweeps.
- `priority`: which rows to save more often (CPR-MFU, CPR-SSU, CPR-SCAR), and of which tables.

What trains, on real ranks and files, but for the last one:

- `controller`: the method: `Cpr`.
- `recovery`: partial recovery at a given interval, also a method: `PartialRecovery`.
- `plan`: who survived, and where all go on from.
- `living`: how a survivor's tables outlive the restart of its process.
- `saved`: one rank's files, crash-safe.
- `saving`: what a save takes, and when.
- `accesses`: how often rows of ecemb.nn are looked up, which their owners don't see.
- `saver`: what a shard has saved, and what it takes up of that.
- `servers`: N servers in one process, which save and fail in a real training by the last two.

In the modules' docstrings each parameter is marked *published* (the paper or its poster says it), *recalled*
(a formula or figure as remembered, not checked against the paper's text), *calibrated* (found so that a
published result comes out, which then is no evidence), *derived* (by our own arithmetic) or *chosen* (by us).
"""
