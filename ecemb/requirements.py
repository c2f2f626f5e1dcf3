"""The platforms and the versions of torch that ecemb runs with; anything else is refused in one sentence.

Owns the bounds: pyproject.toml and README.md repeat them. Must not import torch before the platform is known.
"""

from __future__ import annotations

import os
import re
import sys

from .errors import ConfigurationError

PLATFORMS = frozenset({("linux", "x86_64"), ("linux", "aarch64")})
"""(`sys.platform`, machine). All tests run on x86-64; those of `make arm` run under emulation of aarch64."""
OLDEST_TORCH, TESTED_TORCH, NEWEST_TORCH = (2, 11), (2, 13), (2, 14)
"""What has run on a GPU; what all tests run with; the newest accepted one, which `make compat` ran with."""


def check_platform() -> None:
    """Checks the operating system and the processor.

    Raises:
        ConfigurationError: they are not those that ecemb runs on.
    """
    machine = os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "?")
    if (sys.platform, machine) not in PLATFORMS:
        raise ConfigurationError(
            f"ecemb runs on Linux on x86-64 or aarch64, and this is {sys.platform} on {machine}: train on "
            f"such a machine, or in a container or a virtual machine of one"
        )


def check() -> None:
    """Checks the platform, and imports torch to check its version.

    Raises:
        ConfigurationError: the platform is another one, or torch is missing, too old or too new.
    """
    check_platform()
    tested = _shown(TESTED_TORCH)
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            f"ecemb needs torch, which is not installed: pip install 'torch=={tested}.*', without CUDA with "
            f"--index-url https://download.pytorch.org/whl/cpu"
        ) from None
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and not OLDEST_TORCH <= (int(found[1]), int(found[2])) <= NEWEST_TORCH:
        raise ConfigurationError(
            f"ecemb takes torch {_shown(OLDEST_TORCH)} to {_shown(NEWEST_TORCH)}, and all its tests ran with "
            f"{tested}; this is torch {torch.__version__}: pip install 'torch=={tested}.*'"
        )


def _shown(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
