"""The loops can be compiled for processors that aren't here: LLVM ends the process at code that it can't."""

from __future__ import annotations

import re

import pytest
from llvmlite import binding

from ecemb.kernels import cpu
from ecemb.kernels.llvm import Emitter

PROCESSORS = {
    "x86-64": set[str](),
    "haswell": {"ssse3", "avx2"},
    "znver2": {"ssse3", "avx2"},
    "gracemont": {"ssse3", "avx2", "gfni"},
    "cascadelake": {"ssse3", "avx2", "avx512bw"},  # it prefers vectors of 32 bytes
    "icelake-server": {"ssse3", "avx2", "avx512bw", "gfni"},
}


ARM_PROCESSORS = ("generic", "neoverse-n1", "neoverse-v2")


def written(has: set[str], monkeypatch: pytest.MonkeyPatch) -> list[Emitter]:
    """All loops, by each way to multiply that a processor with these features supports."""
    monkeypatch.setattr(cpu, "features", lambda: has)
    written = [cpu.forget_loop()]
    for way in cpu.available():
        unit = way.vector_bytes
        written += [cpu.distinct_loop(unit, ranged=one) for one in (False, True)]
        written += [cpu.move_loop(unit, put=put) for put in (False, True)]
        written += [cpu.record_loop(unit, (100, 4, 2000), changes=changes) for changes in (False, True)]
        for journalled in (False, True):
            written += [cpu.add_loop(unit, one, journalled=journalled) for one in (None, way)]
        written += [cpu.dot_loop(way, outputs) for outputs in range(1, cpu.MOST_OUTPUTS + 1)]
    return written


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_they_compile_for_it(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    loops = written(PROCESSORS[processor], monkeypatch)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    if target.name != "x86-64":
        pytest.skip(f"this LLVM compiles for {target.name}")
    machine = target.create_target_machine(cpu=processor, opt=2, jit=True)
    for loop in loops:
        assert machine.emit_object(binding.parse_assembly(str(loop.module)))


def arm_assembly(loop: Emitter, processor: str) -> str:
    """A loop compiled for a processor of aarch64; LLVM has verified its IR."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    module = binding.parse_assembly(str(loop.module))
    module.verify()
    return target.create_target_machine(cpu=processor, opt=2, jit=True).emit_assembly(module)


@pytest.mark.slow
@pytest.mark.parametrize("processor", ARM_PROCESSORS)
def test_they_compile_for_aarch64(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    for loop in written({"neon"}, monkeypatch):
        assert "ret" in arm_assembly(loop, processor)


def test_products_look_tables_up_by_neon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: {"neon"})
    fastest = cpu.available()[0]
    assembly = arm_assembly(cpu.dot_loop(fastest, 1), "neoverse-v2")
    assert "tbl" in assembly and "pshuf" not in assembly


def test_on_aarch64_the_compiler_keeps_the_order_of_a_journalled_row() -> None:
    """The old words, then the row's number, then the new words; without a barrier of the processor."""
    assembly = arm_assembly(cpu.add_loop(16, None, journalled=True), "neoverse-v2")
    fenced = re.findall(r"//MEMBARRIER\n\tstr\tx\d+, \[x\d+\]\n\t//MEMBARRIER\n", assembly)
    assert len(fenced) == 1
    before, after = assembly.split(fenced[0])
    assert "\tstr\tq" in before and "\tstr\tq" in after
    assert not re.search(r"\bdmb\b", assembly)


def test_loops_are_compiled_once_in_a_process_for_any_number_of_threads() -> None:
    one, two = cpu.Cpu(threads=1), cpu.Cpu(threads=2)
    assert one._copy is two._copy and one._add is two._add
