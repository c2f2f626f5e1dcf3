"""The loops can be compiled for processors that aren't here: LLVM ends the process at code that it can't."""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import binding

from ecemb.kernels import emit, loops, products

PROCESSORS = {
    "x86-64": set[str](),
    "haswell": {"ssse3", "avx2"},
    "znver2": {"ssse3", "avx2"},
    "gracemont": {"ssse3", "avx2", "gfni"},
    "cascadelake": {"ssse3", "avx2", "avx512bw"},  # it prefers vectors of 32 bytes
    "icelake-server": {"ssse3", "avx2", "avx512bw", "gfni"},
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_they_compile_for_it(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    modules: list[str] = []

    def noted(emitter: emit.Emitter, result: Any = None) -> None:
        emitter.make.ret(emit.number(0) if result is None else result)
        modules.append(str(emitter.module))

    monkeypatch.setattr(loops, "compiled", noted)
    monkeypatch.setattr(products, "features", lambda: PROCESSORS[processor])
    for way in products.available():
        for loop in (loops.copy, loops.put, loops.change):
            loop(way.vector_bytes)
        loops.add(way.vector_bytes, None)
        loops.add(way.vector_bytes, way)
        for outputs in range(1, loops.MOST_OUTPUTS + 1):
            loops.dot(way, outputs)
    loops.distinct()
    loops.forget()

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    if target.name != "x86-64":
        pytest.skip(f"this LLVM compiles for {target.name}")
    machine = target.create_target_machine(cpu=processor, opt=2, jit=True)
    for module in modules:
        assert machine.emit_object(binding.parse_assembly(module))
