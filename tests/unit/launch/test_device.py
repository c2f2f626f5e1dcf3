"""On a machine with a CUDA device: the fork server never has a context there, and its workers can."""

from __future__ import annotations

import os
import re

import pytest
import torch

from support.warm_starts import home, line_of

USES = """
import os, sys, torch
print(os.getppid(), torch.cuda.is_initialized(), int(torch.ones(8, device="cuda").sum()), flush=True)
sys.exit(1)  # after a failure, the server waits
"""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_one_process_after_another_uses_the_device_and_the_server_does_not() -> None:
    with home() as here:
        name = here.write("uses.py", USES)
        servers: set[str] = set()
        for _ in range(3):
            worker = here.start(name, options=())
            server, before, total = line_of(worker).split()
            assert (before, total) == ("False", "8")
            worker.wait()
            servers.add(server)
            with_context = re.compile(r"/dev/nvidia(\d+|-uvm)")
            links = [os.readlink(f"/proc/{server}/fd/{fd}") for fd in os.listdir(f"/proc/{server}/fd")]
            assert not [link for link in links if with_context.match(link)]
        assert len(servers) == 1
