"""The network's compiled loops can be compiled for aarch64 as well."""

from __future__ import annotations

import string

import pytest
from llvmlite import binding

from ecemb.net import mesh, watch


@pytest.mark.parametrize("code", [mesh._CODE, watch._CODE], ids=["channels", "beats"])
def test_they_compile_for_aarch64(code: str) -> None:
    names = {name for _, name, _, _ in string.Formatter().parse(code) if name}
    numbers = {name: 8 * place for place, name in enumerate(sorted(names), 1)}
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    module = binding.parse_assembly(code.format(**numbers))
    module.verify()
    assert target.create_target_machine(cpu="neoverse-v2", opt=2, jit=True).emit_object(module)
