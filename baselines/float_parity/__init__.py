"""Float parity: sums of rows at other ranks, kept up to date by the differences of every step.

Follows Liu & Xu, "Low-Overhead Resilience for Recommendation System Training Using Erasure Codes" (CMU
report), and ECRM (Liu, Kosaian & Rashmi, arXiv 2104.01981) with its successor ECRec (PVLDB 16(11), 2023).

Published: parity is linear in the rows, for any (n, k); numbers are float32; the server that has changed
rows sends the differences to those that keep parity; tables and their optimizer state are coded, the dense
network is copied; lost rows are solved for from what survives.

Chosen, where nothing is published or where it can't be the same:

- Coefficients for r >= 2 (`coefficients`), and their types, float64 among them.
- Parity is rotated over all ranks, as ecemb places it (`baselines.ring`): only the arithmetic differs.
- Trainings here are synchronous, and have no servers. So differences are sent at each step's end, and a rank
  goes on when all that it keeps parity of have come; the papers' are sent asynchronously and unacknowledged.
- All processes start again after a failure, so each rank's rows are kept once more, in memory that outlives
  them.
- What is neither row nor dense (generators, data position) is copied to r other ranks.
- Sums of squares that optimizers take the root of are raised to 0 when rounding has rebuilt them below it, as
  it does with rows that were hardly trained: else they soon were NaN.

What holds after any r ranks are lost with their memory:

- Their rows come back close, and not bit for bit. With float32 and r = 1 a row is off by about 1e-7 of its
  length at first, and the more the longer the training, like a random walk: 5e-7 after 1,000 steps and 1e-6
  after 4,000 (`drift`); by several times that with r = 2. With float64, rows in float32 and r = 1
  there was no difference, as long as all numbers under a parity are within 2^29 of one another, for twice the
  memory and the traffic.
- A number that is small beside others under its parity comes back as their rounding. In Adagrad's sums of
  squares, which begin at 0 and span many powers of ten, that is no small error: rows that were hardly trained
  take steps of another size afterwards, unless parity is float64 (`python -m bench compare`).
- Only the step that was cut off is run again.
- If only processes died, nothing is rebuilt, and all is bit-identical.

What is not covered: there is no transaction. If some ranks have taken a step over and others have not, then
what is rebuilt is off by whole updates, of other ranks' rows; ranks that have taken it over run it a second
time on their own rows; and a rank killed while it takes a step over keeps a mixture. The sums are recomputed
then, so that they are right for what there is. And one NaN or infinity in a row leaves NaN in the parity when
the row has long been mended, so that no other row under it can be rebuilt.

- `recovery`: the method: `FloatParity`.
- `live`: a rank's rows and parity while it trains.
- `wire`: differences on their way.
- `memory`: rows and parity outlive the process.
- `stripes`: rows as blocks, and what lost ones are sums of.
- `arithmetic`: what is done to numbers.
- `coefficients`: codes over the real numbers.
- `drift`: the same arithmetic in one process, to see what becomes of it.
"""

from .recovery import FloatParity, ParityPoisoned
from .stripes import ParityLost

__all__ = ["FloatParity", "ParityLost", "ParityPoisoned"]
