"""Made-up files in the formats of Criteo's click logs and MovieLens's u.data."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def criteo(samples: int, seed: int = 0) -> list[str]:
    """Lines: few categories, one in ten fields empty; the first category says how likely a click is."""
    rng = np.random.default_rng(seed)
    found: list[str] = []
    for ids in (8 ** rng.random((samples, 26))).astype(int):
        fields = [str(number) for number in rng.integers(-2, 1000, 13)]
        fields += [f"{2654435761 * (one + 40503) % 2**32:08x}" for one in ids.tolist()]
        kept = rng.random(39) < 0.9
        click = int(rng.random() < (0.8 if ids[0] % 2 else 0.2))
        found.append("\t".join([str(click), *np.where(kept, fields, "").tolist()]))
    return found


def movielens(samples: int, seed: int = 0) -> list[str]:
    """Lines, of 29 users and 59 films."""
    rng = np.random.default_rng(seed)
    return [
        f"{rng.integers(1, 30)}\t{rng.integers(1, 60)}\t{rng.integers(1, 6)}\t{881250949 + number}"
        for number in range(samples)
    ]


def written(path: Path, text: list[str]) -> Path:
    """A file of these lines."""
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path
