"""What other people do to survive failures: each method built from its paper, for comparison.

A package for each method: `full` (full recovery from checkpoints), `snapshot` (copies in other machines'
memory), `float_parity` (sums of rows, kept up to date), `cpr` (partial recovery, its formulas and an
emulation), `check_n_run` (checkpoints of the rows that have changed, written in the background). Those that
train implement the contract in `method`. `live_copies` sends each step's rows to other ranks, for comparing
the cost of a step.

They stand on the public names of ecemb alone, as a user's own code would, and ecemb knows nothing of them.
"""
