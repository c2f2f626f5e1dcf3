"""Scripts that `python -m bench compare --script FILE.py` trains: the contract, and three that keep to it.

A script is a module, in a file anywhere, with three functions. All ranks call each of them, after the process
group is there:

    def build(job: Job) -> Training:
        '''Model and optimizers, on `job.device` (not on "meta"). Random generators start from the seed.'''

    def batch(job: Job, number: int) -> Any:
        '''This rank's batch of a step, on its device: of the same number it has to be the same again.'''

    def train(training: Training, batch: Any) -> None:
        '''One step: zero_grad, forward, backward, and all optimizers.'''

`Training` is `baselines.method.Training`: `model`, whose dense parameters are the same on all ranks after
each step; `optimizers`, all of them; `tables`, those that are sharded by hand, by key; `state`, other state
that differs by rank; `samples`, of all ranks in a step. Tables are those of `ecemb.nn` and of TorchRec, and
what is in `tables`. All that a step changes is in there, or in the generators of torch, numpy and python.

Must not know: methods, launches.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from baselines.method import Training


@dataclass(frozen=True)
class Job:
    """What a script is called with.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        device: Of the model and of batches.
        seed: Of what is drawn.
        settings: What --set has given.
    """

    rank: int
    ranks: int
    device: torch.device
    seed: int = 0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    def number(self, name: str, default: int) -> int:
        """A setting that is a whole number.

        Raises:
            ValueError: It isn't.
        """
        return int(self.settings.get(name, default))


class Script(Protocol):
    """A module that keeps to the contract."""

    def build(self, job: Job) -> Training: ...
    def batch(self, job: Job, number: int) -> Any: ...
    def train(self, training: Training, batch: Any) -> None: ...


class BadScript(Exception):
    """A script lacks a function of the contract; says which."""


def load(path: str) -> Script:
    """Imports the script in a file, which may import what lies beside it.

    Raises:
        BadScript: It lacks a function.
    """
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("compared_script", path)
    if spec is None or spec.loader is None:
        raise BadScript(f"--script {path} is no module of Python: its name ends with .py")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    missing = [name for name in ("build", "batch", "train") if not callable(getattr(module, name, None))]
    if missing:
        raise BadScript(
            f"--script {path} has no function {missing[0]}(): docs/guides/comparing.md has the contract"
        )
    return module
