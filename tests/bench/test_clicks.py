"""Readers of clicks: the real formats, nonsense, and what a training takes of a file."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.harness.result import BadFile
from bench.workloads import clicks
from bench.workloads import criteo as criteo_format
from bench.workloads import movielens as movielens_format
from bench.workloads.clicks import Format, Tally, lines, stream, take
from bench.workloads.criteo import CRITEO
from bench.workloads.movielens import MOVIELENS
from support.click_files import criteo, movielens, written

SIZE = {"steps": 10, "batch": 8, "held_out": 40}
"""120 samples."""


def test_a_line_of_criteo() -> None:
    integers = ["", "-1", "7", *["0"] * 10]
    line = "\t".join(["1", *integers, "68fd1e64", "", *["0000000a"] * 24])
    sample = criteo_format.parse(line.encode())
    assert sample.click == 1.0
    assert sample.integers == [0.0, 0.0, math.log(8), *[0.0] * 10]
    assert sample.ids == [0x68FD1E64, -1, *[10] * 24]


@pytest.mark.parametrize(
    ("place", "field", "said"),
    [
        (0, "", r"its label is b'', not 0 or 1"),
        (0, "2", "its label is b'2'"),
        (3, "7.5", "b'7.5' is no integer"),
        (3, "1_0", "is no integer"),
        (3, "--1", "is no integer"),
        (3, "9" * 19, r"b'9{19}' is no integer"),
        (3, "9" * 5000, r"b'9{20}'\.\.\. is no integer"),
        (20, "xyz", "b'xyz' is no hexadecimal number"),
        (20, "-1", "is no hexadecimal number"),
        (20, "f" * 16, "is no hexadecimal number"),
        (39, "0\t0", "it has 41 fields, not 40"),
    ],
)
def test_lines_that_are_none_of_criteo(place: int, field: str, said: str) -> None:
    fields = criteo(1)[0].split("\t")
    fields[place] = field
    with pytest.raises(ValueError, match=said):
        criteo_format.parse("\t".join(fields).encode())


def test_a_line_of_movielens() -> None:
    assert movielens_format.parse(b"196\t242\t3\t881250949") == (0.0, (1.0,), (196, 242))
    assert movielens_format.parse(b"196\t242\t4\t881250949").click == 1.0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"1::1193::5::978300760", "it has 1 fields, not 4"),
        (b"196\t242\t3", "it has 3 fields"),
        (b"196\t242\t6\t881250949", "its rating is b'6', not 1 to 5"),
        (b"196\t242\t3.5\t881250949", "its rating is b'3.5', which is no number"),
        (b"-1\t242\t3\t881250949", "its user is b'-1'"),
        (b"196\t" + b"9" * 19 + b"\t3\t1", "its item is"),
    ],
)
def test_lines_that_are_none_of_movielens(line: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        movielens_format.parse(line)


@pytest.mark.parametrize(
    ("form", "text"), [(CRITEO, criteo(130)), (MOVIELENS, movielens(130))], ids=["criteo", "movielens"]
)
def test_what_a_training_takes(form: Format, text: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "data", text)
    data, tally = take(path, form, **SIZE)
    assert (data.steps, data.batch, len(data.held_out.clicks)) == (10, 8, 40)
    assert (tally.malformed, tally.first) == (0, "") and tally.lines < 130
    samples = [form.parse(line.encode()) for line in text[:120]]
    clicked = torch.cat([data.training.clicks, data.held_out.clicks])
    assert clicked.tolist() == [sample.click for sample in samples]
    ids = torch.cat([data.training.ids, data.held_out.ids])
    base = 0
    for table, rows in enumerate(data.rows):
        there = sorted({sample.ids[table] for sample in samples})
        assert rows == len(there)
        assert (ids[:, table] - base).tolist() == [there.index(sample.ids[table]) for sample in samples]
        base += rows
    packed = tmp_path / "data.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    again, _ = take(packed, form, **SIZE)
    assert again.rows == data.rows and torch.equal(again.held_out.ids, data.held_out.ids)


def test_a_short_file_is_split_in_proportion(tmp_path: Path) -> None:
    data, _ = take(written(tmp_path / "u.data", movielens(240)), MOVIELENS, 100, 8, 400)
    assert (data.steps, len(data.held_out.clicks)) == (20, 80)


def test_malformed_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    text = criteo(120)
    text[3:3] = ["", "7", "\t" * 39, "x" * (3 * clicks.LONGEST_BYTES)]
    text += ["\0\xff"]
    data, tally = take(written(tmp_path / "train.txt", text), CRITEO, **SIZE)
    assert len(data.training.clicks) + len(data.held_out.clicks) == 120
    assert (tally.malformed, tally.first) == (3, "line 4: it has 1 fields, not 40")


def test_what_is_gzipped_and_cut_off_counts_as_a_line(tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"{line}\n" for line in criteo(400)).encode(), mtime=0)
    path = tmp_path / "day_0.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    _, tally = take(path, CRITEO, 100, 8, 400)
    assert tally.malformed == 1 and "can't be unpacked" in tally.first
    path.write_bytes(packed[:2] + b"nonsense")
    with pytest.raises(BadFile, match="1 of the first 1 lines are no samples.*can't be unpacked"):
        take(path, CRITEO, **SIZE)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    for text, said in (
        ([], "is empty; a line of Criteo's click logs is a label"),
        (["", ""], "is empty"),
        (criteo(119)[:90] + ["nonsense"] * 20, "20 of the first 110 lines are no samples, and at most 10%"),
        (criteo(119), "has 119 samples; a training takes 120 or more here"),
        (["\t".join("0" * 40)] * 120, "the 80 samples that are trained on are all clicks, or all none"),
        (criteo(80) + ["\t".join("0" * 40)] * 40, "the 40 samples that are held out"),
    ):
        with pytest.raises(BadFile, match=said):
            take(written(path, text), CRITEO, **SIZE)
    for no_file, said in ((tmp_path, "Is a directory"), (tmp_path / "x", "No such file or directory; give")):
        with pytest.raises(BadFile, match=said):
            take(no_file, CRITEO, **SIZE)


def test_something_else_is_refused_without_reading_on(tmp_path: Path) -> None:
    tally = Tally()
    path = written(tmp_path / "data", ["nonsense"] * 5000)
    with pytest.raises(BadFile, match="1000 of the first 1000 lines"):
        list(stream(path, MOVIELENS, 8, tally))
    assert tally.lines == clicks.LOOKED_AT


def test_a_file_is_read_as_far_as_it_is_asked_for(tmp_path: Path) -> None:
    tally = Tally()
    batches = stream(written(tmp_path / "u.data", movielens(100)), MOVIELENS, 8, tally)
    assert len(next(batches).clicks) == tally.lines == 8
    batches.close()


def test_longer_lines_are_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "data"
    longest = clicks.LONGEST_BYTES
    for length in (longest - 1, longest, longest + 1, 2 * longest, 3 * longest):
        path.write_bytes(b"a" * length + b"\r\nb\nc")
        first, *rest = list(lines(path))
        assert first == b"a" * min(length, longest) and rest == [b"b", b"c"]


LIKE_LINES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([line.encode() for line in (*criteo(3), *movielens(3))]),
        st.lists(st.sampled_from([b"0", b"1", b"-7", b"ff", b"", b"\xff", b"9" * 30]), max_size=42).map(
            b"\t".join
        ),
    ),
    max_size=12,
).map(b"\n".join)


@settings(max_examples=60, deadline=None)
@given(content=st.one_of(st.binary(max_size=200), LIKE_LINES), packed=st.booleans(), cut=st.integers(0, 400))
def test_no_bytes_are_a_crash(content: bytes, packed: bool, cut: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "data")
        path.write_bytes(gzip.compress(content)[:cut] if packed else content)
        for form in (CRITEO, MOVIELENS):
            tally = Tally()
            try:
                count = sum(len(part.clicks) for part in stream(path, form, 4, tally))
                assert count + tally.malformed == tally.lines
                take(path, form, 1, 1, 1)
            except BadFile:
                continue
