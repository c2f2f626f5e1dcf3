"""What is imported ahead, and what isn't: found in the script, asked for, unfit, or not there."""

# ruff: noqa: E501
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ecemb.launch import preload
from support.warm_starts import LIGHT, Home, home

NOTHING = compile("", "", "exec")
SHOWS = "import os, sys; print(sorted(n for n in sys.modules if n.startswith('lib_')), len(os.listdir('/proc/self/task')))"

LIBRARIES = {
    "lib_plain": "import os\nos.environ['LIB_PLAIN'] = 'set'",
    "lib_inner/__init__": "",
    "lib_inner/part": "",
    "lib_threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "lib_starts": "import subprocess\nP = subprocess.Popen(['sleep', '1000'], stdout=-3, stderr=-3)",
    "lib_rank": "import os\nRANK = os.environ.get('LOCAL_RANK')",
    "lib_device": "import os, sys\nD = os.open('/dev/null', os.O_RDONLY)",
    "lib_broken": "raise OSError('two\\nlines')",
    "lib_exits": "raise SystemExit(4)",
}  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Iterator[Home]:
    with home() as made:
        for name, text in LIBRARIES.items():
            made.write(f"site-packages/{name}.py", text)
        made.write("local_one.py", "")
        made.environment["PYTHONPATH"] = str(made.folder / "site-packages")
        yield made


def test_a_script_says_what_it_imports(here: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here.folder / "site-packages"))
    name = here.write(
        "reads.py",
        "from __future__ import annotations\n"
        "import json, lib_plain, local_one\n"
        "from lib_inner import part, NAME\n"
        "import lib_inner.part as other\n"
        "from . import nothing\n"
        "if True:\n    import lib_rank\n"
        "def f():\n    import lib_threads\n",
    )
    found = preload.imported_by(str(here.folder / name))
    assert found == ["lib_plain", "lib_inner", "lib_inner.part", "lib_inner.part"]
    names = preload.names(str(here.folder / name), ["x"], ["torch", "lib_inner.part"])
    assert names == ["encodings.idna", "ecemb", "lib_plain", "lib_inner", "x"]
    assert preload.imported_by(here.write("wrong.py", "import (")) == []


def test_what_a_library_imports_late_comes_with_it() -> None:
    assert preload.names(None, ["torchrec.models"], ["torch"])[-2:] == ["ecemb", "torchrec.models"]
    assert preload.names(None, ["torchrec.models"], [])[-2:] == ["torchrec.models", "torch.distributed.optim"]
    assert "torch.distributed.optim" not in preload.names(None, ["torchrec_models"], [])


def test_it_is_there_when_the_script_begins(here: Home) -> None:
    first = here.write("uses.py", f"{SHOWS}\nimport lib_plain\nprint(os.environ['LIB_PLAIN'])")
    options = (*LIGHT, "--preload", "lib_inner.part")
    expected = "['lib_inner', 'lib_inner.part', 'lib_plain'] 1\nset\n"
    assert here.warm(first, options=options) == (0, expected, "")
    assert here.warm(first, options=(*LIGHT, "--no-preload", "lib_plain")) == (0, "[] 1\nset\n", "")


UNFIT = {
    "lib_threads": "starts 1 thread when it is imported",
    "lib_starts": "starts 1 process when it is imported",
    "lib_rank": "reads LOCAL_RANK when it is imported, which differs by worker",
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_unfit_is_left_to_the_worker(here: Home, name: str) -> None:
    script = here.write(f"uses_{name}.py", f"{SHOWS}\nimport {name}, os\nos._exit(1)")
    line = (
        f"ecemb-run: {name} is not imported ahead: it {UNFIT[name]}; --no-preload {name} spares the attempt\n"
    )
    options = (*LIGHT, "--preload", "lib_plain")
    assert here.warm(script, options=options) == (1, "", line)  # so that the server and its log stay
    texts: list[str] = []
    for one in here.arena_dir.glob("*/.warm/*.log"):
        with suppress(FileNotFoundError):  # an earlier server's, that ends
            texts.append(one.read_text())
    [log] = [text for text in texts if name in text]
    assert log == line.removeprefix("ecemb-run: ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lib_missing", "ModuleNotFoundError: No module named 'lib_missing'"),
        ("lib_broken", "OSError: two lines"),
        ("lib_exits", "SystemExit: 4"),
    ],
)
def test_what_cant_be_imported_is_named(here: Home, name: str, reason: str) -> None:
    script = here.write("shows.py", SHOWS)
    line = f"ecemb-run: {name} can't be imported ahead: {reason}\n"
    assert here.warm(script, options=(*LIGHT, "--preload", name)) == (0, "[] 1\n", line)


def test_all_machine_code_is_compiled_ahead() -> None:
    preload.load("ecemb")
    loops = [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("ecemb.")
        for value in vars(module).values()
        if "assembled" in getattr(getattr(value, "__wrapped__", None), "__code__", NOTHING).co_names
    ]
    assert len(loops) > 1
    for loop in loops:
        loop.cache_clear()
    preload.load("ecemb")
    assert [loop.cache_info().currsize for loop in loops] == [1] * len(loops)


def test_a_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    children = preload.child_count()
    for path, unfit in (
        ("/dev/nvidia0", True),
        ("/dev/nvidia-uvm", True),
        ("/dev/nvidiactl", False),
        ("/dev/null", False),
    ):
        monkeypatch.setattr(preload, "_open_files", lambda path=path: iter([path]))
        reason = preload.residue(children) or ""
        if "threads" not in reason and "thread " not in reason:  # of this process
            assert (path in reason) == unfit


def test_where_a_module_lies(here: Home) -> None:
    here.write("pack/__init__.py", "")
    here.write("pack/__main__.py", "")
    here.write("pack/inner.py", "")
    folder = str(here.folder)
    assert preload.script_of("pack", folder) == str(Path(folder) / "pack" / "__main__.py")
    assert preload.script_of("pack.inner", folder) == str(Path(folder) / "pack" / "inner.py")
    assert preload.script_of("pack.other", folder) is None
    assert os.getcwd() != folder
