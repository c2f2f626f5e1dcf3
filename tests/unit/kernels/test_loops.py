"""The loops can be compiled for processors that aren't here: LLVM ends the process at code that it can't."""

from __future__ import annotations

import pytest
from llvmlite import binding

from ecemb.kernels import cpu

PROCESSORS = {
    "x86-64": set[str](),
    "haswell": {"ssse3", "avx2"},
    "znver2": {"ssse3", "avx2"},
    "gracemont": {"ssse3", "avx2", "gfni"},
    "cascadelake": {"ssse3", "avx2", "avx512bw"},  # it prefers vectors of 32 bytes
    "icelake-server": {"ssse3", "avx2", "avx512bw", "gfni"},
}


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_they_compile_for_it(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    monkeypatch.setattr(cpu, "features", lambda: PROCESSORS[processor])
    written = [cpu.forget_loop()]
    for way in cpu.available():
        unit = way.vector_bytes
        written += [cpu.distinct_loop(unit, ranged=one) for one in (False, True)]
        written += [cpu.move_loop(unit, put=put) for put in (False, True)]
        written += [cpu.record_loop(unit, (100, 4, 2000), changes=changes) for changes in (False, True)]
        written += [cpu.add_loop(way.vector_bytes, None), cpu.add_loop(way.vector_bytes, way)]
        written += [cpu.dot_loop(way, outputs) for outputs in range(1, cpu.MOST_OUTPUTS + 1)]

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    if target.name != "x86-64":
        pytest.skip(f"this LLVM compiles for {target.name}")
    machine = target.create_target_machine(cpu=processor, opt=2, jit=True)
    for loop in written:
        assert machine.emit_object(binding.parse_assembly(str(loop.module)))


def test_loops_are_compiled_once_in_a_process_for_any_number_of_threads() -> None:
    one, two = cpu.Cpu(threads=1), cpu.Cpu(threads=2)
    assert one._copy is two._copy and one._add is two._add
