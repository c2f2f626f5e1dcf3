"""ecemb's index of a checkpoint: rows by their places in files, of every dtype, in any runs."""

from __future__ import annotations

import itertools
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from ecemb.checkpoint import Piece, dcp, index
from ecemb.checkpoint.folder_store import CheckpointFolder
from ecemb.errors import CheckpointFailed, CheckpointMismatch
from support.refusals import refused

DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int8", "uint8", "bool", "complex64")


def written(folder: Path, ranks: list[list[Piece]]) -> index.Index:
    """The index of what ranks have written, through its text."""
    fd = os.open(folder, os.O_RDONLY)
    receipts = [dcp.write(fd, folder, rank, len(ranks), pieces) for rank, pieces in enumerate(ranks)]
    os.close(fd)
    made = dcp.index_of(receipts)
    found = index.index_of(index.text_of(made))
    assert found == made
    return found


def read(folder: Path, found: index.Index, pieces: list[Piece]) -> None:
    index.read(folder, found, pieces, lambda name: os.open(folder / name, os.O_RDONLY))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_in_other_runs(dtype: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shape = (draw.randint(1, 40), *[draw.randint(0, 5) for _ in range(draw.randint(0, 2))])
    whole = torch.randn(shape).mul(100).to(getattr(torch, dtype))
    cuts = [0, *sorted(draw.choices(range(shape[0] + 1), k=4)), shape[0]]
    runs = [Piece("t", shape, a, whole[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    runs = [run for run in runs if len(run.tensor)]
    draw.shuffle(runs)
    found = written(tmp_path, [runs[::2], runs[1::2]])
    for _ in range(5):
        a, b = sorted(draw.choices(range(shape[0] + 1), k=2))
        middle, out = draw.randint(a, b), torch.zeros_like(whole)
        pieces = [Piece("t", shape, a, out[a:middle]), Piece("t", shape, middle, out[middle:b])]
        read(tmp_path, found, pieces)
        assert (
            out[a:b].reshape(-1).view(torch.uint8).tolist()
            == whole[a:b].reshape(-1).view(torch.uint8).tolist()
        )
        assert not out[:a].any() and not out[b:].any()


def test_tensors_without_dimensions_and_without_rows(tmp_path: Path) -> None:
    pieces = [Piece("s", (), 0, torch.tensor(2.5)), Piece("e", (0, 3), 0, torch.empty(0, 3))]
    found, out = written(tmp_path, [pieces]), torch.tensor(0.0)
    read(tmp_path, found, [Piece("s", (), 0, out), Piece("e", (0, 3), 0, torch.empty(0, 3))])
    assert out == 2.5


def in_memory_otherwise(seed: int) -> dict[str, torch.Tensor]:
    """Tensors whose bytes in memory are not their values in the order of rows."""
    draw = torch.Generator().manual_seed(seed)
    plain = torch.randn(4, 3, 2, 5, generator=draw)
    complex_ = torch.randn(4, 6, dtype=torch.complex64, generator=draw)
    return {
        "transposed": plain[:, :, 0, 0].t(),
        "channels_last": plain.to(memory_format=torch.channels_last),
        "every second": plain[::2, :, :, 1],
        "expanded": plain[0, 0, 0].expand(3, 5),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag.clone(),
        "neg bit": complex_.conj().imag,
        "neg bit alone": torch._neg_view(plain),
        "all of them": complex_.t().conj(),
    }


def test_values_come_back_whatever_their_place_in_memory(tmp_path: Path, seed: int) -> None:
    """Of what is written, and of what is filled."""
    whole = in_memory_otherwise(seed)
    assert whole["conj"].is_conj() and whole["neg bit"].is_neg() and whole["neg bit alone"].is_neg()
    folder = CheckpointFolder(tmp_path / "checkpoints")
    facts = {"step": 1, "lineage": "one", "job": "job"}
    token = folder.prepare(1, facts)
    given = [Piece(key, tuple(one.shape), 0, one) for key, one in whole.items()]
    folder.commit(token, facts, [folder.write(token, 0, 1, given)])
    stored = folder.newest()
    assert stored is not None
    plain = {key: torch.zeros(one.shape, dtype=one.dtype) for key, one in whole.items()}
    folder.read(stored, [Piece(key, tuple(one.shape), 0, one) for key, one in plain.items()])
    for key, one in whole.items():
        assert torch.equal(plain[key], one.clone()), key
    for key, one in in_memory_otherwise(seed + 1).items():
        if key != "expanded":
            folder.read(stored, [Piece(key, tuple(one.shape), 1, one[1:])])
            assert torch.equal(one[1:], whole[key][1:]), key
            assert not torch.equal(one[0], whole[key][0]), key


def test_plain_dcp_reads_the_same_values(tmp_path: Path, seed: int) -> None:
    whole = in_memory_otherwise(seed)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    facts = {"step": 1, "lineage": "one", "job": "job"}
    token = folder.prepare(1, facts)
    given = [Piece(key, tuple(one.shape), 0, one) for key, one in whole.items()]
    folder.commit(token, facts, [folder.write(token, 0, 1, given)])
    found = {key: torch.zeros(one.shape, dtype=one.dtype) for key, one in whole.items()}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(
            found, checkpoint_id=folder.path / "step-000000000001", no_dist=True
        )
    for key, one in whole.items():
        assert torch.equal(found[key], one.clone()), key


@pytest.mark.parametrize("at_once", [1 << 30, 1 << 16])
def test_a_chunk_is_in_memory_once_while_it_is_read(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "READ_BYTES", at_once)
    whole = torch.arange(1 << 20, dtype=torch.int64).reshape(-1, 8)
    found = written(tmp_path, [[Piece("t", tuple(whole.shape), 0, whole)]])
    out = torch.zeros_like(whole)
    tracemalloc.start()
    try:
        read(tmp_path, found, [Piece("t", tuple(whole.shape), 0, out)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(out, whole)
    assert whole.nbytes < peak < 1.25 * whole.nbytes


@pytest.mark.parametrize(
    "facts",
    [{"sizes": {9: 1, 10: 2}}, {1: "a", "b": 2}, {"a": {True: 1, None: 2}}, {"a": (1, 2)}, {"a": 0.1}],
)
def test_facts_with_any_keys_are_found_as_json_gives_them(facts: Any) -> None:
    assert index.facts_in(index.signed(facts)) == json.loads(json.dumps(facts))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    found = written(tmp_path, [[Piece("t", (4, 2), 0, torch.ones(3, 2))]])
    with refused(CheckpointMismatch, str(tmp_path), "no tensor 'u'"):
        read(tmp_path, found, [Piece("u", (4, 2), 0, torch.ones(3, 2))])
    with refused(CheckpointMismatch, "float32 of shape (4, 2)", "float64 of shape (4, 2)"):
        read(tmp_path, found, [Piece("t", (4, 2), 0, torch.ones(3, 2, dtype=torch.float64))])
    with refused(CheckpointMismatch, "float32 of shape (4, 2)", "float32 of shape (5, 2)"):
        read(tmp_path, found, [Piece("t", (5, 2), 0, torch.ones(3, 2))])
    with refused(CheckpointFailed, "2 of 3 rows of 't' are there", "move this folder away"):
        read(tmp_path, found, [Piece("t", (4, 2), 1, torch.ones(3, 2))])
