"""Memory that torch moves under a protected tensor: noticed, whatever moved it; nothing committed is lost."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ecemb.engines.contract import Hooks, Places
from ecemb.engines.discover import Tables
from ecemb.engines.sparse import SparseTables
from ecemb.errors import EcembError, PeerFailure, StepFailed, UndeclaredWrite
from support.fork_server import fork_server
from support.guarded_training import Training, bags, headers, initialise
from support.processes import RankFailed, launch
from support.refusals import refused

ROWS, DIM, STEPS = 6, 4, 5
pytestmark = pytest.mark.usefixtures("checked_sparse_tensors")


# --- places ---------------------------------------------------------------------------------------


def test_a_place_is_a_number_from_the_memory_and_not_what_a_view_says() -> None:
    memory = np.zeros(ROWS * 4, np.uint8)
    tensor = torch.from_numpy(memory).view(torch.float32)
    view = tensor.detach()
    places = Places()
    places.keep("weight of table 'user'", tensor, memory)
    places.check([tensor])
    places.check([view])
    tensor.share_memory_()
    assert view.data_ptr() == tensor.data_ptr() != memory.ctypes.data
    words = ("weight of table 'user'", f"{memory.ctypes.data:#x}", f"{tensor.data_ptr():#x}", "DataLoader")
    with refused(UndeclaredWrite, *words, "tensor.detach().clone()", "restart goes on from the last commit"):
        places.check([view])


def test_what_does_not_look_the_same_is_not_in_its_place() -> None:
    tensor = torch.zeros(4, 4)
    places = Places()
    places.keep("sum of table 'user'", tensor)
    for other, words in (
        (tensor.t(), ("replaced", "0x")),
        (tensor[:2], ("torch.float32 [2, 4]", "torch.float32 [4, 4]")),
        (tensor.view(torch.int32), ("torch.int32 [4, 4]",)),
        (tensor.clone(), ("replaced", f"{tensor.data_ptr():#x}")),
        (None, ("is gone",)),
        (3.0, ("no longer a tensor",)),
    ):
        with refused(UndeclaredWrite, "sum of table 'user'", *words):
            places.check([other])
    places.check([tensor.detach()])
    nowhere = Places()
    nowhere.keep("empty", torch.empty(0, 4))
    nowhere.check([torch.empty(0, 4)])  # no bytes that could be elsewhere


def test_an_alias_of_another_form_has_the_address() -> None:
    tensor = torch.zeros(4, 4)
    places = Places()
    for what, one in (("first", tensor), ("second", tensor[1]), ("empty", tensor[:0])):
        places.keep(what, one)
    for other in (tensor[1], tensor[1:3].view(torch.int32), tensor[1:].t()):
        places.check_addresses([tensor, other, tensor[:0].clone()])
    for other, words in (
        (tensor[2], "the storage of second was replaced"),
        (tensor[1].clone(), "the storage of second was replaced"),
        (tensor.double()[1], "second was replaced"),
        (None, "second is gone"),
    ):
        with refused(UndeclaredWrite, words):
            places.check_addresses([tensor, other, tensor[:0]])


# --- one table, and all that may move it -----------------------------------------------------------


class One:
    """A table under Adagrad, in memory that lives here."""

    def __init__(self) -> None:
        self.module = nn.EmbeddingBag(ROWS, DIM, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.module.parameters(), lr=0.5)
        self.is_open = False
        engine = SparseTables({"user": self.module}, [self.optimizer])
        (table,) = engine.tables
        self.memory = [np.zeros((ROWS, column.row_bytes), np.uint8) for column in table.layout.columns]
        engine.place(stored([self.memory]), fresh=True)
        self.tables = Tables([engine])
        self.tables.watch(Hooks(lambda *_: None, lambda: self.is_open, lambda: None))
        self.weight = self.module.weight

    @property
    def state(self) -> Tensor:
        return self.optimizer.state[self.weight]["sum"]

    @state.setter
    def state(self, value: object) -> None:
        self.optimizer.state[self.weight]["sum"] = value

    def step(self, change: Callable[[], object] = lambda: None) -> None:
        """A step, and what happens within it before training."""
        self.is_open = True
        try:
            self.tables.check()
            change()
            self.optimizer.zero_grad()
            self.module(torch.tensor([[1, 2], [2, 5]])).square().sum().backward()
            self.optimizer.step()
            self.tables.check()
        finally:
            self.is_open = False

    def fits(self) -> bool:
        """Whether what is trained is what the memory holds."""
        live = (self.module.weight, self.state)
        return all(
            held.tobytes() == tensor.detach().numpy().tobytes()
            for held, tensor in zip(self.memory, live, strict=True)
        )


def assign_all(one: One) -> None:
    state = {"weight": one.weight.detach().clone()}
    one.tables.unwatch()  # whose hook refuses it
    one.module.load_state_dict(state, assign=True)
    one.tables.watch(Hooks(lambda *_: None, lambda: one.is_open, lambda: None))


def convert(one: One, flag: str) -> None:
    switch = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")
    switch(True)
    try:
        one.module.double()
    finally:
        switch(False)


def set_storage(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(tensor.detach().clone())


def put_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value


def loaded(one: One) -> None:
    one.tables.unwatch()
    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    one.tables.watch(Hooks(lambda *_: None, lambda: one.is_open, lambda: None))


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


MOVES: dict[str, Callable[[One], object]] = {
    "share_memory_": lambda one: one.weight.share_memory_(),
    "share_memory": lambda one: (one.optimizer.zero_grad(), one.module.share_memory()),
    "shared view": lambda one: one.weight.detach()[2:].share_memory_(),
    "shared storage": lambda one: one.weight.untyped_storage().share_memory_(),
    "shared state": lambda one: one.state.share_memory_(),
    "sent weight": lambda one: ForkingPickler.dumps(one.weight),
    "sent module": lambda one: ForkingPickler.dumps(one.module),
    "sent state": lambda one: ForkingPickler.dumps(one.optimizer.state_dict()),
    "data": lambda one: put_data(one.weight, one.weight.data.clone()),
    "data of state": lambda one: put_data(one.state, one.state.clone()),
    "set_": lambda one: set_storage(one.weight),
    "set_ of state": lambda one: set_storage(one.state),
    "resize_ of state": lambda one: one.state.resize_(ROWS - 1, DIM),
    "transposed": lambda one: put_data(one.state, one.state.view(-1).as_strided((ROWS, DIM), (1, ROWS))),
    "swap_tensors": lambda one: torch.utils.swap_tensors(one.weight, nn.Parameter(torch.rand(ROWS, DIM))),
    "double": lambda one: one.module.double(),
    "there and back": lambda one: one.module.double().float(),
    "apply": lambda one: one.module._apply(torch.clone),
    "to_empty": lambda one: one.module.to_empty(device="cpu"),
    "overwritten": lambda one: convert(one, "overwrite"),
    "swapped": lambda one: convert(one, "swap"),
    "assigned": lambda one: assign_all(one),
    "parameter": lambda one: setattr(one.module, "weight", nn.Parameter(one.weight.detach().clone())),
    "parametrized": lambda one: parametrize.register_parametrization(one.module, "weight", Halved()),
    "attribute": lambda one: one.module.__dict__.update(weight=one.weight.detach().clone()),
    "state": lambda one: setattr(one, "state", one.state.clone()),
    "state of another type": lambda one: setattr(one, "state", one.state.double()),
    "no state": lambda one: one.optimizer.state[one.weight].pop("sum"),
    "a number": lambda one: setattr(one, "state", 0.0),
    "cleared": lambda one: one.optimizer.state.clear(),
    "new states": lambda one: setattr(one.optimizer, "state", collections.defaultdict(dict)),
    "loaded": loaded,
}
HARMLESS: dict[str, Callable[[One], object]] = {
    "to": lambda one: one.module.to("cpu", torch.float32),
    "contiguous": lambda one: put_data(one.weight, one.weight.data.contiguous()),
    "alias": lambda one: put_data(one.weight, one.weight.data.view(-1).view(ROWS, DIM)),
    "set_ of an alias": lambda one: one.weight.data.set_(torch.zeros(3)),
    "copied": lambda one: ForkingPickler.dumps(one.weight.detach().clone()),
    "state_dict": lambda one: [value.clone() for value in one.module.state_dict().values()],
}
REFUSED_BY_TORCH: dict[str, Callable[[One], object]] = {
    "resize_": lambda one: one.weight.resize_(ROWS + 1, DIM),
    "storage": lambda one: one.weight.untyped_storage().resize_(0),
    "storage of state": lambda one: one.state.untyped_storage().resize_(4 * ROWS * DIM + 64),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_what_moves_a_table_is_noticed_before_the_step_ends(move: str, inside: bool) -> None:
    one = One()
    one.step()
    assert one.fits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the ways to do it
        if inside:
            with pytest.raises((EcembError, RuntimeError, AttributeError, KeyError)) as caught:
                one.step(lambda: MOVES[move](one))
            if isinstance(caught.value, EcembError):
                assert isinstance(caught.value, UndeclaredWrite) and "table 'user'" in str(caught.value)
        else:
            MOVES[move](one)
        before = [held.copy() for held in one.memory]
        with refused(UndeclaredWrite, "table 'user'", "are not the protected ones"):
            one.step()
    assert all((now == then).all() for now, then in zip(one.memory, before, strict=True))


@pytest.mark.parametrize("move", HARMLESS)
def test_what_moves_nothing_goes_on(move: str) -> None:
    one = One()
    one.step()
    HARMLESS[move](one)
    one.step(lambda: HARMLESS[move](one))
    assert one.fits()


@pytest.mark.parametrize("move", REFUSED_BY_TORCH)
def test_what_torch_refuses_itself_moves_nothing(move: str) -> None:
    one = One()
    with pytest.raises(RuntimeError):
        REFUSED_BY_TORCH[move](one)
    one.step()
    assert one.fits()


def stored(memory: Sequence[Sequence[Any]]) -> Any:
    """Memory of tables by column, as an arena gives it."""
    return [SimpleNamespace(columns=columns) for columns in memory]


def test_two_tables_whose_weights_were_exchanged() -> None:
    modules = {name: nn.EmbeddingBag(ROWS, DIM, sparse=True) for name in ("user", "item")}
    engine = SparseTables(modules, [])
    engine.place(stored([[np.zeros((ROWS, 4 * DIM), np.uint8)] for _ in modules]), fresh=True)
    tables = Tables([engine])
    tables.watch(Hooks(lambda *_: None, lambda: False, lambda: None))
    tables.check()
    torch.utils.swap_tensors(modules["user"].weight, modules["item"].weight)
    with refused(UndeclaredWrite, "weight of table 'user' was replaced"):
        tables.check()


# --- on real ranks --------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[int]):
    """A dataset that holds a table, as one that looks features up."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, index: int) -> int:
        return index


def by_a_loader(training: Training) -> None:
    """Draws one batch through a worker process, to which the dataset is sent."""
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": fork_server()}
    loader = torch.utils.data.DataLoader(Rows(training.weights[0]), **options)
    assert next(iter(loader)).tolist() == [0]


def by_a_queue(training: Training) -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(training.sparse.state[training.weights[0]]["sum"])


def by_sharing(training: Training) -> None:
    training.sparse.zero_grad()  # sparse tensors have no storage
    training.model.share_memory()


WAYS: dict[str, Callable[[Training], None]] = {
    "loader": by_a_loader,
    "queue": by_a_queue,
    "share_memory": by_sharing,
}


def undisturbed(folder: Path, meet: Barrier) -> dict[str, str]:
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1)
    while guard.next_step < STEPS:
        with guard.step():
            training.body()
    guard.close()
    return training.snapshot()


def move(folder: Path, meet: Barrier, way: str, inside: bool, options: dict[str, Any]) -> None:
    """Trains three steps; in the fourth, or before it, a table of rank 0 is moved. Then rank 1 is killed."""
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1, **options)
    while guard.next_step < 3:
        with guard.step():
            training.body()
    if dist.get_rank() == 1:
        with pytest.raises((StepFailed, PeerFailure)), guard.step():
            training.body()
        return  # rank 0 says the end, whichever of the two hears of it first
    if not inside:
        WAYS[way](training)
    words = ("table 'table.users'", "to other shared memory", "DataLoader")
    with refused(UndeclaredWrite, *words), guard.step():
        if inside:
            WAYS[way](training)
        training.body()
    with refused(StepFailed, "step 3 failed (UndeclaredWrite: ", "takes no more steps"):
        guard.save(folder / "checkpoint")
    raise RuntimeError("rank 0 ends")


def go_on(folder: Path, meet: Barrier, steps: tuple[int, ...], options: dict[str, Any]) -> dict[str, str]:
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1, **options)
    assert guard.recovery.lost == () and guard.next_step == guard.recovery.step in steps
    while guard.next_step < STEPS:
        with guard.step():
            training.body()
    guard.close()
    return training.snapshot()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return launch(2, undisturbed, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("way", "inside", "options", "steps"),
    [
        ("loader", False, {}, (3,)),
        ("queue", True, {}, (3,)),
        ("share_memory", True, {"window": 2}, (2,)),
        ("share_memory", False, {"overlap": True}, (2, 3)),  # step 2 may not have been decided
    ],
)
def test_a_table_that_leaves_the_arena_ends_the_step_and_loses_nothing(
    way: str,
    inside: bool,
    options: dict[str, Any],
    steps: tuple[int, ...],
    expected: list[dict[str, str]],
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailed, match="rank 0 ends"):
        launch(2, move, tmp_path, way, inside, options)
    assert launch(2, go_on, tmp_path, steps, options) == expected
    assert headers(tmp_path) == {}


def share_dense(folder: Path, meet: Barrier) -> dict[str, str]:
    """Dense parameters and their optimizer's state are copied from where they are: they may move."""
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1)
    while guard.next_step < STEPS:
        with guard.step() as step:
            if step.number == 1:
                training.model.head.share_memory()
                ForkingPickler.dumps(training.dense.state_dict())
            training.body()
            if step.number == 2 and dist.get_rank() == 1:
                step.abort("to write them back")
    found = training.snapshot()
    guard.close()
    return found


def aborted(folder: Path, meet: Barrier) -> dict[str, str]:
    initialise(folder)
    training = bags()
    guard = training.protect(2, 1)
    while guard.next_step < STEPS:
        with guard.step() as step:
            training.body()
            if step.number == 2 and dist.get_rank() == 1:
                step.abort("to write them back")
    guard.close()
    return training.snapshot()


def test_dense_state_may_move_to_shared_memory(tmp_path: Path) -> None:
    assert launch(2, share_dense, tmp_path) == launch(2, aborted, tmp_path)
