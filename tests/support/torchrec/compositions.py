"""Ways to nest TorchRec's optimizers: two deep around the dense ones, else one deep.

A composition is a name such as "clipping(warmup(dense))"; "all" is a `CombinedOptimizer` of both kinds.
TorchRec is imported only to build one.
"""

from __future__ import annotations

import itertools
from typing import Any

WRAPPERS = ("clipping", "warmup", "plain", "combined")
DEPTHS = {"dense": 3, "fused": 2, "all": 2}


def _name(chain: tuple[str, ...], inner: str) -> str:
    return "(".join((*chain, inner)) + ")" * len(chain)


COMPOSITIONS = [
    _name(chain, inner)
    for inner, depths in DEPTHS.items()
    for depth in range(depths)
    for chain in itertools.product(WRAPPERS, repeat=depth)
]


def compose(name: str, model: Any, dense: Any) -> Any:
    """An optimizer of all parameters of a model.

    Args:
        name: one of `COMPOSITIONS`. What it leaves out, the dense or the fused optimizer, stays beside it.
        model: a DistributedModelParallel.
        dense: the KeyedOptimizerWrapper of its dense parameters.
    """
    from torchrec.optim.keyed import CombinedOptimizer

    *chain, inner = name.rstrip(")").split("(")
    fused = model.fused_optimizer
    both: list[Any] = [("fused", fused), ("dense", dense)]
    found: Any = {"dense": dense, "fused": fused, "all": CombinedOptimizer(both)}[inner]
    for depth, wrapper in enumerate(reversed(chain)):
        found = _wrap(wrapper, found, depth)
    if inner == "all":
        return found
    return CombinedOptimizer([("around", found), ("beside", dense if inner == "fused" else fused)])


def _wrap(wrapper: str, inner: Any, depth: int) -> Any:
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    if wrapper == "clipping":
        return GradientClippingOptimizer(inner, clipping=GradientClipping.NORM, max_gradient=0.1)
    if wrapper == "warmup":
        stages = [WarmupStage(WarmupPolicy.LINEAR, 3, 0.1), WarmupStage(WarmupPolicy.CONSTANT, 90, 0.9)]
        return WarmupOptimizer(inner, stages, lr=0.2, param_name=f"__warmup_{depth}")
    return OptimizerWrapper(inner) if wrapper == "plain" else CombinedOptimizer([("inner", inner)])
