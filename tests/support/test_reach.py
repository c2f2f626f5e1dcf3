"""Markers that follow from the names that a test reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import reach

HELPERS = """
import subprocess
from multiprocessing.connection import Connection

LIMIT_S = 60

def run(command):
    return subprocess.run(command, timeout=LIMIT_S)

class Server:
    def start(self):
        return run(["server"])

def receive(pipe: Connection):
    return pipe.recv()
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test(): run([])", {"processes"}),
        ("def test(): helpers.Server().start()", {"processes"}),
        ("def test(server): server.stop()", {"processes"}),
        ("def test(plain): receive(plain)", set()),
        ("def test(): assert LIMIT_S == helpers.LIMIT_S", set()),
        ("def test(): os.fork()", {"processes"}),
        ("def test(): os.getpid()", set()),
        ("def test():\n    import fbgemm_gpu\n    fbgemm_gpu.sparse()", {"torchrec"}),
        ("CASES = {1: run}\n@pytest.mark.parametrize('case', CASES)\ndef test(case): ...", {"processes"}),
    ],
)
def test_markers_follow_from_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: set[str]
) -> None:
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    monkeypatch.setattr(reach, "READ", (tmp_path,))
    (tmp_path / "helpers.py").write_text(HELPERS)
    imports = "import os\nimport pytest\nimport helpers\nfrom helpers import LIMIT_S, Server, receive, run\n"
    fixtures = "\ndef server(): return Server()\ndef plain(): return os.pipe()\n"
    (tmp_path / "test_it.py").write_text(imports + fixtures + source)
    names = {"test", *(name for name in ("server", "plain") if f"({name})" in source.partition("\n")[0])}
    assert reach.kinds(tmp_path / "test_it.py", frozenset(names)) == found


def test_tests_that_launch_jobs_have_the_marker() -> None:
    launched = reach.ROOT / "tests" / "scenarios" / "test_second_launch.py"
    names = [name for name in reach.read(launched).names if name.startswith("test_")]
    assert names and all(reach.kinds(launched, frozenset([name])) == {"processes"} for name in names)


def test_modules_of_ours_that_are_harmless_are_there() -> None:
    ours = [name for name in reach.HARMLESS if name.startswith(("bench.", "baselines.", "support."))]
    assert ours
    assert all(reach.path_of(name) for name in ours)
