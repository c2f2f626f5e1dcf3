"""A forked worker keeps nothing of the process that has imported its modules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from support import kept_by_imports
from support.warm_starts import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]
HARMLESS = {
    r"sympy\.": "numbers of dummy symbols, and the order in which facts are tried",
    r"torch\.distributed\._composable\.contract\.(STATE|REGISTRY)_KEY$": "names of attributes",
    r"re\._cache": "compiled patterns; the order in which they leave the cache varies",
}
"""Places in other packages, and the reason why all workers of a server may have the same value there."""

PLANTED = """
import os, random, threading, time, uuid
class Keeps:
    def __init__(self):
        self.pid = os.getpid()
keeps, native, began, named = Keeps(), threading.get_native_id(), time.time(), f"a-{uuid.uuid4()}"
environment = [{"rank": os.environ["RANK"]}]
closure = (lambda job: lambda: job)(os.environ["TORCHELASTIC_RUN_ID"])
own, constant = random.Random(), random.Random(7)
path, anew = os.path, random.random()
"""


def kept(folder: Path, file: Path, *modules: str) -> dict[str, list[str]]:
    """What workers have from the server's imports, and would have otherwise; by place."""
    command = [sys.executable, "-B", kept_by_imports.__file__, str(file), *modules]
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["values"] > 100_000
    return {
        place: values
        for place, values in found["kept"].items()
        if not any(re.match(pattern, place) for pattern in HARMLESS)
    }


def modules() -> list[str]:
    """All of ecemb, but for what needs Lightning."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "ecemb").rglob("*.py"))
    ]
    return [name for name in names if not name.endswith(("__main__", ".lightning"))]


def test_nothing_that_belongs_to_a_process_is_fixed_by_an_import(tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "planted.py").write_text(PLANTED)
    found = kept(folder, tmp_path / "values.json", *modules(), "planted")
    planted = {name: one for name, one in found.items() if name.startswith("planted.")}
    assert {re.split(r"\W", name)[1] for name in planted} == {
        *("keeps", "native", "began", "named"),
        *("environment", "closure", "own", "anew"),
    }
    assert found == planted, {name: found[name] for name in found.keys() - planted.keys()}
