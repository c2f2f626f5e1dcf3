"""What is written with an Emitter computes what it says, in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ecemb.kernels import llvm
from ecemb.kernels.llvm import Emitter, Value, compiled, number, vector


def square() -> Callable[..., int]:
    e = Emitter("square", 1)
    (x,) = e.arguments
    return compiled(e.end(e.make.mul(x, x)))[0]


def test_functions_of_one_name_are_several() -> None:
    def adder(what: int) -> Emitter:
        e = Emitter("adder", 1)
        return e.end(e.make.add(e.arguments[0], number(what)))

    one, two = compiled(adder(1), adder(2))
    (three,) = compiled(adder(3))
    assert (one(40), two(40), three(40), one(-1)) == (41, 42, 43, 0)


def test_threads_may_compile_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        functions = list(pool.map(lambda _: square(), range(16)))
    assert [function(i) for i, function in enumerate(functions)] == [i * i for i in range(16)]


@pytest.mark.parametrize("stop", [-1, 0, 1, 5])
def test_a_loop_carries_values(stop: int) -> None:
    e = Emitter("sums", 1)
    with e.loop(e.arguments[0], carried=[number(100)]) as loop:
        loop.following = [e.make.add(loop.carried[0], loop.index)]
    (function,) = compiled(e.end(loop.carried[0]))
    assert function(stop) == 100 + sum(range(stop))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 127])
def test_pieces_cover_every_byte_once(size: int) -> None:
    e = Emitter("count", 2)
    base, total = e.arguments

    def act(at: Value, piece: int) -> None:
        there = e.make.add(base, at)
        ones = vector(piece)(int.from_bytes(b"\1" * piece, "little") if piece < 8 else [1] * piece)
        e.store(e.make.add(e.load(vector(piece), there), ones), there)

    e.pieces(total, 32, 1, act)
    memory = np.zeros(200, np.uint8)
    (function,) = compiled(e.end())
    function(memory[3:].ctypes.data, size)
    assert memory.tolist() == [0] * 3 + [1] * size + [0] * (197 - size)


@pytest.mark.parametrize(
    ("triple", "known"),
    [("aarch64-unknown-linux-gnu", {"neon"}), ("x86_64-unknown-linux-gnu", set[str]())],
)
def test_without_reported_features_there_are_those_of_the_architecture(
    monkeypatch: pytest.MonkeyPatch, triple: str, known: set[str]
) -> None:
    def refuse() -> None:
        raise RuntimeError("LLVM can't read them")

    monkeypatch.setattr(llvm.binding, "get_host_cpu_features", refuse)
    monkeypatch.setattr(llvm.binding, "get_process_triple", lambda: triple)
    assert llvm.features.__wrapped__() == known
    assert llvm.engine()
