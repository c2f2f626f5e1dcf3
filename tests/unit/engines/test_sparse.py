"""Tables under stock optimizers: captured rows are those that change, all other changes are refused.

Every refusal must name the table and the way out, and say so before anything is written where it can.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ecemb
from ecemb.coding.rows import Column, TableLayout
from ecemb.engines.contract import Hooks, Tied
from ecemb.engines.discover import Tables, modules_of
from ecemb.engines.sparse import SparseTables
from ecemb.errors import (
    LayoutMismatch,
    UndeclaredWrite,
    UnsupportedOptimizer,
    UnsupportedTable,
    UsageError,
)
from support.own_classes import Quotients, RowWise
from support.refusals import refused
from support.stepping import Stepping

ROWS, DIM = 12, 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(
        parameters, lr=0.5, lr_decay=0.01, initial_accumulator_value=0.25
    ),
    "sparse-adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.5),
}
STATES = {"sgd": (), "adagrad": ("sum",), "sparse-adam": ("exp_avg", "exp_avg_sq")}
pytestmark = pytest.mark.usefixtures("checked_sparse_tensors")
every_optimizer = pytest.mark.parametrize("kind", list(OPTIMIZERS))


class Watched(Stepping):
    """Tables in memory that lives here, and everything that they tell."""

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], *, fresh: bool = True
    ) -> None:
        self.captured: list[tuple[int, list[int]]] = []
        self.undeclared = 0
        self.engine = SparseTables(modules, optimizers)
        self.tables = Tables([self.engine])
        self.memory = [allocate(table.layout) for table in self.engine.tables]
        self.engine.place(stored(self.memory), fresh=fresh)
        self.tables.watch(Hooks(self._capture, lambda: self.is_open, self._on_undeclared))

    def rows(self, table: int = 0) -> NDArray[np.uint8]:
        """The bytes of every row, of the weight and its states together, copied."""
        return np.concatenate(self.memory[table], axis=1)

    def _capture(self, table: int, ids: NDArray[np.int64]) -> None:
        assert ids.dtype == np.int64 and ids.ndim == 1
        self.captured.append((table, np.unique(ids).tolist()))

    def _on_undeclared(self) -> None:
        self.undeclared += 1


def allocate(layout: TableLayout) -> list[NDArray[np.uint8]]:
    return [np.zeros((layout.rows, column.row_bytes), np.uint8) for column in layout.columns]


def stored(memory: Sequence[Sequence[NDArray[np.uint8]]]) -> Any:
    return [SimpleNamespace(columns=columns) for columns in memory]


def embedding(rows: int = ROWS, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Embedding:
    return nn.Embedding(rows, DIM, sparse=True, dtype=dtype, device=device)


def watch(kind: str = "sgd", module: nn.Module | None = None) -> tuple[Watched, nn.Module, Optimizer]:
    """One table, named "user", under one optimizer."""
    module = embedding() if module is None else module
    optimizer = OPTIMIZERS[kind]([module.weight])  # type: ignore[list-item]
    return Watched({"user": module}, [optimizer]), module, optimizer


def gradient(rows: Sequence[int], weight: torch.Tensor) -> torch.Tensor:
    """A sparse gradient, uncoalesced where rows repeat, no value of which is near zero."""
    values = torch.rand(len(rows), weight.shape[1]) + 0.5
    ids = torch.tensor(rows, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(ids, values.to(weight.dtype), weight.shape, check_invariants=True)


def differing(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> list[int]:
    return np.flatnonzero((before != after).any(axis=1)).tolist()


# --- what is captured ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_optimizer
def test_captured_rows_are_exactly_those_that_change(kind: str, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    modules = {"user": embedding(dtype=dtype), "item": embedding(5, dtype), "empty": embedding(0, dtype)}
    optimizer = OPTIMIZERS[kind]([module.weight for module in modules.values()])
    watched = Watched(modules, [optimizer])
    for _ in range(12):
        drawn: dict[int, list[int] | None] = {}
        for index, module in enumerate(modules.values()):
            rows = module.weight.shape[0]
            count = draw.choice([0, 1, 3, 2 * rows]) if rows else 0
            drawn[index] = None if draw.random() < 0.2 else [draw.randrange(rows) for _ in range(count)]
            ids = drawn[index]
            module.weight.grad = None if ids is None else gradient(ids, module.weight)
        before = [watched.rows(index) for index in drawn]
        watched.captured.clear()
        with watched.step():
            optimizer.step()
        expected = [(index, sorted(set(ids))) for index, ids in drawn.items() if ids]
        assert watched.captured == expected
        changed = {index: differing(before[index], watched.rows(index)) for index in drawn}
        assert [(index, ids) for index, ids in changed.items() if ids] == expected
    assert watched.undeclared == 0


def test_a_row_whose_gradient_is_zero_is_captured_all_the_same() -> None:
    watched, module, optimizer = watch()
    module.weight.grad = gradient([3, 1, 3], module.weight) * 0
    with watched.step():
        optimizer.step()
    assert watched.captured == [(0, [1, 3])]


def test_rows_are_captured_before_they_change_and_with_several_steps_each_time() -> None:
    watched, module, optimizer = watch()
    seen: list[bool] = []
    before = watched.rows()
    watched.engine._hooks.capture = lambda _, ids: seen.append((watched.rows() == before).all())
    for rows in ([1], [2], [1]):
        with watched.step():
            module.weight.grad = gradient(rows, module.weight)
            optimizer.step()
            before = watched.rows()
            module.weight.grad = gradient(rows, module.weight)
            optimizer.step()
        before = watched.rows()
    assert seen == [True] * 6


def test_dense_parameters_of_the_same_optimizer_need_no_declaration() -> None:
    table, dense = embedding(), nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD(
        [{"params": [table.weight]}, {"params": dense.parameters(), "momentum": 0.9, "weight_decay": 0.1}],
        lr=0.1,
    )
    watched = Watched({"user": table}, [optimizer])
    for _ in range(2):
        with watched.step():
            optimizer.zero_grad()
            dense(table(torch.tensor([1, 4, 4]))).sum().backward()
            optimizer.step()
    assert watched.captured == [(0, [1, 4])] * 2


def test_an_optimizer_without_tables_is_left_alone() -> None:
    dense = nn.Linear(2, 1)
    other = torch.optim.Adam(dense.parameters(), amsgrad=True)
    table = embedding()
    Watched({"user": table}, [OPTIMIZERS["sgd"]([table.weight]), other])
    dense(torch.ones(1, 2)).sum().backward()
    other.step(lambda: torch.tensor(0.0))  # outside of a step, with a closure
    other.load_state_dict(other.state_dict())


def test_a_table_without_an_optimizer_is_protected_too() -> None:
    table = embedding()
    watched = Watched({"user": table}, [])
    assert watched.tables.tables[0].layout.columns == (Column("weight", "float32", 4 * DIM),)
    with torch.no_grad():
        table.weight[3] = 1
    with refused(UndeclaredWrite, "'user'", "guard.touch"), watched.step():
        pass


def test_learning_rate_schedules_are_fine() -> None:
    watched, module, optimizer = watch()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        module.weight.grad = gradient([1, 5], module.weight)
        with watched.step():
            optimizer.step(closure=None)
        schedule.step()
    assert watched.captured == [(0, [1, 5])] * 2


# --- equal to training without ecemb ------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "build", [nn.Embedding, nn.EmbeddingBag, ecemb.nn.ShardedEmbedding, ecemb.nn.ShardedEmbeddingBag]
)
@every_optimizer
def test_training_in_place_equals_training_without(
    kind: str, build: Callable[..., nn.Module], device: str, seed: int
) -> None:
    options = {"sparse": True} if build in (nn.Embedding, nn.EmbeddingBag) else {}
    outcomes = []
    for protected in (False, True):
        torch.manual_seed(seed)
        table = build(ROWS, DIM, device=device if protected else "cpu", **options)
        optimizer = OPTIMIZERS[kind]([table.weight])
        if protected:
            watched = Watched({"user": table}, [optimizer])
        losses = []
        for _ in range(6):
            ids = torch.randint(ROWS, (2, 4))
            optimizer.zero_grad()
            loss = table(ids).square().sum()
            loss.backward()
            if protected:
                with watched.step():
                    optimizer.step()
            else:
                optimizer.step()
            losses.append(loss.item())
        outcomes.append((losses, table.weight.detach().clone(), copy.deepcopy(optimizer.state_dict())))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1].view(torch.uint8), outcomes[1][1].view(torch.uint8))
    assert_same_state(outcomes[0][2], outcomes[1][2])
    columns = [table.weight.detach()] + [optimizer.state[table.weight][name] for name in STATES[kind]]
    for stored, column in zip(watched.memory[0], columns, strict=True):
        assert stored.tobytes() == column.numpy().tobytes()


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Optimizers' state_dicts are equal bit for bit, with values of the same types; {} is as good as none."""
    assert one["param_groups"] == other["param_groups"]
    states, others = ({key: state for key, state in d["state"].items() if state} for d in (one, other))
    assert states.keys() == others.keys()
    for key, state in states.items():
        assert set(state) == set(others[key])
        for name, value in state.items():
            assert type(value) is type(others[key][name])
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(others[key][name]))


# --- placing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_optimizer
def test_the_layout_has_a_column_for_each_state(kind: str, dtype: torch.dtype) -> None:
    watched, _, _ = watch(kind, embedding(dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    columns = tuple(Column(column, name, DIM * dtype.itemsize) for column in ("weight", *STATES[kind]))
    assert watched.tables.tables[0].layout == TableLayout("user", ROWS, columns)


@pytest.mark.parametrize("steps", [0, 3])
@every_optimizer
def test_a_real_table_keeps_its_values_and_what_was_trained_before(kind: str, steps: int) -> None:
    module = embedding()
    parameter = module.weight
    optimizer = OPTIMIZERS[kind]([parameter])
    for _ in range(steps):
        parameter.grad = gradient([1, 2, 2], parameter)
        optimizer.step()
    weight, state = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())
    watched = Watched({"user": module}, [optimizer])
    assert module.weight is parameter
    assert torch.equal(parameter, weight)
    assert watched.memory[0][0].tobytes() == weight.numpy().tobytes()
    if kind == "sparse-adam" and not steps:  # it would make this in its first step
        zeros = torch.zeros_like(weight)
        state["state"] = {0: {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros}}
    assert_same_state(state, optimizer.state_dict())


@every_optimizer
def test_a_meta_table_is_initialised_in_the_memory_as_a_real_one_would_be(kind: str) -> None:
    torch.manual_seed(5)
    expected = embedding().weight.detach().clone()
    module = embedding(device="meta")
    parameter = module.weight
    optimizer = OPTIMIZERS[kind]([parameter])
    torch.manual_seed(5)
    watched = Watched({"user": module}, [optimizer])
    assert module.weight is parameter and not parameter.is_meta and parameter.requires_grad
    assert torch.equal(parameter, expected)
    assert watched.memory[0][0].tobytes() == expected.numpy().tobytes()
    if kind == "adagrad":
        assert (optimizer.state[parameter]["sum"] == 0.25).all()
        assert (watched.memory[0][1].view(np.float32) == 0.25).all()
    if kind == "sparse-adam":
        assert optimizer.state[parameter]["step"] == 0
        assert not watched.memory[0][1].any() and not watched.memory[0][2].any()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@every_optimizer
def test_memory_that_holds_a_table_is_pointed_to_and_not_written(kind: str, device: str, seed: int) -> None:
    torch.manual_seed(seed)
    first, module, optimizer = watch(kind)
    for _ in range(2):
        module.weight.grad = gradient([0, 7, 7], module.weight)
        with first.step():
            optimizer.step()
    scalars = first.engine.scalars()
    held = first.rows()

    again = embedding(device=device)
    parameter = again.weight
    optimizer_again = OPTIMIZERS[kind]([parameter])
    generator = torch.get_rng_state()
    tables = SparseTables({"user": again}, [optimizer_again])
    tables.place(stored(first.memory), fresh=False)
    tables.set_state({"scalars": scalars, "options": tables.options()}, {})
    assert torch.equal(torch.get_rng_state(), generator)
    assert (first.rows() == held).all()
    assert again.weight is parameter
    assert torch.equal(parameter, module.weight)
    assert_same_state(optimizer.state_dict(), optimizer_again.state_dict())
    tables.unwatch()

    first.tables.unwatch()  # one more step of the second gives what one of the first would
    replica = copy.deepcopy(module)
    replica_optimizer = OPTIMIZERS[kind]([replica.weight])
    replica_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    replica.weight.grad = gradient([7, 8], parameter)
    parameter.grad = replica.weight.grad.clone()
    replica_optimizer.step()
    optimizer_again.step()
    assert torch.equal(parameter, replica.weight)


def test_scalars_are_what_is_not_per_row() -> None:
    modules = {"a": embedding(), "b": embedding(), "c": embedding(), "d": embedding()}
    optimizers = [
        OPTIMIZERS[kind]([modules[name].weight]) for name, kind in zip("abc", OPTIMIZERS, strict=True)
    ]
    watched = Watched(modules, optimizers)
    for module in modules.values():
        module.weight.grad = gradient([1], module.weight)
    with watched.step():
        for optimizer in optimizers:
            optimizer.step()
    assert watched.engine.scalars() == {"a": {}, "b": {"step": torch.tensor(1.0)}, "c": {"step": 1}, "d": {}}
    then = {"a": {}, "b": {"step": torch.tensor(7.0)}, "c": {"step": 7}, "d": {}}
    watched.engine.set_state({"scalars": then, "options": watched.engine.options()}, {})
    assert optimizers[1].state[modules["b"].weight]["step"] == 7
    assert optimizers[2].state[modules["c"].weight]["step"] == 7
    with watched.step():
        pass


def test_a_group_that_a_restart_would_not_have_is_refused() -> None:
    watched, _, optimizer = watch()
    watched.engine.state()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.param_groups[1]["params"].clear()
    with refused(LayoutMismatch, "groups of SGD has changed", "1 before, 2 now", "before ecemb.protect()"):
        watched.engine.state()


def test_what_an_undone_step_added_is_removed() -> None:
    watched, module, optimizer = watch("sparse-adam")
    kept = copy.deepcopy(watched.engine.state())
    optimizer.state[module.weight]["seen"] = 1
    optimizer.param_groups[0]["boost"] = 2.0
    optimizer.param_groups[0]["lr"] = 0.25
    watched.engine.set_state(kept, {})
    assert watched.engine.state() == kept
    assert set(optimizer.state[module.weight]) == {"step", *STATES["sparse-adam"]}
    assert "boost" not in optimizer.param_groups[0] and optimizer.param_groups[0]["lr"] == 0.5


# --- tables that are refused --------------------------------------------------------------------


class Around(nn.Module):
    """A module of the user's own, with rows and an unknown lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Embedding(3, 3, sparse=True))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Embedding(3, 2), ("sparse=False", "sparse=True")),
        (nn.EmbeddingBag(3, 2), ("sparse=False", "sparse=True")),
        (nn.Embedding(3, 2, sparse=True, max_norm=1.5), ("max_norm=1.5", "without max_norm")),
        (nn.EmbeddingBag(3, 2, sparse=True, max_norm=1.5), ("max_norm=1.5", "without max_norm")),
        (nn.LayerNorm(3), ("LayerNorm", "nn.EmbeddingBag")),
        (nn.Linear(3, 2), ("Linear", "only the rows in a sparse gradient", "nn.EmbeddingBag")),
        (nn.ReLU(), ("ReLU", "nn.EmbeddingBag")),
        (Around(), ("Around", "not the module around it")),
        (nn.Parameter(torch.zeros(3, 2)), ("is a Parameter", "nn.EmbeddingBag")),
        (parametrized(), ("weight", "parametrization")),
    ],
    ids=[
        *("dense", "dense bag", "max_norm", "max_norm bag", "vector", "linear", "no weight", "around"),
        *("parameter", "parametrized"),
    ],
)
def test_tables_that_cannot_be_protected(module: nn.Module, words: tuple[str, ...]) -> None:
    with refused(UnsupportedTable, "'user'", *words):
        SparseTables({"user": module}, [])


def test_weights_that_two_tables_share() -> None:
    one, other = embedding(), embedding()
    other.weight = one.weight
    for second in (one, other):
        with refused(UnsupportedTable, "'user'", "'item'", "share", "once"):
            SparseTables({"user": one, "item": second}, [])


# --- optimizers that are refused ----------------------------------------------------------------


class OwnSGD(torch.optim.SGD):
    """May do anything."""


@pytest.mark.parametrize(
    "build", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adadelta, OwnSGD]
)
def test_unknown_optimizers(build: Callable[..., Optimizer]) -> None:
    table = embedding()
    with refused(UnsupportedOptimizer, "'user'", build.__name__, "SGD, Adagrad, SparseAdam"):
        SparseTables({"user": table}, [build([table.weight], lr=0.1)])


OPTIONS = [(torch.optim.SGD, "momentum"), (torch.optim.SGD, "weight_decay")]
OPTIONS.append((torch.optim.Adagrad, "weight_decay"))


@pytest.mark.parametrize(("build", "option"), OPTIONS)
def test_options_that_change_untouched_rows(build: Callable[..., Optimizer], option: str) -> None:
    table = embedding()
    words = ("'user'", build.__name__, f"{option}=0.5", f"set {option}=0", "group")
    with refused(UnsupportedOptimizer, *words):
        SparseTables({"user": table}, [build([table.weight], lr=0.1, **{option: 0.5})])
    optimizer = build([table.weight], lr=0.1)
    watched = Watched({"user": table}, [optimizer])
    optimizer.param_groups[0][option] = 0.5  # later
    table.weight.grad = gradient([1], table.weight)
    before = watched.rows()
    with refused(UnsupportedOptimizer, *words), watched.step():
        optimizer.step()
    assert (watched.rows() == before).all()


@pytest.mark.parametrize("kinds", [("sgd", "sgd"), ("adagrad", "sgd")])
def test_one_parameter_in_two_optimizers(kinds: tuple[str, str]) -> None:
    table = embedding()
    optimizers = [OPTIMIZERS[kind]([table.weight]) for kind in kinds]
    with refused(UnsupportedOptimizer, "two of the optimizers=", str((ROWS, DIM)), "to one"):
        SparseTables({"user": table}, optimizers)


def test_a_class_is_protected_at_the_callers_word() -> None:
    """Of optimizers, if it says so itself; of tables, where a parameter is named."""
    table = Quotients()
    weights = {"quotient": table.quotient, "remainder": table.remainder}
    modules, optimizer = modules_of(weights), RowWise(weights.values())
    watched = Watched(modules, [optimizer])
    assert [one.row_bytes for one in watched.tables.tables[1].layout.columns] == [4 * DIM, 4]
    before = watched.rows(1)
    with watched.step():
        table(torch.tensor([1, 5, 4])).sum().backward()
        optimizer.step()
    assert watched.captured == [(0, [0, 1]), (1, [1, 2])]
    assert np.flatnonzero((before != watched.rows(1)).any(1)).tolist() == [1, 2]
    assert watched.engine.scalars() == {"quotient": {"step": 1}, "remainder": {"step": 1}}
    kept = watched.engine.tensors(1)["moment"]
    assert kept.data_ptr() == optimizer.state[table.remainder]["moment"].data_ptr()


def test_a_class_that_does_not_say_so_is_refused() -> None:
    class Heir(RowWise):
        """Its parent's word does not bind it."""

    class Odd(RowWise):
        ecemb_row_state = "moment"  # pyright: ignore[reportAssignmentType]

    weight = Quotients().remainder
    for kind, words in (
        (Heir, ("Heir.ecemb_row_state = (...)", "'r'")),
        (Odd, ("Odd.ecemb_row_state is", "'moment'")),
    ):
        with refused(UnsupportedOptimizer, *words):
            SparseTables(modules_of({"r": weight}), [kind([weight])])
    other = RowWise([weight])
    other.state[weight]["moment"] = torch.zeros(2)
    with refused(UnsupportedOptimizer, "RowWise", "'moment'", "3 rows", "table 'r'"):
        SparseTables(modules_of({"r": weight}), [other])


@every_optimizer
def test_a_closure_is_called_once_before_rows_are_captured(kind: str) -> None:
    watched, module, optimizer = watch(kind)
    plain, other, alone = watch(kind)
    with torch.no_grad():
        other.weight.copy_(module.weight)
    plain.tables.mark_clean()
    calls: list[list[int]] = []

    def closure(rows: list[int], loss: float) -> float:
        assert torch.is_grad_enabled()
        calls.append(rows)
        module.weight.grad = gradient(rows, module.weight)
        return loss

    for rows, give in (([1, 5], "by place"), ([2], "by name")):
        with watched.step(), torch.no_grad():
            call = partial(closure, rows, len(rows) / 2)
            told = optimizer.step(call) if give == "by place" else optimizer.step(closure=call)
        other.weight.grad = module.weight.grad.clone()
        with plain.step():
            alone.step()
        assert told == len(rows) / 2
        assert (watched.rows() == plain.rows()).all()
    assert calls == [[1, 5], [2]]
    assert watched.captured == plain.captured == [(0, [1, 5]), (0, [2])]


# --- changes that nobody declared ---------------------------------------------------------------


@every_optimizer
def test_a_step_of_the_optimizer_outside_of_a_step(kind: str) -> None:
    watched, module, optimizer = watch(kind)
    before = watched.rows()
    module.weight.grad = gradient([1], module.weight)
    with refused(UsageError, type(optimizer).__name__, "outside of a step", "with guard.step():"):
        optimizer.step()
    assert (watched.rows() == before).all()
    assert watched.captured == [] and watched.undeclared == 0


def test_a_dense_gradient() -> None:
    watched, module, optimizer = watch()
    before = watched.rows()
    module.weight.square().sum().backward()
    with refused(UndeclaredWrite, "'user'", "dense gradient", "sparse=True"), watched.step():
        optimizer.step()
    assert (watched.rows() == before).all()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "index": lambda tensor: tensor.__setitem__(3, 1.0),
    "whole": lambda tensor: tensor.fill_(1.0),
    "view": lambda tensor: tensor[2:4].view(-1).add_(1.0),
    "detached": lambda tensor: tensor.detach().mul_(2.0),
}


@pytest.mark.parametrize("write", list(WRITES))
@pytest.mark.parametrize("what", ["weight", "state"])
def test_a_write_in_place(what: str, write: str) -> None:
    for between, mode in ((True, torch.no_grad), (False, torch.no_grad), (False, torch.inference_mode)):
        watched, module, optimizer = watch("adagrad")
        module.weight.grad = gradient([1], module.weight)
        with watched.step():
            optimizer.step()

        def change() -> None:
            tensor = module.weight if what == "weight" else optimizer.state[module.weight]["sum"]  # noqa: B023
            with mode():  # noqa: B023
                WRITES[write](tensor)

        if between:
            change()
        words = ("'user'", "in place", "guard.touch('user', rows)", "Restart")
        with refused(UndeclaredWrite, *words), watched.step():
            if not between:
                change()
        assert watched.undeclared == 1


def test_a_write_in_place_before_the_optimizers_step_is_noticed_there() -> None:
    watched, module, optimizer = watch()
    module.weight.grad = gradient([1], module.weight)
    with refused(UndeclaredWrite, "'user'", "guard.touch('user', rows)"), watched.step():
        with torch.no_grad():
            module.weight[2] = 0
        optimizer.step()
        raise AssertionError("the optimizer took its step")
    assert watched.undeclared == 1 and watched.captured == []
    watched.tables.mark_clean()  # after an undo, everything is as it should be
    with watched.step():
        optimizer.step()


def replace_data(module: nn.Module, optimizer: Optimizer) -> None:
    module.weight.data = module.weight.data.clone()


def replace_parameter(module: nn.Module, optimizer: Optimizer) -> None:
    module.weight = nn.Parameter(module.weight.detach().clone())


def cast(module: nn.Module, optimizer: Optimizer) -> None:
    module.double()


def replace_state(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[module.weight]["sum"] = optimizer.state[module.weight]["sum"].clone()


def drop_state(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize(
    "change", [replace_data, replace_parameter, cast, replace_state, drop_state], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("between", [True, False])
def test_storage_that_is_replaced(
    change: Callable[[nn.Module, Optimizer], None], between: bool, seed: int
) -> None:
    watched, module, optimizer = watch("adagrad")
    if between:
        change(module, optimizer)
    words = ("'user'", "are not the protected ones", "before ecemb.protect()")
    with refused(UndeclaredWrite, *words), watched.step():
        if not between:
            change(module, optimizer)


def test_loading_a_model_outside_of_a_step() -> None:
    watched, module, _ = watch()
    before = watched.rows()
    values = {"table.weight": torch.ones(ROWS, DIM)}
    for assign in (False, True):
        with refused(UndeclaredWrite, "'user'", "outside of a step", "before ecemb.protect()"):
            nn.ModuleDict({"table": module}).load_state_dict(values, assign=assign)
    assert (watched.rows() == before).all() and watched.undeclared == 0
    with watched.step():
        pass


def test_loading_a_model_in_a_step_declares_every_row() -> None:
    watched, module, optimizer = watch()
    values = torch.rand(ROWS, DIM)
    with watched.step():
        module.load_state_dict({"weight": values})
        module.weight.grad = gradient([2], module.weight)
        optimizer.step()
    assert watched.captured == [(0, list(range(ROWS))), (0, [2])]
    with watched.step():
        pass
    changed = np.flatnonzero((watched.memory[0][0] != values.numpy().view(np.uint8)).any(axis=1))
    assert changed.tolist() == [2]
    assert watched.undeclared == 0


def test_loading_a_model_by_assignment_in_a_step() -> None:
    watched, module, _ = watch()
    with refused(UndeclaredWrite, "'user'", "assign=True", "before ecemb.protect()"), watched.step():
        module.load_state_dict({"weight": torch.ones(ROWS, DIM)}, assign=True)


@every_optimizer
def test_loading_an_optimizer(kind: str) -> None:
    watched, _, optimizer = watch(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    before = watched.rows()
    words = (f"{type(optimizer).__name__}.load_state_dict()", "'user'", "before ecemb.protect()")
    with refused(UndeclaredWrite, *words):
        optimizer.load_state_dict(saved)
    with watched.step(), refused(UndeclaredWrite, *words):
        optimizer.load_state_dict(saved)
    assert (watched.rows() == before).all()


def other_rows(parameter: nn.Parameter) -> None:
    parameter.grad = gradient([7, 8], parameter)


def more_rows(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad + gradient([7], parameter)


def rows_in_place(parameter: nn.Parameter) -> None:
    parameter.grad._indices().add_(1)


def rows_in_the_same_memory(parameter: nn.Parameter) -> None:
    parameter.grad = None
    parameter.grad = gradient([7, 8], parameter)


def no_rows(parameter: nn.Parameter) -> None:
    parameter.grad = None


def with_hook(
    kind: str, register: str, hook: Callable[[nn.Parameter], None], first: bool
) -> tuple[Watched, nn.Module, Optimizer]:
    """A watched table whose optimizer has a hook that was registered first, or after ecemb's."""
    module = embedding()
    optimizer = OPTIMIZERS[kind]([module.weight])  # type: ignore[list-item]

    def add() -> None:
        getattr(optimizer, f"register_step_{register}_hook")(lambda *_: hook(module.weight))

    if first:
        add()
    watched = Watched({"user": module}, [optimizer])
    if not first:
        add()
    module.weight.grad = gradient([1, 2], module.weight)
    return watched, module, optimizer


hooked = pytest.mark.parametrize("first", [True, False])


@hooked
@pytest.mark.parametrize(
    ("change", "captured"),
    [
        (other_rows, [7, 8]),
        (more_rows, [1, 2, 7]),
        (rows_in_place, [2, 3]),
        (rows_in_the_same_memory, [7, 8]),
        (no_rows, []),
    ],
)
def test_a_hook_may_change_the_gradient(
    change: Callable[[nn.Parameter], None], captured: list[int], first: bool
) -> None:
    watched, _, optimizer = with_hook("sgd", "pre", change, first)
    before = watched.rows()
    with watched.step():
        optimizer.step()
    assert differing(before, watched.rows()) == captured and watched.undeclared == 0
    assert watched.captured == ([(0, captured)] if captured else [])


def write(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[5] = 0


@hooked
@pytest.mark.parametrize("register", ["pre", "post"])
def test_what_a_hook_writes_is_not_the_optimizers(register: str, first: bool) -> None:
    watched, _, optimizer = with_hook("adagrad", register, write, first)
    with refused(UndeclaredWrite, "'user'", "guard.touch('user', rows)"), watched.step():
        optimizer.step()
    assert watched.undeclared == 1


@hooked
@pytest.mark.parametrize("register", ["pre", "post"])
def test_a_hook_may_write_what_it_has_declared(register: str, first: bool) -> None:
    def declare_and_write(parameter: nn.Parameter) -> None:
        watched.tables.touch("user", torch.tensor([5]))
        write(parameter)

    watched, _, optimizer = with_hook("adagrad", register, declare_and_write, first)
    for _ in range(2):
        with watched.step():
            optimizer.step()
    assert watched.undeclared == 0 and (0, [5]) in watched.captured


def test_hooks_end_with_the_watch_or_with_the_optimizer() -> None:
    everywhere = {*_global_optimizer_pre_hooks}
    watched, _, optimizer = watch()
    watched.tables.unwatch()
    watched.tables.unwatch()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert {*_global_optimizer_pre_hooks} <= everywhere
    watched, _, optimizer = watch()
    del watched, _, optimizer
    gc.collect()
    assert {*_global_optimizer_pre_hooks} <= everywhere


def test_an_optimizer_without_its_hooks_takes_no_step() -> None:
    watched, module, optimizer = watch()
    optimizer._optimizer_step_post_hooks.clear()
    module.weight.grad = gradient([1, 2], module.weight)
    before = watched.rows()
    with refused(UsageError, "hooks of SGD were removed"), watched.step():
        optimizer.step()
    assert differing(before, watched.rows()) == []


# --- declared by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_rows_of_any_shape_and_order_can_be_touched(dtype: torch.dtype) -> None:
    watched, module, _ = watch()
    with watched.step():
        watched.tables.touch("user", torch.tensor([[5, 2], [5, 0]], dtype=dtype))
        with torch.no_grad():
            module.weight[torch.tensor([0, 2, 5])] = 3.0
        watched.tables.touch("user", torch.tensor([], dtype=dtype))
    assert watched.captured[0] == (0, [0, 2, 5])
    assert all(ids == [] for _, ids in watched.captured[1:])
    with watched.step():
        pass
    assert watched.undeclared == 0


def test_touches_and_writes_and_optimizer_steps_in_turn() -> None:
    watched, module, optimizer = watch("adagrad")
    with watched.step():
        for row in (1, 2):
            watched.tables.touch("user", torch.tensor([row]))
            with torch.no_grad():
                module.weight[row] = row
                optimizer.state[module.weight]["sum"][row] = 0
        module.weight.grad = gradient([2, 3], module.weight)
        optimizer.step()
        watched.tables.touch("user", torch.tensor([4]))
        with torch.no_grad():
            module.weight[4] = 4
    assert watched.captured == [(0, [1]), (0, [2]), (0, [2, 3]), (0, [4])]
    with torch.no_grad():  # the declaration ended with the step
        module.weight[4] = 5
    with refused(UndeclaredWrite, "'user'"), watched.step():
        pass


def test_a_touch_does_not_hide_a_write_before_it_or_to_another_table() -> None:
    modules = {"user": embedding(), "item": embedding()}
    watched = Watched(modules, [])
    with refused(UndeclaredWrite, "'user'"), watched.step():
        with torch.no_grad():
            modules["user"].weight[1] = 0
        watched.tables.touch("user", torch.tensor([1]))
    watched = Watched(modules, [])
    with refused(UndeclaredWrite, "'item'"), watched.step():
        watched.tables.touch("user", torch.tensor([1]))
        with torch.no_grad():
            modules["item"].weight[1] = 0
    assert watched.undeclared == 1


@pytest.mark.parametrize("rows", [[-1], [0, ROWS], [3, -5, 40]])
def test_rows_that_the_shard_does_not_have(rows: list[int]) -> None:
    watched, _, _ = watch()
    words = ("'user'", f"0..{ROWS - 1}", f"{min(rows)}..{max(rows)}", "local shard")
    with watched.step(), refused(UsageError, *words):
        watched.tables.touch("user", torch.tensor(rows))
    assert watched.captured == []


def test_a_shard_without_rows_has_none_to_touch() -> None:
    watched = Watched({"user": embedding(0)}, [])
    with watched.step():
        watched.tables.touch("user", torch.tensor([], dtype=torch.int64))
        with refused(UsageError, "'user'"):
            watched.tables.touch("user", torch.tensor([0]))


def test_a_write_of_a_whole_table_is_declared_where_it_has_no_rows() -> None:
    """torch counts a write of no rows as well."""
    module = embedding(0)
    watched = Watched({"user": module}, [])
    with watched.step(), torch.no_grad():
        watched.tables.touch("user")
        module.weight.mul_(0.5)
    with watched.step():
        module.load_state_dict(module.state_dict())


def test_touching_an_unknown_table_or_outside_of_a_step() -> None:
    watched, _, _ = watch()
    with refused(UsageError, "'user'", "with guard.step():"):
        watched.tables.touch("user", torch.tensor([1]))
    with watched.step(), refused(UsageError, "'users'", "['user']"):
        watched.tables.touch("users", torch.tensor([1]))


@every_optimizer
def test_without_hooks_everything_is_free_again(kind: str) -> None:
    watched, module, optimizer = watch(kind)
    watched.tables.unwatch()
    module.weight.grad = gradient([1], module.weight)
    optimizer.step()
    module.load_state_dict({"weight": torch.ones(ROWS, DIM)})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert watched.captured == []


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_free(way: Callable[[nn.Module], nn.Module]) -> None:
    """As the best model so far, which is loaded into later, or is saved whole."""
    watched, module, _ = watch()
    model = nn.ModuleDict({"table": module})
    copied = way(way(model))
    copied.load_state_dict({"table.weight": torch.ones(ROWS, DIM)})
    assert torch.equal(copied["table"].weight, torch.ones(ROWS, DIM))  # type: ignore[index]
    with watched.step():
        copied.load_state_dict(model.state_dict())
    assert watched.captured == []
    assert torch.equal(copied["table"].weight, module.weight)  # type: ignore[index]
    with refused(UndeclaredWrite, "'user'", "before ecemb.protect()"):
        model.load_state_dict(model.state_dict())


def test_the_copy_of_a_hook_does_nothing() -> None:
    """Of any of a module's hooks."""
    called: list[object] = []
    module = nn.Identity()
    module.register_forward_hook(Tied(lambda *_, **kwargs: called.append(kwargs)), with_kwargs=True)
    assert copy.deepcopy(module)(1) == 1
    assert called == []
    assert module(1) == 1
    assert called == [{}]
