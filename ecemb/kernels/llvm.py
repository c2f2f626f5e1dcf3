"""Machine code for this processor, compiled while the program runs: loops and vectors in LLVM's terms.

Owns: how functions of 64-bit integers are written (`Emitter`) and compiled (`compiled`). LLVM compiles the
package's few loops in milliseconds, so there is no cache of compiled code on disk, which would have to be
protected from other users.

Must not know: the purpose of the loops.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from llvmlite import binding as _binding
from llvmlite import ir as _ir

binding: Final[Any] = _binding
ir: Final[Any] = _ir

Value: TypeAlias = Any
"""A value of the function under construction: an integer of 64 bits, or a vector of bytes."""

I64: Final = ir.IntType(64)
I32: Final = ir.IntType(32)
I8: Final = ir.IntType(8)
LINE_BYTES: Final = 64


def number(value: int) -> Value:
    """A constant integer."""
    return ir.Constant(I64, value)


def vector(size: int) -> Any:
    """The type of a value of `size` bytes, a power of two: a vector of bytes from 8 on, an integer below."""
    return ir.VectorType(I8, size) if size >= 8 else ir.IntType(8 * size)


@dataclass
class Loop:
    """A loop whose body is under construction.

    Attributes:
        index: the loop's counter.
        carried: the loop-carried values: in the body those before the iteration, after the loop the last.
        following: the loop-carried values after the iteration; the body sets them.
    """

    index: Value
    carried: list[Value]
    following: list[Value]


class Emitter:
    """One function under construction; `make` gives the instructions of llvmlite's IRBuilder."""

    def __init__(self, name: str, arguments: int) -> None:
        self.module: Any = ir.Module(name)
        kind = ir.FunctionType(I64, [I64] * arguments)
        self.function: Any = ir.Function(self.module, kind, f"{name}.{next(_names)}")
        self.arguments: tuple[Value, ...] = tuple(self.function.args)
        self.make: Any = ir.IRBuilder(self.function.append_basic_block())

    def end(self, result: Value | None = None) -> Emitter:
        """Ends the function by returning `result`, 0 when None."""
        self.make.ret(number(0) if result is None else result)
        return self

    def call(self, intrinsic: str, result: Any, *values: Value) -> Value:
        """Calls one of LLVM's intrinsics."""
        known = self.module.globals.get(intrinsic)
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.make.call(known or ir.Function(self.module, kind, intrinsic), values)

    def pointer(self, address: Value) -> Value:
        """An address as a pointer."""
        return self.make.inttoptr(address, ir.PointerType())

    def load(self, kind: Any, address: Value) -> Value:
        """Reads a value from an address of any alignment."""
        return self.make.load(self.pointer(address), align=1, typ=kind)

    def store(self, value: Value, address: Value) -> None:
        """Writes a value to an address of any alignment."""
        self.make.store(value, self.pointer(address), align=1)

    def store_word(self, value: Value, address: Value) -> None:
        """Writes an integer to an aligned address, in one store."""
        self.make.store(value, self.pointer(address), align=8)

    def word(self, base: Value, index: Value) -> Value:
        """Reads word `index` of an array of 64-bit integers."""
        return self.load(I64, self.place(base, index, number(8)))

    def place(self, base: Value, index: Value, scale: Value) -> Value:
        """The address base + index · scale."""
        return self.make.add(base, self.make.mul(index, scale))

    @contextmanager
    def loop(self, stop: Value, step: int = 1, carried: Sequence[Value] = ()) -> Generator[Loop, None, None]:
        """Repeats the instructions that the `with` block emits, for an index from 0 to `stop` - 1.

        Args:
            stop: end of the index.
            step: increment of the index.
            carried: the loop-carried values before the first iteration.
        """
        make = self.make
        first = (number(0), *carried)
        before, head, body, behind = make.block, *(make.append_basic_block() for _ in range(3))
        make.branch(head)
        make.position_at_end(head)
        phis = [make.phi(value.type) for value in first]
        loop = Loop(phis[0], phis[1:], [])
        make.cbranch(make.icmp_signed("<", phis[0], stop), body, behind)
        make.position_at_end(body)
        yield loop
        following = (make.add(phis[0], number(step)), *loop.following)
        for phi, value, then in zip(phis, first, following, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(then, make.block)
        make.branch(head)
        make.position_at_end(behind)

    def pieces(self, size: Value, largest: int, smallest: int, act: Callable[[Value, int], None]) -> None:
        """Calls `act(at, bytes)` to write the instructions for each piece of `size` bytes.

        Pieces have `largest` bytes, and then each smaller power of two down to `smallest` at most once.
        """
        make = self.make
        at = make.and_(size, number(-largest))
        with self.loop(at, largest) as main:
            act(main.index, largest)
        piece = largest // 2
        while piece >= smallest:
            part = make.and_(size, number(piece))
            with make.if_then(make.icmp_signed("!=", part, number(0))):
                act(at, piece)
            at = make.add(at, part)
            piece //= 2

    def in_order(self) -> None:
        """Orders stores: a process that ends at any moment has made no later store without all earlier ones.

        A fence for the compiler only, on each architecture: docs/assumptions.md says why no processor needs
        one.
        """
        self.make.fence("seq_cst", "singlethread")

    def prefetch(self, address: Value, *, write: bool) -> None:
        """Prefetches a cache line. The address may be invalid."""
        flags = (ir.Constant(I32, int(write)), ir.Constant(I32, 3), ir.Constant(I32, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), self.pointer(address), *flags)


BASELINES: Final = {"aarch64": frozenset({"neon"})}
"""For each architecture the features that all its processors have, and that LLVM may not report."""


@functools.cache
def features() -> frozenset[str]:
    """The features of this processor that the operating system has enabled, by LLVM's names."""
    architecture = binding.get_process_triple().partition("-")[0]
    reported = frozenset(name for name, has in _reported_features().items() if has)
    return reported | BASELINES.get(architecture, frozenset())


def _reported_features() -> Any:
    """The features by name, as LLVM reports them; none where LLVM can't read them."""
    try:
        return binding.get_host_cpu_features()
    except RuntimeError:
        return binding.FeatureMap()


def engine(source: str = "") -> Any:
    """Makes a compiler for this processor. Its compiled code is valid as long as the compiler lives.

    Args:
        source: LLVM assembly of the compiler's first module.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    flat = _reported_features().flatten()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=binding.get_host_cpu_name(), features=flat, opt=2, jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(source), machine)


def assembled(source: str, function: str, library_calls: Sequence[str], **numbers: int) -> int:
    """Compiles LLVM assembly. Returns the address of a function in it, valid until the process ends.

    Args:
        source: the assembly, a format string with the names that follow as fields.
        function: name of the function.
        library_calls: functions of the C library: fields with their addresses.
        **numbers: other fields.
    """
    library = ctypes.CDLL(None)
    addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in library_calls}
    made = engine(source.format(**addresses, **numbers))
    made.finalize_object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # never freed
    return int(made.get_function_address(function))


_engine: Final = functools.cache(engine)


_names: Final = itertools.count()
_compiling: Final = threading.Lock()


def compiled(*emitters: Emitter) -> list[Callable[..., int]]:
    """Compiles functions for this processor. One call for several functions is faster than a call for each.

    Returns:
        A callable for each of `emitters`, in their order: it takes and returns ints, and releases the
        interpreter's lock while it runs.
    """
    module, *others = (binding.parse_assembly(str(emitter.module)) for emitter in emitters)
    for other in others:
        module.link_in(other)
    with _compiling:
        engine = _engine()
        engine.add_module(module)
        engine.finalize_object()
        addresses = [engine.get_function_address(emitter.function.name) for emitter in emitters]
    return [
        cast(
            "Callable[..., int]", ctypes.CFUNCTYPE(*[ctypes.c_int64] * (1 + len(emitter.arguments)))(address)
        )
        for emitter, address in zip(emitters, addresses, strict=True)
    ]
