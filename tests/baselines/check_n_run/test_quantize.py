"""What rows come back as: bounds of every scheme, rows it can't store, and torch's own search beside ours."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from baselines.check_n_run import quantize, quantize_rows
from baselines.check_n_run.quantize import decode, encode, l2_errors
from baselines.check_n_run.quantize_scheme import BITS, EXACT, KMEANS_BITS, METADATA, METHODS, RATIO, Scheme

SCHEMES = [
    Scheme(method, bits, metadata)
    for method, bits, metadata in product(METHODS[1:], BITS, METADATA)
    if method != "kmeans" or bits in KMEANS_BITS
]
WIDTHS = (1, 5, 8, 16, 33)
ROOT = Path(__file__).resolve().parents[3]


def name(scheme: Scheme) -> str:
    return f"{scheme.method}-{scheme.bits}-{scheme.metadata}"


def rows(m: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed)) * 0.1


def back(given: Tensor, scheme: Scheme) -> Tensor:
    return decode(encode(given, scheme), scheme, given.shape[1])


def one_step(given: Tensor, scheme: Scheme) -> Tensor:
    """[m, 1], what a number may be off by."""
    low, high = given.double().aminmax(dim=1, keepdim=True)
    span = 2 * torch.maximum(-low, high) if scheme.method == "symmetric" else high - low
    return span / (2**scheme.bits - 1)


any_rows = st.tuples(st.integers(1, 4), st.integers(1, 20)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(width=32, allow_nan=True, allow_infinity=True))
)
near_rows = st.tuples(st.integers(1, 4), st.integers(1, 20)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-1, 1, width=32))
)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.method in ("symmetric", "asymmetric")], ids=name)
@settings(max_examples=25, deadline=None)
@given(values=any_rows | near_rows)
def test_numbers_come_back_within_a_step_whatever_they_are(scheme: Scheme, values: np.ndarray) -> None:
    given = torch.from_numpy(values)
    found = back(given, scheme)
    finite = given.isfinite().all(dim=1)
    assert found[~finite].numpy().tobytes() == given[~finite].numpy().tobytes()
    error = (found[finite].double() - given[finite].double()).abs()
    assert bool((error <= 1.0001 * one_step(given[finite], scheme)).all())


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=25, deadline=None)
@given(values=any_rows | near_rows)
def test_adaptive_is_never_worse_than_where_it_starts(bits: int, metadata: str, values: np.ndarray) -> None:
    given = torch.from_numpy(values)
    given = given[given.isfinite().all(dim=1)]
    adaptive, asymmetric = (l2_errors(given, Scheme(m, bits, metadata)) for m in ("adaptive", "asymmetric"))
    assert bool((adaptive <= asymmetric * (1 + 1e-5)).all())


def torch_finds(given: Tensor, scheme: Scheme) -> Tensor:
    """L2 errors of rows as torch's own search would have them stored: [m]."""
    top, (bins, _) = 2**scheme.bits - 1, scheme.search
    ratio = scheme.ratio or RATIO
    found = [torch.choose_qparams_optimized(row, len(row), bins, ratio, scheme.bits) for row in given]
    high, low = (torch.stack([pair[i].reshape(1) for pair in found]) for i in (0, 1))
    low = low.half().float()
    step = ((high - low) / top).half().float()
    codes = ((given - low) * torch.where(step == 0, 0, 1 / step)).round().clamp(0, top)
    return torch.linalg.vector_norm(given.double() - (codes * step + low).double(), dim=1)


def torch_ends(values: np.ndarray, bins: int) -> bool:
    """Whether torch's search comes to an end: it goes on forever where a step changes no bound."""
    span = np.ptp(values, axis=1)
    return bool(((span == 0) | (span / bins > np.spacing(np.abs(values).max(axis=1)))).all())


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.16])
def test_adaptive_is_not_worse_than_torchs_search(bits: int, width: int, ratio: float) -> None:
    scheme = Scheme("adaptive", bits, "float16", ratio=ratio)
    scale = torch.logspace(-3, 3, 100).unsqueeze(1)
    given = torch.cat([rows(100, width), scale * rows(100, width, 1), rows(100, width, 2) ** 3])
    ours, theirs = l2_errors(given, scheme), torch_finds(given, scheme)
    assert bool((ours <= theirs * (1 + 1e-5)).all())


@settings(max_examples=50, deadline=None)
@given(values=near_rows.filter(lambda values: values.shape[1] > 1), bits=st.sampled_from(BITS))
def test_adaptive_is_not_worse_than_torchs_search_on_rows_made_to_break_it(
    values: np.ndarray, bits: int
) -> None:
    scheme, given = Scheme("adaptive", bits, "float16"), torch.from_numpy(values)
    assume(torch_ends(values, scheme.search[0]))
    # Of two moves that are as good but for rounding, either may be taken, and lead elsewhere.
    assert float(l2_errors(given, scheme).mean()) <= 1.1 * float(torch_finds(given, scheme).mean()) + 1e-7


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("bits", KMEANS_BITS)
@pytest.mark.parametrize("width", [32, 128])
def test_the_order_of_the_methods(bits: int, width: int, metadata: str) -> None:
    given = rows(1000, width)
    means = [float(l2_errors(given, Scheme(method, bits, metadata)).mean()) for method in METHODS[1:]]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_rows_of_all_shapes(scheme: Scheme) -> None:
    for width in WIDTHS:
        for m in (0, 1, 7):
            given = rows(m, width)
            encoded = encode(given, scheme)
            assert encoded["codes"].shape[0] == encoded["kept"].shape[0] == m
            stored = encoded["codes"].nbytes + encoded["kept"].nbytes
            assert stored == m * scheme.row_bytes(width)
            assert encoded["kept"].dtype == getattr(torch, scheme.metadata)
            found = decode(encoded, scheme, width)
            assert found.shape == given.shape and found.dtype == torch.float32
            # What k-means or adaptive makes of a number isn't bounded by a step, but by the row's range.
            assert bool(((found - given).abs() <= given.abs().amax(dim=1, keepdim=True) * 2).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_rows_of_one_value(scheme: Scheme) -> None:
    given = torch.tensor([0.0, 1.0, -0.5, 0.1, 1e-30, -1e30, 3.4e38]).unsqueeze(1).expand(-1, 9)
    found = back(given, scheme)
    if scheme.method == "symmetric":
        assert bool(((found - given).abs() <= one_step(given, scheme)).all())
        assert not found[0].any()
    else:
        assert found.equal(given)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_rows_that_cant_be_stored_so_come_back_exactly(scheme: Scheme) -> None:
    given = rows(8, 9)
    given[1, 3], given[2, 0], given[3, 8] = torch.nan, torch.inf, -torch.inf
    given[4, 0], given[4, 1] = 3e38, -3e38
    given[5] *= 1e-41
    encoded = encode(given, scheme)
    lost = [1, 2, 3, 4, 5]
    assert encoded["exact_rows"].tolist() == lost
    found = decode(encoded, scheme, 9)
    assert found[lost].numpy().tobytes() == given[lost].numpy().tobytes()
    assert bool((found[[0, 6, 7]] - given[[0, 6, 7]]).abs().max() < 0.2)


def test_float16_that_is_too_coarse_is_not_used() -> None:
    given = torch.stack([torch.full((8,), 1000.3), rows(1, 8)[0] * 1e-7, rows(1, 8)[0] * 1e7, rows(1, 8)[0]])
    given[0, 0] += 0.001
    for method in METHODS[1:]:
        encoded = encode(given, Scheme(method, 4, "float16"))
        assert encoded["exact_rows"].tolist() == ([1, 2] if method == "symmetric" else [0, 1, 2]), method
        assert not encode(given, Scheme(method, 4))["exact_rows"].numel()


def test_float16_is_rounded_as_numpy_rounds_it() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0, 65504, 65519.996, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24, 2.5 * 2**-24], np.float32)
    values = np.concatenate([bits.view(np.float32), random.normal(size=20_000).astype(np.float32), edges])
    values = values[np.isfinite(values) & (np.abs(values) < 65520)]
    rounded = np.array([quantize_rows._stored(value, True) for value in values], np.float32)
    assert (rounded == values.astype(np.float16).astype(np.float32)).all()
    assert np.isinf(quantize_rows._stored(np.float32(65520), True))


@pytest.mark.parametrize("method", METHODS[1:])
def test_threads_change_no_byte(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_LEAST_BYTES", 64)
    given, scheme = rows(101, 16), Scheme(method, 3)
    given[100, 0] = torch.nan
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        encoded = encode(given, scheme)
        found.append([encoded[key].numpy().tobytes() for key in sorted(encoded)])
        assert decode(encoded, scheme, 16)[:100].equal(back(given[:100], scheme))
    assert found[0] == found[1]


def test_what_fails_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_LEAST_BYTES", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def fail(first: int, stop: int) -> None:
        if first:
            raise MemoryError(stop)

    with pytest.raises(MemoryError):
        quantize._share(30, 30_000, fail)


def test_exact_passes_through() -> None:
    for passed in (torch.arange(5), rows(3, 4).bfloat16(), torch.full((2,), torch.nan)):
        encoded = encode(passed, EXACT)
        assert list(encoded) == ["rows"] and decode(encoded, EXACT, 0) is passed


def test_rows_may_be_views() -> None:
    given = rows(9, 6)
    scheme = Scheme("asymmetric", 8)
    for view in (given[::2], given.T, given[:, 1:4].requires_grad_()):
        assert back(view, scheme).equal(
            back(view.detach().clone(memory_format=torch.contiguous_format), scheme)
        )


@pytest.mark.parametrize(
    "given", [torch.zeros(3), torch.zeros(3, 0), torch.zeros(3, 4).double(), torch.zeros(3, 4, device="meta")]
)
def test_rows_of_another_kind_are_refused(given: Tensor) -> None:
    with pytest.raises(ValueError, match=r"float32 \[m, width\] on the CPU.*Scheme\('none'\)"):
        encode(given, Scheme("asymmetric"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("best",), "method is one of none, symmetric, asymmetric, adaptive, kmeans; it is 'best'"),
        (("adaptive", 5), r"bits, of a code, are one of \(2, 3, 4, 8\); they are 5"),
        (("adaptive", 4, "bfloat16"), "metadata is one of"),
        (("kmeans", 8), "2\\^bits centroids"),
        (("asymmetric", 4, "float32", 25), "bins and ratio are of adaptive's search"),
        (("adaptive", 4, "float32", -1), "they are -1 and 0.0"),
        (("adaptive", 4, "float32", 25, 1.5), "they are 25 and 1.5"),
    ],
)
def test_there_is_no_such_scheme(arguments: tuple, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Scheme(*arguments)


def test_schemes_can_be_written_down() -> None:
    for scheme in (EXACT, Scheme("adaptive", 3, "float16", 30, 0.5)):
        assert Scheme(**json.loads(json.dumps(dataclasses.asdict(scheme)))) == scheme


def test_when_the_search_ends() -> None:
    assert Scheme("adaptive", 2, ratio=1).search == (25, 25)
    assert Scheme("adaptive", 4, ratio=1).search == (45, 45)
    assert Scheme("adaptive", 8, bins=200, ratio=0.16).search == (200, 32)
    assert Scheme("adaptive", 8, bins=10, ratio=0.7).search == (10, 7)
    assert Scheme("adaptive", 8, bins=10, ratio=0.71).search == (10, 8)


def test_rows_of_128_are_as_much_smaller_as_published() -> None:
    smaller = [512 / Scheme("adaptive", bits).row_bytes(128) for bits in BITS]
    assert [round(ratio, 2) for ratio in smaller] == [12.8, 9.14, 7.11, 3.76]
    assert EXACT.row_bytes(128) == 512


def test_tensors_that_were_not_stored_so() -> None:
    given, scheme = rows(4, 8), Scheme("asymmetric", 4)
    encoded = encode(given, scheme)
    with pytest.raises(
        ValueError, match=r"kept of 4 rows of width 8 .* is torch.float16 \[4, 2\]; it is torch.float32"
    ):
        decode(encoded, Scheme("asymmetric", 4, "float16"), 8)
    with pytest.raises(ValueError, match=r"codes of 4 rows of width 16"):
        decode(encoded, scheme, 16)
    with pytest.raises(ValueError, match=r"there are \['codes', 'exact', 'exact_rows', 'kept'\]"):
        decode(encoded, EXACT, 8)
    damaged = encoded | {"exact_rows": torch.tensor([4]), "exact": torch.zeros(1, 8)}
    with pytest.raises(ValueError, match="exact_rows of 4 rows are from 4 to 4"):
        decode(damaged, scheme, 8)


ENCODED = """
import hashlib, torch
from baselines.check_n_run.quantize import encode
from baselines.check_n_run.quantize_scheme import Scheme
half = torch.rand(20000, 8, generator=torch.Generator().manual_seed(1))
rows = torch.stack([half, -half], 2).flatten(1)  # both ends are as good, but for how errors are rounded
print(hashlib.sha256(encode(rows, Scheme("adaptive", 2))["codes"].numpy().tobytes()).hexdigest())
"""


def test_codes_are_the_same_whether_the_loops_are_compiled_or_were_before(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ENCODED]
    compiled, found = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc")) and compiled.stdout == found.stdout
