"""The command line: its tables, its JSON, its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ecemb
from ecemb.__main__ import main
from ecemb.memory.header import State
from ecemb.memory.scan import Directory
from ecemb.tools.command_line import COMMANDS
from support.arena_holders import create, hold, holding


def leave(arena_dir: Path, host: str = "a", **changes: Any) -> Path:
    arena = create(Directory(arena_dir, changes.get("job", "ctr"), host), **changes)
    arena.set("committed", 6)
    arena.set("prepared", 7)
    arena.set("state", State.LIVE)
    arena.close()
    return arena.path


def listed(arena_dir: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[Any]:
    assert main(["arenas", "ls", "--arena-dir", str(arena_dir), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


class TestList:
    def test_as_json(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = leave(arena_dir, rank=2)
        (row,) = listed(arena_dir, capsys)
        assert row == {
            "job": "ctr",
            "host": "a",
            "rank": 2,
            "state": "down",
            "next_step": 6,
            "committed": 6,
            "prepared": 7,
            "pid": None,
            "alive": False,
            "size_bytes": path.stat().st_blocks * 512,
            "arena_id": path.stem,
            "joined": -1,
            "damage": None,
            "path": str(path),
        }

    def test_who_holds_it(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = leave(arena_dir)
        with holding(hold, path) as holder:
            holder.told()
            (row,) = listed(arena_dir, capsys)
            assert (row["pid"], row["alive"]) == (holder.pid, True)
            holder.kill()
            (row,) = listed(arena_dir, capsys)
            assert (row["pid"], row["alive"]) == (holder.pid, False)

    def test_one_jobs_by_host_and_rank(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for host, rank in (("b", 0), ("a", 3), ("a", 1)):
            leave(arena_dir, host, rank=rank)
        leave(arena_dir, job="other")
        rows = listed(arena_dir, capsys, "--job", "ctr")
        assert [(row["host"], row["rank"]) for row in rows] == [("a", 1), ("a", 3), ("b", 0)]
        assert len(listed(arena_dir, capsys)) == 4

    def test_as_a_table(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = leave(arena_dir, job="long-name")
        torn = leave(arena_dir)
        torn.write_bytes(b"")
        assert main(["arenas", "ls", "--arena-dir", str(arena_dir)]) == 0
        out = capsys.readouterr().out.splitlines()
        titles = re.split(r"\s{2,}", out[0])
        assert titles == ["job", "host", "rank", "state", "next step", "MiB", "pid", "path"]
        assert out[1].split() == ["ctr", "a", *["-", "torn", "-", "0.0", "-"], str(torn)]
        assert out[2].split() == ["long-name", *["a", "0", "down", "6", "0.0", "-"], str(path)]
        assert len({line.index("/") for line in out[1:3]}) == 1
        assert "cut short" in out[3]

    def test_what_cannot_be_trusted(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = leave(arena_dir)
        path.parents[1].chmod(0o755)
        (row,) = listed(arena_dir, capsys, "--job", "ctr")
        assert (row["state"], row["host"]) == ("damaged", None)
        assert "0755" in row["damage"]

    def test_none(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert listed(arena_dir, capsys) == []
        assert main(["arenas", "ls", "--arena-dir", str(arena_dir), "--job", "x"]) == 0
        assert capsys.readouterr().out == (
            f"no arenas of this user and job 'x' in {arena_dir} (--arena-dir names another)\n"
        )

    def test_no_such_folder(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["arenas", "ls", "--arena-dir", str(arena_dir / "x")]) == 1
        assert "ecemb: arena_dir" in capsys.readouterr().err


class TestRemove:
    def test_a_job(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        paths = [leave(arena_dir, host) for host in ("a", "a", "b")]
        other = leave(arena_dir, job="other")
        assert main(["arenas", "rm", "--arena-dir", str(arena_dir), "--job", "ctr"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sorted(lines) == sorted(f"removed {path}" for path in paths)
        assert [row["path"] for row in listed(arena_dir, capsys)] == [str(other)]

    def test_a_host(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        kept, gone = leave(arena_dir, "a"), leave(arena_dir, "b")
        command = ["arenas", "rm", "--arena-dir", str(arena_dir), "--job", "ctr", "--host", "b"]
        assert main(command) == 0
        assert (kept.exists(), gone.exists()) == (True, False)
        capsys.readouterr()
        assert main(command) == 1
        assert "no arenas of job 'ctr' and host 'b'" in capsys.readouterr().err

    def test_paths(self, arena_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first, second = leave(arena_dir), leave(arena_dir)
        assert main(["arenas", "rm", str(first)]) == 0
        assert (first.exists(), second.exists()) == (False, True)
        assert main(["arenas", "rm", str(first), str(second)]) == 1
        assert not second.exists()
        assert f"{first} is not there" in capsys.readouterr().err

    def test_the_living_are_spared_without_force(
        self, arena_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        held, free = leave(arena_dir), leave(arena_dir)
        command = ["arenas", "rm", "--arena-dir", str(arena_dir), "--job", "ctr"]
        with holding(hold, held) as holder:
            holder.told()
            assert main(command) == 1
            assert (held.exists(), free.exists()) == (True, False)
            assert f"process {holder.pid}" in capsys.readouterr().err
            assert main([*command, "--force"]) == 0
            assert not held.exists()

    def test_no_file_but_an_arena(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        precious = tmp_path / "precious.arena"
        precious.touch(0o600)
        assert main(["arenas", "rm", "--force", str(precious)]) == 1
        assert precious.exists()
        assert "not an arena file of this user" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "options",
        [[], ["--host", "a"], ["--force"], ["--job", "ctr", "/x.arena"], ["--host", "a", "/x"]],
    )
    def test_what_is_not_understood(self, options: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["arenas", "rm", *options])
        assert caught.value.code == 2


WRONG = """
arena
--verbose
arenas
arenas mv
arenas rm
arenas ls --jobs x
top --interval often
top --all
move
move --job x --timeout soon
check
check --hosts few train.py
rehearse
rehearse --ranks few train.py
plan
plan --hosts 0
plan --hosts 1 --table-gb 1 --batch 1 --row-bytes 8 --step-ms 1 --code 4
"""


@pytest.mark.parametrize("line", WRONG.split("\n")[1:-1])
def test_what_is_not_understood_is_one_line_with_the_way_out(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    name = line.split()[0] if line.split()[0] in COMMANDS else ""
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"ecemb ?{name}.*: see `ecemb ?{name}.* --help`", said)


REFUSED = """
arenas ls --arena-dir DIR/x
arenas rm --arena-dir DIR --job x
arenas rm DIR/x.arena
top --once --arena-dir DIR
move --arena-dir DIR --job x
move --arena-dir DIR --job x -- no-such-command
check train.py
check --ranks-per-host 0 train.py
rehearse DIR/train.py
rehearse --steps 1 DIR
plan --hosts 1 --ranks-per-host 1 --table-gb 1 --batch 1 --row-bytes 8 --step-ms 1
"""
WAYS_OUT = r"create it|`ecemb arenas ls`|--arena-dir|ranks-per-host|name the script|at least|not asked"


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1])
def test_what_is_refused_says_the_way_out(
    line: str, arena_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(line.replace("DIR", str(arena_dir)).split()) == 1
    said = capsys.readouterr().err
    assert re.search(WAYS_OUT, said), said


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_help_is_one_screen(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if words:
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        shown = capsys.readouterr().out
    else:
        assert main(words) == 2
        shown = capsys.readouterr().err
    lines = shown.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("    ")] == list(COMMANDS)


def test_commands_import_no_more_than_they_need(arena_dir: Path) -> None:
    """Torch takes seconds to import: help and what reads headers do without it."""
    code = f"""
import sys
from ecemb.__main__ import main
for line in ("", "arenas ls --arena-dir {arena_dir}", "top --once --arena-dir {arena_dir}",
             "move --job x --arena-dir {arena_dir}", "check train.py", "rehearse train.py",
             "plan --hosts 4 --table-gb 1 --batch 1 --row-bytes 8 --step-ms 1"):
    main(line.split())
    assert "torch" not in sys.modules, line
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)


HEAVY = {"galois", "numba", "scipy", "pandas", "matplotlib", "rich", "tensorboard", "torchrec", "fbgemm_gpu"}
MOST_MODULES = 160  # imported after torch, by all of ecemb and its command line


def test_as_a_program(arena_dir: Path) -> None:
    path = leave(arena_dir)
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "timeout": 600,
        "cwd": Path(__file__).parents[2],
        "env": {**os.environ, "PYTHONWARNINGS": "error"},
    }
    arguments = ["arenas", "ls", "--json", "--arena-dir", str(arena_dir)]
    timed = "import runpy, torch; runpy.run_module('ecemb', run_name='__main__', alter_sys=True)"
    started = [sys.executable, "-X", "importtime", "-c", timed, *arguments]
    done = subprocess.run(started, check=True, **options)
    assert [row["path"] for row in json.loads(done.stdout)] == [str(path)]
    imports = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    beyond = imports[imports.index("torch") + 1 :]
    assert not HEAVY & {name.partition(".")[0] for name in beyond}
    assert len(beyond) <= MOST_MODULES, beyond
    ls = [sys.executable, "-m", "ecemb", *arguments]
    reader, writer = os.pipe()
    os.close(reader)  # as `... | head` does
    cut = subprocess.run(ls, check=False, **{**options, "capture_output": False}, stdout=writer)
    os.close(writer)
    assert cut.returncode == -signal.SIGPIPE


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ecemb {ecemb.__version__}\n"
