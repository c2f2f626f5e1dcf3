"""All that is to be measured on a GPU, part by part, in less than 8 minutes: what `make gpu` runs.

Each part is a process of its own, ended when its share of the time is used up, so that one that fails or
hangs takes nothing from the others. What they measured is in one file, beside how each of them ended. Rows
are explained by the modules of the parts.

- `tests`, 60 s: the guard's tests of images, the contract of the kernels, and warm starts, on the device.
- `kills`, 60 s: cells of the failure matrix (`make failures`) with all of the model on the device, four
  processes sharing it: SIGKILL in the middle of a step and in the recovery from it, of processes alone, and
  with their memory; in the end every parameter has to have the bytes of an undisturbed training's.
- `kernels`, 30 s: kernels and images against the device's copies (kernels.py).
- `windows`, 125 s: the cost of protecting FBGEMM's tables, in windows of more and fewer steps (windows.py).
- `fused`, 75 s: kills in a training of FBGEMM's tables, cold and warm (fused.py).
- `step`, 55 s: the cost of protecting a step of ecemb.nn's tables (step.py).
- `recovery`, 50 s: recovering a table, over copying it (recovery.py).

What a part leaves of its time is the next one's.

- `part_s`: how long each of them took, and how it ended; one that was left out says what is missing.

Without a CUDA device nothing is measured; with TRITON_INTERPRET=1 all of it runs on the CPU in small, in
tables that are taken for a device's, which shows that it works.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from bench import ROOT
from bench.harness.devices import APART, CUDA
from bench.harness.result import Arguments, Incomplete, Row, Unavailable, once
from bench.questions.gpu import fused as gpu_fused
from bench.questions.gpu import kernels as gpu_kernels
from bench.questions.gpu import recovery as gpu_recovery
from bench.questions.gpu import step as gpu_step
from bench.questions.gpu import windows as gpu_windows

STARTING_S = 15.0
"""Of a share: imports before what is measured, and all that comes after it."""
GRACE_S = 25.0
"""For a part that is ended: it clears away what it began, and writes down what it has measured."""
SHARE = "ECEMB_BENCH_SHARE_S"
"""The environment's word of how many seconds a part has, for its process."""
DONE = "done"

MEASURED: Mapping[str, Callable[[Arguments, str, float], Iterator[Row]]] = {
    "kernels": gpu_kernels.run,
    "step": gpu_step.run,
    "windows": gpu_windows.run,
    "fused": gpu_fused.run,
    "recovery": gpu_recovery.run,
}
"""Parts that are measured in a process that asks for them alone."""
TESTED = (
    "tests/unit/engines/test_device_image.py",
    "tests/contracts/test_kernels.py",
    "tests/bench/test_cuda.py",
    "tests/unit/launch/test_device.py",
)
KILLS = tuple(
    f"{cell}*overlap, images*" for cell in ("apply:", "exchange:", "commit:", "undoing:", "rebuilding: 1")
)
"""Cells of the failure matrix. In small, the first one."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        share_s: When it is ended, if it has not done by itself; later, if those before it left time.
        needs: Modules without which it is left out.
        words: Of Python's command line, for a device and the file that it writes.
    """

    share_s: float
    needs: tuple[str, ...]
    words: Callable[[Arguments, str, Path], Sequence[str]]


def tests(arguments: Arguments, device: str, file: Path) -> Sequence[str]:
    """The command of the part `tests`. A warning of a library that is another version there is no failure."""
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *TESTED, "-k", "cuda or device")


def kills(arguments: Arguments, device: str, file: Path) -> Sequence[str]:
    """The command of the part `kills`."""
    cells = KILLS if device == CUDA and not arguments.quick else KILLS[:1]
    options = ("--device", "cuda" if device == CUDA else "cpu", "--no-controls", "--no-hosts")
    return ("tests/failures", "--seed", str(arguments.seed), "--cells", *cells, *options, "--json", str(file))


def measured(name: str) -> Callable[[Arguments, str, Path], Sequence[str]]:
    """The command of one of `MEASURED`."""

    def words(arguments: Arguments, device: str, file: Path) -> Sequence[str]:
        quick = ("--quick",) if arguments.quick else ()
        seed = ("--seed", str(arguments.seed))
        return ("-m", "bench", "gpu", "--setting", name, *seed, *quick, "--json", str(file))

    return words


PARTS: Mapping[str, Part] = {
    "tests": Part(60, ("pytest", "pytest_timeout", "galois", "triton"), tests),
    "kills": Part(60, (), kills),
    "kernels": Part(30, ("triton",), measured("kernels")),
    "windows": Part(125, ("torchrec",), measured("windows")),
    "fused": Part(75, ("torchrec",), measured("fused")),
    "step": Part(55, (), measured("step")),
    "recovery": Part(50, (), measured("recovery")),
}


def run(arguments: Arguments) -> list[Row]:
    """Answers the question, or the one part of it that is the arguments' setting.

    Raises:
        Unavailable: There is no CUDA device.
        Incomplete: A part failed.
    """
    device = device_here()
    if not arguments.setting:
        return ask_all(arguments, device)
    share_s = float(os.environ.get(SHARE, PARTS[arguments.setting].share_s))
    return kept(MEASURED[arguments.setting](arguments, device, time.monotonic() + share_s - STARTING_S))


def kept(measured: Iterable[Row]) -> list[Row]:
    """The rows of a part, until it has done, fails, or is ended from outside.

    Raises:
        Incomplete: One of the latter; it has the rows until then. The log has what failed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # clears away what it began
    rows: list[Row] = []
    try:
        rows.extend(measured)
    except Incomplete as error:
        raise Incomplete([*rows, *error.rows], str(error)) from error
    except SystemExit as error:
        raise Incomplete(rows, str(error)) from error
    except Exception as error:
        traceback.print_exc()
        raise Incomplete(rows, f"{type(error).__name__}: {error}") from error
    return rows


def device_here() -> str:
    """Where tables are on this machine.

    Raises:
        Unavailable: There is no CUDA device, and Triton doesn't interpret.
    """
    if torch.cuda.is_available():
        return CUDA
    if os.environ.get("TRITON_INTERPRET") == "1":
        return APART
    raise Unavailable(
        "torch sees no CUDA device: ask on a machine with one (make gpu), or with TRITON_INTERPRET=1, which "
        "shows that it works and measures nothing of use"
    )


def ask_all(arguments: Arguments, device: str) -> list[Row]:
    """Has all parts done, one after another.

    Raises:
        Incomplete: One failed; what the others came to is kept.
    """
    rows: list[Row] = []
    failed: list[str] = []
    until = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder:
        for name, part in PARTS.items():
            began, file = time.monotonic(), Path(folder, f"{name}.json")
            until += part.share_s
            share_s = max(part.share_s, until - began)
            missing = [module for module in part.needs if find_spec(module) is None]
            if missing:
                outcome = f"left out: no {', '.join(missing)} here (make gpu-packages)"
            else:
                print(f"\n=== {name}: {share_s:.0f} s at most", flush=True)
                outcome = ask(part.words(arguments, device, file), share_s)
                if outcome != DONE:
                    failed.append(f"{name}: {outcome}")
            if file.exists():
                rows += map(Row.from_json, json.loads(file.read_text(encoding="utf-8"))["rows"])
            rows.append(once("part_s", "s", time.monotonic() - began, part=name, outcome=outcome))
            print(f"=== {name}: {outcome}", flush=True)
    if failed:
        raise Incomplete(rows, "\n".join(failed))
    return rows


def ask(words: Sequence[str], share_s: float) -> str:
    """Has one part done, and leaves none of its processes behind.

    Returns:
        How it ended.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    # Looking for a device by CUDA itself would spoil a process that others are forked from.
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        SHARE: str(share_s),
    }
    environment.setdefault("PET_LOCAL_ADDR", "127.0.0.1")  # torchrun's: the host's name may mean nothing here
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(share_s)
        return DONE if code == 0 else f"ended with {code}"
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return f"ended after its share of {share_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
