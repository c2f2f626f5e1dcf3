"""FBGEMM's optimizers: the state that each keeps with a table's rows, and what else its updates depend on.

Owns the rule of each optimizer that ecemb protects. They change only rows that a step looks up, but for those
that overwrite all rows in some lookups, and say in which.

Nothing here imports fbgemm_gpu. Must not know: TorchRec's modules, buffers, journals.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import UnsupportedOptimizer


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of FBGEMM's optimizers changes tables.

    Attributes:
        states: the states of a row, in the order of `split_optimizer_states()`.
        by_row: those with one value for a row; the others have one for each value of the row.
        counts: whether updates depend on the number of lookups so far, training or not.
        mode: FBGEMM's options of the lookups that overwrite all rows; "" if none does.
        every: the options among these that say after how many lookups.
    """

    states: tuple[str, ...] = ()
    by_row: tuple[str, ...] = ()
    counts: bool = False
    mode: str = ""
    every: tuple[str, ...] = ()

    def overwrites_next(self, module: Any) -> bool:
        """Whether the next lookup overwrites all rows, as FBGEMM's module decides."""
        if not self.mode or not module.training:
            return False
        count = int(module.iter_cpu) or int(module.iter)
        return any((count + 1) % int(getattr(module, self.mode)[name]) == 0 for name in self.every)

    @property
    def why_in_steps(self) -> str:
        """Why its lookups belong into steps, if it counts them."""
        return "averages all rows in some of them" if self.mode else "updates rows by their number"


_FIRST, _BOTH = ("momentum1",), ("momentum1", "momentum2")
_COUNTERS = "prev_iter", "row_counter"

RULES: dict[str, Rule] = {
    "EXACT_SGD": Rule(),
    "EXACT_ROWWISE_ADAGRAD": Rule(_FIRST, by_row=_FIRST),
    "EXACT_ADAGRAD": Rule(_FIRST),
    "EMAINPLACE_ROWWISE_ADAGRAD": Rule(_FIRST, _FIRST, True, "_emainplace_mode", ("step_ema",)),
    "ENSEMBLE_ROWWISE_ADAGRAD": Rule(_BOTH, _FIRST, True, "_ensemble_mode", ("step_ema", "step_swap")),
    "ADAM": Rule(_BOTH, counts=True),
    "PARTIAL_ROWWISE_ADAM": Rule(_BOTH, by_row=("momentum2",), counts=True),
    "LAMB": Rule(_BOTH, counts=True),
    "PARTIAL_ROWWISE_LAMB": Rule(_BOTH, by_row=("momentum2",), counts=True),
}
"""By names of `EmbOptimType`."""


def rule_of(what: str, kind: str, module: Any) -> Rule:
    """The rule of an optimizer, with its options.

    Args:
        what: names the tables, for the message.
        kind: name of the optimizer.
        module: FBGEMM's, which has its options.

    Raises:
        UnsupportedOptimizer: ecemb doesn't know which rows it changes.
    """
    decays = "_used_rowwise_adagrad_with_global_weight_decay"
    if kind not in RULES or getattr(module, decays, False):
        how = f" with {decays}" if getattr(module, decays, False) else ""
        raise UnsupportedOptimizer(
            f"{what} is updated by FBGEMM's {kind}{how}, and ecemb doesn't know that it changes only the "
            f"rows that a step looks up: use one of {', '.join(RULES)} (docs/torchrec.md)"
        )
    rule = RULES[kind]
    more: tuple[str, ...] = ()
    if getattr(module, "_used_rowwise_adagrad_with_counter", False):
        more = _COUNTERS
    elif kind == "ADAM" and getattr(module, "use_rowwise_bias_correction", False):
        more = _COUNTERS[1:]
    if more:
        rule = dataclasses.replace(
            rule, states=(*rule.states, *more), by_row=(*rule.by_row, *more), counts=True
        )
    return rule
