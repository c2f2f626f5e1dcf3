"""Checkpoints in object storage: the same objects, and the same tier, on a local server that speaks S3.

Needs s3fs and moto, which `make test-s3` puts into an environment of their own: their botocore wants an older
python-dateutil than constraints.txt has. test_store.py does the same on fsspec's file systems.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.check_n_run.durable import DurableTier
from baselines.check_n_run.store import Store, store_at
from ecemb.checkpoint import Piece
from support.check_n_run.stores import check_objects
from support.object_storage import moto_server, options_of

WHY = "is not in this environment: run `make test-s3`"
pytest.importorskip("moto.server", reason=f"moto {WHY}")
pytest.importorskip("s3fs", reason=f"s3fs {WHY}")

ROWS, DIM = 6, 3


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """Of s3fs, for a server that lives as long as these tests."""
    with moto_server() as (host, port):
        yield options_of(f"http://{host}:{port}")


@pytest.fixture
def url(options: dict[str, Any]) -> str:
    """A folder of a new bucket."""
    import s3fs

    bucket = f"bucket-{secrets.token_hex(4)}"
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return f"s3://{bucket}/job"


def test_objects(url: str, options: dict[str, Any]) -> None:
    check_objects(store_at(url, options), lambda: another(url, options))


def another(url: str, options: dict[str, Any]) -> Store:
    """As another process sees it: without this one's caches."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    return store_at(url, options)


def test_a_tier(url: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Full and differential checkpoints of one rank, and what is removed."""
    weight = torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM)

    def pieces() -> list[Piece]:
        return [
            Piece("t.weight", (ROWS, DIM), 0, weight[:4], "t"),
            Piece("t.weight", (ROWS, DIM), 4, weight[4:], "t"),
            Piece("head", (2,), 0, torch.ones(2)),
        ]

    tier = DurableTier(url, tmp_path, policy="one_shot", options=options)
    assert tier.newest() is None and tier.finished("job") is None
    tier.follow({"t": range(ROWS)})
    for step in range(3):
        tables = [[["t", ROWS, None, [["weight", "float32", DIM]]]]]
        facts = {"step": step, "lineage": "one", "job": "job", "world_size": 1, "tables": tables}
        token = tier.prepare(step, facts)
        tier.take(token, 0, pieces())
        tier.write(token, 0, 1, [])
        tier.commit(token, facts, [""])
        tier.retain(1)
        wanted = weight.clone()
        tier.touched("t", torch.tensor([step, 4]))
        weight[[step, 4]] += 1.0
    assert len([path for path in another(url, options).paths() if path.endswith(".manifest")]) == 2
    again = DurableTier(url, tmp_path / "again", policy="one_shot", options=options)
    stored = again.newest()
    assert stored is not None and stored.step == 2
    weight.zero_()
    again.read(stored, pieces())
    assert torch.equal(weight, wanted)
    tier.finish("job", 3)
    assert again.finished("job") == f"{url}/finished-job"
